"""Weights in 8 or 4 bits, through kept libraries: every linear layer but those that share their matrix with others.

int8: one scale per output row, symmetric, weights only (torchao), on CPU and CUDA. int4: NF4, blocks of 64 weights with a
scale each (bitsandbytes; Dettmers et al. 2023, arXiv 2305.14314), on CUDA. Embeddings, norms and the head keep their
precision. Decoding is exact against the quantised target: it is the target. What is saved is memory; a matrix is
unpacked whenever it is multiplied by, which on a CPU takes several times longer than the product.

A model is quantised on the CPU, layer by layer, before it is moved, so a device never holds the whole of it unquantised.

Letters: I inputs, O outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("int8", "int4")
LIBRARIES = {"int8": "torchao.quantization", "int4": "bitsandbytes"}
INSTALL = "pip install 'draftsmith[quantized]'"

_ASKED_FOR_DTYPE = ("wo",)
"""T5 casts what it multiplies to the dtype of this layer's weight; in four bits that would be bytes."""


@dataclass(frozen=True)
class Quantization:
    """How a target was quantised."""

    kind: str
    """One of KINDS."""
    weights: str
    """`fingerprint.weights_hash` of the target as it was before: what drafters are bound to."""


def check_kind(kind: str, device: torch.device | str) -> None:
    """Raise ValueError if there is no such kind, it does not run there, or its library is not installed (saying how to
    install it)."""
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, got {kind!r}.")
    if kind == "int4" and torch.device(device).type != "cuda":
        raise ValueError(f"int4 weights need a CUDA device, this one is {device}; quantise to int8 here.")
    _library(kind)


def quantize(model: nn.Module, kind: str, *, keep: Collection[Tensor] = (), device: torch.device | str = "cpu") -> int:
    """Quantise a frozen model's linear layers in place, and move them to `device`; returns how many they were.

    keep: matrices that stay as they are, besides those that several modules share. Raises ValueError if there is nothing
    to quantise.
    """
    library = _library(kind)
    shared = _shared(model) | {id(matrix) for matrix in keep}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and id(child.weight) not in shared
        and not (kind == "int4" and name in _ASKED_FOR_DTYPE)
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layers that could be quantised; load it as it is.")
    for parent, name, child in found:
        if kind == "int8":
            library.quantize_(child, library.Int8WeightOnlyConfig(set_inductor_config=False), device=device)
        else:
            setattr(parent, name, _four_bits(child, library).to(device))
    return len(found)


def _four_bits(linear: nn.Linear, library: Any) -> nn.Module:
    dtype = linear.weight.dtype
    packed = library.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype, quant_type="nf4"
    )
    packed.weight = library.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    packed.bias = linear.bias
    module: nn.Module = packed.requires_grad_(False)
    return module


def _shared(model: nn.Module) -> set[int]:
    """Matrices that more than one module owns, such as a head that is also the embedding."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _library(kind: str) -> Any:
    """torchao.quantization or bitsandbytes, without what is said while they load of kernels for other machines."""
    for name in ("torchao", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "Enum subclass" not in record.getMessage())
    try:
        return import_module(LIBRARIES[kind])
    except ImportError as error:
        library = LIBRARIES[kind].split(".")[0]
        raise ValueError(
            f"quantising to {kind} needs {library}, which is not installed ({error}). Install it: {INSTALL}"
        ) from error
