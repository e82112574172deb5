"""Weights laid out once for the CPU's matrix units, instead of at every product.

On a CPU a weight matrix is rearranged each time it is used, which for the few rows of a decoding round costs more than the
product. `pack` lets oneDNN rearrange every linear layer of a frozen model once, and those that read the same tensor
(queries, keys and values; gate and up) as one matrix: small products cost mostly their call. The numbers are the same up to
rounding; the rearranged matrix replaces the plain one, so memory stays what it was (except for matrices that are also
embeddings, which keep both forms).

Letters: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .precision import has_bf16

ROWS = 64
"""Rows that the layout is chosen for: at 1 to 128 rows none was faster on the machines tried."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers side by side which, in models of transformers, read the same tensor. Where they do not, as in attention
to another text, they are multiplied each time they are asked, which is slower and no less right."""


class _Matrix:
    """The packed weights of one or more layers, below one another: (sum of O, I)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.packed: Tensor = _reorder(torch.cat([layer.weight.detach() for layer in layers]))
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.num_layers = len(layers)
        self._last: tuple[Tensor, Tensor, set[int]] | None = (
            None  # what was read, its product, who has had a share of it
        )

    def product(self, inputs: Tensor, asker: int) -> Tensor:
        """(..., I) -> (..., sum of O): once for all layers that ask for the same tensor one after the other. asker: which
        layer does; one that asks again gets a new product, since the tensor may have other numbers in it by then."""
        last = self._last  # read once, so that threads that share a model never get each other's product
        if last is None or last[0] is not inputs or asker in last[2]:
            outputs = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
            self._last = last = (inputs, outputs, set())
        last[2].add(asker)
        if len(last[2]) == self.num_layers:
            self._last = None
        return last[1]

    def __getstate__(self) -> dict[str, Any]:
        """A packed tensor has no storage to copy or pickle, so copies travel plain."""
        return {**self.__dict__, "packed": self.packed.to_dense(), "_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.packed = _reorder(self.packed)


class PackedLinear(nn.Module):
    """A frozen linear layer, (..., I) -> (..., O), with its weight in the layout oneDNN multiplies by."""

    def __init__(self, linear: nn.Linear, *, keep_plain: bool = False, matrix: _Matrix | None = None, start: int = 0):
        """matrix: what the layer's weight is a part of, from row `start`; by itself if None."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        self._plain = linear.weight if keep_plain else None
        self._matrix = matrix or _Matrix([linear])
        self._rows = slice(start, start + self.out_features)

    @property
    def weight(self) -> Tensor:
        """(O, I): the plain matrix, restored bit by bit where only the packed one is held."""
        return self._matrix.packed.to_dense()[self._rows] if self._plain is None else self._plain

    def forward(self, inputs: Tensor) -> Tensor:
        """Gradients towards the inputs and other dtypes (autocast) go through the plain matrix."""
        is_cast = inputs.dtype != self.dtype or (torch.is_autocast_enabled("cpu") and self.dtype == torch.float32)
        if is_cast or (torch.is_grad_enabled() and inputs.requires_grad):
            return F.linear(inputs, self.weight, self.bias)
        outputs = self._matrix.product(inputs, self._rows.start)
        return outputs if self._matrix.num_layers == 1 else outputs[..., self._rows]

    def plain(self) -> nn.Linear:
        """A linear layer of the same numbers; it shares the plain matrix where that is held."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
        kept = self._plain
        layer.weight = kept if isinstance(kept, nn.Parameter) else nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As a linear layer has it: `weight`, then `bias` if there is one."""
        destination[f"{prefix}weight"] = self.weight.detach()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


def is_packable(weight: Tensor) -> bool:
    """Whether packing pays: on a CPU, in the precision that it is faster at."""
    is_plain = type(weight) in (Tensor, nn.Parameter)  # not a quantised matrix that calls itself bfloat16
    if weight.device.type != "cpu" or not is_plain or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == (torch.bfloat16 if has_bf16("cpu") else torch.float32)


def pack(model: nn.Module, *, skip: Collection[str] = (), together: bool = True) -> int:
    """Replace every plain `nn.Linear` of a frozen model in place, but for children of these names; returns how many were
    replaced. together: layers named as in TOGETHER become one; not for models whose attention also reads another text."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    count = 0
    for parent in list(model.modules()):
        found = {
            name: child
            for name, child in parent.named_children()
            if type(child) is nn.Linear and name not in skip and is_packable(child.weight)
        }
        count += len(found)
        for names in TOGETHER if together else ():
            if _fit(found, names) and all(owners[id(found[name].weight)] == 1 for name in names):
                _pack_together(parent, {name: found.pop(name) for name in names})
        for name, child in found.items():
            setattr(parent, name, PackedLinear(child, keep_plain=owners[id(child.weight)] > 1))
    return count


def unpack(model: nn.Module) -> None:
    """Undo `pack` in place, for what needs plain linear layers, such as adapters."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.plain())


def _fit(found: dict[str, nn.Linear], names: tuple[str, ...]) -> bool:
    """Whether layers of all these names are there and can stand below one another."""
    layers = [found[name] for name in names if name in found]
    alike = {(layer.in_features, layer.bias is None) for layer in layers}
    return len(layers) == len(names) and len(alike) == 1


def _pack_together(parent: nn.Module, layers: dict[str, nn.Linear]) -> None:
    matrix, start = _Matrix(list(layers.values())), 0
    for name, layer in layers.items():
        setattr(parent, name, PackedLinear(layer, matrix=matrix, start=start))
        start += layer.out_features


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed
