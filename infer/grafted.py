"""A copy of earlier text grafted onto another drafter's tree: one target forward verifies what both propose.

What a model drafts and what copying drafts are right in different places: a model anywhere for a few tokens, a copy only
where the text repeats itself, and then for many. Serving engines run a suffix automaton beside neural drafters for that
reason (SGLang and TensorRT-LLM, as an add-on). Here the copy's chain shares the nodes that the tree has already, and its
rest hangs from the last of them, so no two siblings say the same and nothing is verified twice.

Without a cost table the whole copy is grafted in every round. With one, a round is the one that is expected to emit most
tokens per second. With a_{r,j} the probability that the first j tokens of row r's copy are accepted (by its own record), and s_j how
often the drafter's tree lately held the next j tokens, a row with a tree of n nodes and a copy of l tokens emits

    1 + sum over j <= l of max(s_j, a_{r,j}) + sum over j > l of s_j     tokens in a round of t(B*n + sum of l) + drafting

and without the tree the same with s = 0, n = 1 and no drafting: where copies are sure, nothing is drafted. Where the tree's record
says that it does not pay even without a copy, it is tried now and then (standby.py). Both proposals must be a function of the
text and of the rows' noise, as sample_match asks; no text changes.

Letters: B rows, N nodes, K tokens of a copy, D depth of the drafter's trees, C = B*K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .cost import draft_seconds, token_seconds, uneven_seconds
from .drafter import Drafter, Observation
from .sampling import Sampling
from .schedule import HOST_SECONDS, LONGEST, admit, cut
from .standby import Trials
from .target import Target
from .tree import TokenTree
from .tree_search import interpolate

FADING = 0.9
"""What a round still counts for when the next one has been seen."""


def follow(tree: TokenTree, tokens: Tensor) -> Tensor:
    """(B, K) int64: the node at which the first 1, ..., K of tokens (B, K) end, or -1 where the tree does not hold them."""
    at, alive = torch.zeros_like(tree.tokens[:, 0]), torch.ones_like(tree.valid[:, 0])
    nodes = torch.full_like(tokens, -1)
    for step, token in enumerate(tokens.unbind(dim=1)):
        is_child = (tree.parents == at[:, None]) & (tree.tokens == token[:, None]) & tree.valid
        alive = alive & is_child.any(dim=1)
        at = torch.where(alive, is_child.int().argmax(dim=1), at)
        nodes[:, step] = torch.where(alive, at, -1)
    return nodes


def graft(tree: TokenTree, chain: TokenTree) -> TokenTree:
    """The tree that holds `tree` as it is, nodes first, and all that `chain` holds besides. Confidences are dropped.

    Worked example: "the" with children "cat" and "dog", and the chain "the cat sat down", give "sat" below "cat" and "down"
    below "sat": two nodes more. Raises ValueError for drawn trees: a copy has no probabilities.
    """
    if tree.probs is not None or chain.probs is not None:
        raise ValueError("a drawn tree takes no graft: verifiers ask with what probability its tokens were drawn.")
    tokens, valid = chain.tokens[:, 1:], chain.valid[:, 1:]
    nodes = torch.where(valid, follow(tree, tokens), -1)
    shared = (nodes >= 0).sum(dim=1)
    missing: list[int] = (valid.sum(dim=1) - shared).tolist()
    width = max(missing)
    if width == 0:
        return replace(tree, confidence=None)
    index = torch.arange(width, device=tokens.device)
    fork = nodes.gather(1, (shared[:, None] - 1).clamp(min=0)).clamp(min=0)
    parents = torch.cat([fork, (tree.num_nodes + index[:-1]).expand(len(fork), -1)], dim=1)
    is_new = index < (valid.sum(dim=1) - shared)[:, None]
    read = None
    if tree.read is not None or min(missing) < width:
        read = torch.cat([torch.ones_like(tree.valid) if tree.read is None else tree.read, is_new], dim=1)
    rest = tokens.gather(1, (shared[:, None] + index).clamp(max=tokens.shape[1] - 1))
    return TokenTree(
        torch.cat([tree.tokens, rest], dim=1),
        torch.cat([tree.parents, parents], dim=1),
        torch.cat([tree.valid, is_new], dim=1),
        read=read,
    )


def best_graft(copied: Tensor, held: Tensor, seconds: Tensor) -> tuple[float, int]:
    """The most tokens per second, and how many of the surest copied tokens are to be grafted for it.

    copied: (B, K) float64, a_{r,j}, non-increasing in j. held: (D,) float64, s_j, likewise. seconds: (C+1,) float64, a round's
    with the tree and 0, 1, ..., C tokens grafted.
    """
    rows, length = copied.shape
    both = held.new_zeros(max(length, len(held)))
    both[: len(held)] = held
    gains = (copied - both[:length]).clamp(min=0).flatten()[copied.flatten().sort(descending=True, stable=True).indices]
    rates = (rows * (1 + held.sum()) + torch.cat([gains.new_zeros(1), gains.cumsum(0)])) / seconds
    count = int(rates.argmax())
    return float(rates[count]), count


@dataclass
class GraftedState:
    """Both drafters' own states, and how often the tree was right lately."""

    inner: Any
    copies: Any
    nodes: int
    """Of the drafter's newest tree."""
    held: Tensor = field(default_factory=lambda: torch.zeros(LONGEST, dtype=torch.float64))
    """(D,) float64: s_j."""
    seen: float = 0.0
    """Rounds that `held` is the mean of; old ones count for less."""
    trials: Trials = field(default_factory=Trials)
    tree: TokenTree | None = None
    """What the drafter has proposed for the round that is not observed yet; None if it was not asked."""


class Grafted:
    """Two drafters as one: `copier`'s chains grafted onto `drafter`'s trees. The loop does not know.

    copier: drafts chains with confidences, and taps nothing (prompt_lookup.py).
    """

    def __init__(
        self,
        drafter: Drafter,
        copier: Drafter,
        *,
        seconds: Mapping[int, float] | None = None,
        uneven: float = 0.0,
        drafting: float = 0.0,
        nodes: int = 1,
    ) -> None:
        """seconds: of a target forward by the number of tokens in it, or None to graft everything; uneven: what one takes besides
        where rows differ; drafting: seconds of one draft of `drafter`; nodes: of its usual tree."""
        assert not copier.taps, "a copier reads the text alone"
        assert seconds is None or min(seconds) == 1, "step times begin with a step of one token"
        self.drafter, self.copier, self.drafting, self.nodes = drafter, copier, drafting, nodes
        self.seconds, self.uneven = seconds, uneven
        self._tables: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def measure(cls, drafter: Drafter, copier: Drafter, target: Target, *, rows: int) -> Grafted:
        """With what a step of up to `rows` rows takes on this machine; some seconds."""
        tree, drafting = draft_seconds(drafter, target, rows=rows)
        seconds = token_seconds(target, rows=rows, depth=tree.num_nodes - 1 + copier.depth)
        uneven = uneven_seconds(target, rows=rows)
        return cls(drafter, copier, seconds=seconds, uneven=uneven, drafting=drafting, nodes=tree.num_nodes)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def depth(self) -> int:
        return max(self.drafter.depth, self.copier.depth)

    def start(self, *, rows: int, capacity: int) -> GraftedState:
        inner, copies = (each.start(rows=rows, capacity=capacity) for each in (self.drafter, self.copier))
        return GraftedState(inner, copies, nodes=self.nodes)

    def move(self, state: GraftedState, source: int, target: int) -> None:
        self.drafter.move(state.inner, source, target)
        self.copier.move(state.copies, source, target)

    def observe(self, state: GraftedState, seen: Observation) -> None:
        self.copier.observe(state.copies, seen)
        if seen.logits is None:
            self.drafter.observe(state.inner, seen)
            return
        tree, state.tree = state.tree, None
        drafted = 1 if tree is None else tree.num_nodes
        self.drafter.observe(state.inner, replace(seen, logits=seen.logits[:, :drafted]))
        if tree is not None:
            self._note(state, tree, seen)

    def _note(self, state: GraftedState, tree: TokenTree, seen: Observation) -> None:
        """How many of the tokens just accepted the drafter's own tree held. Where the copy kept none, those were all it was
        right about."""
        width = min(len(state.held), seen.tokens.shape[1] - 1)
        accepted = torch.arange(1, width + 1, device=seen.count.device) < seen.count[:, None]
        found = (follow(tree, seen.tokens[:, 1 : width + 1]) >= 0) & accepted
        rate = torch.zeros_like(state.held)
        rate[:width] = found.double().mean(dim=0).cpu()
        state.seen = FADING * state.seen + 1
        state.held += (rate - state.held) / state.seen

    def draft(self, state: GraftedState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        chain = self.copier.draft(state.copies, anchors, lengths, sampling)
        is_drafted = True
        if self.seconds is not None:
            is_drafted, chain = self._chosen(state, chain)
        if not is_drafted:
            return replace(chain, confidence=None)
        state.tree = self.drafter.draft(state.inner, anchors, lengths, sampling)
        state.nodes = state.tree.num_nodes
        return graft(state.tree, chain)

    def _chosen(self, state: GraftedState, chain: TokenTree) -> tuple[bool, TokenTree]:
        """Whether the drafter is asked in this round, and the part of the copies that is verified."""
        copied = torch.zeros(len(chain.tokens), 0, dtype=torch.float64)  # (B, K)
        if chain.num_nodes > 1:
            assert chain.confidence is not None, "a copier says how sure it is"
            copied = torch.where(chain.valid, chain.confidence, 0)[:, 1:].double().cumprod(dim=1).cpu()
        alone, short = best_graft(copied, state.held[:0], self._round_seconds(*copied.shape, nodes=1))
        times = self._round_seconds(*copied.shape, nodes=state.nodes) + self.drafting
        beside, rest = best_graft(copied, state.held, times)
        plain = self._round_seconds(len(copied), 0, nodes=1)
        pays = bool(1 + state.held.sum() > times[0] / plain[0])
        is_drafted = (beside > alone or not pays) and state.trials.due(beside > alone)
        kept = admit(copied, rest if is_drafted else short).to(chain.tokens.device)
        return is_drafted, cut(chain, kept.minimum(chain.valid[:, 1:].sum(dim=1)))

    def _round_seconds(self, rows: int, length: int, *, nodes: int) -> Tensor:
        """(C+1,) float64: rounds that verify `nodes` in each row and 0, 1, ..., C copied tokens, drafting aside."""
        assert self.seconds is not None
        first, last = rows * nodes, rows * (nodes + length)
        if (first, last) not in self._tables:
            table = [interpolate(self.seconds, count) + HOST_SECONDS for count in range(first, last + 1)]
            self._tables[first, last] = torch.tensor(table, dtype=torch.float64)
            self._tables[first, last][1:] += self.uneven if rows > 1 else 0.0
        return self._tables[first, last]
