"""Blocks: each anchor drafts several slots at once, which see the target's features before it and each other.

The anchor of row t is token t+1. Its block of b slots stands at positions t+1..t+b and attends to

    the context     keys and values of the features at rows <= t of its document, which no layer changes
    its own block   all of it, or up to the asking slot (causal)

and to nothing of any other block. Worked example, "a b c d e", anchors at rows 1 and 3, b = 2: the block of row 1 is
["c", mask] and sees the features at "a b" and itself, never "d"; the block of row 3, ["e", mask], sees "a b c d".

Context keys are computed once and shared by all blocks. Scores are block-sparse: anchors are taken in groups, each
group reads the slice of its document up to its last anchor, and computes its scores again in the backward pass. What
is held is (heads, QUERIES, document), never (blocks * b, T), and documents are slices, so nothing is masked between them.

Letters: B, T packed rows and their positions; N tokens with keys, R anchors, b slots per block, H key-value heads, G query
heads per key-value head, d head width, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layers import Attention, DecoderLayer, LayerShape, Memory, RMSNorm, Rotation
from .unroll import Blocks

QUERIES = 256
"""Slots whose scores are held at once."""


def sample_anchors(active: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Up to `count` of each row's active positions, uniformly without replacement, and what each stands for.

    active: (B, T) bool. Returns the chosen ones (B, T) bool and (B,) float32, active per chosen: a sum over the chosen
    times that is an unbiased estimate of the sum over all.
    """
    keys = torch.rand(active.shape, device=active.device).masked_fill(~active, -1.0)
    best = keys.topk(min(count, active.shape[1]), dim=1).indices
    chosen = torch.zeros_like(active).scatter_(1, best, True) & active
    return chosen, active.sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def split_anchors(active: Tensor, count: int) -> Iterator[Tensor]:
    """All active positions, `count` at a time: (B, T) bool each; one empty share if there are none."""
    number = active.flatten().cumsum(0).view_as(active) - 1
    for first in range(0, max(1, int(active.sum())), count):
        yield active & (number >= first) & (number < first + count)


class BlockAttention(Attention):
    """Qwen3's attention, with normalised queries and keys, over a context that is given and not computed here."""

    def __init__(self, shape: LayerShape, *, layer: int) -> None:
        super().__init__(shape, layer=layer, reads=shape.width)
        self.q_norm = RMSNorm(shape.head_width, shape.eps)
        self.k_norm = RMSNorm(shape.head_width, shape.eps)

    def remember(self, x: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values (R, H, d) of tokens x (R, D)."""
        return turn.apply(self.k_norm(self._split(self.k_proj(x)))), self._split(self.v_proj(x))

    def forward(self, x: Tensor, turn: Rotation, memory: Memory, ask: Tensor | None) -> Tensor:
        assert ask is None, "every slot of a block asks"
        query = turn.apply(self.q_norm(self._split(self.q_proj(x))))
        out: Tensor = self.o_proj(memory.attend(self.layer, query, *self.remember(x, turn)).flatten(-2))
        return out


class BlockLayer(DecoderLayer):
    """A decoder layer of block slots."""

    self_attn: BlockAttention

    def __init__(self, shape: LayerShape, *, layer: int) -> None:
        super().__init__(shape, layer=layer)
        self.self_attn = BlockAttention(shape, layer=layer)


class BlockMemory:
    """The memory of one training forward over R blocks."""

    def __init__(self, view: Blocks, *, size: int, is_causal: bool) -> None:
        """view: rows are the anchors, keys the features they see; size: b."""
        self.size = size
        places: list[int] = view.ask.tolist()
        step = max(1, QUERIES // size)
        self.groups = [
            (slice(start, min(start + step, stop)), slice(first, places[min(start + step, stop) - 1] + 1))
            for row, stop, first, _ in view.bounds
            for start in range(row, stop, step)
        ]
        self._ask = view.ask
        order = torch.arange(size, device=view.ask.device)
        self._future = order > order[:, None] if is_causal else None  # (b, b)
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The context of a layer: keys and values (N, H, d)."""
        self._context[layer] = key.transpose(0, 1), value.transpose(0, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (R*b, H*G, d), key and value (R*b, H, d), block by block -> (R*b, H*G, d)."""
        context = self._context[layer]
        own = [part.unflatten(0, (-1, self.size)).permute(2, 0, 1, 3) for part in (key, value)]  # (H, R, b, d)
        folded = query.unflatten(0, (-1, self.size)).unflatten(2, (len(context[0]), -1)).permute(2, 0, 3, 1, 4)
        out = _Attention.apply(self, folded.flatten(2, 3), *context, *own)  # type: ignore[no-untyped-call]
        blocks: Tensor = out.unflatten(2, (-1, self.size)).permute(1, 3, 0, 2, 4)  # (R, b, H, G, d)
        return blocks.flatten(2, 3).flatten(0, 1)

    def scores(self, query: Tensor, keys: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Per group of n anchors: which they are, which m context keys they read, and the scores (H, n, G*b, m + b) of
        both parts, -inf where unseen, in fp32 (float64 stays float64)."""
        heads, _, queries, width = query.shape
        for rows, span in self.groups:
            count = span.stop - span.start
            past = query[:, rows].flatten(1, 2) @ keys[:, span].transpose(1, 2)  # (H, n*G*b, m)
            own = query[:, rows] @ key[:, rows].transpose(2, 3)  # (H, n, G*b, b)
            both = _wide(torch.cat([past.view(heads, -1, queries, count), own], dim=-1)).mul_(width**-0.5)
            last = self._ask[rows] - span.start
            unseen = torch.arange(count, device=last.device) > last[:, None]  # (n, m)
            both[..., :count].masked_fill_(unseen[:, None], -torch.inf)
            if self._future is not None:
                both[..., count:].masked_fill_(self._future.repeat(queries // self.size, 1), -torch.inf)
            yield rows, span, both


class _Attention(torch.autograd.Function):
    """One softmax over the context up to the anchor and the anchor's own block.

    Arguments: memory, query (H, R, G*b, d), the context's keys and values (H, N, d), the blocks' own (H, R, b, d). With L
    the log-sum-exp of a row, exp(score - L) is its softmax weight, in the forward and again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, memory: BlockMemory, query: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        out, total = torch.empty_like(query), torch.empty_like(_wide(query[..., :1]))
        for rows, span, scores in memory.scores(query, keys, key):
            total[:, rows] = scores.logsumexp(dim=-1, keepdim=True)
            past, own = _parts(scores.sub_(total[:, rows]).exp_().to(value.dtype), span)
            seen = past.flatten(1, 2) @ values[:, span]
            out[:, rows] = seen.view_as(query[:, rows]) + own @ value[:, rows]
        ctx.memory = memory
        ctx.save_for_backward(query, keys, values, key, value, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, key, value, out, total = ctx.saved_tensors
        given, scale = grads[0].to(query.dtype), query.shape[-1] ** -0.5
        delta = _wide(given * out).sum(dim=-1, keepdim=True)  # (H, R, G*b, 1)
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        d_keys, d_values = torch.zeros_like(_wide(keys)), torch.zeros_like(_wide(values))  # summed over groups
        for rows, span, scores in ctx.memory.scores(query, keys, key):
            asked, gave = query[:, rows], given[:, rows]  # (H, n, G*b, d)
            weights = scores.sub_(total[:, rows]).exp_()
            read = (gave.flatten(1, 2) @ values[:, span].transpose(1, 2)).view_as(_parts(weights, span)[0])
            d_weights = _wide(torch.cat([read, gave @ value[:, rows].transpose(2, 3)], dim=-1))
            d_scores = d_weights.sub_(delta[:, rows]).mul_(weights).mul_(scale).to(query.dtype)
            (past, own), (d_past, d_own) = _parts(weights.to(gave.dtype), span), _parts(d_scores, span)
            d_values[:, span] += past.flatten(1, 2).transpose(1, 2) @ gave.flatten(1, 2)
            d_keys[:, span] += d_past.flatten(1, 2).transpose(1, 2) @ asked.flatten(1, 2)
            d_value[:, rows], d_key[:, rows] = own.transpose(2, 3) @ gave, d_own.transpose(2, 3) @ asked
            d_query[:, rows] = (d_past.flatten(1, 2) @ keys[:, span]).view_as(asked) + d_own @ key[:, rows]
        return None, d_query, d_keys.to(keys.dtype), d_values.to(values.dtype), d_key, d_value


def _parts(scores: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """(H, n, G*b, m + b) -> the context's (H, n, G*b, m) and the block's own (H, n, G*b, b)."""
    count = span.stop - span.start
    return scores[..., :count], scores[..., count:]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
