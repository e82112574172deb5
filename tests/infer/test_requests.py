"""Serving manners: answers end at their stop strings, requests are cancelled, and what fails fails alone."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.infer.decode import Engine
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.request import Output, Request
from draftsmith.infer.target import Target

from . import drafting

TOKENS = 24


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return drafting.texts(drafting.decode(target, None, prompts, new_tokens=TOKENS))


@pytest.fixture(params=["none", *drafting.NAMES])
def drafter(request: pytest.FixtureRequest, target: Target, draft: Target) -> Drafter:
    return NoDraft() if request.param == "none" else drafting.build(request.param, target, draft)


def outputs_of(engine: Engine) -> dict[str, Output]:
    return {output.id: output for output in engine.run()}


# Stop strings ----------------------------------------------------------------------------------------------------


def read(target: Target, tokens: list[int]) -> str:
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True))


def stops_of(text: str) -> list[str]:
    """Strings of one to six letters that the text holds, whole characters all of them, from all over it."""
    found = [text[at : at + 1 + at % 6] for at in range(0, len(text), 3)]
    return [stop for stop in found if "\ufffd" not in stop][:6]


def test_a_stop_string_ends_the_answer_wherever_rounds_end(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    cases = [(ids, stop) for ids, tokens in zip(prompts, plain) for stop in stops_of(read(target, tokens))]
    engine = Engine(target, drafter=drafter, rows=4)
    for index, (ids, stop) in enumerate(cases):
        engine.add(Request(str(index), ids, TOKENS, stop=("never written", stop)))
    outputs, inside = outputs_of(engine), 0
    whole = {tuple(ids): tokens for ids, tokens in zip(prompts, plain)}
    for index, (ids, stop) in enumerate(cases):
        output, tokens = outputs[str(index)], whole[tuple(ids)]
        text = read(target, tokens)
        assert output.finish == "stop"
        assert output.text == text[: text.index(stop)]
        count = next(n for n in range(1, len(tokens) + 1) if stop in read(target, tokens[:n]))
        assert output.tokens == tokens[:count], "the token that completed the stop string is the last"
        assert len(output.from_draft) == count
        assert output.stats.emitted == count - 1, "what followed in the draft was counted"
        inside += output.from_draft[-1]
    assert len(cases) > 10
    assert inside > 0 or isinstance(drafter, NoDraft), "no stop string ended inside a draft"


def test_text_without_a_stop_string_runs_on_and_is_whole(
    target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    engine = Engine(target, rows=2)
    engine.add(Request("stop", prompts[0], TOKENS, stop=["never written"]))
    engine.add(Request("none", prompts[0], TOKENS))
    outputs = outputs_of(engine)
    assert outputs["stop"].tokens == outputs["none"].tokens == plain[0]
    assert (outputs["stop"].text, outputs["none"].text) == (read(target, plain[0]), "")


# Cancelling ------------------------------------------------------------------------------------------------------


def test_cancelled_requests_come_out_with_what_they_wrote_and_others_do_not_notice(
    drafter: Drafter, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    engine, outputs, asked = Engine(target, drafter=drafter, rows=3), dict[str, Output](), False
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, TOKENS))
    for progress in engine.stream():
        if progress.is_last:
            assert progress.output.id not in outputs, "an answer ended twice"
            outputs[progress.output.id] = progress.output
        if not asked and len(progress.output.tokens) > 4:
            running = "1" if progress.output.id != "1" else "0"
            assert engine.cancel(running)
            assert engine.cancel("5"), "a waiting request can be cancelled too"
            assert not engine.cancel("5")
            asked = True
    cancelled = {id for id, output in outputs.items() if output.finish == "cancelled"}
    assert cancelled == {running, "5"}
    assert outputs["5"].tokens == []
    assert 0 < len(outputs[running].tokens) < TOKENS
    for index, tokens in enumerate(plain):
        if str(index) not in cancelled:
            assert outputs[str(index)].tokens == tokens
        else:
            assert outputs[str(index)].tokens == tokens[: len(outputs[str(index)].tokens)]


def test_the_longest_prompts_of_those_that_join_come_first(target: Target, prompts: list[list[int]]) -> None:
    """Rows side by side attend together. Who waits for a row still waits in the order of asking."""
    engine = Engine(target, rows=3)
    for number, length in enumerate((2, 6, 4, 9)):
        engine.add(Request(str(number), (prompts[0] * 9)[:length], 40))
    engine.step()
    assert [row.request.id for row in engine._rows] == ["1", "2", "0"]
    assert [row.request.id for row in engine._queue] == ["3"]


def test_cancelling_what_is_finished_or_unknown_changes_nothing(target: Target, prompts: list[list[int]]) -> None:
    engine = Engine(target, rows=2)
    engine.add(Request("a", prompts[0], 3))
    (output,) = engine.run()
    assert not engine.cancel("a")
    assert not engine.cancel("b")
    assert output.finish == "length"
    assert list(engine.run()) == []


def test_an_id_is_free_again_once_its_end_was_reported(
    target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    engine = Engine(target, rows=2)
    engine.add(Request("a", prompts[0], TOKENS))
    engine.step()
    with pytest.raises(ValueError, match="'a' is not finished"):
        engine.add(Request("a", prompts[1], TOKENS))
    engine.cancel("a")
    with pytest.raises(ValueError, match="'a' is not finished"):
        engine.add(Request("a", prompts[1], TOKENS))
    (progress,) = engine.step()
    assert (progress.is_last, progress.output.finish) == (True, "cancelled")
    engine.add(Request("a", prompts[1], TOKENS))
    assert outputs_of(engine)["a"].tokens == plain[1]


def test_leaving_the_stream_and_coming_back_loses_nothing(
    target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    engine, tokens = Engine(target, rows=3), dict[str, list[int]]()
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, TOKENS))
    ended = 0
    while ended < len(prompts):
        progress = next(engine.stream())
        new = progress.output.tokens[len(progress.output.tokens) - progress.new_tokens :]
        tokens.setdefault(progress.output.id, []).extend(new)
        ended += progress.is_last
    assert [tokens[str(index)] for index in range(len(prompts))] == plain


# What fails fails alone ------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"prompt": [5] * 500}, "500 prompt tokens .* exceed the target's context of 512"),
    "empty": ({"prompt": []}, "empty prompt"),
    "unknown token": ({"prompt": [5, 300]}, r"token ids must lie in \[0, 300\), got 300"),
    "negative token": ({"prompt": [5, -1]}, "got -1"),
    "text": ({"prompt": "hello"}, "a prompt is a list of token ids"),
    "fractions": ({"prompt": [1.0, 2.0]}, "a prompt is a list of token ids"),
    "no room": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "one stop string bare": ({"stop": "END"}, "stop must be a list of non-empty strings"),
    "empty stop string": ({"stop": ["a", ""]}, "stop must be a list of non-empty strings"),
    "stop at a special token": ({"stop": ["<|im_start|>"]}, "'<|im_start|>' is a special token"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone_and_says_why(
    name: str, target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    changes, message = BAD[name]
    engine = Engine(target, rows=3)
    engine.add(Request("good", prompts[0], TOKENS))
    engine.add(Request(**{"id": "bad", "prompt": [5], "max_new_tokens": TOKENS} | changes))
    engine.add(Request("other", prompts[1], TOKENS))
    outputs = outputs_of(engine)
    assert [outputs[id].tokens for id in ("good", "bad", "other")] == [plain[0], [], plain[1]]
    assert (outputs["bad"].finish, outputs["good"].finish) == ("error", "length")
    with pytest.raises(ValueError, match=message):
        outputs["bad"].checked()
    assert outputs["good"].checked() is outputs["good"]


def test_stop_strings_need_a_tokenizer(target: Target, prompts: list[list[int]]) -> None:
    engine = Engine(Target(target.model, None), rows=2)
    engine.add(Request("bad", prompts[0], 4, stop=["a"]))
    engine.add(Request("good", prompts[0], 4))
    outputs = outputs_of(engine)
    assert "stop strings, which need a tokenizer" in outputs["bad"].error
    assert outputs["good"].finish == "length"


def test_the_eos_may_be_named_as_a_stop_string(target: Target, prompts: list[list[int]]) -> None:
    engine = Engine(target, rows=1)
    engine.add(Request("a", prompts[0], 4, stop=["<|im_end|>"]))
    assert outputs_of(engine)["a"].finish == "length"
