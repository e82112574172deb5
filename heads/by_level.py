"""Drafting level by level: a layer is run on the nodes of one depth, each below its parent, and proposes their children.

Letters: B rows, n nodes of one depth, D width, R candidates.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from ..infer.dynamic_tree import DynamicGrowth, DynamicShape, StaticGrowth
from ..infer.tree import TokenTree, Topology
from .own_cache import OwnCache, Recall


class Layer(Protocol):
    """What is run."""

    def read_level(self, tokens: Tensor, above: Tensor, positions: Tensor, memory: Recall) -> Tensor:
        """Its output (B, n, D) on tokens (B, n) int64 at positions (B, n), each below its parent's output (B, n, D)."""
        ...

    def candidates(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best tokens (B, n, R) int64 below nodes with outputs (B, n, D), R = width at most, and their
        log-probabilities, float32."""
        ...


def draft_by_level(
    layer: Layer,
    shape: Topology | DynamicShape,
    anchors: Tensor,
    lengths: Tensor,
    hidden: Tensor,
    *,
    cache: OwnCache,
    owner: nn.Module,
) -> TokenTree:
    """The tree of that shape below `anchors` (B,) int64, of rows with `lengths` (B,) true tokens and the layer's output
    `hidden` (B, D) at the newest of them, which stands at position lengths - 1. owner: the module that attends."""
    if isinstance(shape, Topology) and shape.depth == 0:
        return TokenTree.root(anchors)

    def grow(anchors: Tensor, lengths: Tensor, hidden: Tensor) -> TokenTree:
        growth = StaticGrowth(shape, anchors) if isinstance(shape, Topology) else DynamicGrowth(shape, anchors)
        hidden = hidden[:, None]  # (B, n, D)
        frontier = growth.add(*layer.candidates(hidden, growth.width))
        while frontier is not None:
            memory = cache.grow(owner, lengths, frontier.ancestors)
            above = hidden.gather(1, frontier.origin[:, :, None].expand(-1, -1, hidden.shape[-1]))
            # The newest pair stands at lengths - 1, so a node of depth 1 at lengths.
            positions = (lengths - 1 + growth.depth)[:, None].expand_as(frontier.tokens)
            hidden = layer.read_level(frontier.tokens, above, positions, memory)
            frontier = growth.add(*layer.candidates(hidden, growth.width))
        return growth.finish()

    room = len(shape.paths) if isinstance(shape, Topology) else shape.width * shape.depth
    return cache.draft(shape, room, grow, anchors, lengths, hidden)
