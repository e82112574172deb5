"""Rejection verifiers: which sampled draft tokens to keep so that the text is exactly a sample from the target.

They judge drafts that were *drawn* from known rows q (`propose.py`, `TokenTree.probs`) and keep more of them than
sample-match can. With p the target's row and q the row the token x was drawn from:

- `token_level`, chains (Leviathan et al. 2023, Chen et al. 2023): keep x with probability min(1, p(x)/q(x)); at the
  first rejection emit from norm((p - q)_+).
- `block`, chains (Sun et al. 2024, "Block verification accelerates speculative decoding"): with r_i the running
  min(1, r_{i-1} p/q), S_i = sum (r_i p - q)_+ and h_i = S_i / (S_i + 1 - r_i), h = r at the chain's end, the kept
  length is the *largest* i whose own coin is below h_i: a failure does not end the search. Emits from
  norm((r p - q)_+). Never keeps fewer than token_level.
- `recursive`, trees drawn without replacement (Miao et al. 2024 (SpecInfer), Jeon et al. 2024 (RSD)): at each node,
  children in the order of drawing; every rejection turns p into norm((p - q)_+), and q loses the rejected token and is
  renormalised.
- `traversal`, trees (Weng et al. 2025, "Traversal verification for speculative tree decoding"): block verification
  bottom-up, leaves first; a rejected leaf updates r, p and q of its parent. On chains it is `block` in law.

Each draws one coin per node and round and one number for the final token, all position-keyed (`noise.py`), in streams
of their own: independent of the draft, of the target's own noise and of earlier rounds. A greedy row (temperature 0)
has a point mass for p, for which all four keep exactly the path of argmaxes.

Each verifier is a judge, a deterministic function of (tree, p, coins), followed by one inverse-transform draw.
A judge takes p (B, N, V) float32 and coins (B, N) float64 in [0, 1) and returns the last kept node (B,) int64 and the
weights (B, V) float32, not normalised, from which the final token is drawn.

Letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import noise
from .sampling import Sampling
from .tree import TokenTree
from .verify import Verdict, trace

Judge = Callable[[TokenTree, Tensor, Tensor], tuple[Tensor, Tensor]]


def token_level(tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    """Token-level rejection of a sampled chain. Exact. Raises ValueError for other trees and for drafts without q."""
    return _verify(judge_token_level, tree, logits, lengths, sampling)


def block(tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    """Block verification of a sampled chain. Exact. Raises ValueError for other trees and for drafts without q."""
    return _verify(judge_block, tree, logits, lengths, sampling)


def recursive(tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    """Recursive rejection of a tree drawn without replacement. Exact. Raises ValueError for drafts without q."""
    return _verify(judge_recursive, tree, logits, lengths, sampling)


def traversal(tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    """Traversal verification of a tree drawn without replacement. Exact. Raises ValueError for drafts without q."""
    return _verify(judge_traversal, tree, logits, lengths, sampling)


def _verify(judge: Judge, tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    if tree.probs is None:
        if tree.num_nodes > 1:
            raise ValueError(
                "a rejection verifier needs the rows that the draft was drawn from (TokenTree.probs), and this drafter "
                "gives none. Use the sample_match verifier: it is exact for every drafter."
            )
        tree = TokenTree(tree.tokens, tree.parents, tree.valid, torch.zeros_like(logits, dtype=torch.float32))
    nodes = torch.arange(tree.num_nodes, device=lengths.device)
    coins = noise.uniform(sampling.seeds, lengths, nodes, stream=noise.STREAM_COIN)
    final = noise.uniform(sampling.seeds, lengths, nodes[:1], stream=noise.STREAM_BONUS)[:, 0]
    last, weights = judge(tree, sampling.log_probs(logits).exp(), coins)
    return trace(tree, last, draw(weights, final))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-transform draw: weights (B, V), not normalised, and uniforms (B,) float64 in (0, 1) -> (B,) int64.

    Summed in float64, so that rare tokens keep their chance; a token of weight 0 is never drawn.
    """
    upto = weights.double().cumsum(dim=-1)
    return torch.searchsorted(upto, uniforms[:, None] * upto[:, -1:], right=True)[:, 0]


def judge_token_level(tree: TokenTree, p: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """A judge (module docstring) of chains."""
    p_x, q_x, offered = _chain(tree, p)
    kept = offered & (coins[:, 1:] * q_x < p_x)
    last = kept.cumprod(dim=1).sum(dim=1)
    return last, _chain_residual(tree, p, offered, last, torch.ones_like(p[:, 0, 0]))


def judge_block(tree: TokenTree, p: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """A judge (module docstring) of chains."""
    p_x, q_x, offered = _chain(tree, p)
    ratio = torch.where(offered, p_x / q_x, 0.0)  # (B, N-1)
    rates = [torch.ones_like(p[:, 0, 0])]
    for step in range(tree.num_nodes - 1):
        rates.append((rates[-1] * ratio[:, step]).clamp(max=1))
    rate = torch.stack(rates, dim=1)  # (B, N): r_i
    assert tree.probs is not None, "verifiers check that the draft has its rows"
    excess = (rate[:, :-1, None] * p[:, :-1] - tree.probs[:, 1:]).clamp(min=0).sum(dim=-1)  # (B, N-1): S_i
    follows = pad(offered, (0, 1))  # (B, N): something was drafted after node i
    chance = torch.where(follows, _continue_rate(pad(excess, (0, 1)), rate), rate)  # (B, N): h_i
    passed = pad(offered, (1, 0)) & (coins < chance)
    steps = torch.arange(tree.num_nodes, device=p.device)
    last = (passed * steps).amax(dim=1)  # the largest: no stop at the first failure
    return last, _chain_residual(tree, p, offered, last, rate.gather(1, last[:, None])[:, 0])


def judge_recursive(tree: TokenTree, p: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """A judge (module docstring) of trees. One pass: children follow their parents, siblings the order of drawing."""
    live, earlier = _live(tree), _earlier_siblings(tree)
    law, current = p[:, 0].clone(), torch.zeros_like(tree.tokens[:, 0])
    for node in range(1, tree.num_nodes):
        rows = (live[:, node] & (tree.parents[:, node] == current)).nonzero()[:, 0]
        if len(rows) == 0:  # most nodes hang from tokens that were not kept
            continue
        at = torch.full_like(rows, node)
        q, token = _drawn_from(tree, rows, at, earlier), tree.tokens[rows, at]
        index = torch.arange(len(rows), device=rows.device)
        kept = coins[rows, at] * q[index, token] < law[rows, token]
        rest = _normalised((law[rows] - q).clamp(min=0), law[rows])
        law[rows] = torch.where(kept[:, None], p[rows, at], rest)
        current[rows] = torch.where(kept, at, current[rows])
    return current, law


def judge_traversal(tree: TokenTree, p: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """A judge (module docstring) of trees.

    A depth-first walk visits each node twice. On arrival its rate follows from its parent's current rate and law. On
    departure all its children are gone: it is kept with its current rate, or deleted, which updates its parent.
    """
    earlier = _earlier_siblings(tree)
    visits, arrives = _depth_first(tree, _live(tree), earlier)
    law, rate = p.clone(), torch.ones_like(p[:, :, 0])  # the p and r of every node, updated by deletions
    last = torch.zeros_like(tree.tokens[:, 0])
    for step in range(1, visits.shape[1]):
        busy = (visits[:, step] > 0) & (last == 0)
        if not bool(busy.any()):
            break
        rows = (busy & arrives[:, step]).nonzero()[:, 0]
        if len(rows):
            node = visits[rows, step]
            parent, token = tree.parents[rows, node], tree.tokens[rows, node]
            q_x = _drawn_from(tree, rows, node, earlier).gather(1, token[:, None])[:, 0]
            rate[rows, node] = (rate[rows, parent] * law[rows, parent, token] / q_x).clamp(max=1)

        rows = (busy & ~arrives[:, step]).nonzero()[:, 0]
        kept = coins[rows, visits[rows, step]] < rate[rows, visits[rows, step]]
        last[rows[kept]] = visits[rows[kept], step]
        rows = rows[~kept]
        if len(rows):
            node = visits[rows, step]
            parent = tree.parents[rows, node]
            above, above_rate = law[rows, parent], rate[rows, parent]
            rest = (above_rate[:, None] * above - _drawn_from(tree, rows, node, earlier)).clamp(min=0)
            rate[rows, parent] = _continue_rate(rest.sum(dim=-1), above_rate)
            law[rows, parent] = _normalised(rest, above)
    return last, law[torch.arange(len(p), device=p.device), last]


def _chain(tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p(x) and q(x) of the drafted tokens of a chain, and which were offered: each (B, N-1)."""
    steps = torch.arange(-1, tree.num_nodes - 1, device=p.device)
    if not bool((tree.parents == steps).all()):
        raise ValueError(
            "this verifier judges chains, and the draft has branches. Use recursive or traversal for sampled trees, "
            "or draft a chain."
        )
    assert tree.probs is not None, "verifiers check that the draft has its rows"
    tokens = tree.tokens[:, 1:, None]
    p_x = p[:, :-1].gather(2, tokens)[..., 0]
    q_x = tree.probs[:, 1:].gather(2, tokens)[..., 0]
    return p_x, q_x, _live(tree)[:, 1:]


def _chain_residual(tree: TokenTree, p: Tensor, offered: Tensor, last: Tensor, rate: Tensor) -> Tensor:
    """What is left after node `last`: (rate * p - q)_+ (B, V), or p where nothing was drafted after it."""
    assert tree.probs is not None, "verifiers check that the draft has its rows"
    rows = torch.arange(len(p), device=p.device)
    after = (last + 1).clamp(max=tree.num_nodes - 1)
    rejected = pad(offered, (1, 0))[rows, after] & (after > last)
    law = p[rows, last]
    rest = (rate[:, None] * law - tree.probs[rows, after]).clamp(min=0)
    return torch.where(rejected[:, None], _normalised(rest, law), law)


def _continue_rate(excess: Tensor, rate: Tensor) -> Tensor:
    """S / (S + 1 - r), the new r of a node after a deletion below it; 1 where it is 0/0 (then p is q)."""
    total = excess + 1 - rate
    return torch.where(total > 0, excess / total, 1.0)


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """weights (B, V) over their sum; `fallback` where they are all 0, which happens with probability 0."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, fallback)


def _live(tree: TokenTree) -> Tensor:
    """(B, N) bool: valid nodes whose ancestors are valid too; a token that q makes impossible was never drawn."""
    assert tree.probs is not None, "verifiers check that the draft has its rows"
    drawn = tree.valid & (tree.probs.gather(2, tree.tokens[:, :, None])[..., 0] > 0)
    drawn[:, 0] = True
    return ~(tree.ancestors & ~drawn[:, None, :]).any(dim=-1)


def _earlier_siblings(tree: TokenTree) -> Tensor:
    """(B, N, N) bool: `[b, i, j]` is True where node j is a live sibling of node i and was drawn before it."""
    same = tree.parents[:, :, None] == tree.parents[:, None, :]
    return (same & _live(tree)[:, None, :]).tril(diagonal=-1)


def _drawn_from(tree: TokenTree, rows: Tensor, node: Tensor, earlier: Tensor) -> Tensor:
    """(R, V): for R chosen rows, the law that `node` (R,) was drawn from, its row without its earlier siblings."""
    assert tree.probs is not None, "verifiers check that the draft has its rows"
    q = tree.probs[rows, node]  # a copy
    which, sibling = earlier[rows, node].nonzero(as_tuple=True)
    q[which, tree.tokens[rows[which], sibling]] = 0.0
    return q / q.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _depth_first(tree: TokenTree, live: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """The walk of the live nodes: nodes (B, 2N) int64 and whether each visit is the arrival (B, 2N) bool.

    Padded with node 0. A node arrives 2 * (its rank in preorder) - depth visits after the root.
    """
    batch, count = tree.tokens.shape
    size = (tree.ancestors & live[:, :, None]).sum(dim=1)  # (B, N): live nodes in the subtree
    offset = 1 + (earlier * size[:, None, :]).sum(dim=-1)  # rank in preorder, less the parent's
    offset[:, 0] = 0
    rank = (tree.ancestors * offset[:, None, :]).sum(dim=-1)
    arrival = torch.where(live, 2 * rank - tree.depths, 2 * count)  # slot 2N is thrown away
    departure = torch.where(live, arrival + 2 * size - 1, 2 * count)
    index = torch.arange(count, device=live.device).expand(batch, count)
    walk = torch.zeros(batch, 2 * count + 1, dtype=torch.int64, device=live.device)
    walk = walk.scatter_(1, arrival, index).scatter_(1, departure, index)[:, :-1]
    arrives = torch.zeros(batch, 2 * count + 1, dtype=torch.bool, device=live.device).scatter_(1, arrival, True)[:, :-1]
    return walk, arrives
