"""What is known of a target behind a server, and how sure it is that text becomes the ids that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.prompts import Conversation
from draftsmith.distill.responses import read_responses
from draftsmith.distill.served import ServedTarget
from draftsmith.distill.server import Completion
from draftsmith.distill.talks import Talk
from draftsmith.infer.target import Target

from .chat_server import Answer, Body, ChatServer, completion
from .test_remote import run
from .test_respond import TALKS, talk


@pytest.fixture
def served(tiny_tokenizer: PreTrainedTokenizerFast) -> ServedTarget:
    return ServedTarget("tiny", tiny_tokenizer, (0, 2), 300, 512)


def test_what_is_known_of_a_served_target_is_what_the_target_itself_says(
    tiny_target_dir: Path, tiny_target: Target, build_target: Callable[..., Target], tmp_path: Path
) -> None:
    found = ServedTarget.load(str(tiny_target_dir))
    assert (found.eos_ids, found.vocab_size, found.max_length) == (tiny_target.eos_ids, 300, tiny_target.max_length)
    several = build_target(eos_token_id=[0, 2, 7])
    several.model.save_pretrained(tmp_path / "several")
    several.tokenizer.save_pretrained(tmp_path / "several")
    again = ServedTarget.load(str(tmp_path / "several"))
    assert again.eos_ids == (0, 2, 7)
    assert again.end == 2, "the template's end, not the first of the list"
    with pytest.raises(ValueError, match="does not exist"):
        ServedTarget.load(str(tmp_path / "nowhere"))


def test_ids_that_are_not_this_tokenizer_s_stop_the_run(tmp_path: Path, served: ServedTarget) -> None:
    with (
        ChatServer(lambda body: completion("x", choice={"token_ids": [299, 300]})) as server,
        pytest.raises(ValueError, match="ids do not fit tiny, of 300 tokens"),
    ):
        run(server, served, TALKS, tmp_path / "r.jsonl")


def test_calls_of_tools_are_written_out_by_the_template_that_has_them(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    target = ServedTarget("tools", tokenizer, (2,), 300, 512)
    add = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    asked = (
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "2"},
    )
    source = Conversation("a", "tools", asked, "train", tools=(add,))
    calls = [{"id": "c9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]

    def speak(body: Body) -> Answer:
        if body["messages"][-1]["role"] == "tool":
            return completion("two")
        return completion("", finish="tool_calls", choice={"message": {"content": None, "tool_calls": calls}})

    with ChatServer(speak) as server:
        run(server, target, [source], tmp_path / "r.jsonl")
        assert server.bodies[0]["tools"] == [add]
        assert server.bodies[1]["messages"][-1]["tool_call_id"] == "c9"
    (found,) = read_responses(tmp_path / "r.jsonl")
    (sequence,) = found.sequences
    spans = [tokenizer.decode(sequence.token_ids[start:end]) for start, end in sequence.supervised]
    assert spans == ['CALL add {"a": 1}<|im_end|>', "two<|im_end|>"]


@pytest.mark.parametrize(
    ("prompt", "answer", "is_cut", "spelling"),
    [
        (0, 0, False, "counted"),
        (0, -1, False, "counted"),  # a server that does not count the EOS
        (0, -2, False, "differs"),
        (0, 1, False, "differs"),
        (1, 0, False, "differs"),
        (0, 0, True, "counted"),
        (0, -1, True, "differs"),
        (None, 0, False, "unknown"),
        (0, None, False, "unknown"),
        (None, 2, False, "differs"),
    ],
)
def test_counts_tell_how_sure_the_ids_are(
    served: ServedTarget, prompt: int | None, answer: int | None, is_cut: bool, spelling: str
) -> None:
    """prompt, answer: what the server counts beyond the ids here."""
    asked = Talk.begin(talk("a", "hello"), served.template, 512)
    ids = served.tokenizer("the cat", add_special_tokens=False)["input_ids"] + ([] if is_cut else [2])
    counts = (
        None if prompt is None else len(asked.prompt) + prompt,
        None if answer is None else len(ids) + answer,
    )
    said = Completion({"role": "assistant", "content": "the cat"}, is_cut, *counts, None, None)
    assert served.spell(asked, said) == (ids, spelling)


@pytest.mark.parametrize(
    ("ids", "is_cut", "wanted"),
    [([5, 2], False, [5, 2]), ([5], False, [5, 2]), ([5], True, [5]), ([5, 0], False, [5, 0])],
)
def test_ids_of_the_server_are_used_as_they_are_with_the_end_that_some_leave_out(
    served: ServedTarget, ids: list[int], is_cut: bool, wanted: list[int]
) -> None:
    asked = Talk.begin(talk("a", "hello"), served.template, 512)
    message = {"role": "assistant", "content": "whatever"}
    for prompt, spelling in ((None, "written"), (asked.prompt, "written"), ([*asked.prompt, 1], "differs")):
        assert served.spell(asked, Completion(message, is_cut, None, None, prompt, ids)) == (wanted, spelling)
