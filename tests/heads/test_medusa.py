"""Medusa beyond the laws: what each of its two forms holds, and that a file says which it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.distill.objectives import ObjectiveConfig, make_objective
from draftsmith.heads import Binding, load_drafter
from draftsmith.heads import medusa as module
from draftsmith.heads.medusa import Medusa, MedusaConfig
from draftsmith.infer.target import Target

from . import laws


def test_heads_of_their_own_projection_have_it_by_name_and_shape(tiny_target: Target, tmp_path: Path) -> None:
    drafter = Medusa(MedusaConfig(num_heads=2), tiny_target)
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    wide, size = tiny_target.hidden_size, tiny_target.vocab_size
    for head in range(2):
        assert shapes.pop(f"blocks.{head}.0.linear.weight") == (wide, wide)
        assert shapes.pop(f"blocks.{head}.0.linear.bias") == (wide,)
        assert shapes.pop(f"projections.{head}.weight") == (size, wide)
    assert shapes == {}
    assert json.loads((tmp_path / "config.json").read_text())["draftsmith"]["head"]["own_lm_head"] is True


def test_heads_that_share_the_targets_projection_hold_no_copy_of_it(tiny_target: Target) -> None:
    drafter = Medusa(MedusaConfig(num_heads=2, own_lm_head=False), tiny_target)
    held = {*dict(drafter.named_parameters()), *drafter.state_dict()}
    assert held == {f"blocks.{head}.0.linear.{part}" for head in range(2) for part in ("weight", "bias")}


def test_files_of_another_form_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    """The original's two formats are told apart by nothing: ours by the config, and both must name the same tensors."""
    drafter = Medusa(MedusaConfig(num_heads=2), tiny_target)
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    tensors = load_file(tmp_path / "model.safetensors")
    biasless = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
    save_file(biasless, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['blocks.0.0.linear.bias'"):
        load_drafter(tmp_path, tiny_target)
    config = json.loads((tmp_path / "config.json").read_text())
    config["draftsmith"]["format"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has format 99"):
        load_drafter(tmp_path, tiny_target)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    with pytest.raises(ValueError, match="is not a drafter's config"):
        load_drafter(tmp_path, tiny_target)


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy"])
def test_logits_kept_and_logits_computed_again_give_the_same_sums_and_gradient(
    name: Literal["forward_kl", "cross_entropy"], tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = laws.write_text(tiny_target, 6, seed=5)
    teacher, found = laws.teach(tiny_target, text, taps=()), []
    torch.manual_seed(0)
    drafter = Medusa(MedusaConfig(num_heads=3), tiny_target)
    for kept, rows in ((2**28, 256), (0, 7)):
        monkeypatch.setattr(module, "KEPT_BYTES", kept)
        monkeypatch.setattr(module, "ROWS", rows)
        out = drafter.loss(teacher, make_objective(ObjectiveConfig(name=name)))
        weights = list(drafter.parameters())
        found.append([out.sums.detach(), out.survived, out.reached, *torch.autograd.grad(out.sums.sum(), weights)])
    torch.testing.assert_close(*found)
    assert int(out.counts[2]) > 0
