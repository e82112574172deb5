"""The next teacher batch, read while the step before it is computed: on a thread and a CUDA stream of its own.

The target's forward and the drafter's step share nothing but the target's weights, which nobody writes: on a device that
runs two streams at once the features of the next micro-step cost no time of their own, and while the drafter's kernels
are launched from one thread, the target's are from the other. On a CPU there is nothing to gain, both want its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from ..heads import TeacherBatch
from .features import TeacherSource


class Ahead:
    """A source that is told what will be asked for next.

    Not for a source whose reading is a collective call (a split target): the order of calls between processes would
    depend on which thread came first. Holds one batch more than the step works on, and ends reading ahead where the device
    has no memory for both at once.
    """

    def __init__(self, source: TeacherSource, device: torch.device) -> None:
        self._source = source
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize(device)  # the weights are there; afterwards the streams do not wait for each other
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")
        self._fits = True
        self._coming: tuple[list[int], Future[TeacherBatch]] | None = None

    def batch(self, indices: Sequence[int], then: Sequence[int] | None) -> TeacherBatch:
        """These rows, and from now on `then` is being read (None: nothing). Raises what the source raises on these rows,
        never on others."""
        coming, self._coming = self._coming, None
        if coming is not None:
            wait([coming[1]])
        found = None
        if coming is not None and coming[0] == list(indices):
            with suppress(torch.OutOfMemoryError):  # beside the step; alone it may fit
                found = coming[1].result()
            self._fits = found is not None
        if found is None:
            found = self._read(indices)
        if self._stream is not None:  # its memory goes back to the other stream only after this one's use
            for values in vars(found).values():
                if isinstance(values, torch.Tensor):
                    values.record_stream(torch.cuda.current_stream(values.device))
        if then is not None and self._fits:
            self._coming = list(then), self._thread.submit(self._read, then)
        return found

    def _read(self, indices: Sequence[int]) -> TeacherBatch:
        if self._stream is None:
            return self._source.batch(indices)
        with torch.cuda.stream(self._stream):
            found = self._source.batch(indices)
        self._stream.synchronize()
        return found
