"""Laws of the parallel draft model beyond those of every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.heads import Binding, TeacherBatch, load_drafter
from draftsmith.heads.pard import Pard, PardConfig
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import Topology

from . import laws


def make(target: Target, **fields: object) -> Pard:
    torch.manual_seed(1)
    return Pard(PardConfig.model_validate({"keep_layers": (0, 3), "num_steps": 4, "mask_token_id": 0} | fields), target)


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=5)


@pytest.fixture(scope="module")
def teacher(tiny_target: Target, text: laws.Text) -> TeacherBatch:
    return laws.teach(tiny_target, text, taps=())


def test_the_first_token_is_that_of_a_plain_language_model(tiny_target: Target, teacher: TeacherBatch) -> None:
    """A copy of all layers knows the target's next token, and nothing yet of what a mask asks for."""
    drafter = make(tiny_target, keep_layers=(0, 1, 2, 3)).eval()
    ranks = drafter.ranks(teacher)
    assert bool((ranks[..., 0] <= 0).all())
    assert float((ranks[..., 1] > 0).float().sum()) > 0.5 * float(teacher.step_mask(1).sum())


def test_whatever_the_tree_a_draft_is_one_forward(tiny_target: Target) -> None:
    drafter = make(tiny_target).eval()
    calls = 0

    def count(module: torch.nn.Module, args: object, output: object) -> None:
        nonlocal calls
        calls += 1

    handle = drafter.model_view.model.base_model.register_forward_hook(count)
    for topology in (Topology.chain(4), Topology(((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 0, 0)))):
        drafter.use_tree(topology)
        state, calls = drafter.start(rows=2, capacity=64), 0
        anchors = torch.tensor([5, 6])
        tree = drafter.draft(state, anchors, torch.ones_like(anchors), Sampling([SamplingParams()] * 2))
        assert tree.num_nodes == 1 + len(topology.paths)
        assert calls == 1
    handle.remove()


def losses(drafter: Pard, teacher: TeacherBatch, *, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    sums = drafter(teacher, laws.SoftCrossEntropy())
    assert sums.counts.tolist() == [int(teacher.step_mask(step).sum()) for step in range(4)]
    found: Tensor = sums.sums.detach()
    return found


def test_dropped_steps_leave_the_expected_loss_as_it_is(tiny_target: Target, teacher: TeacherBatch) -> None:
    drafter = make(tiny_target, keep_ratio=0.5, min_keep_ratio=0.2)
    assert drafter.config.ratios == (1.0, 0.5, 0.25, 0.2)
    draws = torch.stack([losses(drafter, teacher, seed=seed) for seed in range(40)])
    whole = losses(drafter.eval(), teacher)
    assert torch.allclose(draws[:, 0], whole[0].expand(40), rtol=1e-4), "step 0 is never dropped"
    error = draws.std(dim=0) / 40**0.5
    assert bool((error[1:] > 0).all())
    assert bool(((draws.mean(dim=0) - whole).abs() <= 4 * error + 1e-3 * whole).all())


def test_with_all_steps_kept_training_is_evaluation(tiny_target: Target, teacher: TeacherBatch) -> None:
    drafter = make(tiny_target, keep_ratio=1.0)
    assert torch.equal(losses(drafter, teacher), losses(drafter.eval(), teacher))


def test_the_folder_says_what_other_engines_look_for(tiny_target: Target, tmp_path: Path) -> None:
    drafter = make(tiny_target)
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["spd_type"], written["pard_token"]) == ("pard", 0)
    assert (written["model_type"], written["num_hidden_layers"]) == ("llama", 2)
    assert load_drafter(tmp_path, tiny_target).config == drafter.config


def test_the_mask_is_a_token_that_no_text_holds(build_target: Callable[..., Target], tiny_target: Target) -> None:
    assert make(build_target(vocab_size=320), mask_token_id=None).mask == 300
    with pytest.raises(ValueError, match="none is free to be the mask"):
        make(tiny_target, mask_token_id=None)
    with pytest.raises(ValueError, match="mask_token_id 300 is not among the target's 300 tokens"):
        make(tiny_target, mask_token_id=300)


def test_vocabularies_padded_differently_are_one(build_target: Callable[..., Target], tmp_path: Path) -> None:
    draft, target = build_target(num_hidden_layers=2, seed=3), build_target(vocab_size=320)
    draft.model.save_pretrained(tmp_path)
    draft.tokenizer.save_pretrained(tmp_path)
    text = laws.write_text(target, 4, seed=2)
    teacher = laws.teach(target, text, taps=())
    with pytest.raises(ValueError, match="mask_token_id 300 is not among the draft model's 300 tokens"):
        make(target, keep_layers=None, checkpoint=str(tmp_path), mask_token_id=None)
    drafter = make(target, keep_layers=None, checkpoint=str(tmp_path))
    laws.train(drafter, teacher, steps=30)
    assert int(drafter.ranks(teacher).max()) <= 300
    outputs = laws.decode(target, drafter, text.prompts)
    assert [output.tokens for output in outputs] == text.answers


def test_beyond_the_drafts_context_nothing_is_drafted(
    build_target: Callable[..., Target], tiny_target: Target, text: laws.Text, tmp_path: Path
) -> None:
    short = build_target(max_position_embeddings=40, num_hidden_layers=1)
    short.model.save_pretrained(tmp_path)
    short.tokenizer.save_pretrained(tmp_path)
    drafter = make(tiny_target, keep_layers=None, checkpoint=str(tmp_path)).eval()
    outputs = laws.decode(tiny_target, drafter, text.prompts)
    assert [output.tokens for output in outputs] == text.answers
    whole = 4 * sum(output.stats.rounds for output in outputs)
    assert 0 < sum(output.stats.drafted for output in outputs) < whole
