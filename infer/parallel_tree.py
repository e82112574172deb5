"""The exact best-first tree over the candidates of a drafter that proposes all its depths in one forward.

JetSpec (arXiv 2606.18394) drafts trees from a block's marginals: a node is worth the product of the draft's own
probabilities down to it. Here the expansion is lazy. Candidates of one parent are sorted, so of a popped node only two
others become reachable, its next sibling and its first child, and neither is worth more:

    pop the best node; push its next sibling and its first child

Hence the N nodes popped first are the N most likely of all paths, whatever K and R are; a rule that pushes every child
of a popped node and keeps them spends nodes on unlikely siblings. Candidates are chosen by rank, never drawn, so any
choice among them is exact under sample-match.

Two kinds of scores. Independent marginals, (B, K, R): a candidate of depth k is worth the same below every parent.
Parent-conditioned, (B, K, R, R): `[b, k, p, r]` rescores candidate r of depth k below candidate p of depth k-1 (depth 0
stands below the anchor, whose row is p = 0). The tree is exact for either.

Letters: B rows, K depths, R candidates per depth, P parents with scores of their own (1 or R), N draft nodes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import torch
from torch import Tensor

from .tree import TokenTree

Scores = list[list[list[float]]]
"""[depth][parent][place]: log-probabilities, descending in the place."""
Order = list[list[list[int]]]
"""[depth][parent][place]: which candidate of the depth stands at a place."""


def best_first(anchors: Tensor, tokens: Tensor, log_probs: Tensor, *, nodes: int) -> TokenTree:
    """The `nodes` most likely draft nodes of every row, most likely first, behind the anchor.

    anchors: (B,) int64; tokens: (B, K, R) int64, the candidates of each depth, distinct; log_probs: (B, K, R) or
    (B, K, R, R) as above, -inf where a candidate is impossible. A row with fewer possible nodes is padded with invalid
    ones. One transfer to the host and one back, whatever B is.
    """
    batch, depths, ranks = tokens.shape
    assert nodes >= 1, f"a tree of {nodes} nodes is no draft"
    assert log_probs.shape in {(batch, depths, ranks), (batch, depths, ranks, ranks)}, (
        f"scores {tuple(log_probs.shape)} do not belong to candidates {tuple(tokens.shape)}"
    )
    table = log_probs if log_probs.dim() == 4 else log_probs[:, :, None]  # (B, K, P, R)
    # Rounding can lift a log-probability above 0, which would rank a child before its parent.
    values, order = table.float().clamp(max=0).sort(dim=-1, descending=True, stable=True)
    grown = [_grow(*row, nodes=nodes) for row in zip(values.tolist(), order.tolist())]
    width = max(map(len, grown))
    padded = [[*row, *[(0, 0, 0, 0)] * (width - len(row))] for row in grown]
    parents, steps, places, real = torch.tensor(padded, device=tokens.device).view(batch, width, 4).unbind(dim=2)
    found = tokens.flatten(1).gather(1, steps * ranks + places)  # (B, N)
    roots = anchors[:, None]
    return TokenTree(
        torch.cat([roots, found], dim=1),
        torch.cat([torch.full_like(roots, -1), parents], dim=1),
        torch.cat([torch.ones_like(roots), real], dim=1).bool(),
    )


def _grow(values: Scores, order: Order, *, nodes: int) -> list[tuple[int, int, int, int]]:
    """(index of the parent in the tree, depth, candidate, 1) of the chosen nodes, in the order they were popped."""
    # Entries: cost (minus the path's log-probability), depth, number; then what is needed to go on from the node. Of
    # equal costs the shallower comes first, then the one that was pushed first.
    heap = [(-values[0][0][0], 0, 0, 0.0, 0, 0, 0)]
    chosen: list[tuple[int, int, int, int]] = []
    pushed = 1
    while heap and len(chosen) < nodes:
        cost, depth, _, above, parent, below, place = heappop(heap)
        if cost == inf:
            break
        candidate = order[depth][below][place]
        chosen.append((parent, depth, candidate, 1))
        siblings = values[depth][below]
        if place + 1 < len(siblings):
            heappush(heap, (above - siblings[place + 1], depth, pushed, above, parent, below, place + 1))
        if depth + 1 < len(values):
            under = candidate if len(values[depth + 1]) > 1 else 0
            first = cost - values[depth + 1][under][0]
            heappush(heap, (first, depth + 1, pushed + 1, cost, len(chosen), under, 0))
        pushed += 2
    return chosen
