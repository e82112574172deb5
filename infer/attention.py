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

from . import few_queries
from .cache import Plan

NAME = "draftsmith"
TOGETHER = 8
"""Rows that attend in one call at least."""


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
    found = list[Tensor]()
    for number, (rows, nodes, slots) in enumerate(plan.pieces):
        mask = plan.mask(number, groups=groups, window=window, dtype=query.dtype)
        folded = query[rows, :, nodes].reshape(-1, key.shape[1], mask.shape[2], query.shape[-1])
        piece = folded, key[rows, :, slots], value[rows, :, slots], mask
        if plan.reach is None:
            part = _attend(*piece, scaling, softcap)
        else:
            part = torch.ops.draftsmith.attend_within(*piece, plan.reach[rows], scaling, softcap)
        found.append(part.reshape(len(part), query.shape[1], -1, part.shape[-1]))
    if plan.pieces is Plan.pieces:
        return plan.pack(found[0].transpose(1, 2)), None
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for (rows, nodes, _), part in zip(plan.pieces, found):
        out[rows, :, nodes] = part
    return plan.pack(out.transpose(1, 2)), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """query (B, H, Q, d), key and value (B, H, S, d), mask (B or 1, 1, Q, S) -> (B, H, Q, d)."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * (scaling or query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)


def _attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    reach: Tensor,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """The same; of each row only the slots below `reach` (B,), as far as rows side by side have that in common. An operation
    by itself, because a recording of it has to look at the numbers."""
    if softcap is None and (found := few_queries.attend(query, key, value, mask, reach, scaling)) is not None:
        return found
    parts = [
        _attend(query[rows], key[rows, :, :end], value[rows, :, :end], mask[rows, ..., :end], scaling, softcap)
        for rows, end in _together(reach.tolist())
    ]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _together(reach: list[int]) -> list[tuple[slice, int]]:
    """Rows that attend in one call, and the slots they read: few enough that one long row is not everyone's length."""
    width = max(TOGETHER, torch.get_num_threads())
    groups = [slice(first, min(first + width, len(reach))) for first in range(0, len(reach), width)]
    apart = [(rows, max(reach[rows])) for rows in groups]
    if sum((rows.stop - rows.start) * end for rows, end in apart) > 0.9 * len(reach) * max(reach):
        return [(slice(None), max(reach))]
    return apart


_OPS = torch.library.Library("draftsmith", "FRAGMENT")
_OPS.define(
    "attend_within(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor reach, float? scaling, float? softcap) -> Tensor"
)
_OPS.impl("attend_within", _attend_within, "CPU")
_OPS.impl("attend_within", lambda query, key, value, *rest: query.new_empty(*query.shape[:-1], value.shape[-1]), "Meta")


def register() -> None:
    """Make `attend` known to transformers under NAME. Imported late: transformers' modelling code takes seconds to load."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
