"""The audit: the target's own text passes, and every planted error is found where it was planted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftsmith.infer import audit as module
from draftsmith.infer.audit import audit
from draftsmith.infer.decode import Engine
from draftsmith.infer.request import Output, Request
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=11)
PENALISED = [
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(0.9, min_p=0.01, seed=3, presence_penalty=1.0),
]
PROMPTS = [torch.randint(3, 300, (5 + n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]


def answer(target: Target, prompt: list[int], new_tokens: int = 30, sampling: SamplingParams | None = None) -> Output:
    engine = Engine(target, rows=1)
    engine.add(Request("x", prompt, new_tokens, sampling or SamplingParams()))
    return next(engine.run())


@pytest.fixture(scope="module")
def ending(build_target: Callable[..., Target], tiny_target: Target) -> Target:
    """The tiny target, ending an answer where it would have written the 12th new token of its text."""
    text = answer(tiny_target, PROMPTS[0], 30).tokens
    assert text.index(text[12]) == 12
    return build_target(eos_token_id=text[12])


@pytest.fixture(scope="module")
def rough(tiny_target: Target) -> Target:
    return Target(copy.deepcopy(tiny_target.model).to(torch.bfloat16), tiny_target.tokenizer)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, SamplingParams(1.3, top_p=0.8, seed=5), *PENALISED])
@pytest.mark.parametrize("block", [256, 7])
def test_the_targets_own_text_is_exact(
    tiny_target: Target, sampling: SamplingParams, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    for prompt in PROMPTS:
        out = answer(tiny_target, prompt, 30, sampling)
        found = audit(tiny_target, prompt, out.tokens, sampling=sampling, finish=out.finish, max_new_tokens=30)
        assert (found.verdict, found.position, found.end_checked) == ("exact", None, True)


@pytest.mark.parametrize("sampling", PENALISED)
def test_text_is_wrong_without_the_penalties_it_was_written_with(tiny_target: Target, sampling: SamplingParams) -> None:
    tokens = answer(tiny_target, PROMPTS[0], 60, sampling).tokens
    without = SamplingParams(sampling.temperature, min_p=sampling.min_p, seed=sampling.seed)
    assert audit(tiny_target, PROMPTS[0], tokens, sampling=without).verdict == "wrong"


@pytest.mark.parametrize("position", [0, 7, 29])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, *PENALISED])
def test_a_planted_token_is_found_in_its_place(tiny_target: Target, position: int, sampling: SamplingParams) -> None:
    tokens = answer(tiny_target, PROMPTS[0], sampling=sampling).tokens
    right, tokens[position] = tokens[position], (tokens[position] + 1) % 300
    found = audit(tiny_target, PROMPTS[0], tokens, sampling=sampling)
    assert (found.verdict, found.position) == ("wrong", position)
    assert (found.emitted, found.choice) == (tokens[position], right)
    assert found.top2 is not None
    assert found.tolerance is not None
    assert found.gap is None or found.gap > found.tolerance


@pytest.mark.parametrize("position", [0, 11, 29])
def test_a_planted_second_best_is_wrong_and_the_gaps_are_the_targets(tiny_target: Target, position: int) -> None:
    """The error a wrong tree mask would make: a token that is nearly as likely."""
    tokens = answer(tiny_target, PROMPTS[1]).tokens
    with torch.no_grad():
        logits = tiny_target.model.base_model  # the stock model knows nothing of plans, so the head is asked directly
        assert logits is not None
        hidden = tiny_target.replay(PROMPTS[1], tokens)[position]
        best = tiny_target.logits(hidden).topk(2)
    tokens[position] = int(best.indices[1])
    found = audit(tiny_target, PROMPTS[1], tokens)
    assert (found.verdict, found.position) == ("wrong", position)
    assert found.gap == found.top2 == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-5)


def test_swapped_tokens_and_swapped_answers_are_wrong(tiny_target: Target) -> None:
    one, two = (answer(tiny_target, prompt).tokens for prompt in PROMPTS[:2])
    assert one != two
    assert audit(tiny_target, PROMPTS[0], two).verdict == "wrong"
    assert one[8] != one[9]
    swapped = [*one[:8], one[9], one[8], *one[10:]]
    found = audit(tiny_target, PROMPTS[0], swapped)
    assert (found.verdict, found.position) == ("wrong", 8)


def test_a_truncated_answer_is_wrong_where_it_stops(ending: Target) -> None:
    out = answer(ending, PROMPTS[0])
    assert (len(out.tokens), out.finish) == (13, "eos")
    for options in ({"finish": "eos"}, {"max_new_tokens": 30}, {"finish": "length", "max_new_tokens": 30}):
        found = audit(ending, PROMPTS[0], out.tokens[:9], **options)
        assert (found.verdict, found.position, found.emitted) == ("wrong", 9, None), options
        assert found.choice == out.tokens[9]
    cut = audit(ending, PROMPTS[0], out.tokens[:9], finish="length", max_new_tokens=9)
    assert (cut.verdict, cut.end_checked) == ("exact", True)


def test_an_answer_whose_eos_was_taken_off_is_exact(ending: Target) -> None:
    tokens = answer(ending, PROMPTS[0]).tokens
    assert audit(ending, PROMPTS[0], tokens[:-1], finish="eos").verdict == "exact"
    assert audit(ending, PROMPTS[0], [], finish="eos").verdict == "wrong"


def test_without_a_reason_to_end_the_end_is_not_judged_and_it_says_so(ending: Target) -> None:
    tokens = answer(ending, PROMPTS[0]).tokens
    found = audit(ending, PROMPTS[0], tokens[:9])
    assert (found.verdict, found.end_checked) == ("exact", False)
    assert audit(ending, PROMPTS[0], tokens).end_checked


def test_text_after_the_end_is_wrong(ending: Target, tiny_target: Target) -> None:
    """Tokens kept after an EOS, though the target without that EOS would write the very same."""
    longer = answer(tiny_target, PROMPTS[0]).tokens
    found = audit(ending, PROMPTS[0], longer)
    assert (found.verdict, found.position, found.choice) == ("wrong", 13, None)
    over = audit(tiny_target, PROMPTS[0], longer, max_new_tokens=20)
    assert (over.verdict, over.position) == ("wrong", 20)


def test_another_seed_or_setting_is_wrong(tiny_target: Target) -> None:
    tokens = answer(tiny_target, PROMPTS[1], sampling=SAMPLED).tokens
    for other in (replace(SAMPLED, seed=12), replace(SAMPLED, temperature=1.4), SamplingParams()):
        assert audit(tiny_target, PROMPTS[1], tokens, sampling=other).verdict == "wrong"


def test_a_token_outside_top_k_has_no_gap(tiny_target: Target) -> None:
    tokens = answer(tiny_target, PROMPTS[1], sampling=SAMPLED).tokens
    logits = tiny_target.logits(tiny_target.replay(PROMPTS[1], tokens)[4])
    tokens[4] = int(logits.argmin())
    found = audit(tiny_target, PROMPTS[1], tokens, sampling=SAMPLED)
    assert (found.verdict, found.position, found.gap) == ("wrong", 4, None)


def test_in_bf16_a_second_best_within_rounding_is_a_near_tie_and_any_other_is_wrong(rough: Target) -> None:
    verdicts = set()
    for prompt in PROMPTS:
        tokens = answer(rough, prompt).tokens
        best = rough.logits(rough.replay(prompt, tokens)).float().topk(2)
        for position in range(0, 30, 3):
            planted = [*tokens[:position], int(best.indices[position, 1])]
            if planted[-1] == tokens[position]:  # decoding took it: a near-tie of its own
                continue
            found = audit(rough, prompt, planted)
            if found.position == position and found.gap is not None and found.tolerance is not None:
                assert found.verdict == ("near-tie" if found.gap <= found.tolerance else "wrong")
                verdicts.add(found.verdict)
    assert verdicts == {"near-tie", "wrong"}


def test_a_wrong_token_after_a_near_tie_is_what_is_reported(rough: Target) -> None:
    for prompt in PROMPTS:
        tokens = answer(rough, prompt).tokens
        best = rough.logits(rough.replay(prompt, tokens)).float().topk(2)
        for position in range(20):
            tied = [*tokens[:position], int(best.indices[position, 1])]
            if audit(rough, prompt, tied).verdict == "near-tie":
                worst = int(rough.logits(rough.replay(prompt, tied)[-1]).argmin())
                found = audit(rough, prompt, [*tied, worst])
                assert (found.verdict, found.position, found.emitted) == ("wrong", position + 1, worst)
                return
    pytest.fail("no near-tie to begin with")


def test_bf16_text_is_never_called_wrong(rough: Target) -> None:
    """One token at a time and eight rows together round differently from the replay."""
    for rows in (1, 8):
        engine = Engine(rough, rows=rows)
        for index in range(8):
            sampling = SamplingParams() if index % 2 else replace(SAMPLED, seed=index)
            engine.add(Request(str(index), PROMPTS[index % 4], 40, sampling))
        for out in engine.run():
            index = int(out.id)
            sampling = SamplingParams() if index % 2 else replace(SAMPLED, seed=index)
            assert audit(rough, PROMPTS[index % 4], out.tokens, sampling=sampling).verdict != "wrong"


@pytest.mark.parametrize(
    ("prompt", "tokens", "named"),
    [
        ([], [4], "there is no prompt"),
        ([5], [300], "token id 300 is none of the target's 300"),
        ([5], [-1], "token id -1"),
        ([5] * 500, [6] * 20, "exceed the target's context of 512"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tiny_target: Target, prompt: list[int], tokens: list[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        audit(tiny_target, prompt, tokens)
