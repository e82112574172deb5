"""Laws of the optimiser: Muon is torch's Muon, every weight has one rule, and a resumed run ends where it would have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from draftsmith.heads import METHODS
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.infer.target import Target
from draftsmith.train.loop import train
from draftsmith.train.optimiser import Muon, make_optimiser, orthogonal, split
from draftsmith.train.recipe import Optimiser, parse_recipe

from ..heads.laws import SMALL
from .conftest import Content, read_lines

MUON = Optimiser(name="muon", lr=1e-3)


@pytest.mark.parametrize("shape", [(48, 48), (48, 160), (160, 48), (2, 64)])
def test_orthogonal_turns_singular_values_to_about_one(shape: tuple[int, int]) -> None:
    """And leaves the singular vectors as they are."""
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = orthogonal(left @ torch.diag(torch.logspace(0, -1, min(shape))) @ right)
    rotated = left.T @ found @ right.T
    assert torch.allclose(rotated, torch.diag(rotated.diagonal()), atol=0.05)
    assert 0.6 < float(rotated.diagonal().min()) <= float(rotated.diagonal().max()) < 1.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_step_is_the_one_of_torch(shape: tuple[int, int]) -> None:
    """Ten steps; torch's iterations round to bfloat16, so the weights agree as far as that goes."""
    ours, theirs = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.empty(shape))
    theirs.data.copy_(ours.data)
    start = ours.detach().clone()
    mine = Muon([{"params": [ours], "orthogonal": True}], lr=1e-2, weight_decay=0.1)
    peer = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        peer.step()
    assert float((ours - theirs).detach().norm() / (theirs - start).detach().norm()) < 0.02


def test_other_groups_take_adamws_step() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(3, 5))
    mine, peer = Muon([ours], lr=0.1, weight_decay=0.2), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.2)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(3, 5)
        mine.step()
        peer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_trained_weight_has_one_rule(tiny_target: Target, method: str) -> None:
    config, make = METHODS[method]
    drafter = make(config.model_validate({"method": method, **SMALL[method]}), tiny_target)
    hidden, others = split(drafter)
    trained = {id(weight) for weight in drafter.parameters() if weight.requires_grad}
    assert {id(weight) for weight in (*hidden, *others)} == trained
    assert len(hidden) + len(others) == len(trained)
    assert hidden
    assert all(weight.dim() == 2 and tiny_target.vocab_size not in weight.shape for weight in hidden)
    optimiser = make_optimiser(MUON, drafter, is_whole=True)
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(trained)


def test_a_head_is_not_taken_for_a_hidden_layer_whatever_its_size(tiny_target: Target) -> None:
    """Nor a hidden layer for a head where both are of one size."""
    width = tiny_target.hidden_size
    known = torch.cat([torch.tensor(tiny_target.eos_ids), torch.arange(3, 300)])[:width].unique()
    drafter = Eagle3(Eagle3Config(draft_vocab_size=len(known)), tiny_target, token_map=known)
    assert len(known) == width
    hidden, others = split(drafter)
    assert any(weight is drafter.fc.weight for weight in hidden)
    assert any(weight is drafter.lm_head.weight for weight in others)


def test_muon_on_sharded_weights_is_refused(tiny_target: Target) -> None:
    config, make = METHODS["medusa"]
    drafter = make(config(method="medusa", num_heads=2), tiny_target)
    with pytest.raises(ValueError, match="whole matrices"):
        make_optimiser(MUON, drafter, is_whole=False)


def test_muon_learns_and_resumes_bit_identically(content: Content, tmp_path: Path) -> None:
    settings = {"lr": 3e-2, "name": "muon"}

    def run(out: Path, *, resume: bool) -> None:
        recipe = parse_recipe(content | {"optimiser": settings, "save_every": 3, "out": str(out)}, source="test")
        train(recipe, resume=resume)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, resume=False)
    run(broken, resume=False)
    shutil.rmtree(broken / "checkpoints" / "step-000006")
    shutil.rmtree(broken / "drafter")
    run(broken, resume=True)
    names = [path.relative_to(whole / "drafter") for path in (whole / "drafter").rglob("*.safetensors")]
    assert names
    for name in names:
        assert (whole / "drafter" / name).read_bytes() == (broken / "drafter" / name).read_bytes()
    assert (whole / "metrics.jsonl").read_bytes() == (broken / "metrics.jsonl").read_bytes()
    losses = [line["train/loss"] for line in read_lines(whole / "metrics.jsonl") if "train/loss" in line]
    assert losses[-1] < 0.9 * losses[0]
