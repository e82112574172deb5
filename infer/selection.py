"""The part of a target's head that a reduced draft vocabulary needs, copied once instead of in every round and chunk.

Letters: V target vocabulary, W draft vocabulary, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Selection:
    """Rows of a linear layer: those that were asked for last are kept until others are, or until layer or ids change."""

    def __init__(self) -> None:
        self._key: tuple[tuple[Tensor, int], ...] = ()
        self._kept: tuple[Tensor, Tensor | None] | None = None

    def linear(self, hidden: Tensor, head: nn.Linear, rows: Tensor) -> Tensor:
        """Outputs `rows` (W,) int64 of the layer: (..., D) -> (..., W)."""
        key = (rows, _version(rows)), (head.weight, _version(head.weight))
        same = len(self._key) == 2 and all(a is b and m == n for (a, m), (b, n) in zip(self._key, key))
        if self._kept is None or not same:
            with torch.inference_mode(False), torch.no_grad():  # asked for in decoding first, used in training then
                self._key, self._kept = key, (head.weight[rows], None if head.bias is None else head.bias[rows])
        return F.linear(hidden, *self._kept)


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; tensors of the inference mode do not count, and nobody changes them."""
    return 0 if tensor.is_inference() else tensor._version
