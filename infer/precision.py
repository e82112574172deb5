"""Which precision to compute in where the user leaves it to the machine.

bfloat16 is the faster one wherever the processor multiplies it: on cards since 2020, and on CPUs with matrix or AVX-512
units. Elsewhere it is emulated, up to four hundred times slower than float32 (an AVX2 processor: 0.3 against 122 GFLOP/s),
so float32 it is, and with it texts that are identical to plain decoding's.
"""

from __future__ import annotations

import torch

AUTO = "auto"


def has_bf16(device: str | torch.device | None = None) -> bool:
    """Whether `device` (cuda where there is one, else cpu) multiplies bfloat16 in hardware."""
    kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False


def resolve_dtype(dtype: str, device: str | torch.device | None = None) -> str:
    """`auto` as bfloat16 or float32, whichever `device` is faster at; any other name as it is."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if has_bf16(device) else "float32"
