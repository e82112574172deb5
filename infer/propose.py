"""Drawing stochastic drafts: tokens sampled from the drafter, for the rejection verifiers of `rejection.py`.

The contract between draft and verifier: `TokenTree.probs[:, j]` is `log_q.exp()` of the very row that node j was drawn
from. Siblings are drawn without replacement and all carry their parent's row *before* any of them was removed; their
order in the tree is the order of drawing (the verifier removes the earlier ones itself). In a chain, node j carries
the drafter's row after node j-1. The root's row is never read.

Children come from the Gumbel-top-k trick (Kool et al. 2019, "Stochastic beams and where to find them"): the k largest
of log q + Gumbel noise, in descending order, are k draws without replacement in the order of drawing. A row with fewer
than k possible tokens runs out: the rest is marked invalid and never verified.

Draft noise is keyed by the round and the *parent node*, not by the token's position: two nodes of one depth must not
share their noise (traversal verification relies on independent branches), nor may a position that was drafted, judged
and thrown away in one round meet the same noise in the next.

Which nodes are drawn may depend on the past, on tokens already drawn above them and on load, never on the drawn token
itself: stopping after an unlikely token is exact, dropping it is a bias.

Letters: B rows, M parents, R rows of noise, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import noise

MAX_NODES = 2**20
"""Nodes per round that have noise of their own."""


def gumbel_top_k(
    log_q: Tensor, *, seeds: Tensor, positions: Tensor, k: int, stream: int = noise.STREAM_DRAFT
) -> tuple[Tensor, Tensor]:
    """k draws without replacement per row, in the order of drawing.

    log_q: (R, V) float32, normalised, -inf where impossible; seeds, positions: (R,) int64, the key of each row's noise.
    Returns tokens (R, k) int64 and valid (R, k) bool, False where the row had run out of possible tokens.
    """
    assert 0 < k <= log_q.shape[-1], f"cannot draw {k} distinct tokens from a vocabulary of {log_q.shape[-1]}"
    ids = torch.arange(log_q.shape[-1], device=log_q.device)
    keys = log_q + noise.gumbel(seeds, positions, ids, stream=stream)
    best = keys.topk(k, dim=-1)
    return best.indices, best.values > -torch.inf


def draw_children(log_q: Tensor, nodes: Tensor, *, lengths: Tensor, seeds: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """k children for each of M nodes of every row's tree.

    log_q: (B, M, V) float32, the drafter's rows at the parents; nodes: (B, M) int64, the parents' indices in the tree;
    lengths: (B,) int64, tokens the target has read; seeds: (B,) int64, `Sampling.seeds`.
    Returns tokens (B, M, k) int64 and valid (B, M, k) bool.
    """
    batch, count, vocab = log_q.shape
    keys = (lengths[:, None] * MAX_NODES + nodes).reshape(-1)
    tokens, valid = gumbel_top_k(log_q.reshape(-1, vocab), seeds=seeds.repeat_interleave(count), positions=keys, k=k)
    return tokens.view(batch, count, k), valid.view(batch, count, k)


def draw_next(log_q: Tensor, step: int, *, lengths: Tensor, seeds: Tensor) -> Tensor:
    """A chain's next token (B,) int64: node `step + 1`, drawn from the row log_q (B, V) after node `step`."""
    nodes = torch.full_like(lengths, step)[:, None]
    tokens, _ = draw_children(log_q[:, None], nodes, lengths=lengths, seeds=seeds, k=1)
    return tokens[:, 0, 0]
