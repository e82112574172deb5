"""Confidence-scheduled verification: of each draft only the prefix that is worth the time it takes to verify.

DSpark paper, Algorithm 1 and section 5.2. R requests draft chains; a_{r,j} is the calibrated probability that the first j
tokens of request r are accepted (calibration.py), SPS(B) the measured steps per second with B tokens in the target's
forward. Verifying prefixes of lengths l_r is expected to emit

    Theta = (R + sum over r and j <= l_r of a_{r,j}) * SPS(R + sum over r of l_r)      tokens per second

Candidates (r, j) are admitted in descending order of a_{r,j}, of equal ones the shorter prefix first, so that what is
admitted is a prefix of every chain. Three rules say how many:

- `early_stop`: as long as every admission raises Theta. Stops at the first that does not. What prefixes of different lengths
  cost in themselves no single admission is worth, so where they cost anything, the round before says whether to draft at all.
- `best`: the unconstrained search itself, for drafts that are a function of the text alone, such as prompt lookup's.
- `budget`: as many as would have been best the round before, by an unconstrained search, so that SPS may have steps; the
  present confidences say which. (The paper takes the confidences of two steps earlier, as its pipeline knows no later ones.)

The other two are non-anticipating: whether token j of a request is verified never depends on that token, nor on anything computed
from it. a_{r,j} knows the tokens before j only. Early stop decides on (r, j) by what it admitted before and by a_{r,j}; the
budget is older than all of the tokens. The best Theta of all, by contrast, looks at a_{r,j+1}, which knows token j: where
that token makes the next one look sure, it is verified, where not, not, and the text no longer has the target's law
(tests/infer/test_schedule.py proves both, by enumeration). Under sample_match every schedule gives the same text.

Letters: B = R rows, K draft positions, C = B*K candidates, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .calibration import Calibration, check_chain
from .cost import draft_seconds, token_seconds, uneven_seconds
from .drafter import Drafter, Observation
from .sampling import Sampling
from .target import Target
from .tree import TokenTree
from .tree_search import interpolate

RULES = ("early-stop", "budget", "best")
LONGEST = 64
"""Tokens of a chain at most."""
HOST_SECONDS = 1e-3
"""What a step takes besides drafting and the target's forward."""


def rates(survival: Tensor, seconds: Tensor, uneven: float = 0.0) -> Tensor:
    """Theta with the 0, 1, ..., C best candidates admitted, (C+1,) float64.

    survival: (B, K) float64, a_{r,j}, non-increasing in j; seconds: (C+1,) float64, a step's that verifies B, B+1, ... tokens;
    uneven: what it takes besides where the requests' prefixes differ in length.
    """
    batch, depth = survival.shape
    gains, order = survival.flatten().sort(descending=True, stable=True)
    if uneven and batch > 1:
        lengths = one_hot(order // depth, batch).cumsum(0)  # (C, B)
        differ = lengths.amin(dim=1) != lengths.amax(dim=1)
        seconds = seconds + uneven * torch.cat([differ.new_zeros(1), differ])
    return (batch + torch.cat([gains.new_zeros(1), gains.cumsum(0)])) / seconds


def early_stop(survival: Tensor, seconds: Tensor) -> Tensor:
    """Lengths (B,) int64 by Algorithm 1; arguments as in `rates`."""
    rate = rates(survival, seconds)
    stops = torch.cat([rate[1:] <= rate[:-1], torch.ones_like(rate[:1], dtype=torch.bool)])
    return admit(survival, int(stops.int().argmax()))


def best_budget(survival: Tensor, seconds: Tensor, uneven: float = 0.0) -> int:
    """How many candidates the highest Theta admits; arguments as in `rates`. May steer a later round; this one only where the
    draft is a function of the text."""
    return int(rates(survival, seconds, uneven).argmax())


def admit(survival: Tensor, count: int) -> Tensor:
    """Lengths (B,) int64 of the prefixes that hold the `count` best candidates."""
    order = survival.flatten().sort(descending=True, stable=True).indices[:count]  # stable: j ascends among equals
    return torch.bincount(order // survival.shape[1], minlength=len(survival))


def cut(tree: TokenTree, lengths: Tensor) -> TokenTree:
    """The chains' first `lengths` (B,) tokens; the target reads no others."""
    kept: list[int] = lengths.tolist()
    nodes = 1 + max(kept)
    read = torch.arange(nodes, device=lengths.device) <= lengths[:, None]
    return replace(
        tree,
        tokens=tree.tokens[:, :nodes],
        parents=tree.parents[:, :nodes],
        valid=tree.valid[:, :nodes] & read,
        probs=None if tree.probs is None else tree.probs[:, :nodes],
        confidence=None if tree.confidence is None else tree.confidence[:, :nodes],
        read=None if min(kept) == max(kept) else read,
    )


@dataclass
class ScheduledState:
    """The drafter's own state, and the survivals (rows, K) float64 of each row's last draft."""

    inner: Any
    survival: Tensor


class Scheduled:
    """A drafter of chains, each cut to what is worth verifying; a drafter itself, so the loop does not know."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        seconds: Mapping[int, float],
        uneven: float = 0.0,
        rule: str = "early-stop",
        calibration: Calibration | None = None,
    ) -> None:
        """seconds: of a whole step, by the number of tokens that the target reads in it; uneven: what it takes besides where rows
        differ in how many they read."""
        if rule not in RULES:
            raise ValueError(f"a schedule is one of {', '.join(RULES)}, got {rule!r}.")
        assert min(seconds) == 1, "step times begin with a step of one token"
        self.drafter, self.seconds, self.uneven, self.rule = drafter, seconds, uneven, rule
        self.calibration = calibration or Calibration()
        self._tables: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def measure(
        cls, drafter: Drafter, target: Target, *, rows: int, rule: str, calibration: Calibration | None = None
    ) -> Scheduled:
        """The drafter, scheduled by what a step of up to `rows` rows takes on this machine; some seconds.

        Raises ValueError unless it drafts chains and says how sure it is.
        """
        tree, drafting = draft_seconds(drafter, target, rows=rows)
        check_chain(tree)
        measured = token_seconds(target, rows=rows, depth=drafter.depth)
        seconds = {count: taken + drafting + HOST_SECONDS for count, taken in measured.items()}
        uneven = uneven_seconds(target, rows=rows)
        return cls(drafter, seconds=seconds, uneven=uneven, rule=rule, calibration=calibration)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def start(self, *, rows: int, capacity: int) -> ScheduledState:
        inner = self.drafter.start(rows=rows, capacity=capacity)
        return ScheduledState(inner, self._prior().repeat(rows, 1))

    def move(self, state: ScheduledState, source: int, target: int) -> None:
        self.drafter.move(state.inner, source, target)
        state.survival[target] = state.survival[source]

    def observe(self, state: ScheduledState, seen: Observation) -> None:
        self.drafter.observe(state.inner, seen)
        if seen.is_prompt:
            state.survival[seen.rows] = self._prior()

    def draft(self, state: ScheduledState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        tree = self.drafter.draft(state.inner, anchors, lengths, sampling)
        if tree.num_nodes == 1:
            return tree
        if self.rule == "best" and tree.probs is not None:
            raise ValueError(
                "rule best is for drafts that are a function of the text; drawn ones take early-stop or budget."
            )
        confidence, valid = check_chain(tree).confidence, tree.valid[:, 1:]
        assert confidence is not None, "check_chain lets no tree pass without"
        survival = self.calibration.of(torch.where(valid, confidence[:, 1:], 0)).cpu()  # (B, K)
        chosen = self._choose(survival, state.survival[: len(anchors), : survival.shape[1]])
        state.survival[: len(anchors), : survival.shape[1]] = survival
        return cut(tree, chosen.to(valid.device).minimum(valid.sum(dim=1)))

    def _choose(self, survival: Tensor, before: Tensor) -> Tensor:
        """Lengths (B,) int64; before: the survivals of the round before."""
        seconds = self._step_seconds(*survival.shape)
        if self.rule == "best":
            return admit(survival, best_budget(survival, seconds, self.uneven))
        past = best_budget(before, seconds, self.uneven)
        if self.rule == "budget":
            return admit(survival, past)
        if self.uneven and len(survival) > 1 and not past:
            return torch.zeros(len(survival), dtype=torch.int64)
        return early_stop(survival, seconds)

    def _prior(self) -> Tensor:
        return torch.tensor(self.calibration.prior(LONGEST), dtype=torch.float64)

    def _step_seconds(self, rows: int, depth: int) -> Tensor:
        """(C+1,) float64: steps that verify rows, rows + 1, ..., rows * (depth + 1) tokens."""
        if (rows, depth) not in self._tables:
            counts = range(rows, rows * (depth + 1) + 1)
            table = [interpolate(self.seconds, count) for count in counts]
            self._tables[rows, depth] = torch.tensor(table, dtype=torch.float64)
        return self._tables[rows, depth]
