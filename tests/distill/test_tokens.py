"""Samples hold the text decoding would read and write, and learn the answers and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.responses import Manifest, Response, TokenSequence
from draftsmith.distill.tokens import Sample, load_samples, preview
from draftsmith.infer.target import Target

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(*parts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(parts)
    return {"messages": [{"role": role, "content": part} for role, part in zip(roles, parts)]} | more


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learned(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode([token for token, flag in zip(sample.tokens, sample.supervised) if flag]))


def write_responses(path: Path, target: Target, responses: list[Response], **changes: Any) -> Path:
    path.write_text("".join(response.model_dump_json() + "\n" for response in responses))
    fields = {
        "target": target.fingerprint(),
        "dtype": "float32",
        "template_hash": target.template_hash,
        "sampling": {},
        "max_new_tokens": 8,
    }
    Manifest.model_validate(fields | changes).write(path)
    return path


def response(id: str, split: str = "train", *, truncated: bool = False) -> Response:
    return Response.model_validate(
        {
            "id": id,
            "category": "writing",
            "split": split,
            "messages": talk("hi", "yo")["messages"],
            "truncated": truncated,
            "sequences": [TokenSequence(token_ids=[5, 6, 7, 8, 2], supervised=[(2, 5)])],
        }
    )


def test_every_answer_is_learned_and_nothing_else(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "a.jsonl", [talk("the cat", "sat", "and the dog", "sat by the door")])
    (sample,) = load_samples(path, tiny_target, max_length=512)
    assert learned(sample, tiny_target.tokenizer) == "sat<|im_end|>sat by the door<|im_end|>"
    text = tiny_target.tokenizer.decode(sample.tokens)
    own = tiny_target.tokenizer.apply_chat_template(
        talk("the cat", "sat", "and the dog", "sat by the door")["messages"], tokenize=False
    )
    assert own == text + "\n"


def test_a_tokenizer_alone_gives_the_same_samples(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "a.jsonl", [talk("the cat", "sat")])
    assert load_samples(path, tiny_target.tokenizer, max_length=512) == load_samples(path, tiny_target, max_length=512)


def test_rewritten_history_gives_each_answer_the_text_it_was_decoded_in(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = THINKING
    path = write(tmp_path / "a.jsonl", [talk("one", "<think>a</think>b", "two", "<think>c</think>d", id="x")])
    first, second = load_samples(path, tokenizer, max_length=512)
    assert (first.id, second.id) == ("x", "x#2")
    assert learned(first, tokenizer) == "<think>a</think>b<|im_end|>"
    assert learned(second, tokenizer) == "<think>c</think>d<|im_end|>"
    assert "<think>a" not in tokenizer.decode(second.tokens)


def test_plain_text_is_learned_to_its_end(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "the cat sat"}])
    (sample,) = load_samples(path, tiny_target, max_length=512)
    assert tiny_target.tokenizer.decode(sample.tokens) == "the cat sat<|im_end|>"
    assert sample.supervised == [False] + [True] * (len(sample.tokens) - 1)


def test_long_samples_are_cut_and_counted(
    tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", [talk("hi", "the cat " * 60), talk("the dog " * 90, "sat"), talk("hi", "yo")])
    samples = load_samples(path, tiny_target, max_length=120)
    assert max(len(sample.tokens) for sample in samples) == 120
    assert len(samples) == 2
    assert "2 cut at 120, 1 of them left without an answer" in capsys.readouterr().err


def test_nothing_to_learn_is_an_error_with_the_reason(tmp_path: Path, tiny_target: Target) -> None:
    prompts = write(tmp_path / "p.jsonl", [talk("hi")])
    with pytest.raises(
        ValueError, match="no supervised token, nothing would be trained: no conversation in it holds an"
    ):
        load_samples(prompts, tiny_target, max_length=512)
    answers = write(tmp_path / "a.jsonl", [talk("hi", "yo")])
    with pytest.raises(ValueError, match=r"1 of 1 samples have 10 tokens before any answer\. Raise the length"):
        load_samples(answers, tiny_target, max_length=10)


def test_conversations_the_template_refuses_stop_the_run_above_the_share(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + THINKING
    )
    rows = [talk("hi", "yo", id=f"x{i}") for i in range(3)]
    rows[1]["messages"].insert(0, {"role": "system", "content": "be kind"})
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"1 of 3 conversations of .* cannot be used, the first is 'x1': .*no system"):
        load_samples(path, tokenizer, max_length=512)
    assert [sample.id for sample in load_samples(path, tokenizer, max_length=512, max_bad_share=0.5)] == ["x0", "x2"]
    assert "1 of 3 conversations" in capsys.readouterr().err


def test_response_ids_are_used_as_they_were_generated(tmp_path: Path, tiny_target: Target) -> None:
    path = write_responses(tmp_path / "r.jsonl", tiny_target, [response("b"), response("a", "held-out"), response("c")])
    samples = load_samples(path, tiny_target, max_length=512)
    assert [sample.id for sample in samples] == ["a", "b", "c"], "by id, whatever order they were finished in"
    assert samples[0] == Sample("a", [5, 6, 7, 8, 2], [False, False, True, True, True])
    assert [s.id for s in load_samples(path, tiny_target, split="held-out", max_length=512)] == ["a"]
    assert load_samples(path, tiny_target.tokenizer, max_length=512) == samples


def test_responses_under_another_template_are_tokenised_anew_and_said_so(
    tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [response("a"), response("b", truncated=True)]
    path = write_responses(tmp_path / "r.jsonl", tiny_target, answers, template_hash="feedfeedfeedfeed")
    (sample,) = load_samples(path, tiny_target, max_length=512)
    assert learned(sample, tiny_target.tokenizer) == "yo<|im_end|>"
    assert f"chat template feedfeedfeedfeed there, {tiny_target.template_hash} here" in (
        said := capsys.readouterr().err
    )
    assert "1 conversations with cut answers are left out" in said


def test_responses_of_another_target_are_said_to_be_that(
    tmp_path: Path, tiny_target: Target, build_target: Callable[..., Target], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_responses(tmp_path / "r.jsonl", tiny_target, [response("a")])
    load_samples(path, tiny_target, max_length=512)
    assert "not this target's own text" not in capsys.readouterr().err
    load_samples(path, build_target(seed=9), max_length=512)
    assert "answered by tiny: it is not this target's own text" in capsys.readouterr().err


def test_a_choice_of_samples_does_not_depend_on_finishing_order(tmp_path: Path, tiny_target: Target) -> None:
    responses = [response(f"r{i:02d}") for i in range(30)]
    forward = write_responses(tmp_path / "f.jsonl", tiny_target, responses)
    backward = write_responses(tmp_path / "b.jsonl", tiny_target, responses[::-1])
    few = load_samples(forward, tiny_target, max_length=512, max_samples=10)
    assert few == load_samples(backward, tiny_target, max_length=512, max_samples=10)
    assert len(few) == 10
    assert [s.id for s in few] != [f"r{i:02d}" for i in range(10)], "not simply the first ones"


def test_preview_shows_the_whole_text_with_answers_green(tmp_path: Path, tiny_target: Target) -> None:
    path = write(tmp_path / "a.jsonl", [talk("the cat", "sat", "the dog", "ran")])
    (sample,) = load_samples(path, tiny_target, max_length=512)
    shown = preview(sample, tiny_target.tokenizer)
    assert shown.plain == tiny_target.tokenizer.decode(sample.tokens)
    green = [shown.plain[span.start : span.end] for span in shown.spans if span.style == "green"]
    assert green == ["sat<|im_end|>", "ran<|im_end|>"]
    assert {span.style for span in shown.spans} == {"green", "dim"}
