"""Drafting for encoder-decoder targets: the laws of every drafter, on T5 and BART, and where drafts come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftsmith.infer.decoder import SpeculativeDecoder
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.drafters import make_drafter
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree

from . import drafting
from .encoder_decoders import VOCAB, build

GREEDY = SamplingParams()
SAMPLED = [SamplingParams(0.5), SamplingParams(0.8, top_k=5), SamplingParams(1.0, top_p=0.6)]
MIXED = [replace((GREEDY, *SAMPLED)[index % 4], seed=index) for index in range(5)]
LIMITS = [16, 3, 20, 1, 9]


@pytest.fixture(scope="module", params=["t5", "bart"])
def target(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast) -> Seq2SeqTarget:
    model = build(request.param)
    model.generation_config.eos_token_id = []
    return Seq2SeqTarget(model, tiny_tokenizer, name=request.param)


@pytest.fixture(scope="module")
def draft(target: Seq2SeqTarget, tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    fresh = Seq2SeqTarget(build(target.name), tiny_tokenizer, name="draft")
    return drafting.perturbed(target, fresh, noise=0.01)


@pytest.fixture(scope="module")
def prompts(target: Seq2SeqTarget) -> list[list[int]]:
    return [[*ids, *target.opening] for ids in drafting.prompts(5, seed=3, vocab_size=VOCAB)]


@pytest.fixture(scope="module")
def plain(target: Seq2SeqTarget, prompts: list[list[int]]) -> list[list[int]]:
    return drafting.texts(drafting.decode(target, None, prompts, rows=1, new_tokens=24))


@pytest.fixture(params=drafting.NAMES)
def drafter(request: pytest.FixtureRequest, target: Seq2SeqTarget, draft: Target) -> Drafter:
    return drafting.build(str(request.param), target, draft)


def test_greedy_output_equals_plain_decoding(
    drafter: Drafter, target: Seq2SeqTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    outputs = drafting.decode(target, drafter, prompts, new_tokens=24)
    assert drafting.texts(outputs) == plain
    accepted = sum(output.stats.accepted for output in outputs)
    assert accepted > 0.1 * sum(map(len, plain)), "few drafts were accepted: the law was hardly exercised"
    assert sum(output.stats.drafted for output in outputs) > accepted, "nothing was ever rejected"


def test_sampled_output_is_the_same_with_and_without_the_drafter(
    drafter: Drafter, target: Seq2SeqTarget, prompts: list[list[int]]
) -> None:
    plain = drafting.decode(target, None, prompts, rows=1, sampling=MIXED, new_tokens=20)
    outputs = drafting.decode(target, drafter, prompts, rows=3, sampling=MIXED, new_tokens=20)
    assert drafting.texts(outputs) == drafting.texts(plain)
    assert sum(output.stats.accepted for output in outputs) > 0


def test_rows_leave_and_join_midway_without_a_trace(
    drafter: Drafter, target: Seq2SeqTarget, prompts: list[list[int]]
) -> None:
    """Sources of different lengths change rows with their answers."""
    alone = drafting.decode(target, drafter, prompts, rows=1, new_tokens=LIMITS)
    crowd = drafting.decode(target, drafter, prompts, rows=3, new_tokens=LIMITS)
    assert drafting.texts(crowd) == drafting.texts(alone)
    assert [vars(output.stats) for output in crowd] == [vars(output.stats) for output in alone]


def test_a_drafter_that_is_the_target_is_always_right(target: Seq2SeqTarget, prompts: list[list[int]]) -> None:
    """So the draft model reads the source, and its positions are the target's."""
    drafter = DraftModel(target, target, length=4, min_confidence=0)
    for output in drafting.decode(target, drafter, prompts, rows=3, new_tokens=26):
        assert output.stats.accepted == output.stats.drafted == 20


class Spy(PromptLookup):
    """Remembers the first draft of every generation."""

    first: list[int] | None = None

    def draft(self, state: Any, anchors: Any, lengths: Any, sampling: Sampling) -> TokenTree:
        tree = super().draft(state, anchors, lengths, sampling)
        if self.first is None:
            self.first = tree.tokens[0, 1:][tree.valid[0, 1:]].tolist()
        return tree


def test_prompt_lookup_drafts_from_the_source(target: Seq2SeqTarget) -> None:
    """The first token of the answer stands in the source: what follows it there is the first draft."""
    found = 0
    for seed in range(60):
        source = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        (output,) = drafting.decode(target, None, [[*source, *target.opening]], new_tokens=1)
        places = [at for at, token in enumerate(source[:-3]) if token == output.tokens[0]]
        if not places or output.tokens[0] in target.opening:
            continue
        spy = Spy(length=3)
        drafting.decode(target, spy, [[*source, *target.opening]], new_tokens=4)
        assert spy.first == source[places[-1] + 1 : places[-1] + 4]
        found += 1
    assert found > 0, "no answer began with a token of its source"


def test_a_causal_draft_model_is_refused(target: Seq2SeqTarget, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="is an encoder-decoder model, draft model 'tiny' is not"):
        DraftModel(tiny_target, target)
    with pytest.raises(ValueError, match="reads a source, and target 'tiny' has none"):
        DraftModel(target, tiny_target)


def test_a_draft_model_that_begins_otherwise_is_refused(
    target: Seq2SeqTarget, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build(target.name)
    model.generation_config.decoder_start_token_id = 17
    other = Seq2SeqTarget(model, tiny_tokenizer, name="other")
    with pytest.raises(ValueError, match="it cannot read the same prompts"):
        DraftModel(other, target)


def test_a_folder_drafts_by_name(
    target: Seq2SeqTarget, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    build(target.name).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    drafter = make_drafter(f"draft:{tmp_path}", target)
    assert isinstance(drafter, DraftModel)
    decoder = SpeculativeDecoder(target, drafter)
    prompt = [5, 9, 7, *target.opening]
    answer = decoder.generate(prompt, max_new_tokens=15)
    assert answer.tokens == SpeculativeDecoder(target).generate(prompt, max_new_tokens=15).tokens
    assert answer.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5 1.1", "umt5", "mbart", "marian", "pegasus", "blenderbot"])
def test_every_architecture_may_be_drafted_for(
    kind: str, tiny_tokenizer: PreTrainedTokenizerFast, build_draft: Callable[[str], Target]
) -> None:
    target = Seq2SeqTarget(build(kind), tiny_tokenizer)
    prompts = [[*ids, *target.opening] for ids in drafting.prompts(5, seed=5, vocab_size=VOCAB)]
    plain = drafting.texts(drafting.decode(target, None, prompts, rows=1, sampling=MIXED, new_tokens=20))
    for name in drafting.NAMES:
        drafter = drafting.build(name, target, build_draft(kind))
        outputs = drafting.decode(target, drafter, prompts, rows=3, sampling=MIXED, new_tokens=20)
        assert drafting.texts(outputs) == plain, name


@pytest.fixture
def build_draft(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Target]:
    def build_draft(kind: str) -> Target:
        owner, fresh = (Seq2SeqTarget(build(kind), tiny_tokenizer) for _ in range(2))
        return drafting.perturbed(owner, fresh, noise=0.01)

    return build_draft
