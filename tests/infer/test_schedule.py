"""Scheduling proved: by enumeration, the text keeps the target's law; and against Algorithm 1 of the paper, line by line.

The rules under test are the tensor functions of `infer/schedule.py` themselves. Requests draft from q, the schedule cuts
the drafts, a rejection rule judges what is left: all of it weighed with fractions (exact.py). A schedule that looks at
confidences beyond what it admits must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial, reduce
from itertools import product
from math import lcm, prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.infer.schedule import admit, best_budget, early_stop, rates
from tests.infer import exact, rules
from tests.infer.exact import ROOT, Draft, Law, Tokens, World

Schedule = Callable[[Tensor, Tensor], Tensor]
Chances = np.ndarray[Any, np.dtype[np.object_]]
"""Exact numbers, one per complete output of a request, or per combination of outputs."""
SEEDS = range(10)
SHAPES = {"one request, chain of 3": (1, 3), "two requests, chains of 2": (2, 2)}
RULES = {"token_level": rules.token_level, "block": rules.block}


def anticipating(survival: Tensor, seconds: Tensor) -> Tensor:
    """The best Theta of all, whatever must be seen to find it: not lossless."""
    return admit(survival, best_budget(survival, seconds))


def budget(count: int) -> Schedule:
    return lambda survival, seconds: admit(survival, count)


@dataclass(frozen=True, eq=False)
class Request:
    """A world, and the drafter's confidence in the next token by what was drafted before it."""

    world: World
    confidence: Mapping[Tokens, Fraction]
    depth: int

    @cached_property
    def drafts(self) -> Law:
        shape = exact.chain_shape(self.depth)
        return exact.law(lambda world, source: exact.draw_tree(world, source, shape).tokens[1:], self.world)

    def survival(self, drafted: Tokens) -> list[float]:
        sure = [self.confidence[drafted[:k]] for k in range(self.depth)]
        return [float(prod(sure[: k + 1])) for k in range(self.depth)]

    def wanted(self) -> Chances:
        """The target's law of complete outputs."""
        return self._listed(self.world.target_law())

    @cache  # noqa: B019
    def written(self, rule: exact.Rule) -> tuple[dict[tuple[Tokens, int], Chances], int]:
        """Per draft and number of verified tokens its probability times the law of what is written, continued by p; as
        integers, and what to divide them by."""
        found = {}
        for (drafted, weight), length in product(self.drafts.items(), range(self.depth + 1)):
            found[drafted, length] = self._judged(rule, drafted[:length]) * weight
        scale = lcm(*(chance.denominator for table in found.values() for chance in table))
        return {key: np.array([int(chance * scale) for chance in table], object) for key, table in found.items()}, scale

    @cache  # noqa: B019
    def _judged(self, rule: exact.Rule, verified: Tokens) -> Chances:
        draft = Draft((ROOT, *verified), exact.chain_shape(len(verified)))
        return self._listed(self.world.complete(exact.law(partial(rule, draft), self.world)))

    def _listed(self, law: Law) -> Chances:
        texts = product(range(exact.VOCAB), repeat=self.world.length)
        return np.array([law.get(text, Fraction(0)) for text in texts], dtype=object)


@dataclass(frozen=True)
class Batch:
    requests: tuple[Request, ...]
    seconds: tuple[Fraction, ...]
    """Of steps that verify R, R + 1, ... tokens."""

    def lengths(self, schedule: Schedule, drafted: Sequence[Tokens]) -> list[int]:
        survival = [request.survival(tokens) for request, tokens in zip(self.requests, drafted)]
        found: list[int] = schedule(
            torch.tensor(survival, dtype=torch.float64),
            torch.tensor([float(taken) for taken in self.seconds], dtype=torch.float64),
        ).tolist()
        return found

    def law(self, schedule: Schedule, rule: exact.Rule) -> Chances:
        """The joint law of what all requests have written after a round: one axis per request."""
        tables, scales = zip(*(request.written(rule) for request in self.requests))
        outputs = [exact.VOCAB**request.world.length for request in self.requests]
        joint = np.zeros(outputs, object)
        for drafted in product(*(request.drafts for request in self.requests)):
            parts = [table[key] for table, key in zip(tables, zip(drafted, self.lengths(schedule, drafted)))]
            joint += reduce(np.multiply.outer, parts)
        return joint * Fraction(1, prod(scales))

    def error(self, schedule: Schedule, rule: exact.Rule) -> Fraction:
        """Total variation between that and the product of the targets' laws."""
        wanted = reduce(np.multiply.outer, [request.wanted() for request in self.requests])
        return Fraction(abs(self.law(schedule, rule) - wanted).sum()) / 2


@cache
def random_batch(seed: int, count: int, depth: int) -> Batch:
    """Confidences of a few values only, so that ties, zeros and ones are common. Step times rise evenly in every other
    batch; in the rest the first token that is verified costs most of what many do."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        contexts = [context for size in range(depth) for context in product(range(exact.VOCAB), repeat=size)]
        sure = {context: Fraction(rng.choice([0, 2, 5, 8] if context else [5, 6, 7, 8]), 8) for context in contexts}
        requests.append(Request(exact.random_world(100 * seed + number, depth + 1), sure, depth))
    slope, jump = Fraction(rng.choice([3, 4, 5]), 8 * count), Fraction(rng.choice([6, 7, 8]), 8)
    later = [slope * n if seed % 2 else jump + Fraction(n, 16 * count) for n in range(1, count * depth + 1)]
    return Batch(tuple(requests), (Fraction(1), *(1 + more for more in later)))


# Losslessness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_early_stop_keeps_the_targets_law(shape: str, rule: str) -> None:
    for seed in SEEDS:
        assert random_batch(seed, *SHAPES[shape]).error(early_stop, RULES[rule]) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_budget_older_than_the_tokens_keeps_the_targets_law(shape: str) -> None:
    count, depth = SHAPES[shape]
    for seed in SEEDS:
        batch = random_batch(seed, count, depth)
        for admitted in range(count * depth + 1):
            assert batch.error(budget(admitted), rules.token_level) == 0


def test_these_batches_make_early_stop_choose_by_what_was_drafted() -> None:
    for shape in SHAPES.values():
        chosen = []
        for seed in SEEDS:
            batch = random_batch(seed, *shape)
            drafts = product(*(request.drafts for request in batch.requests))
            chosen.append({tuple(batch.lengths(early_stop, drafted)) for drafted in drafts})
        assert max(map(len, chosen)) > 1
        assert len(set.union(*chosen)) > 3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_of_all_lengths_does_not_keep_the_targets_law(shape: str) -> None:
    errors = [random_batch(seed, *SHAPES[shape]).error(anticipating, rules.token_level) for seed in SEEDS]
    assert max(errors) > Fraction(1, 10)


@pytest.mark.parametrize("schedule", [early_stop, anticipating, budget(2)])
def test_under_sample_match_every_schedule_keeps_the_targets_law(schedule: Schedule) -> None:
    for seed in SEEDS:
        assert random_batch(seed, 2, 2).error(schedule, rules.sample_match) == 0


def counter_example() -> Batch:
    """The paper's, of two requests: the target writes A with probability 0.7, the draft with 0.5.

    One more token is not worth its time, two more are if both are sure. After a drafted A the next token looks certain,
    after a B hopeless; the second request offers nothing.
    """
    half, whole, none = Fraction(1, 2), Fraction(1), Fraction(0)
    p, q = (Fraction(7, 10), Fraction(3, 10), none), (half, half, none)
    contexts = [context for size in range(3) for context in product(range(exact.VOCAB), repeat=size)]
    world = World(dict.fromkeys(contexts, p), dict.fromkeys(contexts, q), 3)
    eager = Request(world, {(): whole, (0,): whole, (1,): none, (2,): none}, 2)
    idle = Request(world, dict.fromkeys(eager.confidence, none), 2)
    return Batch((eager, idle), (Fraction(1), Fraction(8, 5), Fraction(8, 5), Fraction(4), Fraction(4)))


def share_of_a(law: Chances) -> Fraction:
    """How often the first request's first token is A: the first third of its outputs."""
    return Fraction(law[: len(law) // exact.VOCAB].sum())


def test_the_papers_counter_example() -> None:
    batch = counter_example()
    assert [batch.lengths(anticipating, [(token, 0), (0, 0)]) for token in (0, 1)] == [[2, 0], [0, 0]]
    assert share_of_a(batch.law(anticipating, rules.token_level)) == Fraction(17, 20)
    assert [batch.lengths(early_stop, [(token, 0), (0, 0)]) for token in (0, 1)] == [[0, 0], [0, 0]]
    assert share_of_a(batch.law(early_stop, rules.token_level)) == Fraction(7, 10)


# What is chosen --------------------------------------------------------------------------------------------------


def algorithm_1(survival: list[list[float]], seconds: list[float], *, is_early: bool) -> list[int]:
    """As the paper states it, in exact arithmetic; without early stop, the best of all it passes."""
    candidates = sorted(
        (-Fraction(value), row, step) for row, values in enumerate(survival) for step, value in enumerate(values)
    )
    lengths = [0] * len(survival)
    expected = Fraction(len(survival))
    best, chosen = expected / Fraction(seconds[0]), list(lengths)
    for admitted, (value, row, step) in enumerate(candidates, start=1):
        lengths[row] = step + 1
        expected -= value
        rate = expected / Fraction(seconds[admitted])
        if rate > best:
            best, chosen = rate, list(lengths)
        elif is_early:
            break
    return chosen


@pytest.mark.parametrize("is_early", [True, False])
def test_lengths_are_those_of_algorithm_1(is_early: bool) -> None:
    rng = random.Random(3)
    schedule = early_stop if is_early else anticipating
    seen = set()
    for _ in range(300):
        rows, depth = rng.randint(1, 5), rng.randint(1, 5)
        sure = [[rng.choice([rng.random(), rng.random(), 1.0]) for _ in range(depth)] for _ in range(rows)]
        survival = torch.tensor(sure, dtype=torch.float64).cumprod(dim=1)
        survival[:, :] = torch.where(torch.rand(rows, 1) < 0.2, survival[:1], survival)  # rows alike, so that they tie
        seconds = 1 + torch.rand(rows * depth + 1, dtype=torch.float64).cumsum(0) * rng.choice([0.02, 0.2, 1])
        found = schedule(survival, seconds).tolist()
        assert found == algorithm_1(survival.tolist(), seconds.tolist(), is_early=is_early)
        seen.add(sum(found) / (rows * depth))
    assert len(seen) > 10


def test_a_worked_example() -> None:
    """Two requests; verifying a third and fourth token is free, a fifth is not."""
    survival = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]], dtype=torch.float64)
    seconds = torch.tensor([1.0, 1.0, 1.0, 1.2, 1.2, 2.0, 3.0], dtype=torch.float64)
    expected = [2.0, 2.9, 3.7, 4.2 / 1.2, 4.6 / 1.2, 4.9 / 2, 5.0 / 3]
    torch.testing.assert_close(rates(survival, seconds), torch.tensor(expected, dtype=torch.float64))
    assert early_stop(survival, seconds).tolist() == [2, 0]  # 4.2 / 1.2 < 3.7: stopped at the step in the times
    assert best_budget(survival, seconds) == 4
    assert admit(survival, 4).tolist() == [2, 2]
