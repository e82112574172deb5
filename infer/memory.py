"""Bytes that a model's weights take, in whatever form they are kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .packed import PackedLinear


def num_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once: quantised ones as they are stored, packed ones as packed."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    in_layout = sum(module.in_features * module.out_features * module.dtype.itemsize for module in packed)
    return in_layout + sum(_stored(tensor) for tensor in tensors.values())


def _stored(tensor: Tensor) -> int:
    """What a tensor subclass holds is counted, not what it stands for."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_stored(getattr(tensor, name)) for name in names)
    if type(tensor).__name__ == "Params4bit":  # bitsandbytes: packed bytes, and a scale per block beside them
        beside: Any = tensor
        return tensor.nbytes + int(beside.quant_state.absmax.nbytes)
    return tensor.nbytes
