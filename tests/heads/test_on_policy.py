"""Laws of answers that the draft model writes for its own training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.heads import TeacherBatch
from draftsmith.heads.on_policy import resample
from draftsmith.infer.target import Target

from . import laws


@pytest.fixture(scope="module")
def writer(build_target: Callable[..., Target]) -> Target:
    return build_target(seed=4, num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=8)


@pytest.fixture(scope="module")
def teacher(tiny_target: Target, text: laws.Text) -> TeacherBatch:
    return laws.teach(tiny_target, text, taps=())


def written(
    teacher: TeacherBatch, writer: Target, target: Target, rows: list[bool], temperature: float = 1.0
) -> TeacherBatch:
    chosen = torch.tensor(rows)
    return resample(teacher, chosen, model=writer, logits=writer.logits, target=target, temperature=temperature)


def test_the_text_is_what_the_model_itself_decodes(
    teacher: TeacherBatch, text: laws.Text, writer: Target, tiny_target: Target
) -> None:
    """At a temperature next to zero: the greedy answers of the verified loop, up to where they would end."""
    found = written(teacher, writer, tiny_target, [True] * 3, temperature=1e-6)
    outputs = laws.decode(writer, None, text.prompts)
    compared = 0
    for number, (prompt, answer, output) in enumerate(zip(text.prompts, text.answers, outputs)):
        row, document = divmod(number, 2)
        start = int((teacher.segments[row] == document + 1).nonzero()[0]) + len(prompt)
        own = [token for token in output.tokens if token not in tiny_target.eos_ids][: len(answer)]
        assert found.tokens[row, start : start + len(own)].tolist() == own
        compared += len(own)
    assert compared > 60
    assert not torch.equal(found.tokens, teacher.tokens)


def test_only_answers_change_and_no_answer_changes_its_length(
    teacher: TeacherBatch, writer: Target, tiny_target: Target
) -> None:
    ends = torch.isin(teacher.tokens, torch.tensor(tiny_target.eos_ids))
    found = written(teacher, writer, tiny_target, [True] * 3)
    changed = found.tokens != teacher.tokens
    assert not bool((changed & (~teacher.supervised | ends)).any())
    assert float(changed[teacher.supervised].float().mean()) > 0.8
    assert torch.equal(torch.isin(found.tokens, torch.tensor(tiny_target.eos_ids)), ends)
    for step in range(3):
        assert torch.equal(found.step_mask(step), teacher.step_mask(step))


def test_the_target_reads_what_was_written(teacher: TeacherBatch, writer: Target, tiny_target: Target) -> None:
    found = written(teacher, writer, tiny_target, [True, False, True])
    read = tiny_target.read_packed(found.tokens, found.positions, found.segments)
    assert torch.allclose(found.hidden, read.hidden, atol=1e-5)
    assert torch.equal(found.tokens[1], teacher.tokens[1])
    assert torch.equal(found.hidden[1], teacher.hidden[1])
    assert bool((found.tokens[0] != teacher.tokens[0]).any())
    assert written(teacher, writer, tiny_target, [False] * 3) is teacher


def test_what_stands_between_two_answers_stays(teacher: TeacherBatch, writer: Target, tiny_target: Target) -> None:
    """A second turn: the user's tokens in between are read, not written."""
    supervised = torch.zeros_like(teacher.supervised)
    row = (teacher.segments[0] == 1).nonzero()[:, 0]
    turns = torch.cat([row[4:9], row[13:20]])
    supervised[0, turns] = True
    found = written(replace(teacher, supervised=supervised), writer, tiny_target, [True] * 3)
    changed = (found.tokens != teacher.tokens).nonzero()
    assert set(changed[:, 0].tolist()) == {0}
    assert set(changed[:, 1].tolist()) <= set(turns.tolist())
    assert {place > 10 for place in (changed[:, 1] - row[0]).tolist()} == {False, True}


def test_draws_follow_the_models_distribution(writer: Target, tiny_target: Target) -> None:
    """One prompt many times over: the frequencies of the first written token against its probabilities."""
    count, prompt = 1500, [5, 17, 40]
    tokens = torch.tensor([[*prompt, 9, 9]]).repeat(count, 1)
    ones = torch.ones_like(tokens)
    supervised = torch.tensor([[False] * 3 + [True] * 2]).expand(count, -1)
    positions = torch.arange(5).expand(count, -1)
    hidden = torch.zeros(count, 5, tiny_target.hidden_size)
    batch = TeacherBatch(tokens, ones, positions, supervised, hidden, None, tiny_target.logits)
    found = written(batch, writer, tiny_target, [True] * count)
    reading = writer.read_packed(tokens[:1, :3], positions[:1, :3], ones[:1, :3])
    expected = allowed(writer.logits(reading.hidden[0, -1]), tiny_target)
    frequency = torch.bincount(found.tokens[:, 3], minlength=len(expected)) / count
    error = (expected * (1 - expected) / count).sqrt()
    likely = expected > 0.01
    assert int(likely.sum()) > 5
    assert bool(((frequency - expected).abs() <= 4.5 * error)[likely].all())


def allowed(logits: Tensor, target: Target) -> Tensor:
    """Probabilities without the tokens that end an answer."""
    logits = logits.clone()
    logits[list(target.eos_ids)] = -torch.inf
    return logits.softmax(dim=-1)


def test_one_seed_writes_one_text(teacher: TeacherBatch, writer: Target, tiny_target: Target) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(written(teacher, writer, tiny_target, [True] * 3).tokens)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
