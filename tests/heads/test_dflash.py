"""What is particular to block drafters: every setting keeps the laws, the two layouts, the causal block, anchors and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill.objectives import ObjectiveConfig, make_objective
from draftsmith.heads import TeacherBatch
from draftsmith.heads.dflash import DFlash, DFlashConfig
from draftsmith.infer.drafter import Observation
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree, Topology

from . import laws, test_laws
from .test_laws import Trained

PLAIN: dict[str, Any] = {
    "method": "dflash",
    "block_size": 4,
    "sample_from_anchor": False,
    "num_layers": 1,
    "mask_token_id": 0,
    "num_anchors": 16,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dflash": {"position_weights": {"kind": "exponential", "gamma": 4.0}},
    "jetspec": {"is_causal": True, "num_layers": 2, "best_first": {"nodes": 10, "width": 3}},
    "dspark-gated": {
        "sample_from_anchor": True,
        "markov_head_type": "gated",
        "tree": ((0,), (1,), (0, 0), (1, 0), (1, 1)),
    },
    "dspark-rnn": {
        "sample_from_anchor": True,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "position_weights": {"kind": "d_pace"},
        "best_first": {"nodes": 10, "width": 3},
    },
    "reduced": {"draft_vocab_size": 120, "is_causal": True, "position_weights": {"kind": "cat"}},
}


def build(target: Target, **changes: Any) -> DFlash:
    torch.manual_seed(1)
    return DFlash(DFlashConfig.model_validate(PLAIN | {"markov_rank": 8} | changes), target)


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 8, seed=5)


@pytest.fixture(scope="module")
def teacher(tiny_target: Target, text: laws.Text) -> TeacherBatch:
    return laws.teach(tiny_target, text, taps=build(tiny_target).taps)


@pytest.fixture(scope="module", params=list(SETTINGS))
def trained(request: pytest.FixtureRequest, tiny_target: Target, text: laws.Text) -> Trained:
    drafter = build(tiny_target, **SETTINGS[request.param])
    batch = laws.teach(tiny_target, text, taps=drafter.taps)
    return Trained(drafter, text, batch, laws.train(drafter, batch, steps=60, lr=6e-3))


def test_every_setting_writes_what_plain_decoding_writes(trained: Trained, tiny_target: Target) -> None:
    test_laws.test_greedy_output_equals_plain_decoding(trained, tiny_target)


def test_every_setting_is_accepted_as_its_ranks_say(trained: Trained, tiny_target: Target) -> None:
    test_laws.test_teacher_forced_acceptance_equals_the_loops(trained, tiny_target)
    ranks = trained.drafter.ranks(trained.teacher)
    accepted = (ranks == 0).cumprod(dim=-1).sum(dim=-1)
    assert int(accepted.max()) == trained.drafter.num_steps, (
        "no chain was ever accepted whole: later steps went untested"
    )


def test_every_setting_counts_what_its_ranks_count(trained: Trained) -> None:
    test_laws.test_loss_counts_what_ranks_count(trained)


def test_every_setting_is_restored_bit_by_bit(trained: Trained, tiny_target: Target, tmp_path: Path) -> None:
    test_laws.test_save_and_load_are_bit_identical(trained, tiny_target, tmp_path)


def test_both_layouts_propose_the_token_after_the_anchor_first(tiny_target: Target, teacher: TeacherBatch) -> None:
    """Trained on one batch each layout learns the first step, whose label is token t+2 in both."""
    for sample_from_anchor, steps in ((True, 4), (False, 3)):
        drafter = build(tiny_target, sample_from_anchor=sample_from_anchor)
        assert drafter.num_steps == steps
        laws.train(drafter, teacher, steps=40, lr=6e-3)
        first = drafter.ranks(teacher)[..., 0]
        assert torch.equal(first >= 0, teacher.step_mask(0))
        assert float((first[first >= 0] == 0).float().mean()) > 0.3


def test_a_causal_slot_does_not_depend_on_how_many_masks_follow(tiny_target: Target, teacher: TeacherBatch) -> None:
    for is_causal in (True, False):
        short, long = (build(tiny_target, is_causal=is_causal, num_layers=2, block_size=size) for size in (3, 6))
        long.load_state_dict(short.state_dict())
        hidden = []
        for drafter in (short, long):
            counted = torch.stack([teacher.step_mask(0)] * drafter.num_steps)
            drafts, _ = drafter._draft_blocks(teacher, teacher.step_mask(0), counted)
            hidden.append(drafts.states[: short.num_steps])
        assert torch.allclose(hidden[0], hidden[1], atol=1e-5) == is_causal


def test_drafting_sees_the_block_as_training_does(tiny_target: Target, text: laws.Text, teacher: TeacherBatch) -> None:
    """Slot outputs of a block drafted behind a prompt equal those of the training forward at the same row."""
    prompt, anchor = text.prompts[0], text.answers[0][0]
    for is_causal in (True, False):
        drafter = build(tiny_target, is_causal=is_causal, num_layers=2, sample_from_anchor=True)
        row = len(prompt) - 1
        at = torch.zeros_like(teacher.supervised)
        at[0, row] = True
        drafts, _ = drafter._draft_blocks(teacher, at, torch.stack([at] * drafter.num_steps))
        state, lengths = drafter.start(rows=1, capacity=64), torch.tensor([len(prompt)])
        with torch.inference_mode():
            drafter.observe(state, observation(tiny_target, prompt, anchor, drafter.taps))
            block = torch.ones(1, 4, 4, dtype=torch.bool)
            memory = state.grow(drafter, lengths, block.tril() if is_causal else block)
            hidden = drafter._read(torch.tensor([anchor]), lengths, memory)
        torch.testing.assert_close(hidden[0], drafts.states[:, 0].detach())


def observation(target: Target, prompt: list[int], anchor: int, taps: tuple[int, ...]) -> Observation:
    tokens = torch.tensor([prompt])
    reading = target.read_packed(tokens, torch.arange(len(prompt))[None], torch.ones_like(tokens), taps=taps)
    return Observation(
        rows=slice(0, 1),
        tokens=tokens,
        count=torch.tensor([len(prompt)]),
        start=torch.tensor([0]),
        hidden=reading.hidden,
        features=reading.features,
        anchor=torch.tensor([anchor]),
    )


def test_anchors_taken_in_shares_are_anchors_taken_together(tiny_target: Target, teacher: TeacherBatch) -> None:
    """No block sees another one: ranks and losses do not depend on which anchors share a forward."""
    few, many = (build(tiny_target, num_anchors=count).eval() for count in (3, 500))
    assert torch.equal(few.ranks(teacher), many.ranks(teacher))
    parts, whole = (drafter.loss(teacher, laws.SoftCrossEntropy()) for drafter in (few, many))
    torch.testing.assert_close(parts.sums, whole.sums)
    assert torch.equal(parts.reached, whole.reached)


def test_a_sample_of_anchors_estimates_the_loss_of_all(tiny_target: Target, teacher: TeacherBatch) -> None:
    drafter = build(tiny_target, num_anchors=20)
    with torch.no_grad():
        whole = drafter.eval().loss(teacher, laws.SoftCrossEntropy())
        drafter.train()
        samples = [drafter.loss(teacher, laws.SoftCrossEntropy()) for _ in range(60)]
    assert all(torch.equal(sample.counts, whole.counts) for sample in samples), "the loop divides by the masks' counts"
    assert any(not torch.equal(sample.sums, samples[0].sums) for sample in samples), "anchors are drawn anew each time"
    torch.testing.assert_close(
        torch.stack([sample.sums for sample in samples]).mean(dim=0), whole.sums, rtol=0.02, atol=0
    )


def test_a_batch_without_supervised_tokens_gives_every_weight_a_zero_gradient(
    tiny_target: Target, teacher: TeacherBatch
) -> None:
    """An engine that waits for all gradients would hang on a missing one."""
    nothing = TeacherBatch(**vars(teacher) | {"supervised": torch.zeros_like(teacher.supervised)})
    for settings in ({}, SETTINGS["dspark-rnn"]):
        drafter = build(tiny_target, **settings)
        out = drafter.loss(nothing, laws.SoftCrossEntropy())
        assert int(out.counts.sum()) == 0
        out.sums.sum().backward()
        wrong = [name for name, p in drafter.named_parameters() if p.grad is None or bool((p.grad != 0).any())]
        assert wrong == []
        assert bool((drafter.ranks(nothing) == -1).all())


def test_training_in_bfloat16_over_a_bfloat16_target_is_finite(
    build_target: Callable[..., Target], text: laws.Text
) -> None:
    target = build_target()
    target.model.bfloat16()
    for settings in ({}, SETTINGS["dspark-rnn"], SETTINGS["reduced"]):
        drafter = build(target, **settings).float()
        batch = laws.teach(target, text, taps=drafter.taps)
        with torch.autocast("cpu", torch.bfloat16):
            out = drafter(batch, laws.SoftCrossEntropy())
        assert out.sums.dtype == torch.float32
        out.sums.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
        assert all(bool(p.grad.isfinite().all()) for p in drafter.parameters() if p.grad is not None)


def test_rotary_angles_stay_in_fp32_whatever_the_weights_are(tiny_target: Target) -> None:
    drafter = build(tiny_target)
    before = drafter._turn(torch.tensor([4095]))
    after = drafter.to(torch.bfloat16)._turn(torch.tensor([4095]))
    assert torch.equal(before.cos, after.cos)
    assert after.cos.dtype == torch.float32
    assert [name for name, _ in drafter.named_buffers() if "token_map" not in name] == []


def test_confidence_in_decoding_is_confidence_in_training(
    tiny_target: Target, text: laws.Text, teacher: TeacherBatch
) -> None:
    """Along a chain that the text follows, both read the same hidden states and the same previous tokens."""
    drafter = build(tiny_target, sample_from_anchor=True, markov_head_type="vanilla", enable_confidence_head=True)
    laws.train(drafter, teacher, steps=60, lr=6e-3)
    ranks = drafter.ranks(teacher)[0]
    whole = next(row for row in range(len(ranks)) if bool((ranks[row] == 0).all()))
    at = torch.zeros_like(teacher.supervised)
    at[0, whole] = True
    document = int(teacher.segments[0, whole])
    tokens = teacher.tokens[0, (teacher.segments[0] == document).nonzero()[:, 0]].tolist()
    read = int(teacher.positions[0, whole]) + 1
    with torch.no_grad():
        _, logits = drafter._draft_blocks(teacher, at, torch.stack([at] * drafter.num_steps))
        state = drafter.start(rows=1, capacity=64)
        drafter.observe(state, observation(tiny_target, tokens[:read], tokens[read], drafter.taps))
        given = torch.tensor([tokens[read]]), torch.tensor([read]), Sampling([SamplingParams()])
        tree = drafter.draft(state, *given)
        assert tree.tokens[0].tolist() == tokens[read : read + 5]
        assert logits is not None
        assert tree.confidence is not None
        torch.testing.assert_close(tree.confidence[:, 1:], logits[:, 0].sigmoid()[None])


def test_no_tree_is_no_draft(tiny_target: Target) -> None:
    drafter = build(tiny_target, markov_head_type="vanilla")
    drafter.use_tree(Topology(()))
    anchors = torch.tensor([3, 4])
    state = drafter.start(rows=2, capacity=64)
    tree = drafter.draft(state, anchors, torch.tensor([5, 6]), Sampling([SamplingParams()] * 2))
    assert torch.equal(tree.tokens, TokenTree.root(anchors).tokens)


def test_the_layout_is_never_guessed_and_contradictions_are_refused(build_target: Callable[..., Target]) -> None:
    with pytest.raises(ValueError, match="sample_from_anchor"):
        DFlashConfig.model_validate({key: value for key, value in PLAIN.items() if key != "sample_from_anchor"})
    with pytest.raises(ValueError, match="tree and best_first exclude each other"):
        DFlashConfig.model_validate(PLAIN | {"tree": ((0,),), "best_first": {}})
    with pytest.raises(ValueError, match="Set mask_token_id"):
        build(build_target(), mask_token_id=None)
    with pytest.raises(ValueError, match="taps must be ascending"):
        build(build_target(), taps=(3,))
    assert build(build_target(vocab_size=310), mask_token_id=None).config.mask_token_id == 300


def test_a_frozen_head_of_a_reduced_vocabulary_gives_the_layers_the_same_gradient(
    tiny_target: Target, teacher: TeacherBatch
) -> None:
    """Its gradients are taken in the forward pass; a trained one's by autograd."""
    found = []
    for train_head in (True, False):
        drafter = build(tiny_target, draft_vocab_size=120, train_head=train_head).eval()
        out = drafter.loss(teacher, make_objective(ObjectiveConfig(name="lk")))
        (out.sums * torch.tensor(out.weights)).sum().backward()
        layers = (weight.grad for name, weight in drafter.named_parameters() if name != "lm_head.weight")
        found.append([out.sums.detach(), out.survived, *layers])
        assert drafter.lm_head is not None
        assert (drafter.lm_head.weight.grad is not None) == train_head
    torch.testing.assert_close(*found)
