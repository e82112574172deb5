"""Weights laid out once for the CPU's matrix units, instead of at every product.

In bfloat16 on CPU, oneDNN rearranges a weight matrix each time it is used, which for the few rows of a decoding round
costs more than the product. `pack` lets it rearrange every linear layer of a frozen model once. The numbers are the
same up to rounding; the rearranged matrix replaces the plain one, so memory stays what it was (except for matrices that
are also embeddings, which keep both forms).

Letters: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 64
"""Rows that the layout is chosen for: at 1 to 128 rows none was faster on the machines tried."""


class PackedLinear(nn.Module):
    """A frozen linear layer, (..., I) -> (..., O) bfloat16, with its weight in the layout oneDNN multiplies by."""

    def __init__(self, linear: nn.Linear, *, keep_plain: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._plain = linear.weight if keep_plain else None
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        """(O, I): the plain matrix, restored bit by bit where only the packed one is held."""
        return self._packed.to_dense() if self._plain is None else self._plain

    def forward(self, inputs: Tensor) -> Tensor:
        """Gradients towards the inputs and other dtypes (autocast) go through the plain matrix."""
        if inputs.dtype != torch.bfloat16 or (torch.is_grad_enabled() and inputs.requires_grad):
            return F.linear(inputs, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As a linear layer has it: `weight`, then `bias` if there is one."""
        destination[f"{prefix}weight"] = self.weight.detach()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()

    def __getstate__(self) -> dict[str, Any]:
        """A packed tensor has no storage to copy or pickle, so copies travel plain."""
        return {**self.__dict__, "_packed": self._packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._packed, ROWS)


def is_packable(weight: Tensor) -> bool:
    """Whether packing pays: bfloat16 on a CPU whose oneDNN multiplies it in hardware."""
    is_plain = type(weight) in (Tensor, nn.Parameter)  # not a quantised matrix that calls itself bfloat16
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and is_plain
    return on_cpu and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(model: nn.Module, *, skip: Collection[str] = ()) -> int:
    """Replace every plain `nn.Linear` of a frozen model in place, but for children of these names; returns how many were
    replaced."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and name not in skip and is_packable(child.weight)
    ]
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, keep_plain=owners[id(child.weight)] > 1))
    return len(found)
