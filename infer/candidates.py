"""Several candidates per round from a draft model, as one tree that the target verifies in one forward.

- `DraftBeams`: a beam search of the draft model, scored by log-probability. Hypotheses share their common prefixes, so
  the beams are a prefix tree as they grow (Miao et al. 2024, "SpecInfer", merges finished sequences into one), and of
  all continuations that were scored the best are kept (dynamic_tree.py). On sampled rows scores are log softmax(log q + G)
  as in draft_model.py, so the best child of a node is the coupled proposal. Exact under sample-match.
- `DraftTree`: a fixed shape whose siblings are sampled without replacement (Jeon et al. 2024, "Recursive speculative
  decoding"), with the rows they were drawn from, for the recursive and traversal verifiers.

The draft model reads one depth of the tree per forward. Nothing of the tree stays in its cache but the anchor: which
nodes are accepted is known only later, and reading those again with the next anchor costs no forward of its own.

Letters: B rows, M nodes of one depth, N nodes, R beams or siblings, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from .draft_model import DraftReader, DraftState
from .dynamic_tree import DynamicGrowth, DynamicShape
from .propose import draw_children
from .sampling import Sampling
from .target import Target
from .tree import TokenTree, Topology


class DraftBeams(DraftReader):
    """Drafts the `nodes` most likely tokens that a search with `beams` hypotheses of up to `length` tokens comes across."""

    def __init__(self, model: Target, target: Target, *, beams: int = 4, length: int = 4, nodes: int = 15) -> None:
        super().__init__(model, target, depth=length)
        if not 1 <= beams <= target.vocab_size:
            raise ValueError(f"beams must lie in 1..{target.vocab_size}, the size of the vocabulary, got {beams}.")
        self.shape = DynamicShape(nodes=nodes, width=beams, depth=length)

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        opening, beams = self._open(state, anchors, lengths), TokenTree.root(anchors)
        if opening is None:
            return beams
        growth = DynamicGrowth(self.shape, anchors)
        logits, ended = opening.logits[:, None], torch.zeros_like(beams.valid)  # (B, M, V), (B, M): at first the root's
        while True:
            scores = self._scores(logits, opening.lengths + growth.depth + 1, sampling)
            best = scores.topk(self.shape.width, dim=-1)
            worth = best.values - scores.logsumexp(dim=-1, keepdim=True)
            frontier = growth.add(best.indices, worth.masked_fill(ended[:, :, None], -torch.inf))
            if frontier is None:
                break
            above = beams.num_nodes - logits.shape[1] + frontier.origin
            beams = _extended(beams, frontier.tokens, above, torch.ones_like(above, dtype=torch.bool))
            logits = self._read_level(state, beams, opening, frontier.tokens.shape[1])
            ended = self._ends(frontier.tokens)
        tree = growth.finish()
        return replace(tree, valid=tree.valid & (opening.alive[:, None] | (tree.parents < 0)))


class DraftTree(DraftReader):
    """Samples a tree of a fixed shape; a node's children are drawn without replacement from one row.

    shape: rank paths. The ranks below a node count its draws, so they are 0, 1, 2, ... without gaps.
    """

    def __init__(self, model: Target, target: Target, *, shape: Topology) -> None:
        super().__init__(model, target, depth=shape.depth)
        for path in shape.paths:
            before = (*path[:-1], path[-1] - 1)
            if path[-1] and before not in shape.paths:
                raise ValueError(
                    f"siblings are drawn one after another: path {path} needs its elder {before} in the tree."
                )
        levels = [[path for path in shape.paths if len(path) == depth] for depth in range(shape.depth + 1)]
        levels[0] = [()]
        self._levels = [_Level(above, level, model.device) for above, level in pairwise(levels)]

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        opening, tree = self._open(state, anchors, lengths), TokenTree.root(anchors)
        if opening is None:
            return tree
        logits, alive = opening.logits[:, None], opening.alive[:, None]  # (B, M, V), (B, 1)
        tree = replace(tree, probs=torch.zeros_like(logits, dtype=torch.float32))
        for depth, level in enumerate(self._levels, start=1):
            log_q, first = sampling.log_probs(logits), tree.num_nodes - logits.shape[1]
            nodes = torch.arange(first, tree.num_nodes, device=anchors.device).expand(len(anchors), -1)
            drawn, possible = draw_children(log_q, nodes, lengths=lengths, seeds=sampling.seeds, k=level.draws)
            parents = (first + level.slots).expand(len(anchors), -1)
            goes_on = (tree.valid & alive & ~self._ends(tree.tokens)).gather(1, parents)
            valid = possible[:, level.slots, level.ranks] & goes_on
            tree = _extended(tree, drawn[:, level.slots, level.ranks], parents, valid, log_q.exp()[:, level.slots])
            if depth < self.depth:
                logits = self._read_level(state, tree, opening, len(level.slots))
        return tree


class _Level:
    """How the nodes of one depth hang from those above: slots (M,) of their parents and ranks (M,) among siblings."""

    def __init__(self, above: list[tuple[int, ...]], paths: list[tuple[int, ...]], device: torch.device) -> None:
        self.slots = torch.tensor([above.index(path[:-1]) for path in paths], device=device)
        self.ranks = torch.tensor([path[-1] for path in paths], device=device)
        self.draws = 1 + max(path[-1] for path in paths)


def _extended(
    tree: TokenTree, tokens: Tensor, parents: Tensor, valid: Tensor, probs: Tensor | None = None
) -> TokenTree:
    """The tree with M more nodes: tokens, parents, valid (B, M), probs (B, M, V) or None."""
    return TokenTree(
        torch.cat([tree.tokens, tokens], dim=1),
        torch.cat([tree.parents, parents], dim=1),
        torch.cat([tree.valid, valid], dim=1),
        None if tree.probs is None or probs is None else torch.cat([tree.probs, probs], dim=1),
    )
