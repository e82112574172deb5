"""Laws of the position weights: each paper's formula, on numbers and on gradients."""

from __future__ import annotations

from math import exp

import pytest
import torch

from draftsmith.heads.position_weights import PositionWeights


def test_d_pace_without_smoothing_is_the_gradient_of_the_expected_accepted_length() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    probs = logits.sigmoid()  # (K, R), of the text's own tokens
    expected = probs.cumprod(dim=0).sum()
    truth = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    weights = PositionWeights(kind="d_pace", alpha=0.0).of(probs.detach(), torch.ones(5, 3, dtype=torch.bool))
    surrogate = (weights * -probs.log()).sum()  # weighted cross entropy
    found = torch.autograd.grad(surrogate, logits)[0]
    torch.testing.assert_close(-found, truth)


def test_d_pace_by_hand() -> None:
    probs = torch.tensor([[0.5], [0.0], [1.0]])
    prefix = [0.75, 0.75 * 0.5, 0.75 * 0.5 * 1.0]  # alpha is the paper's 0.5
    weights = PositionWeights(kind="d_pace").of(probs, torch.ones(3, 1, dtype=torch.bool))
    torch.testing.assert_close(weights[:, 0], torch.tensor([sum(prefix), sum(prefix[1:]), prefix[2]]))


def test_d_pace_ignores_positions_that_do_not_count() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.3, 0.3], [0.9, 0.1]])
    counted = torch.tensor([[True, True], [True, True], [False, False]])
    weights = PositionWeights(kind="d_pace", alpha=0.2).of(probs, counted)
    torch.testing.assert_close(weights[:, 0], weights[:, 1])
    short = PositionWeights(kind="d_pace", alpha=0.2).of(probs[:2], counted[:2])
    torch.testing.assert_close(weights[:2], short)
    assert weights[2].tolist() == [0.0, 0.0]


def test_cat_is_the_targets_probability_of_what_stands_before() -> None:
    probs = torch.tensor([[0.5], [0.25], [0.9]])
    weights = PositionWeights(kind="cat").of(probs, torch.ones(3, 1, dtype=torch.bool))
    torch.testing.assert_close(weights[:, 0], torch.tensor([1.0, 0.5, 0.125]))


def test_fixed_weights_sum_to_one_and_fall_as_they_say() -> None:
    assert PositionWeights().fixed(4) == (0.25, 0.25, 0.25, 0.25)
    weights = PositionWeights(kind="exponential", gamma=4.0).fixed(7)
    assert sum(weights) == pytest.approx(1.0)
    # exp(-i/4) of seven positions, as the report on DeepSpec lists them: 1, .78, .61, .47, .37, .29, .22
    assert [round(weight / weights[0], 2) for weight in weights] == [1.0, 0.78, 0.61, 0.47, 0.37, 0.29, 0.22]
    assert weights[5] / weights[1] == pytest.approx(exp(-1))


def test_a_parameter_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma belongs to kind exponential"):
        PositionWeights(kind="exponential")
    with pytest.raises(ValueError, match="gamma belongs to kind exponential"):
        PositionWeights(kind="cat", gamma=4.0)
    with pytest.raises(ValueError, match="alpha belongs to kind d_pace"):
        PositionWeights(alpha=0.5)
