"""Confidences: what they were worth is counted in the loop, and a known distortion is found and undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.infer.calibration import (
    Calibration,
    Recorder,
    Rounds,
    calibration_error,
    errors,
    fit_temperatures,
    scaled,
)
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.target import Target

from . import drafting


def simulated(temperatures: list[float], *, count: int = 20_000, seed: int = 0) -> Rounds:
    """Rounds whose true acceptance is sigmoid(logit(c) / T) at each position."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.sigmoid(2.5 * torch.randn(count, len(temperatures), generator=generator) + 1)
    chance = scaled(confidence, torch.tensor(temperatures, dtype=torch.float64))
    hits = torch.rand(confidence.shape, generator=generator, dtype=torch.float64) < chance
    accepted = hits.cumprod(dim=1).sum(dim=1)
    return Rounds(confidence, torch.full((count,), len(temperatures)), accepted)


def test_the_error_of_a_worked_example() -> None:
    """Two bins: .62 and .64 of which one happened, and .99 of which it did not."""
    predicted = torch.tensor([0.62, 0.64, 0.99], dtype=torch.float64)
    happened = torch.tensor([True, False, False])
    wanted = (abs(0.62 + 0.64 - 1) + 0.99) / 3
    torch.testing.assert_close(calibration_error(predicted, happened), torch.tensor(wanted, dtype=torch.float64))
    assert calibration_error(predicted[:0], happened[:0]) == 0
    assert calibration_error(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)) == 0


def test_a_known_distortion_is_found_position_by_position() -> None:
    true = [2.0, 0.5, 1.0]
    found = fit_temperatures(simulated(true))
    assert all(0.8 < ours / theirs < 1.25 for ours, theirs in zip(found, true)), found


def test_calibration_lowers_the_error_on_rounds_that_did_not_choose_it() -> None:
    calibration = Calibration.fit(simulated([2.5, 2.5, 2.5]), temperature=0.7)
    assert all(after < 0.5 * before for before, after in zip(calibration.error_before, calibration.error_after))
    assert max(calibration.error_after) < 0.02
    assert (calibration.rounds, calibration.temperature) == (20_000, 0.7)
    fresh = simulated([2.5, 2.5, 2.5], seed=9)
    assert max(errors(fresh, calibration.temperatures)) < 0.02
    assert calibration.survival[0] > calibration.survival[1] > calibration.survival[2] > 0


def test_no_round_is_judged_by_temperatures_that_it_chose() -> None:
    """The two halves are of different worlds, so that what one chooses is wrong for the other."""
    one, two = simulated([3.0], count=4000), simulated([1.0], count=4000, seed=1)
    mixed = Rounds(
        torch.stack([one.confidence, two.confidence], dim=1).flatten(0, 1),
        torch.stack([one.offered, two.offered], dim=1).flatten(),
        torch.stack([one.accepted, two.accepted], dim=1).flatten(),
    )
    calibration = Calibration.fit(mixed, temperature=0.0)
    assert 1.2 < calibration.temperatures[0] < 2.5
    assert calibration.error_after[0] > 1.5 * calibration.error_before[0]


def test_tokens_that_were_not_offered_say_nothing() -> None:
    """A draft that ended early neither fulfilled nor broke what it would have promised of later tokens."""
    rounds = simulated([2.0, 2.0])
    short = Rounds(rounds.confidence.clone(), rounds.offered.clone(), rounds.accepted.clone())
    short.offered[::2], short.confidence[::2, 1] = 1, 0.0
    short.accepted[::2] = short.accepted[::2].clamp(max=1)
    for ours, theirs in zip(fit_temperatures(short), fit_temperatures(rounds)):
        assert 0.8 < ours / theirs < 1.25


def test_order_and_certainty_survive_a_temperature() -> None:
    calibration = Calibration(temperatures=(3.0, 0.2))
    sure = torch.linspace(0, 1, 21)[:, None].expand(-1, 3)
    survival = calibration.of(sure)
    assert bool((survival[1:] >= survival[:-1]).all())
    assert survival[0].tolist() == [0, 0, 0]
    assert survival[-1].tolist() == [1, 1, 1]
    assert bool((survival[:, 1:] <= survival[:, :-1]).all())
    torch.testing.assert_close(calibration.of(sure[10:11]), torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float64))
    plain = Calibration().of(torch.tensor([[0.9, 0.5]]))
    torch.testing.assert_close(plain, torch.tensor([[0.9, 0.45]], dtype=torch.float64))


def test_what_is_expected_of_a_new_request() -> None:
    assert Calibration(survival=(0.8, 0.6)).prior(4) == [0.8, 0.6, 0.125, 0.0625]
    assert Calibration().prior(2) == [0.5, 0.25]


def test_a_calibration_survives_json() -> None:
    import json

    calibration = Calibration.fit(simulated([2.0, 1.0], count=400), temperature=0.0)
    assert Calibration.from_dict(json.loads(json.dumps(vars(calibration)))) == calibration


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="90 rounds are too few"):
        Calibration.fit(simulated([1.0], count=90), temperature=0.0)


# Recording ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(build_target: Callable[..., Target], tiny_target: Target) -> Target:
    return drafting.perturbed(tiny_target, build_target(), noise=0.06)


@pytest.mark.parametrize("stop", [0.0, 0.08])
def test_recorded_rounds_are_the_loops(tiny_target: Target, draft: Target, stop: float) -> None:
    """Accepted tokens too, but for those of last rounds that the limit kept out; confidences are of drafted tokens only."""
    recorder = Recorder(DraftModel(draft, tiny_target, length=3, min_confidence=stop))
    ids = drafting.prompts(5, seed=4, vocab_size=tiny_target.vocab_size)
    outputs = drafting.decode(tiny_target, recorder, ids, rows=3, new_tokens=30)
    rounds = recorder.rounds()
    assert len(rounds.accepted) == sum(output.stats.rounds for output in outputs)
    assert int(rounds.offered.sum()) == sum(output.stats.drafted for output in outputs)
    counted = sum(output.stats.accepted for output in outputs)
    assert 0 < counted <= int(rounds.accepted.sum()) <= counted + 3 * len(ids)
    assert torch.equal((rounds.confidence > 0).sum(dim=1), rounds.offered)
    assert bool((rounds.accepted <= rounds.offered).all())
    assert stop == 0 or len(rounds.offered.unique()) > 1


def test_recording_changes_no_text(tiny_target: Target, draft: Target) -> None:
    ids = drafting.prompts(4, seed=4, vocab_size=tiny_target.vocab_size)
    drafter = DraftModel(draft, tiny_target, length=3)
    recorded = drafting.decode(tiny_target, Recorder(drafter), ids)
    assert drafting.texts(recorded) == drafting.texts(drafting.decode(tiny_target, None, ids))


def test_nothing_drafted_is_nothing_to_calibrate(tiny_target: Target) -> None:
    recorder = Recorder(NoDraft())
    drafting.decode(tiny_target, recorder, [[5, 6, 7]], new_tokens=4)
    with pytest.raises(ValueError, match="nothing was drafted"):
        recorder.rounds()


def test_a_confidence_does_not_depend_on_the_drawn_token_itself(tiny_target: Target, draft: Target) -> None:
    """Other draft noise, other tokens: until the first difference, and at it, the confidences are the same."""
    from draftsmith.infer.sampling import Sampling, SamplingParams

    drafter = DraftModel(draft, tiny_target, length=4, min_confidence=0, is_drawn=True)
    anchors, lengths = torch.full((16,), 7), torch.ones(16, dtype=torch.int64)
    state = drafter.start(rows=16, capacity=16)
    tree = drafter.draft(state, anchors, lengths, Sampling([SamplingParams(1.0, seed=seed) for seed in range(16)]))
    assert tree.confidence is not None
    sure: Tensor = tree.confidence
    compared = 0
    for row in range(1, 16):
        same = int((tree.tokens[0] == tree.tokens[row]).long().cumprod(0).sum())  # the anchor and what follows
        shared = slice(0, min(same, 4) + 1)
        torch.testing.assert_close(sure[row, shared], sure[0, shared])
        compared += same < 5 and bool(sure[row, shared].numel() > 1)
    assert compared > 10
