"""Trees that a drafter grows level by level because its proposals depend on the path: a fixed shape, or its confidence.

The drafter drives; a growth says which nodes to run next and keeps the books:

    frontier = growth.add(candidates and log-probs at the anchor)
    while frontier is not None:
        run the drafter on frontier.tokens, each below the node `frontier.origin` of the level before
        frontier = growth.add(candidates and log-probs at the frontier)
    tree = growth.finish()

`DynamicGrowth` is EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858): a node is worth the product of the draft's own
probabilities down to it; every level expands its `width` best nodes, and of everything seen the `nodes` best are kept.
Scores are fp32 log-probabilities that never rise along a path, and of equal scores the shallower level comes first, so
the kept set holds every node's parent. Candidates are chosen by rank, never drawn: dropping an unlikely one is exact.

Letters: B rows, n frontier nodes, R candidates per node, M nodes run so far (the frontier included), N tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .tree import TokenTree, Topology


@dataclass(frozen=True)
class Frontier:
    """The nodes to run the drafter on next, all of one depth."""

    tokens: Tensor
    """(B, n) int64."""
    origin: Tensor
    """(B, n) int64: the node's parent, as an index into the frontier before (0: the anchor, before the first one)."""
    ancestors: Tensor
    """(B, n, M) bool: which of all nodes run so far are the node itself or above it; the anchor is not among them."""


@dataclass(frozen=True)
class DynamicShape:
    """Limits of a dynamic tree."""

    nodes: int
    """Draft nodes kept (the anchor is not counted)."""
    width: int
    """Nodes expanded per level, and candidates of each."""
    depth: int
    """Levels of draft tokens."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.width, self.depth) < 1:
            raise ValueError(f"a dynamic tree needs nodes, width and depth of at least 1, got {self}.")


class DynamicGrowth:
    """Grows the tree of the draft's most likely paths."""

    def __init__(self, shape: DynamicShape, anchors: Tensor) -> None:
        """anchors: (B,) int64."""
        batch, device = len(anchors), anchors.device
        self.shape, self.anchors, self.width, self.depth = shape, anchors, shape.width, 0
        self._scores = torch.zeros(batch, 1, device=device)  # (B, n), of the frontier
        self._index = torch.full((batch, 1), -1, device=device)  # (B, n): places of the frontier in the pool
        self._ancestors = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        self._pool: list[tuple[Tensor, Tensor, Tensor]] = []  # per level: tokens, scores, parents (B, n*R)

    def add(self, tokens: Tensor, log_probs: Tensor) -> Frontier | None:
        """Take in the frontier's candidates; the next frontier, or None when the tree is as deep as it may be.

        tokens: (B, n, R) int64; log_probs: (B, n, R), the draft's log-probabilities of them.
        """
        batch, _, ranks = tokens.shape
        offset = sum(level.shape[1] for level, _, _ in self._pool)
        # Rounding can lift a log-probability above 0, which would rank a child before its parent; what is no number has no rank.
        scores = (self._scores[:, :, None] + log_probs.float().clamp(max=0)).flatten(1)  # (B, n*R)
        scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        self._pool.append((tokens.flatten(1), scores, self._index.repeat_interleave(ranks, dim=1)))
        self.depth += 1
        if self.depth == self.shape.depth:
            return None
        best = _best(scores, self.shape.width)  # (B, k)
        origin = best // ranks
        above = self._ancestors.gather(1, origin[:, :, None].expand(-1, -1, self._ancestors.shape[2]))
        own = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(batch, -1, -1)
        self._ancestors = torch.cat([above, own], dim=2)
        self._scores, self._index = scores.gather(1, best), best + offset
        return Frontier(tokens.flatten(1).gather(1, best), origin, self._ancestors)

    def finish(self) -> TokenTree:
        """The `nodes` most likely of all nodes seen, level by level."""
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*self._pool))
        kept = _best(scores, self.shape.nodes).sort(dim=1).values  # (B, N-1); the pool is level by level
        parents = parents.gather(1, kept)
        places = torch.searchsorted(kept, parents.clamp(min=0))
        closed = (kept.gather(1, places.clamp(max=kept.shape[1] - 1)) == parents) | (parents < 0)
        # On a card the check does not wait for it, so that drafting can be recorded.
        torch._assert_async(closed.all(), "a dynamic tree kept a node without its parent: scores rose along a path")
        parents = torch.cat([torch.full_like(kept[:, :1], -1), torch.where(parents < 0, 0, places + 1)], dim=1)
        nodes = torch.cat([self.anchors[:, None], tokens.gather(1, kept)], dim=1)
        return TokenTree(nodes, parents, torch.ones_like(nodes, dtype=torch.bool))


class StaticGrowth:
    """Fills a fixed topology whose candidates differ from parent to parent."""

    def __init__(self, topology: Topology, anchors: Tensor) -> None:
        """anchors: (B,) int64."""
        self.anchors, self.width, self.depth = anchors, topology.width, 0
        self._levels = _compiled(topology.paths, str(anchors.device))
        self._parents = _parents(topology.paths, str(anchors.device))
        self._tokens = [anchors[:, None]]
        self._log_probs = [torch.zeros(len(anchors), 1, device=anchors.device)]

    def add(self, tokens: Tensor, log_probs: Tensor) -> Frontier | None:
        """Like `DynamicGrowth.add`; the shape does not depend on `log_probs`."""
        batch, level = len(tokens), self._levels[self.depth]
        self.depth += 1
        found = tokens[:, level.origin, level.ranks]
        self._tokens.append(found)
        self._log_probs.append(log_probs[:, level.origin, level.ranks].float().clamp(max=0))
        if self.depth == len(self._levels):
            return None
        inner = level.inner
        origin = level.origin[inner].expand(batch, -1)
        return Frontier(found[:, inner], origin, level.ancestors.expand(batch, -1, -1))

    def finish(self) -> TokenTree:
        """The tree; a node's confidence is the draft's own probability of its token."""
        nodes, confidence = torch.cat(self._tokens, dim=1), torch.cat(self._log_probs, dim=1).exp()
        parents, valid = self._parents.expand(len(nodes), -1), torch.ones_like(nodes, dtype=torch.bool)
        return TokenTree(nodes, parents, valid, confidence=confidence)


@dataclass(frozen=True)
class _Level:
    """One depth of a topology."""

    origin: Tensor
    """(m,) per node of this depth: its parent among the inner nodes of the depth above."""
    ranks: Tensor
    """(m,) which candidate of its parent it is."""
    inner: Tensor
    """(n,) which of the m have children."""
    ancestors: Tensor
    """(n, M) bool."""


@lru_cache(maxsize=64)
def _compiled(paths: tuple[tuple[int, ...], ...], device: str) -> list[_Level]:
    has_children = {path[:-1] for path in paths}
    levels: list[_Level] = []
    before: list[tuple[int, ...]] = [()]  # inner nodes of the depth above
    seen: list[tuple[int, ...]] = []  # all inner nodes so far, the anchor left out
    for depth in range(1, max(map(len, paths), default=0) + 1):
        nodes = [path for path in paths if len(path) == depth]
        inner = [path for path in nodes if path in has_children]
        seen += inner
        ancestors = [[path[: len(other)] == other for other in seen] for path in inner]
        levels.append(
            _Level(
                origin=torch.tensor([before.index(path[:-1]) for path in nodes], device=device),
                ranks=torch.tensor([path[-1] for path in nodes], device=device),
                inner=torch.tensor([nodes.index(path) for path in inner], dtype=torch.int64, device=device),
                ancestors=torch.tensor(ancestors, dtype=torch.bool, device=device).view(len(inner), len(seen)),
            )
        )
        before = inner
    return levels


@lru_cache(maxsize=64)
def _parents(paths: tuple[tuple[int, ...], ...], device: str) -> Tensor:
    """(N,) int64, as `TokenTree.parents`."""
    index = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
    return torch.tensor([-1] + [index[path[:-1]] for path in paths], device=device)


def _best(scores: Tensor, count: int) -> Tensor:
    """Places (B, min(count, P)) of the highest of scores (B, P); of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
