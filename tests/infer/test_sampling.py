"""From logits to choices: the same distributions as transformers' warpers, one row never touching another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.infer import noise
from draftsmith.infer.sampling import Sampling, SamplingParams

FALSE_ALARM = 1e-6
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=5, seed=2),
    SamplingParams(temperature=1.0, top_p=0.6, seed=3),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.8, seed=4),
    SamplingParams(temperature=1.0, top_k=10_000, seed=5),
    SamplingParams(temperature=1.0, top_p=1e-6, seed=6),
    SamplingParams(top_k=3, top_p=0.5, seed=7),
    SamplingParams(temperature=1.2, min_p=0.2, seed=8),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.1, seed=9),
    SamplingParams(temperature=1.0, min_p=1.0, seed=10),
]


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """(N, V) log-probabilities by transformers' warpers, in its own order."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.log_softmax(scores, dim=-1)


def test_distributions_equal_those_of_transformers() -> None:
    sampled = [params for params in PARAMS if params.temperature]
    logits = torch.randn(len(sampled), 6, 50) * 3
    log_p = Sampling(sampled).log_probs(logits)
    for row, params in enumerate(sampled):
        torch.testing.assert_close(log_p[row], warped(logits[row], params), atol=1e-5, rtol=0)


def test_greedy_rows_are_a_point_mass_on_the_argmax() -> None:
    logits = torch.randn(len(PARAMS), 4, 50)
    log_p = Sampling(PARAMS).log_probs(logits)
    for row, params in enumerate(PARAMS):
        if params.temperature == 0:
            expected = torch.nn.functional.one_hot(logits[row].argmax(-1), 50).float()
            assert torch.equal(log_p[row].exp(), expected)


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    kept = [
        Sampling([SamplingParams(1.0, top_p=value)]).log_probs(logits).isfinite().sum()
        for value in (0.4, 0.6, 0.9, 1.0)
    ]
    assert kept == [1, 2, 3, 4]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = torch.tensor([[[0.5, 0.26, 0.15, 0.05, 0.04]]]).log()
    kept = [
        Sampling([SamplingParams(1.0, min_p=value)]).log_probs(logits).isfinite().sum()
        for value in (0.0, 0.09, 0.25, 0.5, 0.6, 1.0)
    ]
    assert kept == [5, 4, 3, 2, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_are_those_of_noise_over_the_whole_vocabulary(dtype: torch.dtype) -> None:
    """However noise is spared and kept, the numbers are those of the definition, to the bit: no seed's text changes."""
    positions = torch.tensor([[7, 8, 8, 9, 30]])
    for params in PARAMS:
        sampling = Sampling([params])
        for turn in range(3):  # later rounds meet noise that earlier ones left
            logits, at = (torch.randn(1, 5, 3000) * 8).to(dtype), positions + turn
            whole = noise.gumbel(torch.full((5,), params.seed), at[0], torch.arange(3000))
            expected = (sampling.log_probs(logits) + whole).argmax(dim=-1)
            assert torch.equal(sampling.choose(logits, at), expected)
            assert torch.equal(sampling.scores(logits, at), sampling.log_probs(logits) + whole)


def test_noise_is_made_once_per_position_for_drafter_verifier_and_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    gumbel = noise.gumbel

    def counted(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        made.extend(positions.tolist())
        return gumbel(seeds, positions, ids)

    monkeypatch.setattr(noise, "gumbel", counted)
    sampling = Sampling([SamplingParams(temperature=1.0)])
    sampling.choose(torch.zeros(1, 5, 50), torch.tensor([[5, 6, 6, 7, 8]]))  # a round, whose span is remembered
    made.clear()
    drafted = [sampling.gumbel(torch.tensor([[at]]), 50) for at in (7, 8, 9)]  # a draft model, step by step
    verified = sampling.gumbel(torch.tensor([[7, 8, 8, 9, 10]]), 50)
    assert torch.equal(verified[:, :4], torch.cat([drafted[0], drafted[1], drafted[1], drafted[2]], dim=1))
    sampling.choose(torch.zeros(1, 3, 50), torch.tensor([[9, 10, 11]]))  # the next round
    assert made == [9, 10, 11]
    assert torch.equal(sampling.gumbel(torch.tensor([[7]]), 50), drafted[0]), "going back gives the same numbers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_tied_logits_is_chosen(dtype: torch.dtype) -> None:
    """`max` is used for its speed; among ties it must give what `argmax` promises, at any place and length."""
    logits = torch.randn(40, 3, 3001).to(dtype)
    logits[:, 0], logits[:, 1] = 0, (logits[:, 1] * 2).round()
    logits[:, 2, 2990:] = 100
    chosen = Sampling([SamplingParams()] * 40).choose(logits, torch.zeros(40, 3, dtype=torch.int64))
    first = (logits == logits.amax(-1, keepdim=True)).float().argmax(-1)
    assert torch.equal(chosen, first)
    assert chosen[:, 0].tolist() == [0] * 40
    assert chosen[:, 2].tolist() == [2990] * 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_owes_nothing_to_its_batch(dtype: torch.dtype) -> None:
    """To the bit, and also where another row's top-p sends everybody through the sorting."""
    logits = (torch.randn(len(PARAMS), 5, 3000) * 8).to(dtype)
    positions = torch.tensor([[7, 8, 8, 9, 30]]).expand(len(PARAMS), 5)
    together = Sampling(PARAMS)
    log_p, choice = together.log_probs(logits), together.choose(logits, positions)
    for row, params in enumerate(PARAMS):
        alone, one = Sampling([params]), slice(row, row + 1)
        assert torch.equal(alone.log_probs(logits[one]), log_p[one])
        assert torch.equal(alone.choose(logits[one], positions[one]), choice[one])


def test_a_choice_depends_on_its_position_and_not_on_the_tree() -> None:
    """The nodes of a tree in any order and number: the same logits at the same position give the same token."""
    sampling = Sampling([SamplingParams(temperature=2.0, seed=9)])
    logits = torch.randn(1, 1, 1000)
    positions = torch.tensor([[4, 5, 5, 6, 9]])
    whole = sampling.choose(logits.expand(1, 5, -1), positions)[0].tolist()
    single = [int(sampling.choose(logits, positions[:, [node]])) for node in range(5)]
    assert whole == single
    assert whole[1] == whole[2]
    assert len(set(whole)) > 1


def test_the_seed_and_the_position_change_the_choice() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(30)]
    tokens = Sampling(params).choose(torch.zeros(30, 2, 10_000), torch.tensor([[3, 4]]).expand(30, 2))
    assert len(tokens.unique()) > 55  # of 60; a few may meet by chance


def test_greedy_choice_is_the_first_argmax_with_or_without_sampled_company() -> None:
    logits = torch.zeros(2, 1, 6)
    logits[:, :, [2, 4]] = 1.0  # a tie
    positions = torch.full((2, 1), 5)
    assert Sampling([SamplingParams()] * 2).choose(logits, positions).flatten().tolist() == [2, 2]
    mixed = Sampling([SamplingParams(), SamplingParams(temperature=1.0)])
    assert int(mixed.choose(logits, positions)[0]) == 2


def test_choices_have_the_law_of_log_probs() -> None:
    params, rows = SamplingParams(temperature=0.8, top_k=4, top_p=0.95), 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5])
    sampling = Sampling([replace(params, seed=seed) for seed in range(rows)])
    tokens = sampling.choose(logits.expand(rows, 1, 6), torch.full((rows, 1), 17)).flatten()
    law = Sampling([params]).log_probs(logits[None, None]).exp().flatten()
    seen = torch.bincount(tokens, minlength=6)
    assert int(seen[law == 0].sum()) == 0
    possible = law > 0
    expected = rows * law[possible]
    statistic = float(((seen[possible] - expected) ** 2 / expected).sum())
    assert 1 < int(possible.sum()) < 6
    assert chi2.sf(statistic, int(possible.sum()) - 1) > FALSE_ALARM


def test_the_coldest_temperature_still_gives_numbers() -> None:
    log_p = Sampling([SamplingParams(temperature=1e-5)]).log_probs(torch.randn(1, 3, 50) * 100)
    assert not bool(log_p.isnan().any())
    assert torch.equal(log_p.exp().amax(dim=-1), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be 0"),
        ("temperature", float("nan"), "temperature must be 0"),
        ("temperature", 1e-30, "at least 1e-5"),
        ("top_k", -1, "top_k must be 0"),
        ("top_p", 0.0, "top_p must lie in"),
        ("top_p", 1.5, "top_p must lie in"),
        ("temperature", float("inf"), "temperature must be 0"),
        ("seed", 2**63, "64 bits"),
        ("min_p", -0.1, "min_p must lie in"),
        ("min_p", 1.1, "min_p must lie in"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0"),
        ("repetition_penalty", float("nan"), "repetition_penalty must be above 0"),
        ("presence_penalty", 2.5, "presence_penalty must lie in"),
        ("frequency_penalty", -2.5, "frequency_penalty must lie in"),
    ],
)
def test_impossible_settings_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})
