"""The gradient worked out by hand is autograd's, whatever the block size, the precision and the upstream weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.distill import closed_form
from draftsmith.distill.closed_form import ForwardKL
from draftsmith.distill.objectives import Name, ObjectiveConfig, make_objective


def rows(count: int = 7, width: int = 33, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    draft, target = (torch.randn(count, width, generator=draw, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
    return draft.requires_grad_(), target


@pytest.mark.parametrize("elements", [1, 70, 10**6], ids=["row by row", "two rows", "all rows"])
def test_value_and_gradient_are_autograds(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "ELEMENTS", elements)
    draft, target = rows()
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    value = ForwardKL.apply(draft, target)
    (gradient,) = torch.autograd.grad((value * weights).sum(), draft)
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), draft)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, wanted)


def test_its_gradient_is_that_of_finite_differences() -> None:
    draft, target = rows(3, 5)
    assert torch.autograd.gradcheck(lambda z: ForwardKL.apply(z, target), (draft,))


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy", "reverse_kl", "jsd", "tvd", "lk"])
@pytest.mark.parametrize("elements", [1, 70, 10**6], ids=["row by row", "two rows", "all rows"])
def test_rows_compared_with_one_row_of_the_target_are_compared_with_copies_of_it(
    name: Name, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "ELEMENTS", elements)
    objective = make_objective(ObjectiveConfig(name=name))
    draft, target = rows()
    labels, which, weights = torch.arange(7), torch.tensor([2, 0, 0, 1, 2, 0, 1]), torch.linspace(-1, 2, 7).double()
    shared = objective(draft, labels, target[:3], which)
    copied = objective(draft, labels, target[which])
    torch.testing.assert_close(shared, copied)
    gradients = (torch.autograd.grad((found * weights).sum(), draft)[0] for found in (shared, copied))
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(objective(draft, labels, target[:3], which), copied)


def test_excluded_tokens_add_nothing_and_nan_stays_visible() -> None:
    draft, target = rows()
    target[:, 3:20] = -torch.inf
    value = ForwardKL.apply(draft, target)
    kept = torch.cat([draft[:, :3], draft[:, 20:]], 1)
    p = torch.cat([target[:, :3], target[:, 20:]], 1).softmax(-1)
    log_q = kept - draft.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(value, (p * (p.log() - log_q)).sum(-1))
    with torch.no_grad():
        draft[2, 2] = torch.nan
    assert ForwardKL.apply(draft, target).isnan().tolist() == [row == 2 for row in range(7)]


def test_bfloat16_is_compared_in_float32() -> None:
    draft, target = rows(dtype=torch.bfloat16)
    value = ForwardKL.apply(draft, target)
    wide = ForwardKL.apply(draft.detach().double(), target.double())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), wide, rtol=1e-5, atol=1e-6)
    value.sum().backward()
    assert draft.grad is not None
    assert draft.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy", "reverse_kl", "jsd", "tvd", "lk"])
def test_the_precision_around_it_is_not_that_of_the_comparison(name: Name) -> None:
    """Training calls it under autocast, where a product of two float32 matrices is one in bfloat16."""
    objective = make_objective(ObjectiveConfig(name=name))
    draft, target = rows(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = objective(draft, torch.arange(7), target)
    torch.testing.assert_close(value, objective(draft, torch.arange(7), target))


@pytest.mark.parametrize("elements", [1, 70, 10**6], ids=["row by row", "two rows", "all rows"])
@pytest.mark.parametrize("name", ["cross_entropy", "reverse_kl", "jsd", "tvd", "lk"])
def test_block_by_block_is_all_at_once(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "ELEMENTS", elements)
    objective = make_objective(ObjectiveConfig.model_validate({"mix": {name: 0.7, "forward_kl": 0.2}}))
    draft, target = rows()
    labels, weights = torch.arange(7), torch.linspace(-1, 2, 7, dtype=torch.float64)
    value = objective(draft, labels, target)
    (gradient,) = torch.autograd.grad((value * weights).sum(), draft)
    at_once = objective._of_wide(draft, labels, target)
    (wanted,) = torch.autograd.grad((at_once * weights).sum(), draft)
    torch.testing.assert_close(value, at_once)
    torch.testing.assert_close(gradient, wanted)


def test_a_checkpoint_computes_its_contents_once_more_and_not_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "ELEMENTS", 33)
    objective = make_objective(ObjectiveConfig(name="lk"))
    draft, target = rows()
    calls = 0

    def judge(states: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return objective(2 * states, torch.arange(7), target).sum()

    checkpoint(judge, draft, use_reentrant=False).backward()
    assert calls == 2
    plain = draft.detach().requires_grad_()
    objective(2 * plain, torch.arange(7), target).sum().backward()
    assert draft.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(draft.grad, plain.grad)
