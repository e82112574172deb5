"""Ctrl-C and SIGTERM as a wish: finish the step, save, and leave with a line that says how to go on."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Within `with Interrupt() as interrupt:` the first signal sets `asked`; a second one acts as it always does."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
