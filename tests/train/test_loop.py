"""Laws of the loop: what is minimised does not depend on how it is split up, and nothing is trained on in silence."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.distill.tokens import load_samples
from draftsmith.heads import load_drafter
from draftsmith.heads.files import read_config
from draftsmith.infer.target import Target
from draftsmith.train import assembly, engine
from draftsmith.train.assembly import assemble
from draftsmith.train.data import load_rows, prepare_rows, share
from draftsmith.train.loop import TrainResult, take_step, train
from draftsmith.train.recipe import Recipe, parse_recipe

from ..heads.laws import SMALL
from .conftest import Content, read_lines


def recipe_of(content: Content, **changes: Any) -> Recipe:
    return parse_recipe(content | changes, source="test")


def weights_of(result: TrainResult) -> dict[str, Tensor]:
    return load_file(result.drafter / "model.safetensors")


def losses_of(result: TrainResult) -> list[float]:
    return [line["train/loss"] for line in read_lines(result.out / "metrics.jsonl") if "train/loss" in line]


WITHOUT_DRAWS: dict[str, dict[str, object]] = {"dflash": {"num_anchors": 128}, "pard": {"keep_ratio": 1.0}}
"""Settings under which these methods learn from every row instead of a sample of them."""


@pytest.mark.parametrize("method", sorted(SMALL))
def test_accumulated_steps_are_the_whole_step(method: str, content: Content, tmp_path: Path) -> None:
    """Four forwards of one row against one of four: uneven numbers of supervised tokens, one normalisation."""
    content |= {
        "head": {"method": method} | SMALL[method] | WITHOUT_DRAWS.get(method, {}),
        "optimiser": {"lr": 1e-3, "warmup_share": 0.5},
    }
    four = train(recipe_of(content, rows_per_forward=1, out=str(tmp_path / "4x1")), resume=False)
    one = train(recipe_of(content, rows_per_forward=4, out=str(tmp_path / "1x4")), resume=False)
    assert losses_of(four) == pytest.approx(losses_of(one), rel=1e-5)
    for name, tensor in weights_of(one).items():
        torch.testing.assert_close(weights_of(four)[name], tensor, rtol=1e-4, atol=2e-6)


def test_gradient_is_that_of_the_global_mean(content: Content) -> None:
    """Against the formula itself: all rows of the step in one batch, each draft step divided by its own count."""
    run = assemble(recipe_of(content, rows_per_forward=1, optimiser={"lr": 1e-9, "clip": 1e9}), resume=False)
    batch = run.stream.batch(0)
    out = run.drafter.loss(run.rows.teach(batch), run.objective)
    loss = sum(w * s / n for w, s, n in zip(out.weights, out.sums, out.counts))
    assert isinstance(loss, Tensor)
    expected = torch.autograd.grad(loss, list(run.drafter.parameters()))
    totals, norm = take_step(run, batch, run.rows.counts[batch].sum(dim=0), step=1, lr=1e-9)
    assert totals.loss == pytest.approx(loss.item(), rel=1e-6)
    assert norm == pytest.approx(torch.cat([gradient.flatten() for gradient in expected]).norm().item(), rel=1e-5)


def test_reading_ahead_trains_the_same_weights(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the next rows are read during the step; here too, to see that it is the same training."""
    plain = train(recipe_of(content, rows_per_forward=1, eval_every=2, out=str(tmp_path / "plain")), resume=False)
    monkeypatch.setattr(assembly, "reads_ahead", lambda recipe, target: True)
    ahead = train(recipe_of(content, rows_per_forward=1, eval_every=2, out=str(tmp_path / "ahead")), resume=False)
    assert losses_of(plain) == losses_of(ahead)
    for name, tensor in weights_of(plain).items():
        assert torch.equal(weights_of(ahead)[name], tensor)


@pytest.mark.gpu
def test_on_cuda_the_rows_that_are_read_ahead_are_those_of_the_source(content: Content) -> None:
    run = assemble(recipe_of(content, rows_per_forward=1), resume=False)
    assert run.ahead is not None
    batches = run.share(run.stream.batch(0))
    for micro, then in zip(batches, [*batches[1:], None]):
        found, wanted = run.teach(micro, then), run.rows.teach(micro)
        torch.testing.assert_close(found.hidden, wanted.hidden)
        torch.testing.assert_close(found.features, wanted.features)


def test_only_the_drafter_is_trained(content: Content) -> None:
    run = assemble(recipe_of(content), resume=False)
    target = {name: tensor.clone() for name, tensor in run.drafter.target.model.state_dict().items()}
    before = {name: tensor.detach().clone() for name, tensor in run.drafter.named_parameters()}
    batch = run.stream.batch(0)
    take_step(run, batch, run.rows.counts[batch].sum(dim=0), step=1, lr=1e-3)
    trained = {id(parameter) for group in run.optimiser.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in run.drafter.parameters()}
    assert all(not torch.equal(parameter, before[name]) for name, parameter in run.drafter.named_parameters())
    assert all(torch.equal(tensor, target[name]) for name, tensor in run.drafter.target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.drafter.target.model.parameters())


@pytest.mark.parametrize("method", ["dflash", "eagle3", "hydra"])
def test_norms_move_though_all_is_computed_in_bf16(method: str, content: Content) -> None:
    """They begin at 1, where a bf16 weight swallows an update of a thousandth."""
    changes = {"head": {"method": method} | SMALL[method], "precision": "bf16", "objective": {"name": "forward_kl"}}
    run = assemble(recipe_of(content, **changes), resume=False)
    before = {name: p.detach().clone() for name, p in run.drafter.named_parameters() if "norm" in name}
    for step in range(1, 4):
        batch = run.stream.batch(step - 1)
        take_step(run, batch, run.rows.counts[batch].sum(dim=0), step=step, lr=1e-3)
    assert before
    still = [name for name, p in run.drafter.named_parameters() if name in before and torch.equal(p, before[name])]
    assert still == []


def test_what_the_draft_vocabulary_covers_is_said(content: Content, capsys: pytest.CaptureFixture[str]) -> None:
    assemble(recipe_of(content), resume=False)
    assert re.search(r"draft vocabulary: 200 tokens cover [\d.]+% of the supervised ones", capsys.readouterr().err)


def test_stored_trajectory(content: Content) -> None:
    """Fixed seed, fixed data: a refactoring that changes these numbers changes the training."""
    result = train(recipe_of(content, optimiser={"lr": 5e-3}, steps=8), resume=False)
    assert losses_of(result) == pytest.approx(TRAJECTORY, rel=2e-4)
    drafter = load_drafter(result.drafter, Target.load(content["target"]))
    assert drafter.measured["step"] == 8
    assert len(drafter.measured["rank_accuracy"]) == drafter.num_steps


TRAJECTORY = [16.772, 16.0687, 15.5337, 14.5562, 15.442, 15.5822, 15.396, 15.2735]


@pytest.mark.parametrize("method", ["dflash", "pard"])
def test_draws_follow_from_the_step_and_the_rows(method: str, content: Content) -> None:
    """Whatever was drawn before: so a continued run draws what an uninterrupted one does."""
    run = assemble(recipe_of(content, head={"method": method} | SMALL[method]), resume=False)
    batch = run.stream.batch(0)
    counts, saved = run.rows.counts[batch].sum(dim=0), {k: v.clone() for k, v in run.drafter.state_dict().items()}

    def loss(step: int) -> float:
        run.drafter.load_state_dict(saved)
        torch.rand(17)
        return take_step(run, batch, counts, step=step, lr=1e-9)[0].loss

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)


@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
def test_bf16_computes_over_fp32_weights(target_dtype: str, content: Content, tmp_path: Path) -> None:
    content |= {"target_dtype": target_dtype, "optimiser": {"lr": 1e-3}}
    low = train(recipe_of(content, precision="bf16", out=str(tmp_path / "bf16")), resume=False)
    full = train(recipe_of(content, precision="fp32", out=str(tmp_path / "fp32")), resume=False)
    assert losses_of(low) == pytest.approx(losses_of(full), rel=0.02)
    assert losses_of(low) != losses_of(full)
    floating = [tensor for tensor in weights_of(low).values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in floating), "weights finer than bf16"


def test_kept_features_train_as_those_read_anew(content: Content, tmp_path: Path) -> None:
    kept = train(
        recipe_of(content, data=content["data"] | {"features": "memory"}, out=str(tmp_path / "kept")), resume=False
    )
    anew = train(recipe_of(content, out=str(tmp_path / "anew")), resume=False)
    assert losses_of(kept) == pytest.approx(losses_of(anew), rel=1e-5)


def test_non_finite_loss_stops_with_the_documents_named(content: Content) -> None:
    recipe = recipe_of(content, optimiser={"lr": 1e36}, save_every=1)
    with pytest.raises(
        ValueError, match=r"the loss of step 2 is (nan|inf), in row \d+ \(train-\d+.*lower optimiser.lr"
    ) as caught:
        train(recipe, resume=False)
    assert "not stepped" in str(caught.value)
    metrics = read_lines(Path(recipe.out) / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1]


def lonely_rows(content: Content, target: Target) -> Recipe:
    """A recipe whose rows are one sample each, cut so short that some have a single supervised token."""
    samples = load_samples(content["data"]["responses"], target, max_length=128)
    length = sorted(sample.supervised.index(True) for sample in samples)[len(samples) // 2] + 1
    data = content["data"] | {"row_length": length, "held_out": content["data"]["responses"]}
    changes = {"rows_per_step": 1, "rows_per_forward": 1, "eval_every": None, "save_every": None}
    return recipe_of(content, data=data, steps=None, epochs=1, **changes)


def test_steps_without_a_supervised_token_are_passed_over_and_counted(content: Content, tiny_target: Target) -> None:
    recipe = lonely_rows(content, tiny_target)
    result = train(recipe, resume=False)
    lines = read_lines(result.out / "metrics.jsonl")
    skipped = [line for line in lines if "train/skipped" in line]
    assert skipped
    assert all(math.isfinite(loss) for loss in losses_of(result))
    position = json.loads((result.out / "run.json").read_text())["position"]
    assert position["skipped"] == len(skipped)
    assert position["step"] == len(skipped) + len(losses_of(result))


def test_head_without_trainable_weights_is_an_error(content: Content, tiny_target: Target) -> None:
    recipe = recipe_of(content)
    run = assemble(recipe, resume=False)
    run.drafter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        engine.prepare(run.engine, recipe, run.drafter)


def test_wall_clock_budget_ends_the_run_fully_annealed(content: Content) -> None:
    result = train(recipe_of(content, steps=1_000_000, minutes=1 / 60, eval_every=None, save_every=None), resume=False)
    assert result.is_finished
    assert 1 < result.step < 1_000_000
    rates = [line["train/lr"] for line in read_lines(result.out / "metrics.jsonl") if "train/lr" in line]
    assert max(rates) > 5e-4
    assert rates[-1] < 1e-4
    again = train(recipe_of(content, steps=1_000_000, minutes=1 / 60, eval_every=None, save_every=None), resume=True)
    assert again == result, "a run whose time is over is not continued"


def test_warm_start_begins_where_the_other_run_ended(content: Content, tmp_path: Path) -> None:
    first = train(recipe_of(content, optimiser={"lr": 1e-2}, steps=12), resume=False)
    head, _ = read_config(first.drafter)
    changes = {"init": str(first.drafter), "head": head, "out": str(tmp_path / "second"), "optimiser": {"lr": 1e-9}}
    described = json.loads((first.drafter / "config.json").read_text())
    del described["draftsmith"]["head"]["head_decay"]  # as if it had come later: its default, which is the recipe's too
    (first.drafter / "config.json").write_text(json.dumps(described))
    second = train(recipe_of(content, **changes), resume=False)
    assert second.measured["loss"] == pytest.approx(first.measured["loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"another head: num_heads: 3 there, 2 here"):
        train(
            recipe_of(content, **changes | {"head": head | {"num_heads": 2}, "out": str(tmp_path / "third")}),
            resume=False,
        )


def test_folder_of_another_run_is_not_overwritten(content: Content) -> None:
    train(recipe_of(content), resume=False)
    with pytest.raises(
        ValueError, match=r"already holds a run \(step-000006\); continue it with --resume, or choose another"
    ):
        train(recipe_of(content), resume=False)


def test_process_shares_make_up_the_global_batch(content: Content) -> None:
    batch, recipe = list(range(30, 42)), recipe_of(content, rows_per_step=12, rows_per_forward=4)
    for world in (1, 2, 3, 4, 6):
        shares = [share(batch, rank=rank, world=world, most=4) for rank in range(world)]
        assert sorted(row for mine in shares for micro in mine for row in micro) == batch
        assert {len(mine) for mine in shares} == {engine.count_micro_steps(recipe, world)}
    alone = share(batch, rank=0, world=1, most=3)
    together = [micro for rank in range(2) for micro in share(batch, rank=rank, world=2, most=3)]
    assert together == alone, "what a method draws for a micro-batch does not depend on the number of processes"
    with pytest.raises(
        ValueError, match=r"rows_per_step 12 does not divide over 5 processes; set it to a multiple of 5"
    ):
        engine.count_micro_steps(recipe, 5)


def test_rows_counted_beforehand_are_those_of_the_step(content: Content, tiny_target: Target) -> None:
    recipe = recipe_of(content)
    run = assemble(recipe, resume=False)
    _, packed, _ = load_rows(recipe, tiny_target)
    again = prepare_rows(packed, run.drafter, features="online", what="test")
    assert torch.equal(again.counts, run.rows.counts)
