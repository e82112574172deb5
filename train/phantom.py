"""Tensors without contents: a training step is run for its shapes alone, and the memory it would take is counted.

Inside `with Phantoms() as phantoms:` every new floating-point tensor is a phantom: it has a shape, a dtype and a
gradient, and no memory. What decides what is computed (tokens, masks, indices) is real, so any module takes the way
through its code that it takes in training, and any method is counted without knowing it. Comparisons of phantoms are
true, indices found in them 0, and numbers read from them 0.

Bytes are counted as they are taken and given back, per storage: views are free, and what autograd keeps for the
backward pass stays. Floating-point operations are those of matrix products and attention, by torch's own formulas. The
same counting works on real tensors (`Phantoms(is_real=True)`), which is how it is checked.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_MADE = {
    getattr(packet, name)
    for packet in (_aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full)
    for name in packet.overloads()
}
"""What makes a tensor out of nothing."""


def _grouped(rows: Tensor, experts: Tensor, *rest: Any, out_val: Any, **unused: Any) -> int:
    """rows (N, in), each with one of the experts' matrices (E, in, out)."""
    return 2 * rows.shape[0] * rows.shape[1] * experts.shape[-1]


_FLOPS: dict[Any, Any] = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._grouped_mm: _grouped,
}
"""Operator -> torch's formula, and those that torch lacks, as far as a target that needs no gradients goes."""


class Phantom(Tensor):
    """A tensor on the CPU, as far as anyone can see, whose contents are nowhere."""

    shape_only: Tensor
    """The same on the meta device; it carries the storage that is counted."""

    @staticmethod
    def __new__(cls, shape_only: Tensor) -> Phantom:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            shape_only.shape,
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            device=torch.device("cpu"),
        )

    def __init__(self, shape_only: Tensor) -> None:
        self.shape_only = shape_only

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Phantom({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} met a phantom outside of `with Phantoms()`")


class Phantoms(TorchDispatchMode):
    """Turns new tensors into phantoms and counts bytes."""

    def __init__(self, *, is_real: bool = False) -> None:
        """is_real: only count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_real = is_real
        self.now = 0
        """Bytes held."""
        self.peak = 0
        """Most bytes held at once since the last `restart`."""
        self.flops = 0
        """Floating-point operations since the last `restart`."""
        self._known: set[int] = set()

    def restart(self) -> int:
        """Forget peak and operations; returns the bytes held now."""
        self.peak, self.flops = self.now, 0
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        tree_map(self._count, result)
        formula = _FLOPS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs or {}, out_val=result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_real:
            return func(*args, **kwargs)
        given: list[Any] = []
        tree_map(given.append, (args, kwargs))
        if not any(isinstance(value, Phantom) for value in given):
            if func in _MADE and _is_floating(kwargs.get("dtype"), args):
                return Phantom(func(*args, **kwargs | {"device": "meta"}))
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return 0.0
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            args = (args[0], _positions(args[1]), *args[2:])
        if "device" in kwargs:
            kwargs = kwargs | {"device": "meta"}
        names: dict[int, Tensor] = {}
        bare = tree_map(lambda value: _bare(value, names), (args, kwargs))
        return tree_map(lambda value: _dressed(value, names), func(*bare[0], **bare[1]))

    def _count(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        storage = (value.shape_only if isinstance(value, Phantom) else value).untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _is_floating(dtype: torch.dtype | None, args: Any) -> bool:
    """Whether a maker's result is floating-point; `full` goes by its value where no dtype is given."""
    if dtype is None and len(args) > 1 and isinstance(args[1], bool | int):
        return False
    return (dtype or torch.get_default_dtype()).is_floating_point


def _positions(indices: Any) -> list[Any]:
    """Masks among the indices as positions: how many there are is in a mask's contents, which the meta device has not."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        found += index.nonzero(as_tuple=True) if is_mask else [index]
    return found


def _bare(value: Any, names: dict[int, Tensor]) -> Any:
    """A tensor on the meta device in place of any other; `names` remembers what each stands for."""
    if not isinstance(value, Tensor):
        return value
    shape_only = (
        value.shape_only
        if isinstance(value, Phantom)
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    )
    names[id(shape_only)] = value
    return shape_only


def _dressed(value: Any, names: dict[int, Tensor]) -> Any:
    """What the result stands for: the argument it is, a phantom, or real numbers where it decides what is computed."""
    if not isinstance(value, Tensor):
        return value
    if id(value) in names:
        return names[id(value)]
    if value.is_floating_point():
        return Phantom(value)
    return torch.full(value.shape, value.dtype == torch.bool, dtype=value.dtype)
