"""How hidden states are stored on disk: as they are, in bfloat16, or in 8 or 6 bits per number.

Letters: P positions, M vectors per position (taps, or 1 for the last hidden state), D hidden.

    x[p, m, d]  ~  channels[m, d] * scale[p, m] * q[p, m, d]        q an integer of 8 or 6 bits

A few channels of a residual stream are a hundred times larger than the others, always the same ones. A scale per row
alone is set by those and leaves few steps to the rest; so each channel is divided by its typical magnitude in the
shard first. Over 2,000 positions of the embedded target (taps 1, 14, 27; n = 600 for the teacher) this gave:

    stored                 bytes at D=576   relative error    KL(teacher || teacher from the stored state)
    8 bits, row scale only      578          0.027 - 0.039     0.0047
    fp8 (e4m3), row scale       578          0.018 - 0.022     0.0053
    8 bits, as here             578          0.008 - 0.010     0.0005
    6 bits, as here             434          0.033 - 0.042     0.0093
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Compression = Literal["exact", "bf16", "int8", "int6"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)

_HIGHEST = {"int8": 127, "int6": 31}
_OFFSET = 32
"""Added to 6-bit integers, which are packed without a sign."""
_SCALE = torch.bfloat16

_POSITIONS = 4096
"""Positions turned into integers at a time: their float32 form would otherwise be the largest thing in memory."""

Stored = dict[str, Tensor]
"""`values` (P, M, bytes or numbers), and for integers `scale` (P, M) bfloat16 and `channels` (M, D) float32."""


def encode(values: Tensor, compression: Compression) -> Stored:
    """(P, M, D) floating point -> what is stored. Raises ValueError if D cannot be packed."""
    if compression == "exact":
        return {"values": values.contiguous()}
    if compression == "bf16":
        return {"values": values.bfloat16().contiguous()}
    roots = torch.stack([part.float().abs().sqrt().sum(dim=0) for part in values.split(_POSITIONS)])
    channels = (
        roots.sum(dim=0) / len(values)
    ).square()  # (M, D): typical magnitudes, hardly moved by a few huge entries
    channels = torch.where(channels > 0, channels, 1.0)
    parts = [_integers(part.float() / channels, _HIGHEST[compression]) for part in values.split(_POSITIONS)]
    whole, scale = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return {"values": whole if compression == "int8" else _pack(whole), "scale": scale, "channels": channels}


def _integers(even: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """(P, M, D) float32 -> int8 in [-highest, highest] and the scale (P, M) bfloat16 that they are multiplied by."""
    scale = (even.abs().amax(dim=-1) / highest).clamp(min=torch.finfo(_SCALE).tiny).to(_SCALE)
    return (even / scale.float()[..., None]).round().clamp(-highest, highest).to(torch.int8), scale


def decode(stored: Stored, compression: Compression, dtype: torch.dtype) -> Tensor:
    """What `encode` made -> (P, M, D) in `dtype`, on the device it is stored on."""
    values = stored["values"]
    if compression in ("exact", "bf16"):
        return values.to(dtype)
    whole = values if compression == "int8" else _unpack(values)
    return (whole.float() * stored["scale"].float()[..., None] * stored["channels"]).to(dtype)


def bytes_per_token(hidden_size: int, vectors: int, compression: Compression, dtype: torch.dtype) -> int:
    """Bytes of one position's `vectors` hidden states; `bytes_per_shard` come on top."""
    if compression in ("exact", "bf16"):
        return vectors * hidden_size * (dtype if compression == "exact" else torch.bfloat16).itemsize
    return vectors * (hidden_size * (8 if compression == "int8" else 6) // 8 + _SCALE.itemsize)


def bytes_per_shard(hidden_size: int, vectors: int, compression: Compression) -> int:
    """Bytes of the channels' scales, of which there is one set for all positions that are stored together."""
    return 0 if compression in ("exact", "bf16") else vectors * hidden_size * torch.float32.itemsize


def _pack(whole: Tensor) -> Tensor:
    """(..., D) int8 in [-31, 31] -> (..., 3D/4) uint8: four numbers in three bytes, the first in the lowest bits."""
    if whole.shape[-1] % 4:
        raise ValueError(f"int6 packs four numbers at a time, the hidden size is {whole.shape[-1]}; use int8 or bf16.")
    a, b, c, d = (whole + _OFFSET).to(torch.uint8).unflatten(-1, (-1, 4)).unbind(dim=-1)
    return torch.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], dim=-1).flatten(-2)


def _unpack(packed: Tensor) -> Tensor:
    """(..., 3D/4) uint8 -> (..., D) int8."""
    x, y, z = packed.unflatten(-1, (-1, 3)).unbind(dim=-1)
    parts = [x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.int8) - _OFFSET
