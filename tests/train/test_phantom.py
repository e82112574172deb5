"""Laws of phantoms: what is counted on tensors without contents is what real tensors take, for every method."""

from __future__ import annotations

import pytest
import torch

from draftsmith.distill.features import teacher_batch
from draftsmith.distill.objectives import ObjectiveConfig, make_objective
from draftsmith.distill.packing import Row
from draftsmith.heads import METHODS
from draftsmith.infer.target import Target
from draftsmith.train.phantom import Phantom, Phantoms

from ..conftest import tiny_model
from ..heads.laws import SMALL


def row(seed: int) -> Row:
    """Two documents and padding."""
    generator = torch.Generator().manual_seed(seed)
    segments = torch.tensor([1] * 60 + [2] * 60 + [0] * 8)
    positions = torch.cat([torch.arange(60), torch.arange(60), torch.arange(8)])
    supervised = (positions > 10) & (segments > 0)
    return Row(torch.randint(3, 300, (128,), generator=generator), segments, positions, supervised, ("a", "b"))


def take_step(method: str, tokenizer: object, *, is_real: bool) -> list[int]:
    """Bytes and operations of building, reading and one step."""
    config, drafter_class = METHODS[method]
    torch.manual_seed(0)
    with Phantoms(is_real=is_real) as phantoms:
        target = Target(tiny_model(eos_token_id=2), tokenizer, name="tiny")  # type: ignore[arg-type]
        drafter = drafter_class(config.model_validate({"method": method, **SMALL[method]}), target).float().train()
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        found = [phantoms.now, phantoms.restart()]
        teacher = teacher_batch(target, [row(1), row(2)], taps=drafter.taps)
        found += [phantoms.now, phantoms.peak, phantoms.flops]
        phantoms.restart()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            out = drafter(teacher, make_objective(ObjectiveConfig(name="forward_kl")))
            loss = (out.sums * torch.tensor(out.weights)).sum()
        loss.backward()
        assert isinstance(loss, Phantom) != is_real
        return [*found, phantoms.peak, phantoms.flops]


@pytest.mark.parametrize("method", sorted(SMALL))
def test_a_step_without_contents_takes_the_bytes_and_operations_of_a_real_one(
    method: str, tiny_tokenizer: object
) -> None:
    real = take_step(method, tiny_tokenizer, is_real=True)
    assert take_step(method, tiny_tokenizer, is_real=False) == real
    assert all(figure > 0 for figure in real)


def test_bytes_are_given_back_and_views_are_free() -> None:
    with Phantoms() as phantoms:
        first = torch.zeros(1000)
        assert phantoms.now == 4000
        view = first.view(10, 100)[2:]
        second = view @ view.T
        assert isinstance(second, Phantom)
        assert phantoms.now == 4000 + 8 * 8 * 4
        assert phantoms.flops == 2 * 8 * 100 * 8
        del first, view, second
        assert phantoms.now == 0
        assert phantoms.restart() == 0
        assert phantoms.peak == phantoms.flops == 0


def test_a_real_mask_decides_how_many_rows_there_are() -> None:
    with Phantoms():
        values, mask = torch.zeros(6, 4), torch.tensor([True, False, True, True, False, False])
        assert values[mask].shape == (3, 4)
        values[mask] = torch.ones(3, 4)
        better = values[:, 0] > values[:, 1]
        assert not isinstance(better, Phantom)
        assert better.all()
        assert values.argmax(dim=-1).tolist() == [0] * 6
        assert values.sum().item() == 0.0


def test_what_autograd_keeps_for_the_backward_pass_is_counted_until_then() -> None:
    with Phantoms() as phantoms:
        weight = torch.zeros(100, 100, requires_grad=True)
        before = phantoms.restart()
        loss = (torch.zeros(50, 100) @ weight).relu().sum()
        kept = phantoms.now - before
        assert kept >= 2 * 50 * 100 * 4, "the input of the product and the output of the activation"
        loss.backward()
        del loss
        assert isinstance(weight.grad, Phantom)
        assert phantoms.now == before + 100 * 100 * 4, "only the gradient is left"


def test_a_phantom_outside_is_our_own_mistake() -> None:
    with Phantoms():
        value = torch.zeros(3)
    with pytest.raises(AssertionError, match=r"aten.add.* met a phantom outside"):
        value + 1
