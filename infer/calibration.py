"""How far a draft's confidences can be trusted: measured in the loop, and corrected by one temperature per position.

The draft says c_k, its estimate of P(token k accepted | tokens 1..k-1 accepted), and survival a_k = c_1 ... c_k. Sequential
temperature scaling (DSpark paper) sets, for k = 1, 2, ... in turn,

    T_k = argmin over a grid of ECE_k,    a_k = prod over i <= k of sigmoid(logit(c_i) / T_i)

with the earlier temperatures fixed. ECE_k, the expected calibration error, compares a_k with what happened: over bins of a_k
of equal width, the sum of |mean a_k - share of rounds that accepted k tokens|, weighted by the bins' sizes. A temperature
keeps the order of one position's confidences. The errors that are reported are cross-validated: each half of the rounds is
judged by temperatures that the other half chose. The temperatures that are kept are chosen by all rounds.

Letters: B rows, K draft positions, R rounds, G temperatures tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .drafter import Drafter, Observation
from .sampling import Sampling
from .tree import TokenTree

BINS = 15
GRID = tuple(10 ** (step / 20) for step in range(-20, 21))
"""Temperatures tried: 0.1 to 10, in 41 equal ratios."""
FEWEST_ROUNDS = 100
"""Fewer say nothing about bins of which the rarer hold a hundredth of the rounds."""


@dataclass(frozen=True)
class Rounds:
    """What chains promised and what became of them."""

    confidence: Tensor
    """(R, K) float32; 0 where nothing was drafted."""
    offered: Tensor
    """(R,) int64: tokens drafted."""
    accepted: Tensor
    """(R,) int64: tokens accepted."""


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and how well temperatures chosen so do on other rounds."""

    temperatures: tuple[float, ...] = ()
    """(K,); a position beyond has 1."""
    survival: tuple[float, ...] = ()
    """(K,): the share of rounds that accepted k tokens and more; what to expect of a request before its first draft."""
    error_before: tuple[float, ...] = ()
    """(K,): ECE_k with all temperatures 1, the mean of two halves."""
    error_after: tuple[float, ...] = ()
    """(K,): ECE_k with the temperatures of the other half, likewise."""
    rounds: int = 0
    """How many there were."""
    temperature: float = 0.0
    """Sampling temperature of the rounds."""

    @classmethod
    def fit(cls, rounds: Rounds, *, temperature: float) -> Calibration:
        """Raises ValueError if there are too few rounds."""
        if len(rounds.accepted) < FEWEST_ROUNDS:
            raise ValueError(
                f"{len(rounds.accepted)} rounds are too few to calibrate by; decode at least {FEWEST_ROUNDS}: give more prompts or "
                "longer answers."
            )
        one, other = _half(rounds, 0), _half(rounds, 1)
        depth = rounds.confidence.shape[1]
        before = torch.tensor([errors(half, [1.0] * depth) for half in (one, other)])
        after = torch.tensor([errors(one, fit_temperatures(other)), errors(other, fit_temperatures(one))])
        happened = [float((rounds.accepted > k).double().mean()) for k in range(depth)]
        return cls(
            fit_temperatures(rounds),
            tuple(happened),
            tuple(before.mean(dim=0).tolist()),
            tuple(after.mean(dim=0).tolist()),
            len(rounds.accepted),
            temperature,
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Calibration:
        """What `vars` of one has become in JSON."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        return cls(**fields)

    def of(self, confidence: Tensor) -> Tensor:
        """Survivals (B, K) float64, non-increasing, of confidences (B, K)."""
        count = confidence.shape[1]
        used = [*self.temperatures[:count], *[1.0] * (count - len(self.temperatures))]
        return scaled(confidence, torch.tensor(used, dtype=torch.float64, device=confidence.device)).cumprod(dim=1)

    def prior(self, count: int) -> list[float]:
        """Survivals to expect of a request that nothing is known of; a coin's where none were measured."""
        known = list(self.survival[:count])
        return known + [0.5 ** (k + 1) for k in range(len(known), count)]


def scaled(confidence: Tensor, temperatures: Tensor) -> Tensor:
    """sigmoid(logit(c) / T) in float64; 0 and 1 stay what they are."""
    return torch.sigmoid(torch.logit(confidence.double()) / temperatures)


def fit_temperatures(rounds: Rounds) -> tuple[float, ...]:
    """Sequential temperature scaling: (K,)."""
    grid = torch.tensor(GRID, dtype=torch.float64, device=rounds.confidence.device)
    before = torch.ones(len(rounds.accepted), dtype=torch.float64, device=grid.device)
    found = []
    for k in range(rounds.confidence.shape[1]):
        tried = before * scaled(rounds.confidence[:, k], grid[:, None])  # (G, R)
        counted = rounds.offered > k
        wrong = torch.stack([calibration_error(row[counted], rounds.accepted[counted] > k) for row in tried])
        # Of equal errors the temperature nearest to 1: where nothing was measured, nothing is corrected.
        order = grid.log().abs().argsort()
        best = int(order[wrong[order].argmin()])
        before = tried[best]
        found.append(float(grid[best]))
    return tuple(found)


def errors(rounds: Rounds, temperatures: tuple[float, ...] | list[float]) -> list[float]:
    """ECE_k (K,) with these temperatures."""
    used = torch.tensor(temperatures, dtype=torch.float64, device=rounds.confidence.device)
    survival = scaled(rounds.confidence, used).cumprod(dim=1)
    return [
        float(calibration_error(survival[rounds.offered > k, k], rounds.accepted[rounds.offered > k] > k))
        for k in range(len(temperatures))
    ]


def calibration_error(predicted: Tensor, happened: Tensor) -> Tensor:
    """Expected calibration error, a scalar: predicted (R,) float64 in [0, 1], happened (R,) bool; 0 of nothing."""
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=bins.device).index_add_(0, bins, predicted - happened.double())
    return gaps.abs().sum() / max(1, len(predicted))


def _half(rounds: Rounds, which: int) -> Rounds:
    """Every other round."""
    return Rounds(rounds.confidence[which::2], rounds.offered[which::2], rounds.accepted[which::2])


class Recorder:
    """A drafter of chains whose promises are written down beside what became of them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._drafted: TokenTree | None = None
        self._rounds: list[Rounds] = []

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def start(self, *, rows: int, capacity: int) -> Any:
        return self.drafter.start(rows=rows, capacity=capacity)

    def move(self, state: Any, source: int, target: int) -> None:
        self.drafter.move(state, source, target)

    def observe(self, state: Any, seen: Observation) -> None:
        self.drafter.observe(state, seen)
        if not seen.is_prompt and self._drafted is not None:
            tree = self._drafted
            assert tree.confidence is not None, "check_chain lets no tree pass without"
            sure = torch.where(tree.valid, tree.confidence, 0)[:, 1:]
            self._rounds.append(Rounds(sure.cpu(), (tree.valid.sum(dim=1) - 1).cpu(), (seen.count - 1).cpu()))
            self._drafted = None

    def draft(self, state: Any, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        tree = self.drafter.draft(state, anchors, lengths, sampling)
        self._drafted = check_chain(tree) if tree.num_nodes > 1 else None
        return tree

    def rounds(self) -> Rounds:
        """Everything seen so far. Raises ValueError if that is nothing."""
        if not self._rounds:
            raise ValueError("nothing was drafted, so there is nothing to calibrate.")
        longest = max(part.confidence.shape[1] for part in self._rounds)
        return Rounds(
            torch.cat([pad(part.confidence, (0, longest - part.confidence.shape[1])) for part in self._rounds]),
            torch.cat([part.offered for part in self._rounds]),
            torch.cat([part.accepted for part in self._rounds]),
        )


def check_chain(tree: TokenTree) -> TokenTree:
    """The same draft. Raises ValueError unless it is a chain that says how sure it is of each token."""
    if tree.confidence is None:
        raise ValueError(
            "this drafter does not say how sure it is of its tokens, so its drafts cannot be scheduled. Leave --schedule out, or "
            "use a drafter that draws on a model: a trained one, or draft:MODEL."
        )
    steps = torch.arange(-1, tree.num_nodes - 1, device=tree.parents.device)
    if not bool((tree.parents == steps).all()):
        raise ValueError(
            "a schedule chooses how long a chain is, and this drafter drafts a tree; let it draft a chain."
        )
    return tree
