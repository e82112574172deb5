"""A drafter that stands by while drafting does not pay: for drafts that bring no confidence by which to cut them.

Drafting pays where the tokens that a round emits are worth the time it takes: with e the emitted tokens per row and round
while it drafted lately, n the tokens of its tree, B the rows at present and t(m) the measured seconds of a target forward
over m tokens,

    e / (t(B*n) + drafting)  >  1 / t(B)

Otherwise rounds are plain, and after a pause it drafts on trial again, as texts change: TRIAL rounds, the pause after
each vain trial twice as long. More rows make drafting dearer (t rises where the forward is no longer waiting for weights),
so that it pays alone and not in a crowd; both are known from the same table. What is decided follows from earlier rounds
only, so no verifier's law changes.

Letters: B rows, n nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .cost import draft_seconds, token_seconds
from .drafter import Drafter, Observation
from .sampling import Sampling
from .target import Target
from .tree import TokenTree
from .tree_search import interpolate

TRIAL = 8
"""Rounds after which a record is believed; lookahead's window needs the first four of them to fill."""
SHORTEST, LONGEST = 16, 256
"""Plain rounds between trials."""
FADING = 0.9
"""What a round still counts for when the next one has been seen."""


@dataclass
class Trials:
    """When to draft: while it pays, and on trial now and then while it does not."""

    left: int = TRIAL
    """Rounds that draft whatever comes of it."""
    waited: int = 0
    """Plain rounds since the last draft."""
    pause: int = SHORTEST

    def due(self, pays: bool) -> bool:
        """Whether the next round drafts; asked once a round, with what the record says."""
        if self.left:
            self.left -= 1
        elif pays:
            self.pause = SHORTEST
        elif self.waited < self.pause:
            self.waited += 1
            return False
        else:
            self.left, self.pause = TRIAL - 1, min(2 * self.pause, LONGEST)
        self.waited = 0
        return True


@dataclass
class StandbyState:
    """The drafter's own state, and what drafting has brought lately."""

    inner: Any
    emitted: float = 0.0
    """Tokens per row and round, over the rounds that drafted."""
    nodes: int = 1
    """Of the newest tree."""
    trials: Trials = field(default_factory=Trials)
    is_plain: bool = True
    """Whether the newest round drafted nothing on purpose."""


class Standby:
    """A drafter that drafts while it pays; a drafter itself, so the loop does not know."""

    def __init__(
        self, drafter: Drafter, *, seconds: Mapping[int, float], drafting: float = 0.0, nodes: int = 1
    ) -> None:
        """seconds: of a target forward, by the number of tokens in it; drafting: of one draft; nodes: of a usual tree."""
        assert min(seconds) == 1, "step times begin with a step of one token"
        self.drafter, self.seconds, self.drafting, self.nodes = drafter, seconds, drafting, nodes

    @classmethod
    def measure(cls, drafter: Drafter, target: Target, *, rows: int) -> Standby:
        """With what a step of up to `rows` rows takes on this machine; some seconds."""
        tree, drafting = draft_seconds(drafter, target, rows=rows)
        seconds = token_seconds(target, rows=rows, depth=tree.num_nodes)
        return cls(drafter, seconds=seconds, drafting=drafting, nodes=tree.num_nodes)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def needs(self, rows: int, *, nodes: int | None = None) -> float:
        """Tokens per row and round from which drafting is faster than plain rounds, with trees of so many nodes."""
        drafted = interpolate(self.seconds, rows * (nodes or self.nodes)) + self.drafting
        return drafted / interpolate(self.seconds, rows)

    def start(self, *, rows: int, capacity: int) -> StandbyState:
        return StandbyState(self.drafter.start(rows=rows, capacity=capacity))

    def move(self, state: StandbyState, source: int, target: int) -> None:
        self.drafter.move(state.inner, source, target)

    def observe(self, state: StandbyState, seen: Observation) -> None:
        self.drafter.observe(state.inner, seen)
        if seen.is_prompt or state.is_plain:
            return
        now = seen.count.double().mean().item()
        state.emitted = now if not state.emitted else FADING * state.emitted + (1 - FADING) * now

    def draft(self, state: StandbyState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        pays = state.emitted > self.needs(len(anchors), nodes=state.nodes)
        state.is_plain = not state.trials.due(pays)
        if state.is_plain:
            return TokenTree.root(anchors)
        tree = self.drafter.draft(state.inner, anchors, lengths, sampling)
        state.nodes = tree.num_nodes
        return tree
