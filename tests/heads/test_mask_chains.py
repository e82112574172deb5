"""Laws of masks behind packed text: every row reads as if it stood alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.heads import TeacherBatch
from draftsmith.heads.mask_chains import MaskChains
from draftsmith.infer.target import Target

from ..infer.architectures import VOCAB, build

MASK, STEPS = 7, 4
LENGTHS = [[9, 14], [20]]


@pytest.fixture(scope="module")
def teacher() -> TeacherBatch:
    """Two packed rows, three documents, padding at their ends; each document's second half is an answer."""
    tokens, segments, positions = (torch.zeros(2, 25, dtype=torch.int64) for _ in range(3))
    supervised, generator = torch.zeros(2, 25, dtype=torch.bool), torch.Generator().manual_seed(3)
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(lengths, start=1):
            tokens[row, at : at + length] = torch.randint(8, VOCAB, (length,), generator=generator)
            segments[row, at : at + length] = number
            positions[row, at : at + length] = torch.arange(length)
            supervised[row, at + length // 2 : at + length] = True
            at += length
    return TeacherBatch(tokens, segments, positions, supervised, torch.empty(0), None, lambda *_: torch.empty(0))


def states(target: Target, chains: MaskChains) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = target.model.base_model(
            input_ids=chains.tokens, position_ids=chains.positions, use_cache=False, plan=chains.plan
        ).last_hidden_state
    return hidden


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral with a window", "gemma2"])
def test_every_step_is_scored_as_the_text_and_its_masks_alone_would_be(name: str, teacher: TeacherBatch) -> None:
    """Against transformers' own forward on [text up to the anchor, masks]."""
    stock = build(name)
    stock.config._attn_implementation = "eager"
    kept = torch.stack([teacher.step_mask(step) for step in range(STEPS)])
    chains = MaskChains.lay_out(teacher, kept, mask_token=MASK)
    hidden, compared = states(Target(build(name), None), chains), 0
    for step, row, t in kept.nonzero().tolist():
        first = int((teacher.segments[row] == teacher.segments[row, t]).nonzero()[0])
        alone = torch.tensor([[*teacher.tokens[row, first : t + 2].tolist(), *[MASK] * step]])
        with torch.no_grad():
            expected = stock.base_model(input_ids=alone, use_cache=False).last_hidden_state[0, -1]
        assert torch.allclose(hidden[row, chains.scored[step, row, t]], expected, atol=2e-5)
        compared += 1
    assert compared == int(kept.sum()) > 40


def test_steps_that_are_dropped_leave_the_others_as_they_are(teacher: TeacherBatch) -> None:
    target = Target(build("llama"), None)
    whole = torch.stack([teacher.step_mask(step) for step in range(STEPS)])
    depth = torch.randint(0, STEPS + 1, teacher.tokens.shape, generator=torch.Generator().manual_seed(1))
    kept = whole & (torch.arange(STEPS)[:, None, None] < depth)
    found = []
    for chosen in (whole, kept):
        chains = MaskChains.lay_out(teacher, chosen, mask_token=MASK)
        hidden = states(target, chains)
        found.append((chains.tokens.shape[1], hidden[torch.arange(2)[:, None], chains.scored]))
    assert found[1][0] < found[0][0], "nothing was saved"
    assert torch.allclose(found[1][1][kept], found[0][1][kept], atol=1e-5)


def test_without_a_chain_there_is_only_text(teacher: TeacherBatch) -> None:
    nothing = torch.zeros(STEPS, *teacher.tokens.shape, dtype=torch.bool)
    chains = MaskChains.lay_out(teacher, nothing, mask_token=MASK)
    assert torch.equal(chains.tokens, teacher.tokens)
    single = teacher.step_mask(0)[None]
    chains = MaskChains.lay_out(replace(teacher), single, mask_token=MASK)
    assert torch.equal(chains.tokens, teacher.tokens)
    rows = single[0].nonzero()
    assert torch.equal(chains.scored[0, rows[:, 0], rows[:, 1]], rows[:, 1] + 1)
