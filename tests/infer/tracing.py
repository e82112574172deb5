"""A recorder for machines without CUDA: the very tensor operations of one forward, with their shapes and buffers, run again with
no Python between them. What a CUDA graph would freeze, the trace freezes too, and it refuses what waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch.fx.experimental import proxy_tensor

from draftsmith.infer.tapes import Tensors


class Trace:
    """Records a function's tensor operations; counts how often they were played."""

    seen, takes = 4, "at once"

    def __init__(self, step: int = 128, *, most: int = 3) -> None:
        self.step, self.most, self.recorded, self.played = step, most, 0, 0

    def span(self, needed: int) -> int:
        return -(-needed // self.step) * self.step

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        spared = patch.object(
            proxy_tensor, "extract_val", lambda *args, **kwargs: None
        )  # what only compilers need to know
        # Some models ask for the stream, to spare a check.
        with spared, patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            graph = proxy_tensor.make_fx(function)()
        self.recorded += 1

        def play() -> Tensors:
            self.played += 1
            found: Tensors = graph()
            return found

        return play
