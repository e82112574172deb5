"""Attention of an unrolled drafter in training: what each step of a chain would see in decoding, for all rows at once.

EAGLE-3's training-time test (Li et al. 2025, arXiv 2503.01840): every row is the root of a chain of its own. At step s
it sees the keys of step 0 up to itself, within its document, and its own keys of steps 1..s, nobody else's:

    scores = [q_t . k0_j for j <= t | q_t . k1_t, ..., q_t . ks_t]        one softmax over both parts

The first part is computed in blocks of queries that are never kept, the second as elementwise products; both share one
log-sum-exp. Memory is linear in the number of tokens, and documents are slices, so there is nothing to mask between
them. Written backward: with L the log-sum-exp of a row, p = exp(score - L) is its softmax weight wherever the key lives.

Letters: B, T packed rows and their positions; N tokens with keys, R rows that ask, H key-value heads, G query heads per
key-value head, d head width, s later steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Queries per block: the scores of one block are all that is ever held, (heads, BLOCK, document)."""


@dataclass(frozen=True)
class Blocks:
    """Which keys each block of queries sees."""

    keys: Tensor
    """(N,) int64: the tokens that some row sees, as flat indices b*T + t, ascending."""
    rows: Tensor
    """(R,) int64: the rows that ask, likewise. A row sees keys of its document up to itself."""
    ask: Tensor
    """(R,) int64: where each row stands among the keys."""
    bounds: tuple[tuple[int, int, int, int], ...]
    """Per block: first and end row (of R), first and end key (of N); the end key is the block's last row."""
    documents: tuple[tuple[int, int], ...]
    """First and end key of each document."""

    @classmethod
    def find(cls, segments: Tensor, active: Tensor) -> Blocks:
        """segments: (B, T) int64 as in `TeacherBatch`; active: (B, T) bool, rows that ask; none of them is padding."""
        rows = active.flatten().nonzero()[:, 0]
        places: list[int] = rows.tolist()
        starts, ends = _documents(segments)
        before = torch.cat([rows.new_zeros(1), active.flatten().cumsum(0)])  # active rows before each token
        keys: list[Tensor] = []
        bounds, documents = [], []
        num_keys = 0
        for start, first, last in zip(starts.tolist(), before[starts].tolist(), before[ends].tolist()):
            if first == last:
                continue
            end = places[last - 1] + 1  # nobody sees what stands behind the last row that asks
            keys.append(torch.arange(start, end))
            for row in range(first, last, BLOCK):
                stop = min(row + BLOCK, last)
                bounds.append((row, stop, num_keys, num_keys + places[stop - 1] + 1 - start))
            documents.append((num_keys, num_keys + end - start))
            num_keys += end - start
        assert sum(stop - row for row, stop, _, _ in bounds) == len(places), "padding asks for attention"
        found = torch.cat(keys).to(rows.device) if keys else rows
        return cls(found, rows, torch.searchsorted(found, rows), tuple(bounds), tuple(documents))

    @cached_property
    def everyone(self) -> Blocks:
        """The same keys, all of which ask."""
        bounds = [
            (row, min(row + BLOCK, end), first, min(row + BLOCK, end))
            for first, end in self.documents
            for row in range(first, end, BLOCK)
        ]
        places = torch.arange(len(self.keys), device=self.keys.device)
        return Blocks(self.keys, self.keys, places, tuple(bounds), self.documents)


def _documents(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and ends of the documents as flat indices b*T + t, in order."""
    changes = torch.ones_like(segments, dtype=torch.bool)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = changes.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([segments.numel()])])
    real = segments.flatten()[starts] > 0
    return starts[real], ends[real]


class Unroll:
    """The memory of one unrolled forward: a layer's first call brings step 0, each later call one step more."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._steps: dict[int, list[Tensor]] = {}  # per layer: keys and values of step 0, then of each later step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: (R, H*G, d), or (N, H*G, d) at step 0; key, value: (N, H, d) at step 0, (R, H, d) later. Returns as
        query."""
        blocks = self.blocks if len(query) == len(self.blocks.rows) else self.blocks.everyone
        assert len(query) == len(blocks.rows), f"{len(query)} queries of {len(self.blocks.rows)} rows"
        if layer not in self._steps:
            self._steps[layer] = [key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()]  # (H, N, d)
        else:
            self._steps[layer] += [key, value]
        out: Tensor = _Attention.apply(blocks, query, *self._steps[layer])  # type: ignore[no-untyped-call]
        return out


class _Attention(torch.autograd.Function):
    """One softmax over the keys of step 0 and the row's own keys of later steps.

    Arguments: blocks, query (R, H*G, d), keys and values of step 0 (H, N, d), then keys and values (R, H, d) of each
    later step. Scores, softmax and what is summed over blocks are fp32 (float64 stays float64).
    """

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, *later: Tensor) -> Tensor:
        scale = query.shape[-1] ** -0.5
        folded = _fold(query.contiguous(), len(key))  # (H, G, R, d)
        own = torch.stack([_products(folded, k) for k in later[::2]], dim=-1) * scale if later else None  # (H, G, R, s)
        out, total = torch.empty_like(folded), _wide(folded[..., 0]).clone()
        for rows, keys, asked, scores in _scores(blocks, folded, key, scale):
            top = scores.amax(dim=-1, keepdim=True)  # (H, G, n, 1)
            if own is not None:
                top = top.maximum(own[:, :, rows].amax(dim=-1, keepdim=True))
            weights = scores.sub_(top).exp_()
            mass = weights.sum(dim=-1, keepdim=True)
            if own is not None:
                mass = mass + (own[:, :, rows] - top).exp().sum(dim=-1, keepdim=True)
            mixed = torch.bmm(weights.div_(mass).flatten(1, 2).to(value.dtype), value[:, keys])
            out[:, :, rows] = mixed.view_as(asked)
            total[:, :, rows] = (top + mass.log())[..., 0]
        for step, v in enumerate(later[1::2]):
            assert own is not None
            weight = (own[..., step] - total).exp()
            out += (weight[..., None] * _spread(v)).to(out.dtype)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(folded, key, value, out, total, *later)
        return _unfold(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        folded, key, value, out, total, *later = ctx.saved_tensors
        given = _fold(grads[0].to(folded.dtype).contiguous(), len(key))  # (H, G, R, d)
        delta = _wide(given * out).sum(dim=-1, keepdim=True)  # (H, G, R, 1)
        d_query = torch.zeros_like(_wide(folded))
        d_key, d_value = torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
        for rows, keys, asked, scores in _scores(ctx.blocks, folded, key, ctx.scale):
            weights = scores.sub_(total[:, :, rows, None]).exp_()  # (H, G, n, m)
            gave = given[:, :, rows].flatten(1, 2)  # (H, G*n, d)
            d_value[:, keys] += torch.bmm(weights.flatten(1, 2).to(gave.dtype).transpose(1, 2), gave)
            d_weights = _wide(torch.bmm(gave, value[:, keys].transpose(1, 2))).view_as(weights)
            d_scores = d_weights.sub_(delta[:, :, rows]).mul_(weights).mul_(ctx.scale).flatten(1, 2).to(gave.dtype)
            d_query[:, :, rows] += torch.bmm(d_scores, key[:, keys]).view_as(asked)
            d_key[:, keys] += torch.bmm(d_scores.transpose(1, 2), asked.flatten(1, 2))
        d_later: list[Tensor] = []
        for k, v in zip(later[::2], later[1::2]):
            weight = (_products(folded, k) * ctx.scale - total).exp()[..., None]  # (H, G, R, 1)
            d_score = weight * (_products(given, v)[..., None] - delta) * ctx.scale
            d_query += d_score * _spread(k)
            d_later += [_gather(d_score * folded).to(k.dtype), _gather(weight * given).to(v.dtype)]
        d_query = _unfold(d_query.to(folded.dtype))
        return None, d_query, d_key.to(key.dtype), d_value.to(value.dtype), *d_later


def _scores(blocks: Blocks, folded: Tensor, key: Tensor, scale: float) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Per block: its rows, its keys, its queries (H, G, n, d) and their scores (H, G, n, m), -inf where unseen."""
    for row, stop, first, end in blocks.bounds:
        rows, keys = slice(row, stop), slice(first, end)
        asked = folded[:, :, rows].contiguous()
        scores = _wide(torch.bmm(asked.flatten(1, 2), key[:, keys].transpose(1, 2))).mul_(scale)
        scores = scores.view(*asked.shape[:3], end - first)
        unseen = torch.arange(first, end, device=key.device) > blocks.ask[rows, None]  # (n, m)
        yield rows, keys, asked, scores.masked_fill_(unseen, -torch.inf)


def _fold(x: Tensor, heads: int) -> Tensor:
    """(R, H*G, d) -> (H, G, R, d)."""
    return x.view(len(x), heads, x.shape[1] // heads, x.shape[2]).permute(1, 2, 0, 3).contiguous()


def _unfold(x: Tensor) -> Tensor:
    """(H, G, R, d) -> (R, H*G, d)."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _spread(x: Tensor) -> Tensor:
    """(R, H, d) -> (H, 1, R, d), for all query heads of a group."""
    return x.transpose(0, 1)[:, None]


def _gather(x: Tensor) -> Tensor:
    """(H, G, R, d) -> (R, H, d), summed over the group."""
    return x.sum(dim=1).transpose(0, 1)


def _products(folded: Tensor, own: Tensor) -> Tensor:
    """Each query with its own row's vector: (H, G, R, d), (R, H, d) -> (H, G, R), fp32."""
    return (_wide(folded) * _wide(_spread(own))).sum(dim=-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
