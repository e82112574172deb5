"""Draft trees from one forward of a block drafter: what each slot proposes, with or without a head that conditions it.

Without a Markov head a slot's candidates are the same below every parent. With one they depend on the parent's token
(heads/markov.py); a static tree ranks every node's candidates given its own path, a best-first tree rescores a pool.

Letters: B rows, K slots, D draft width, W draft vocabulary, C candidates per slot, n nodes of one depth, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..infer.dynamic_tree import StaticGrowth
from ..infer.tree import TokenTree, Topology
from .markov import ConfidenceHead, MarkovHead
from .vocabulary import DraftVocabulary


class BestFirst(BaseModel):
    """A tree of the draft's most likely paths, anew in every round (infer/parallel_tree.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(63, ge=1)
    """n: draft nodes that are verified (JetSpec: budgets of 64, 128 and 256 with the anchor)."""
    width: int = Field(7, ge=1)
    """C: candidates per slot (JetSpec: 7)."""


@dataclass(frozen=True)
class Slots:
    """What a block drafter computed for the blocks of B rows."""

    anchors: Tensor
    """(B,) int64."""
    hidden: Tensor
    """(B, K, D): slot k proposes the token of depth k + 1."""
    base: Tensor
    """(B, K, W): its logits, without the Markov head's bias."""
    vocabulary: DraftVocabulary
    """Of the logits."""
    markov: MarkovHead | None
    sure: ConfidenceHead | None = None

    def static_tree(self, topology: Topology) -> TokenTree:
        """The tree of a fixed shape, of depth K at most: rank r of a node is its r-th choice given the node's path. The
        confidences of a chain are the confidence head's, if there is one."""
        tree = self._ranked(topology)
        if self.sure is None or topology.width > 1:
            return tree
        logits = self.sure(self.hidden, self.markov, tree.tokens[:, :-1])
        confidence = torch.cat([torch.ones_like(logits[:, :1]), logits.sigmoid()], dim=1)
        return replace(tree, confidence=confidence.float())

    def _ranked(self, topology: Topology) -> TokenTree:
        width = topology.width
        if self.markov is None:
            best, log_probs = self.marginals(width)
            return topology.fill(self.anchors, self.vocabulary.to_target(best), log_probs)
        growth, tokens = StaticGrowth(topology, self.anchors), self.anchors[:, None]  # (B, n)
        state = self.markov.begin(tokens)
        for step in range(topology.depth):
            logits, state = self._below(self.markov, step, tokens, state)
            found = logits.topk(width, dim=-1)
            log_probs = found.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
            frontier = growth.add(self.vocabulary.to_target(found.indices), log_probs)
            if frontier is not None:
                tokens = frontier.tokens
                state = state.gather(1, frontier.origin[:, :, None].expand(-1, -1, state.shape[-1]))
        return growth.finish()

    def candidates(self, width: int) -> tuple[Tensor, Tensor]:
        """Of every slot `width` target ids (B, K, C) int64, and what the best-first tree scores them by: log-probabilities
        (B, K, C), with a Markov head (B, K, C, C) as in `conditioned`."""
        tokens, log_probs = self.marginals(width) if self.markov is None else self.conditioned(self.markov, width)
        return self.vocabulary.to_target(tokens), log_probs

    def marginals(self, width: int) -> tuple[Tensor, Tensor]:
        """The best draft ids (B, K, C) int64 of every slot and their log-probabilities, float32; C = min(width, W)."""
        best = self.base.float().topk(min(width, self.base.shape[-1]), dim=-1)
        return best.indices, best.values - self.base.float().logsumexp(dim=-1, keepdim=True)

    def conditioned(self, markov: MarkovHead, width: int) -> tuple[Tensor, Tensor]:
        """Draft ids (B, K, C) int64 and their log-probabilities below each candidate of the slot before, (B, K, C, C)
        float32, parent before child; the first slot's are the same in every row of the table.

        A slot's candidates are the best below the top-1 chain, so candidate 0 of every slot is the chain, exactly. Below
        another parent they are rescored: tokens that are no candidates keep the mass they have below the chain, and an
        rnn's state is the chain's. Both are estimates that cost acceptance where they are wrong, never exactness.
        """
        count = min(width, self.base.shape[-1])
        parents = self.anchors[:, None].expand(-1, count)
        state = markov.begin(self.anchors[:, None])  # (B, 1, r), of the chain
        tokens, log_probs = [], []
        for step in range(self.base.shape[1]):
            chain, after = self._below(markov, step, parents[:, :1], state)  # (B, 1, W)
            best = chain[:, 0].float().topk(count, dim=-1)
            at = self.hidden[:, step, None].expand(-1, count, -1)
            code, _ = markov.step(state.expand(-1, count, -1), at, parents)  # (B, C, r)
            own = self.base[:, step].gather(1, best.indices).float()
            scores = own[:, None] + markov.rescore(code, best.indices).float()  # (B, C, C)
            scores[:, 0] = best.values
            pool, whole = scores.logsumexp(dim=-1), chain[:, 0].float().logsumexp(dim=-1)  # (B, C), (B,)
            rest = whole + torch.log(-torch.expm1((pool[:, 0] - whole).clamp(max=-1e-7)))  # of all other tokens
            log_probs.append(scores - torch.logaddexp(pool, rest[:, None])[:, :, None])
            tokens.append(best.indices)
            parents, state = self.vocabulary.to_target(best.indices), after
        return torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1)

    def _below(self, markov: MarkovHead, step: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, n, W) of slot `step` below nodes with `tokens` (B, n) int64 and `state` (B, n, r), and the state
        after them."""
        at = self.hidden[:, step, None].expand(-1, tokens.shape[1], -1)
        code, after = markov.step(state, at, tokens)
        return self.base[:, step, None] + markov.markov_w2(code).to(self.base), after
