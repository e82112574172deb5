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
        self._key: tuple[object, ...] = ()
        self._kept: tuple[Tensor, Tensor | None] | None = None

    def linear(self, hidden: Tensor, head: nn.Linear, rows: Tensor) -> Tensor:
        """Outputs `rows` (W,) int64 of the layer: (..., D) -> (..., W)."""
        own = head._parameters.get("weight")  # a packed layer has none, and nobody changes it
        key = head, rows, own, _version(rows), _version(own)
        if self._kept is None or any(a is not b for a, b in zip(self._key[:3], key)) or self._key[3:] != key[3:]:
            with torch.inference_mode(False), torch.no_grad():  # asked for in decoding first, used in training then
                self._kept = head.weight[rows], None if head.bias is None else head.bias[rows]
            self._key = key
        return F.linear(hidden, *self._kept)


def _version(tensor: Tensor | None) -> int:
    """How often it was changed in place; tensors of the inference mode do not count, and nobody changes them."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
