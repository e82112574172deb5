"""Recorded forwards, compiled: torch.compile makes one kernel of every chain of small operations between two products.

On a CPU the products of packed.py are left as they are, called by number: the compiler knows nothing of oneDNN's layout.
Compiling takes about a minute per shape the first time, and a C++ compiler; later processes find most of it on disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from .tapes import Tensors

PRODUCT = "mkldnn._linear_pointwise.default"
"""What packed.py multiplies with, by name: builds of torch without oneDNN have no such operation."""
SMALLEST = 256
"""Slots that the first recording of a shape reads; each further one reads twice as many."""


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Weights in oneDNN's layout, and their bias."""

    packed: Tensor
    bias: Tensor | None
    number: int


_MATRICES: WeakValueDictionary[int, _Matrix] = WeakValueDictionary()
"""By number, as long as a program calls them."""
_NUMBERS = itertools.count()
_OPS = torch.library.Library("draftsmith", "FRAGMENT")
_OPS.define("packed_linear(Tensor inputs, int matrix, int width) -> Tensor")


def _packed_linear(inputs: Tensor, matrix: int, width: int) -> Tensor:
    """(..., I) -> (..., width)."""
    weights = _MATRICES[matrix]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weights.packed, weights.bias, "none", [], "")
    return product


def _shape_of_packed_linear(inputs: Tensor, matrix: int, width: int) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], width)


_OPS.impl("packed_linear", _packed_linear, "CPU")
_OPS.impl("packed_linear", _shape_of_packed_linear, "Meta")


class Compiled:
    """Records compiled programs."""

    seen, most, takes = 32, 8, "up to a minute"

    def span(self, needed: int) -> int:
        """Powers of two."""
        return max(SMALLEST, 1 << (needed - 1).bit_length())

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        traced: fx.GraphModule = make_fx(function)()
        matrices = _number_products(traced)
        compiled = torch.compile(traced, fullgraph=True)
        compiled()
        return partial(_play, compiled, matrices)


def _play(program: Callable[[], Tensors], matrices: Sequence[_Matrix]) -> Tensors:
    """matrices: those that the program calls by number; held by whoever can call it."""
    return program()


def _number_products(traced: fx.GraphModule) -> list[_Matrix]:
    """Call packed products by their number, and let go of what is not used then; the matrices so called."""
    tensors, graph, found = dict(traced.named_buffers()), traced.graph, list[_Matrix]()
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == PRODUCT:
            inputs, weight, bias = node.args[:3]
            packed = tensors[weight.target]
            matrix = _numbered(packed, None if bias is None else tensors[bias.target])
            found.append(matrix)
            with graph.inserting_before(node):
                arguments = (inputs, matrix.number, packed.shape[0])
                call = graph.call_function(torch.ops.draftsmith.packed_linear.default, arguments)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    for name in tensors.keys() - used:
        delattr(traced, name)
    traced.recompile()
    return found


def _numbered(packed: Tensor, bias: Tensor | None) -> _Matrix:
    """Known ones keep their number: a program that calls the same ones is found on disk."""
    for known in list(_MATRICES.values()):
        if known.packed is packed:
            return known
    matrix = _Matrix(packed, bias, next(_NUMBERS))
    _MATRICES[matrix.number] = matrix
    return matrix
