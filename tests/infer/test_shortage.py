"""Memory that runs out costs one request, and the others write what they would have written.

It runs out for real: the CPU's allocator is asked for more than there is, at the moment when a small device would be full.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.infer.cache import KVCache
from draftsmith.infer.decode import Engine
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.request import Output, Request
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.target import Reading, Target
from draftsmith.infer.tree import TokenTree

from . import drafting, encoder_decoders

TOKENS = 24
HOT = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return drafting.texts(drafting.decode(target, None, prompts, new_tokens=TOKENS))


@pytest.fixture(params=["none", *drafting.NAMES])
def drafter(request: pytest.FixtureRequest, target: Target, draft: Target) -> Drafter:
    return NoDraft() if request.param == "none" else drafting.build(request.param, target, draft)


def outputs_of(engine: Engine) -> dict[str, Output]:
    return {output.id: output for output in engine.run()}


def exhaust_memory() -> None:
    """The allocator's own error: nobody has so much."""
    torch.empty(1 << 60)


class SmallTarget(Target):
    """A target on a device that cannot hold `room` tokens of one row, nor read `burst` of them in one forward."""

    room = burst = 10_000

    def prefill(self, prompts: list[Tensor], cache: KVCache, *, first_row: int, taps: tuple[int, ...] = ()) -> Reading:
        if sum(map(len, prompts)) >= self.burst or max(map(len, prompts)) >= self.room:
            exhaust_memory()
        return super().prefill(prompts, cache, first_row=first_row, taps=taps)

    def verify(self, tree: TokenTree, lengths: Tensor, cache: KVCache, **options: Any) -> Reading:
        reading = super().verify(tree, lengths, cache, **options)
        if int(lengths.max()) >= self.room:
            exhaust_memory()
        return reading


@pytest.fixture
def small(target: Target) -> SmallTarget:
    return SmallTarget(target.model, target.tokenizer, name="small")


def test_memory_that_runs_out_in_a_round_costs_the_longest_request_alone(
    drafter: Drafter, small: SmallTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """The others start over from what they had written, drafter and all, and write what they would have written."""
    engine, long = Engine(small, drafter=drafter, rows=4), [7] * 60
    small.room = len(long) + 6
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, TOKENS))
    engine.add(Request("long", long, TOKENS))
    outputs = outputs_of(engine)
    assert [outputs[str(index)].tokens for index in range(len(prompts))] == plain
    assert outputs["long"].finish == "error"
    assert "'long': memory ran out with" in outputs["long"].error
    assert "allocate" in outputs["long"].error
    assert 0 < len(outputs["long"].tokens) < TOKENS


def test_memory_that_runs_out_for_sampled_and_penalised_text_changes_none(
    small: SmallTarget, prompts: list[list[int]]
) -> None:
    expected = [outputs.tokens for outputs in drafting.decode(small, None, prompts, sampling=HOT, new_tokens=TOKENS)]
    engine = Engine(small, rows=4)
    small.room = 66
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, TOKENS, SamplingParams(**vars(HOT) | {"seed": index})))
    engine.add(Request("long", [7] * 60, TOKENS))
    outputs = outputs_of(engine)
    assert outputs["long"].finish == "error"
    assert [outputs[str(index)].tokens for index in range(len(prompts))] == expected


def test_prompts_that_do_not_fit_together_are_read_one_by_one(
    drafter: Drafter, small: SmallTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    small.burst = max(map(len, prompts)) + TOKENS + 1
    engine = Engine(small, drafter=drafter, rows=4)
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, TOKENS))
    engine.add(Request("long", [7] * 80, TOKENS))
    outputs = outputs_of(engine)
    assert [outputs[str(index)].tokens for index in range(len(prompts))] == plain
    assert (outputs["long"].finish, outputs["long"].tokens) == ("error", [])


class SmallSeq2Seq(Seq2SeqTarget):
    """As SmallTarget."""

    room = 10_000

    def verify(self, tree: TokenTree, lengths: Tensor, cache: KVCache, **options: Any) -> Reading:
        if int(lengths.max()) >= self.room:
            exhaust_memory()
        return super().verify(tree, lengths, cache, **options)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_start_over_too_but_for_answers_that_hold_their_start_token(kind: str) -> None:
    """What stands before that token would be taken for the source, so such an answer fails rather than go on wrongly."""
    model = encoder_decoders.build(kind)
    model.generation_config.eos_token_id = []
    small = SmallSeq2Seq(model, None)
    sources = drafting.prompts(30, seed=2, vocab_size=encoder_decoders.VOCAB, longest=12)
    prompts = [[*ids, *small.opening] for ids in sources]
    hot = SamplingParams(temperature=50.0)  # any token, so that the start token is among what is written
    plain = drafting.texts(drafting.decode(small, None, prompts, new_tokens=16, sampling=hot))
    small.room = 33
    engine = Engine(small, drafter=PromptLookup(), rows=31)
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, 16, SamplingParams(**vars(hot) | {"seed": index})))
    engine.add(Request("long", [*range(3, 24), *small.opening], 16, hot))
    outputs, whole = outputs_of(engine), 0
    assert "memory ran out" in outputs["long"].error
    for index, tokens in enumerate(plain):
        output = outputs[str(index)]
        if output.finish == "error":
            assert small.opening[0] in output.tokens
        else:
            assert output.tokens == tokens
            whole += 1
    assert 0 < whole < len(prompts)


def test_memory_that_runs_out_in_the_drafter_is_the_same(
    small: SmallTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    class Hungry(NoDraft):
        def draft(self, state: None, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
            if len(anchors) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")
            return super().draft(state, anchors, lengths, sampling)

    engine = Engine(small, drafter=Hungry(), rows=3)
    for index, ids in enumerate(prompts[:3]):
        engine.add(Request(str(index), ids, TOKENS))
    outputs = outputs_of(engine)
    longest = max(range(3), key=lambda index: len(prompts[index]))
    assert "CUDA out of memory. Tried to allocate 2 GiB.)" in outputs[str(longest)].error
    for index in {0, 1, 2} - {longest}:
        assert outputs[str(index)].tokens == plain[index]


def test_any_other_error_is_no_request_s_fault(target: Target, prompts: list[list[int]]) -> None:
    class Broken(NoDraft):
        def draft(self, state: None, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
            raise RuntimeError("shapes do not match")

    engine = Engine(target, drafter=Broken(), rows=1)
    engine.add(Request("a", prompts[0], 4))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        outputs_of(engine)
