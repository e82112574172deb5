"""Acceptance and predicted tau from raw integers, in training and on held-out text.

Letters: K draft steps.

Teacher-forced and greedy: at each row t that counts, step k is right if its first choice is token t+2+k.

    acceptance@k     of the rows at which steps 1..k-1 were right and step k counts, the share at which it is right
    survival@k       product of acceptance@1..k: how often a draft of length k is accepted whole
    predicted tau    1 + sum_k survival@k: tokens per target forward of a chain draft, bonus token included
    walked tau       the same over the rows at which a decode of the text would begin its rounds, which are the harder ones

Worked example: 100 rows, 60 right at step 1; step 2 counts at 50 of those (10 stand before the end of an answer) and is
right at 20. acceptance = .60 .40, survival = .60 .24, predicted tau = 1.84.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..heads import LossSums, Objective, TrainedDrafter
from ..infer.tree_search import rank_accuracy, round_starts
from .data import Rows, seed_draws

RANKS = 16
"""Candidates per step whose accuracy is measured."""

Values = dict[str, float | int | list[int]]


@dataclass(frozen=True)
class Totals:
    """Sums over rows, micro-steps and processes."""

    sums: list[float]
    counts: list[int]
    survived: list[int]
    reached: list[int]
    weights: tuple[float, ...]
    extra: dict[str, tuple[float, float]]

    @property
    def loss(self) -> float:
        """sum_k weights[k] * sums[k] / counts[k]."""
        return sum(w * s / max(n, 1) for w, s, n in zip(self.weights, self.sums, self.counts))

    @property
    def acceptance(self) -> list[float]:
        """Conditional: P(step k right | steps before it right)."""
        return [right / max(rows, 1) for right, rows in zip(self.survived, self.reached)]

    @property
    def survival(self) -> list[float]:
        running, result = 1.0, []
        for share in self.acceptance:
            running *= share
            result.append(running)
        return result

    @property
    def predicted_tau(self) -> float:
        return 1.0 + sum(self.survival)

    def values(self, prefix: str) -> Values:
        """Flat figures for metrics.jsonl: `prefix/loss`, `prefix/acceptance@1`, ..., and the integers behind them."""
        found: Values = {f"{prefix}/loss": self.loss, f"{prefix}/predicted_tau": self.predicted_tau}
        found |= {f"{prefix}/acceptance@{k}": share for k, share in enumerate(self.acceptance, start=1)}
        found |= {f"{prefix}/{name}": top / bottom if bottom else 0.0 for name, (top, bottom) in self.extra.items()}
        return found | {
            f"{prefix}/counts": self.counts,
            f"{prefix}/reached": self.reached,
            f"{prefix}/survived": self.survived,
        }


class Tally:
    """Adds up `LossSums` in float64, in which the integers stay exact."""

    def __init__(self) -> None:
        self._last: LossSums | None = None
        self._total: Tensor | float = 0.0

    def add(self, out: LossSums, *, weight: int = 1) -> None:
        """weight 0 keeps the shape but adds nothing: a process without rows of its own takes part in the reduction."""
        extra = [out.extra[name].detach().double() for name in sorted(out.extra)]
        parts = [out.sums.detach().double(), out.counts.double(), out.survived.double(), out.reached.double(), *extra]
        self._last, self._total = out, self._total + weight * torch.cat(parts)

    def reduce(self, accelerator: Accelerator) -> Totals:
        """The totals over all processes; a collective call."""
        assert self._last is not None, "nothing was added to the tally"
        assert isinstance(self._total, Tensor), "nothing was added to the tally"
        total: Any = accelerator.reduce(self._total, reduction="sum")
        numbers: list[float] = total.tolist()
        size, names = len(self._last.weights), sorted(self._last.extra)
        sums, counts, survived, reached = (numbers[i * size : (i + 1) * size] for i in range(4))
        pairs = numbers[4 * size :]
        extra = {name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(names)}
        return Totals(sums, _ints(counts), _ints(survived), _ints(reached), self._last.weights, extra)


@dataclass(frozen=True)
class HeldOut:
    """What a drafter does on held-out text."""

    totals: Totals
    rank_accuracy: list[list[float]]
    """(K, RANKS): `infer.tree_search.rank_accuracy` where rounds begin, from which draft trees are built."""
    walked_tau: float
    """1 + mean tokens that a chain draft keeps where rounds begin: what the loop does on these very texts."""

    def measured(self, step: int) -> dict[str, Any]:
        """What a checkpoint carries of it (`heads.Binding.measured`)."""
        totals = self.totals
        return {
            "step": step,
            "loss": totals.loss,
            "acceptance": totals.acceptance,
            "predicted_tau": totals.predicted_tau,
            "walked_tau": self.walked_tau,
            "rank_accuracy": self.rank_accuracy,
        }


@torch.no_grad()
def evaluate(
    drafter: TrainedDrafter, objective: Objective, rows: Rows, *, accelerator: Accelerator, size: int
) -> HeldOut:
    """Read all rows, `size` at a time, each process its share; a collective call. The drafter has its whole weights
    (`Engine.whole`)."""
    tally, found = Tally(), []
    drafter.eval()
    for indices, weight in _shares(len(rows.rows), accelerator.process_index, accelerator.num_processes, size):
        teacher = rows.teach(indices)
        seed_draws(*indices)
        tally.add(drafter.loss(teacher, objective), weight=weight)
        ranks = drafter.ranks(teacher).cpu()  # (B, T, K)
        found.append(ranks[round_starts(ranks)] if weight else ranks.new_empty(0, ranks.shape[-1]))
    drafter.train()
    everywhere = gather_object([torch.cat(found)])
    rounds = torch.cat(everywhere)  # (R, K)
    kept = (rounds == 0).long().cumprod(dim=-1).sum(dim=-1)
    walked = 1.0 + float(kept.sum()) / max(1, len(kept))
    return HeldOut(tally.reduce(accelerator), rank_accuracy(rounds, width=RANKS), walked)


def _shares(num_rows: int, rank: int, world: int, size: int) -> Iterator[tuple[list[int], int]]:
    """This process' batches and their weight. The batches are the same for any number of processes, and every process
    gets equally many, as sharded weights are gathered by all together; one that has run out reads row 0 with weight 0."""
    batches = [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]
    for first in range(0, len(batches), world):
        yield (batches[first + rank], 1) if first + rank < len(batches) else ([0], 0)


def _ints(numbers: list[float]) -> list[int]:
    return [round(number) for number in numbers]
