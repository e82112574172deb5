"""Each divergence has its closed form's value and gradient, vanishes where it should, and survives half precision."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from draftsmith.distill.objectives import Name, ObjectiveConfig, make_objective

NAMES = get_args(Name)
AGAINST_TARGET = [name for name in NAMES if name != "cross_entropy"]
BETA = 0.3


def config(name: str, **more: Any) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({"name": name} | ({"beta": BETA} if name == "jsd" else {}) | more)


def logits(rows: int = 40, width: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draft, target = (3 * torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, width, (rows,), generator=generator)
    return draft.to(dtype).requires_grad_(), labels, target.to(dtype)


def closed_forms(p: Tensor, q: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Value (R,) and gradient in the draft logits (R, W), written out by hand."""
    one_hot = torch.nn.functional.one_hot(labels, p.shape[-1]).to(p.dtype)
    m = BETA * p + (1 - BETA) * q
    reverse = (q * (q / p).log()).sum(-1)
    to_mixture = (q * (q / m).log()).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    sign = 0.5 * torch.sign(q - p)
    tvd = q * (sign - (q * sign).sum(-1, keepdim=True))
    return {
        "cross_entropy": (-(q * one_hot).sum(-1).log(), q - one_hot),
        "forward_kl": ((p * (p / q).log()).sum(-1), q - p),
        "reverse_kl": (reverse, q * ((q / p).log() - reverse[:, None])),
        "jsd": (
            BETA * (p * (p / m).log()).sum(-1) + (1 - BETA) * to_mixture,
            (1 - BETA) * q * ((q / m).log() - to_mixture[:, None]),
        ),
        "tvd": (1 - alpha, tvd),
        "lk": (-alpha.log(), tvd / alpha[:, None]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_the_closed_form(name: str) -> None:
    draft, labels, target = logits()
    value = make_objective(config(name))(draft, labels, target)
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    expected = closed_forms(target.softmax(-1), draft.detach().softmax(-1), labels)[name]
    torch.testing.assert_close(value, expected[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_finite_differences(name: str) -> None:
    draft, labels, target = logits(rows=4, width=5)
    objective = make_objective(config(name))
    assert torch.autograd.gradcheck(lambda z: objective(z, labels, target), (draft,))


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_equal_distributions_have_no_divergence_and_others_have_some(name: str) -> None:
    draft, labels, target = logits()
    objective = make_objective(config(name))
    torch.testing.assert_close(objective(target, labels, target), torch.zeros(40, dtype=torch.float64))
    assert (objective(draft, labels, target) > 1e-3).all()


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_no_gradient_reaches_the_target(name: str) -> None:
    draft, labels, target = logits()
    target.requires_grad_()
    make_objective(config(name))(draft, labels, target).sum().backward()
    assert target.grad is None


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_temperature_softens_both_distributions(name: str) -> None:
    draft, labels, target = logits()
    softened = make_objective(config(name, temperature=2.0))(draft, labels, target)
    torch.testing.assert_close(softened, make_objective(config(name))(draft / 2, labels, target / 2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_compared_in_float32(name: str, dtype: torch.dtype) -> None:
    draft, labels, target = logits(dtype=dtype)
    objective = make_objective(config(name))
    value = objective(draft, labels, target)
    assert value.dtype == torch.float32
    assert torch.equal(value, objective(draft.float(), labels, target.float()))


@pytest.mark.parametrize("name", NAMES)
def test_distributions_far_apart_stay_finite_with_a_gradient_that_is(name: str) -> None:
    draft = torch.tensor([[0.0, 300.0, 0.0]], requires_grad=True)
    target = torch.tensor([[300.0, 0.0, 0.0]])
    value = make_objective(config(name))(draft, torch.tensor([0]), target)
    value.sum().backward()
    assert value.isfinite().all()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()


def test_lk_still_pulls_where_tvd_has_gone_flat() -> None:
    slopes = {}
    for name in ("tvd", "lk"):
        draft = torch.tensor([[0.0, 60.0, 0.0]], requires_grad=True)
        make_objective(config(name))(draft, torch.tensor([0]), torch.tensor([[60.0, 0.0, 0.0]])).sum().backward()
        assert draft.grad is not None
        slopes[name] = float(draft.grad.abs().max())
    assert slopes["tvd"] < 1e-12
    assert slopes["lk"] > 0.1


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_a_teacher_of_few_tokens_never_sees_more_divergence_and_all_of_it_in_the_end(name: str) -> None:
    draft, labels, target = logits()
    whole = make_objective(config(name))(draft, labels, target)
    before = torch.zeros_like(whole)
    for k in range(1, 10):
        value = make_objective(config(name, teacher_top_k=k))(draft, labels, target)
        assert (value >= before - 1e-12).all(), "one bucket more can only tell more"
        assert (value <= whole + 1e-12).all()
        before = value
    assert float((whole - before).detach().max()) > 0, "two tokens are still one"
    torch.testing.assert_close(make_objective(config(name, teacher_top_k=10))(draft, labels, target), whole)


def test_what_a_teacher_of_few_tokens_misses_is_bounded_by_the_tails() -> None:
    """In total variation: at most the larger tail, so an acceptance rate known to a thousandth needs a tail of that."""
    draft, labels, target = logits()
    missed = [make_objective(config("tvd", **more))(draft, labels, target) for more in ({}, {"teacher_top_k": 4})]
    p, q = target.softmax(-1), draft.softmax(-1)
    inside = torch.zeros_like(p).scatter(-1, p.topk(4).indices, 1.0).bool()
    tails = torch.maximum(p.masked_fill(inside, 0).sum(-1), q.masked_fill(inside, 0).sum(-1))
    assert (missed[0] - missed[1] <= tails + 1e-12).all()
    assert float((missed[0] - missed[1]).detach().max()) > 0


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_a_teacher_of_few_tokens_gives_the_gradient_of_what_it_compares(name: str) -> None:
    draft, labels, target = logits(rows=4, width=6)
    objective = make_objective(config(name, teacher_top_k=3))
    assert torch.autograd.gradcheck(lambda z: objective(z, labels, target), (draft,))


def test_a_mix_is_the_weighted_sum() -> None:
    draft, labels, target = logits()
    mixed = make_objective(ObjectiveConfig(mix={"cross_entropy": 0.1, "forward_kl": 2.0}))(draft, labels, target)
    parts = [make_objective(config(name))(draft, labels, target) for name in ("cross_entropy", "forward_kl")]
    torch.testing.assert_close(mixed, 0.1 * parts[0] + 2.0 * parts[1])


@pytest.mark.parametrize("name", NAMES)
def test_only_cross_entropy_does_without_the_target(name: str) -> None:
    assert make_objective(config(name)).uses_target == (name != "cross_entropy")
    draft, labels, _ = logits()
    assert make_objective(config("cross_entropy"))(draft, labels, None).shape == (40,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"either objective\.name or objective\.mix"),
        ({"name": "tvd", "mix": {"lk": 1}}, r"either objective\.name or objective\.mix"),
        ({"mix": {}}, r"either objective\.name or objective\.mix"),
        ({"mix": {"lk": 0}}, "weights must be positive"),
        ({"name": "tvd", "beta": 0.2}, "beta applies to jsd only"),
        ({"name": "jsd", "beta": 1.0}, "less than 1"),
        ({"name": "cross_entropy", "temperature": 2}, "does not apply to cross_entropy"),
        ({"name": "cross_entropy", "teacher_top_k": 8}, "teacher_top_k does not apply to cross_entropy"),
        ({"name": "kl"}, "Input should be 'cross_entropy', 'forward_kl'"),
        ({"name": "tvd", "weight": 1}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig.model_validate(fields)


def test_a_resolved_config_can_be_read_back() -> None:
    for name in NAMES:
        written = config(name)
        assert ObjectiveConfig.model_validate(written.model_dump()) == written
