"""The laws of every drafter that needs no training, parametrised over all of them, and drafters by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.drafters import make_drafter
from draftsmith.infer.lookahead import Lookahead
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

from . import architectures, drafting

GREEDY = SamplingParams()
SAMPLED = [SamplingParams(0.3), SamplingParams(0.6, top_k=3), SamplingParams(0.8, top_p=0.4)]
PENALISED = [
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(0.4, min_p=0.3, presence_penalty=0.5),
    SamplingParams(0.3, frequency_penalty=0.1),
]
MIXED = [replace((GREEDY, *SAMPLED, *PENALISED)[index % 7], seed=index) for index in range(12)]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return drafting.texts(drafting.decode(target, None, prompts))


@pytest.fixture(scope="module")
def plain_sampled(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return drafting.texts(drafting.decode(target, None, prompts * 2, sampling=MIXED))


@pytest.fixture(params=drafting.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafter(name: str, target: Target, draft: Target) -> Drafter:
    return drafting.build(name, target, draft)


def test_greedy_output_equals_plain_decoding(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    outputs = drafting.decode(target, drafter, prompts)
    assert drafting.texts(outputs) == plain
    accepted = sum(output.stats.accepted for output in outputs)
    assert accepted > 0.1 * sum(map(len, plain)), "few drafts were accepted: the law was hardly exercised"
    assert sum(output.stats.drafted for output in outputs) > accepted, "nothing was ever rejected"


def test_greedy_output_equals_stock_generate(drafter: Drafter, target: Target, prompts: list[list[int]]) -> None:
    """Against transformers itself, which shares none of our loop, cache or attention."""
    stock = copy.deepcopy(target.model)
    stock.config._attn_implementation = "eager"
    for output, ids in zip(drafting.decode(target, drafter, prompts[:3]), prompts):
        whole = stock.generate(torch.tensor([ids]), max_new_tokens=drafting.NEW_TOKENS, do_sample=False)
        assert output.tokens == whole[0, len(ids) :].tolist()


def test_a_repetition_penalty_is_that_of_stock_generate(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    stock = copy.deepcopy(target.model)
    stock.config._attn_implementation = "eager"
    outputs = drafting.decode(target, drafter, prompts[:3], sampling=SamplingParams(repetition_penalty=1.3))
    for output, ids in zip(outputs, prompts):
        settings = {"max_new_tokens": drafting.NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.3}
        assert output.tokens == stock.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
    assert drafting.texts(outputs) != plain[:3]


def test_sampled_output_is_the_same_with_and_without_the_drafter(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain_sampled: list[list[int]]
) -> None:
    """Temperature, top-k, top-p, min-p, penalties and greedy rows share the batch; every request has its own seed."""
    outputs = drafting.decode(target, drafter, prompts * 2, sampling=MIXED, rows=3)
    assert drafting.texts(outputs) == plain_sampled
    sampled = [output for output, settings in zip(outputs, MIXED) if settings.temperature > 0]
    assert sum(output.stats.accepted for output in sampled) > 0


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED[0], PENALISED[1]], ids=["greedy", "sampled", "penalised"])
def test_rows_leave_and_join_midway_without_a_trace(
    drafter: Drafter, target: Target, prompts: list[list[int]], settings: SamplingParams
) -> None:
    """Text and counts of a request alone, and in a batch whose rows end at different times and move."""
    limits = [3, 26, 12, 1, 17, 7]
    alone = drafting.decode(target, drafter, prompts, rows=1, new_tokens=limits, sampling=settings)
    crowd = drafting.decode(target, drafter, prompts, rows=3, new_tokens=limits, sampling=settings)
    assert drafting.texts(crowd) == drafting.texts(alone)
    assert [vars(output.stats) for output in crowd] == [vars(output.stats) for output in alone]


def test_the_token_limit_may_fall_inside_a_draft(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    ids, answer = max(zip(prompts, plain), key=lambda pair: len(pair[1]))
    limits = [1, 2, 3, 4, 5, 7, 10, 13, 17, 20, 23, 28]
    outputs = drafting.decode(target, drafter, [ids] * len(limits), new_tokens=limits)
    assert drafting.texts(outputs) == [answer[:limit] for limit in limits]
    assert {output.finish for output in outputs} == {"length"}


def test_an_eos_inside_a_draft_ends_the_answer(
    name: str, target: Target, draft: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Drafts meet no EOS at first; then tokens that were accepted from a draft are made the EOS, one at a time."""
    asked = [ids + answer for ids, answer in zip(prompts, plain)][
        :2
    ]  # so that even copied tokens can be new to the answer
    ended = 0
    for output, ids in zip(drafting.decode(target, drafting.build(name, target, draft), asked, new_tokens=16), asked):
        firsts = [at for at, token in enumerate(output.tokens) if output.tokens.index(token) == at]
        for at in [at for at in firsts if output.from_draft[at]][:3]:
            model = copy.deepcopy(target.model)
            model.generation_config.eos_token_id = [5000, output.tokens[at]]  # the second of a list
            ending = Target(model, target.tokenizer, name="ending")
            (again,) = drafting.decode(ending, drafting.build(name, ending, draft), [ids], new_tokens=16)
            assert again.tokens == output.tokens[: at + 1]
            assert again.finish == "eos"
            ended += again.from_draft[-1]
    assert ended > 0, "no answer ended with a drafted EOS"


@pytest.mark.parametrize("kind", ["mistral with a window", "gemma2", "gpt2"])
@pytest.mark.parametrize("free", list(drafting.FREE))
def test_any_target_may_be_drafted_for(kind: str, free: str) -> None:
    """Sliding windows, soft-caps, learned positions; answers run to the end of the target's context."""
    model = architectures.build(kind)
    model.generation_config.eos_token_id = []
    target = Target(model, None)
    prompts = [ids * 4 for ids in drafting.prompts(4, seed=2, vocab_size=target.vocab_size)]
    prompts[0] = (prompts[0] * 100)[: target.max_length - 20]
    limits = [20, 12, 12, 12]
    expected = drafting.decode(target, None, prompts, new_tokens=limits)
    outputs = drafting.decode(target, drafting.FREE[free](target), prompts, new_tokens=limits)
    assert drafting.texts(outputs) == drafting.texts(expected)
    assert outputs[0].finish == "length", "the end of the context was not reached"


def test_drafters_are_made_by_name(target: Target, tiny_target_dir: Path) -> None:
    assert isinstance(make_drafter("none", target), NoDraft)
    assert isinstance(make_drafter("lookahead", target), Lookahead)
    lookup, model = make_drafter("prompt-lookup", target), make_drafter(f"draft:{tiny_target_dir}", target)
    assert isinstance(lookup, PromptLookup)
    assert lookup.stop_ids == set(target.eos_ids)
    assert isinstance(model, DraftModel)
    assert model.model.dtype == target.dtype


def test_a_folder_is_handed_to_the_loader_of_trained_drafters(target: Target, tmp_path: Path) -> None:
    asked: list[tuple[Path, Target]] = []

    def load(folder: Path, owner: Target) -> Drafter:
        asked.append((folder, owner))
        return NoDraft()

    make_drafter(str(tmp_path), target, load)
    assert asked == [(tmp_path, target)]


@pytest.mark.parametrize("name", ["prompt_lookup", "draft:", "", "no/such/folder", "draft"])
def test_an_unknown_name_is_answered_with_those_that_exist(name: str, target: Target) -> None:
    with pytest.raises(ValueError, match="expected none, prompt-lookup, lookahead, draft:MODEL"):
        make_drafter(name, target, lambda folder, owner: NoDraft())


def test_a_draft_model_that_is_not_there_is_named(target: Target) -> None:
    with pytest.raises(ValueError, match=r"'\./nowhere' does not exist"):
        make_drafter("draft:./nowhere", target)
