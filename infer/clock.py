"""Where a round's time goes: seconds per named phase, device work included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_aside = 0.0


def now() -> float:
    """Seconds on a clock that stands still during `set_aside`."""
    return time.perf_counter() - _aside


@contextmanager
def set_aside() -> Iterator[None]:
    """What happens once, such as compiling, is no part of what a round takes."""
    global _aside
    began = time.perf_counter()
    try:
        yield
    finally:
        _aside += time.perf_counter() - began


class Clock:
    """Accumulates wall-clock seconds per phase. A phase inside another counts for the inner one only.

    On CUDA the device is synchronised at phase edges only when `exact` is set (evaluation), since that costs speed.
    """

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.exact = exact
        self._is_cuda = device.type == "cuda"
        self._open: list[float] = []  # seconds spent in phases nested below each open one

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        self._sync()
        began = now()
        self._open.append(0.0)
        try:
            yield
        finally:
            self._sync()
            took = now() - began
            inner = self._open.pop()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took - inner
            if self._open:
                self._open[-1] += took

    def total(self) -> float:
        return sum(self.seconds.values())

    def _sync(self) -> None:
        if self.exact and self._is_cuda:
            torch.cuda.current_stream().synchronize()
