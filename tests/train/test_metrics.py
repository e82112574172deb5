"""Laws of the figures: integers first, conditional acceptance, and agreement with the ranks they could be read from."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from draftsmith.distill.packing import pack
from draftsmith.heads import METHODS, LossSums
from draftsmith.infer.target import Target
from draftsmith.infer.tree_search import rank_accuracy, round_starts
from draftsmith.train.data import prepare_rows
from draftsmith.train.metrics import RANKS, Tally, Totals, _shares, evaluate

from ..heads.laws import SMALL, HardCrossEntropy
from .test_data import samples


def test_worked_example_of_the_module_docstring() -> None:
    totals = Totals([0.0, 0.0], [100, 80], [60, 20], [100, 50], (1.0, 0.8), {})
    assert totals.acceptance == pytest.approx([0.6, 0.4])
    assert totals.survival == pytest.approx([0.6, 0.24])
    assert totals.predicted_tau == pytest.approx(1.84)


def test_loss_is_the_weighted_sum_of_means_and_a_step_without_rows_adds_nothing() -> None:
    totals = Totals([6.0, 4.0, 0.0], [3, 2, 0], [0, 0, 0], [0, 0, 0], (1.0, 0.5, 0.25), {"confidence": (1.0, 4.0)})
    assert totals.loss == pytest.approx(3.0)
    values = totals.values("train")
    assert values["train/acceptance@3"] == 0.0
    assert values["train/confidence"] == 0.25
    assert values["train/counts"] == [3, 2, 0]


def test_tally_adds_and_weight_zero_adds_nothing() -> None:
    out = LossSums(
        torch.tensor([1.5, 2.0]),
        torch.tensor([3, 2]),
        (1.0, 0.8),
        torch.tensor([2, 1]),
        torch.tensor([3, 2]),
        {"x": torch.tensor([1.0, 2.0])},
    )
    tally = Tally()
    for weight in (1, 0, 1):
        tally.add(out, weight=weight)
    assert tally.reduce(Accelerator(cpu=True)) == Totals(
        [3.0, 4.0], [6, 4], [4, 2], [6, 4], (1.0, 0.8), {"x": (2.0, 4.0)}
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_evaluation_agrees_with_the_ranks_whatever_the_batch_size(method: str, tiny_target: Target) -> None:
    config, drafter_class = METHODS[method]
    drafter = drafter_class(config.model_validate({"method": method} | SMALL[method]), tiny_target).eval()
    rows = prepare_rows(pack(samples(8), length=48), drafter, features="online", what="test")
    found = [
        evaluate(drafter, HardCrossEntropy(), rows, accelerator=Accelerator(cpu=True), size=size) for size in (1, 3, 50)
    ]
    teacher = rows.teach(range(len(rows.rows)))
    right = (ranks := drafter.ranks(teacher)) == 0
    alive = torch.ones(right.shape[:2], dtype=torch.bool)
    for step in range(drafter.num_steps):
        alive &= ranks[..., step] >= 0
        assert [each.totals.reached[step] for each in found] == [int(alive.sum())] * 3
        alive &= right[..., step]
        assert [each.totals.survived[step] for each in found] == [int(alive.sum())] * 3
    begun = ranks[round_starts(ranks)]
    assert 0 < len(begun) <= int((ranks[..., 0] >= 0).sum())
    assert found[0].rank_accuracy == found[1].rank_accuracy == rank_accuracy(begun, width=RANKS)
    assert found[0].walked_tau == pytest.approx(1 + float((begun == 0).long().cumprod(1).sum(1).double().mean()))
    assert found[0].totals.loss == pytest.approx(found[2].totals.loss, rel=1e-5)
    assert drafter.training, "evaluation leaves the drafter in training mode"


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_shares_cover_all_rows_once_in_equally_many_batches(world: int, size: int) -> None:
    for num_rows in range(1, 12):
        shares = [list(_shares(num_rows, rank, world, size)) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(row for share in shares for indices, weight in share for row in indices * weight) == list(
            range(num_rows)
        )
        assert all(0 < len(indices) <= size for share in shares for indices, _ in share)
