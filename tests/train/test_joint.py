"""Laws of joint training: it begins as the target, ends as another one, and decoding is faithful to that one."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.heads import load_drafter
from draftsmith.heads.files import read_config
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.target import Target
from draftsmith.train import engine
from draftsmith.train.assembly import Run, assemble
from draftsmith.train.checkpoint import checkpoints
from draftsmith.train.loop import TrainResult, take_step, train
from draftsmith.train.recipe import Recipe, parse_recipe

from .conftest import Content, read_lines

BACKBONE = {"rank": 4, "alpha": 8, "head_weight": 1.0}


@pytest.fixture
def joint(content: Content) -> Recipe:
    return recipe_of(content)


def recipe_of(content: Content, **changes: Any) -> Recipe:
    return parse_recipe(content | {"backbone": BACKBONE, "optimiser": {"lr": 1e-2}} | changes, source="test")


def step(run: Run, number: int) -> Any:
    batch = run.stream.batch(number - 1)
    return take_step(run, batch, run.rows.counts[batch].sum(dim=0), step=number, lr=1e-2)


def answers(target: Target, drafter: Drafter | None = None) -> list[list[int]]:
    decoding = Engine(target, drafter=drafter, rows=2)
    for number in range(4):
        decoding.add(Request(str(number), [5 + number, 9, 40 + number], 24))
    return [output.tokens for output in sorted(decoding.run(), key=lambda output: output.id)]


def test_it_begins_as_the_target_and_only_adapters_and_drafter_move(joint: Recipe, tiny_target: Target) -> None:
    run = assemble(joint, resume=False)
    assert run.joint is not None
    original = {name: tensor.clone() for name, tensor in tiny_target.model.state_dict().items()}
    totals, _ = step(run, 1)
    assert totals.extra["backbone_kl"][0] == pytest.approx(0, abs=1e-4), "adapters begin as nothing"
    rows = run.rows.rows
    learned = sum(
        int((row.supervised[1:] & (row.segments[1:] == row.segments[:-1]) & (row.segments[1:] > 0)).sum())
        for row in (rows[index] for index in run.stream.batch(0))
    )
    assert totals.extra["backbone_kl"][1] == learned
    totals, _ = step(run, 2)
    assert totals.extra["backbone_kl"][0] > 1e-3
    now = {name.replace(".base_layer", ""): t for name, t in run.drafter.target.model.state_dict().items()}
    assert all(torch.equal(now[name], tensor) for name, tensor in original.items())
    assert any(bool((part != 0).any()) for name, part in zip(run.joint.names, run.joint.adapter) if "lora_B" in name)
    shares = [group["lr"] for group in run.optimiser.param_groups]
    assert shares == [pytest.approx(1e-2), pytest.approx(2.5e-3)], "a quarter of the drafter's rate"


def test_the_teacher_is_the_network_with_its_adapters_off(joint: Recipe, tiny_target: Target) -> None:
    run = assemble(joint, resume=False)
    for number in (1, 2, 3):
        step(run, number)
    taught, adapted = run.teach([0, 1]), run.rows.teach([0, 1])
    whole = tiny_target.read_packed(taught.tokens, taught.positions, taught.segments).hidden
    torch.testing.assert_close(taught.hidden, whole)
    assert not torch.allclose(adapted.hidden, whole, atol=1e-3)


def test_the_drafters_loss_is_ramped_beside_the_mean_divergence(joint: Recipe) -> None:
    run = assemble(joint, resume=False)
    assert run.joint is not None
    batch = run.stream.batch(0)
    out = run.model(run.teach(batch), run.objective)
    out = replace(out, extra=out.extra | {"backbone_kl": torch.tensor([12.0, 5.0])})
    counts = run.rows.counts[batch].sum(dim=0)
    drafted = sum(float(w * s / n) for w, s, n in zip(out.weights, out.sums.detach(), counts))
    supervised = run.joint.loss(out, torch.tensor(0.0), [run.rows.rows[index] for index in batch], 0.0)
    for number in (1, 6):
        ramp = math.sin(math.pi / 2 * (number - 0.5) / 6)
        assert float(run.loss(out, counts, batch, number).detach()) == pytest.approx(
            ramp * drafted + float(supervised), rel=1e-5
        )
    assert 0 < float(supervised) < 12


@pytest.fixture
def trained(content: Content) -> TrainResult:
    return train(recipe_of(content, steps=10, decode_prompts=3, decode_tokens=8), resume=False)


def test_decoding_is_faithful_to_the_adapted_target_and_to_no_other(trained: TrainResult, tiny_target: Target) -> None:
    adapted = Target.load(str(trained.out / "target"))
    drafter = load_drafter(trained.drafter, adapted)
    plain = answers(adapted)
    assert answers(adapted, drafter) == plain
    assert plain != answers(tiny_target), "it is another target"
    with pytest.raises(ValueError, match=r"was trained for target .* not for .*weights"):
        load_drafter(trained.drafter, tiny_target)
    assert trained.measured["real_tau"] >= 1.0
    assert all(
        "train/backbone_kl" in line for line in read_lines(trained.out / "metrics.jsonl") if "train/loss" in line
    )


def test_the_saved_target_is_the_trained_one(content: Content) -> None:
    """What is merged at loading computes what the adapters computed in training."""
    run = assemble(recipe_of(content), resume=False)
    for number in (1, 2, 3):
        step(run, number)
    folder = Path(content["out"])
    run.save_drafter(folder / "drafter", {}, run.engine.state(run.model))
    loaded, inside = Target.load(str(folder / "target")), run.drafter.target
    tokens = torch.arange(3, 40)[None]
    read = [
        target.read_packed(tokens, torch.arange(37)[None], torch.ones_like(tokens)).hidden
        for target in (loaded, inside)
    ]
    torch.testing.assert_close(read[0], read[1], rtol=1e-4, atol=1e-4)
    _, binding = read_config(folder / "drafter")
    assert binding.target == loaded.fingerprint() | {"name": inside.name}
    assert binding.target["weights"] != inside.fingerprint()["weights"]


def test_a_continued_run_ends_bit_identical(content: Content, trained: TrainResult, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    recipe = recipe_of(content, steps=10, decode_prompts=3, decode_tokens=8, out=str(broken))
    train(recipe, resume=False)
    for place in checkpoints(broken / "checkpoints")[1:]:
        shutil.rmtree(place)
    assert (checkpoints(broken / "checkpoints")[0] / "target" / "adapter_model.safetensors").is_file()
    shutil.rmtree(broken / "target")
    train(recipe, resume=True)
    for name in ("target/adapter_model.safetensors", "drafter/model.safetensors", "metrics.jsonl"):
        assert (broken / name).read_bytes() == (trained.out / name).read_bytes(), name


def test_features_kept_beforehand_teach_the_same(content: Content, trained: TrainResult, tmp_path: Path) -> None:
    """They are the original target's; the held-out ones have to be read anew."""
    data = content["data"] | {"features": "memory"}
    kept = train(
        recipe_of(content, steps=10, decode_prompts=3, decode_tokens=8, data=data, out=str(tmp_path / "kept")),
        resume=False,
    )
    weights, wanted = (load_file(result.drafter / "model.safetensors") for result in (kept, trained))
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)
    assert kept.measured["loss"] == pytest.approx(trained.measured["loss"], rel=1e-3)


def test_what_cannot_be_trained_jointly_is_said(
    content: Content, joint: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"backbone.modules \('nothing',\): .*set it to all-linear"):
        assemble(recipe_of(content, backbone=BACKBONE | {"modules": ["nothing"]}), resume=False)
    with pytest.raises(ValueError, match="set target_sharding to none or remove backbone"):
        recipe_of(content, target_sharding="tensor")
    run = assemble(joint, resume=False)
    with pytest.raises(ValueError, match="backbone trains under ddp, zero1 and zero2; this launch is fsdp2"):
        engine.prepare(replace(run.engine, name="fsdp2"), joint, run.drafter, run.joint)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"peft is not installed; run `pip install 'draftsmith\[peft\]'`"):
        assemble(recipe_of(content, out=str(tmp_path / "other")), resume=False)
