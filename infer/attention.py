"""Attention for any transformers model through its public registry: plans instead of masks, no copied KV heads.

Letters: B rows, Hq query heads, H KV heads, G = Hq / H, N queries, S keys, d head width.

Query heads of one group share their keys, so they are folded into the length axis, (B, Hq, N, d) -> (B, H, G*N, d),
instead of repeating keys and values G times. Sliding windows come from the layer itself (`sliding_window`), so one
plan serves layers of every kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import Plan

NAME = "draftsmith"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query (B, Hq, N, d), key and value (B, H, S, d) -> (B, N, Hq, d). `attention_mask` is ignored: `plan` decides."""
    if s_aux is not None or position_bias is not None:
        raise ValueError(
            f"{type(module).__name__} uses attention sinks or a position bias, which the verified loop does not support yet. "
            "Use a target without them."
        )
    query = plan.spread(query.transpose(1, 2)).transpose(1, 2)
    groups, window = query.shape[1] // key.shape[1], sliding_window or 0
    masks = [plan.mask(number, groups=groups, window=window, dtype=query.dtype) for number in range(len(plan.pieces))]
    found = [
        _attend(query[rows, :, nodes], key[rows], value[rows], mask, scaling, softcap)
        for (rows, nodes), mask in zip(plan.pieces, masks)
    ]
    out = found[0]
    if len(found) > 1:
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for (rows, nodes), part in zip(plan.pieces, found):
            out[rows, :, nodes] = part
    return plan.pack(out.transpose(1, 2)), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """(B, Hq, N, d)."""
    batch, query_heads, count, width = query.shape
    folded = query.reshape(batch, key.shape[1], query_heads // key.shape[1] * count, width)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = torch.matmul(folded, key.transpose(-1, -2)).float() * (scaling or width**-0.5)
        scores = torch.tanh(scores / softcap) * softcap + mask
        out = torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
    return out.reshape(batch, query_heads, count, -1)


def register() -> None:
    """Make `attend` known to transformers under NAME. Imported late: transformers' modelling code takes seconds to load."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
