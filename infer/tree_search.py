"""Which static tree to draft: best-first search over measured rank accuracies, sized by a measured cost curve.

With a_k(r) = P(candidate r of step k is the right one | its parent was accepted), a path (r_1, ..., r_m) is accepted
with probability prod_k a_k(r_k) and E[tau] = 1 + the sum of that over all nodes (Chen et al. 2024, "Sequoia"; Cai et
al. 2024, "Medusa"). Where a_k does not increase with r, the N best nodes are closed under parents and better siblings,
so popping a heap finds the optimal tree of every size at once. The size is the one with the most tokens per second.

Letters: K steps, R ranks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .tree import Topology

UNCERTAINTY = 0.03
"""Relative error of a measured rate: repeated measurements of one forward differ by as much on a quiet machine."""

Accuracy = Sequence[Sequence[float]]
"""(K, R): accuracy[k][r] as above."""


def rank_accuracy(ranks: Tensor, *, width: int) -> list[list[float]]:
    """(K, R) accuracies from teacher-forced ranks.

    ranks: (..., K) int64, the rank of the true token in each step's list, -1 where the step does not count. A step is
    measured on the positions whose earlier steps were all among the first `width` candidates.
    """
    flat = ranks.reshape(-1, ranks.shape[-1])
    alive = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    table = []
    for step in flat.unbind(dim=1):
        counted = step[alive & (step >= 0)]
        hits = torch.bincount(counted.clamp(max=width), minlength=width + 1)[:width]
        table.append((hits / max(1, len(counted))).tolist())
        alive &= (step >= 0) & (step < width)
    return table


def round_starts(ranks: Tensor) -> Tensor:
    """(B, T) bool: the rows at which a chain decode of this very text begins its rounds.

    ranks: (B, T, K) int64, as above. Rounds are not spread evenly: one that goes well passes over the rows that were easy, so
    drafts begin where the text is harder than on average, and what is measured at all rows promises too much. Each run of
    rows that count is an answer, and its first row, whose anchor the prompt gave, begins a round.
    """
    counted: list[list[bool]] = (ranks[..., 0] >= 0).tolist()
    leading: list[list[int]] = (ranks == 0).long().cumprod(dim=-1).sum(dim=-1).tolist()
    starts = torch.zeros(ranks.shape[:2], dtype=torch.bool)
    for number, (counts, kept) in enumerate(zip(counted, leading)):
        at = 0
        while at < len(counts):
            starts[number, at] = counts[at]
            at += kept[at] + 1 if counts[at] else 1
    return starts.to(ranks.device)


def grow(accuracy: Accuracy, *, num_nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """The `num_nodes` most valuable paths, best first, each with its probability of being accepted.

    Noisy tables are made non-increasing in the rank first (a better-ranked candidate cannot be worth less).
    """
    table = [sorted(row, reverse=True) for row in accuracy]
    heap: list[tuple[float, tuple[int, ...]]] = [(-table[0][0], (0,))]
    chosen: list[tuple[tuple[int, ...], float]] = []
    while heap and len(chosen) < num_nodes:
        value, path = heapq.heappop(heap)
        if value == 0.0:
            break
        chosen.append((path, -value))
        step, rank = len(path) - 1, path[-1]
        if rank + 1 < len(table[step]):
            sibling = value / table[step][rank] * table[step][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if step + 1 < len(table):
            heapq.heappush(heap, (value * table[step + 1][0], (*path, 0)))
    return chosen


def choose_tree(accuracy: Accuracy, *, seconds: Mapping[int, float], overhead: float = 0.0) -> tuple[Topology, float]:
    """The tree with the most expected tokens per second, and its expected tau.

    seconds: measured time of one target forward by number of tree nodes (the root included), interpolated linearly;
    overhead: seconds of a round that do not depend on the tree (drafting, host). An empty tree is plain decoding, which
    has no overhead, and may win. Sizes whose rates lie within `UNCERTAINTY` of the best cannot be told apart by timing;
    the largest of them is taken, since what it accepts more is certain.
    """
    sizes = sorted(seconds)
    if not sizes or sizes[0] != 1:
        raise ValueError(f"the cost curve must start at 1 node (plain decoding), got sizes {sizes}.")
    ranked = grow(accuracy, num_nodes=sizes[-1] - 1)
    taus = list(itertools.accumulate((value for _, value in ranked), initial=1.0))
    plain = 1.0 / seconds[1]
    rates = [plain] + [tau / (interpolate(seconds, n) + overhead) for n, tau in enumerate(taus[1:], start=2)]
    best = max(rates)
    floor = max(plain, (1 - UNCERTAINTY) * best)
    size = max(n for n, rate in enumerate(rates) if rate >= floor) if best > plain else 0
    return Topology(tuple(path for path, _ in ranked[:size])), taus[size]


def expected_tau(topology: Topology, accuracy: Accuracy) -> float:
    """1 + the sum of all nodes' acceptance probabilities."""
    return 1.0 + sum(math.prod(accuracy[k][rank] for k, rank in enumerate(path)) for path in topology.paths)


def interpolate(seconds: Mapping[int, float], size: int) -> float:
    """Piecewise linear in the number of nodes; beyond the largest measured size, proportional to it."""
    sizes = sorted(seconds)
    if size >= sizes[-1]:
        return seconds[sizes[-1]] * size / sizes[-1]
    above = next(s for s in sizes if s >= size)
    if above == size:
        return seconds[size]
    below = max(s for s in sizes if s < size)
    share = (size - below) / (above - below)
    return seconds[below] * (1 - share) + seconds[above] * share
