"""Standby: drafts where the measured curve says that it pays, is silent where not, and changes no text."""

from __future__ import annotations

import pytest

from draftsmith.infer.decode import Engine
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.request import Request
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.standby import SHORTEST, TRIAL, Standby
from draftsmith.infer.target import Target

from . import drafting

FREE, DEAR = {1: 1.0, 64: 1.0}, {1: 1.0, 64: 64.0}
CROWD = {1: 1.0, 32: 1.0, 512: 16.0}
"""One row drafts for nothing; of four rows each node costs."""


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return drafting.prompts(6, seed=11, vocab_size=target.vocab_size)


def drafted(target: Target, drafter: Drafter, prompt: list[int], tokens: int, *, rows: int = 1) -> list[int]:
    """What one request's rounds drafted, `rows` equal ones decoding together."""
    engine = Engine(target, drafter=drafter, rows=rows)
    for index in range(rows):
        engine.add(Request(str(index), prompt, tokens))
    counts, before = [], 0
    for progress in engine.stream():
        if progress.output.id == "0":
            now = progress.output.stats.drafted
            counts.append(now - before)
            before = now
    return counts


@pytest.mark.parametrize("name", drafting.FREE)
@pytest.mark.parametrize("seconds", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(
    name: str, seconds: dict[int, float], sampling: SamplingParams | None, target: Target, prompts: list[list[int]]
) -> None:
    standby = Standby(drafting.FREE[name](target), seconds=seconds)
    outputs = drafting.decode(target, standby, prompts, sampling=sampling, new_tokens=48)
    assert drafting.texts(outputs) == drafting.texts(
        drafting.decode(target, None, prompts, sampling=sampling, new_tokens=48)
    )


@pytest.mark.parametrize("name", drafting.FREE)
def test_what_never_pays_is_tried_and_then_rests(name: str, target: Target, prompts: list[list[int]]) -> None:
    """Of n nodes each costs as much as a token, so no draft can pay: a trial, a pause, a trial, a pause twice as long."""
    standby = Standby(drafting.FREE[name](target), seconds=DEAR, drafting=100.0)
    counts = drafted(target, standby, prompts[0], 220)[1:]
    silent = [count == 0 for count in counts[TRIAL:]]
    assert any(counts[:TRIAL]), "a trial comes first"
    assert all(silent[:SHORTEST]), "a vain trial is followed by a pause"
    second = counts[2 * TRIAL + SHORTEST :]
    assert any(counts[TRIAL + SHORTEST : 2 * TRIAL + SHORTEST]), "then it tries again"
    assert not any(second[: 2 * SHORTEST]), "and pauses twice as long"


def test_what_costs_nothing_is_never_paused(target: Target, prompts: list[list[int]]) -> None:
    """The repeating target's text runs in loops, so lookahead's guesses are right now and then."""
    plain, standing = drafting.FREE["lookahead"](target), Standby(drafting.FREE["lookahead"](target), seconds=FREE)
    for prompt in prompts[:3]:
        assert drafted(target, standing, prompt, 60) == drafted(target, plain, prompt, 60)


def test_it_pays_alone_and_not_in_a_crowd(target: Target, prompts: list[list[int]]) -> None:
    standby = Standby(drafting.FREE["lookahead"](target), seconds=CROWD)
    alone, crowded = (drafted(target, standby, prompts[0], 120, rows=rows) for rows in (1, 16))
    assert sum(alone[TRIAL + 1 :]) > 4 * sum(crowded[TRIAL + 1 : TRIAL + 1 + SHORTEST])
    assert not any(crowded[TRIAL + 1 : TRIAL + 1 + SHORTEST])


def test_what_tau_it_needs() -> None:
    standby = Standby(drafting.PromptLookup(), seconds={1: 0.05, 11: 0.06, 21: 0.08}, drafting=0.01, nodes=11)
    assert standby.needs(1) == pytest.approx(1.4)
    assert standby.needs(1, nodes=21) == pytest.approx(1.8)


def test_measured_on_a_target(target: Target) -> None:
    standby = Standby.measure(drafting.FREE["lookahead"](target), target, rows=2)
    assert standby.needs(1) > 1
    assert standby.depth == 3
