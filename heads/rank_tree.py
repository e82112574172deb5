"""A fixed tree of a language model's best tokens: the child of rank r is its r-th choice after the path to the parent.

One forward of the draft model per depth. On sampled requests the ranks are those of log q + G, with the target's own
noise, so the first child is the coupled proposal; exact under sample-match.

Letters: B rows, M nodes of one depth, R candidates, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..infer.draft_model import DraftReader, DraftState
from ..infer.dynamic_tree import StaticGrowth
from ..infer.sampling import Sampling
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology


class RankTree(DraftReader):
    """Drafts a static tree with a language model."""

    def __init__(self, model: Target, target: Target, *, topology: Topology) -> None:
        super().__init__(model, target, depth=topology.depth)
        self.topology = topology

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        opening, read = self._open(state, anchors, lengths), TokenTree.root(anchors)
        if opening is None:
            return read
        growth, logits = StaticGrowth(self.topology, anchors), opening.logits[:, None]  # (B, M, V)
        while True:
            scores = self._scores(logits, opening.lengths + growth.depth + 1, sampling)
            best = scores.topk(growth.width, dim=-1)
            frontier = growth.add(best.indices, best.values - scores.logsumexp(dim=-1, keepdim=True))
            if frontier is None:
                break
            above = read.num_nodes - logits.shape[1] + frontier.origin
            tokens = torch.cat([read.tokens, frontier.tokens], dim=1)
            read = TokenTree(tokens, torch.cat([read.parents, above], dim=1), torch.ones_like(tokens, dtype=torch.bool))
            logits = self._read_level(state, read, opening, frontier.tokens.shape[1])
        tree = growth.finish()
        return replace(tree, valid=tree.valid & (opening.alive[:, None] | (tree.parents < 0)))
