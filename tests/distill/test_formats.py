"""Every format becomes the same messages, and each kind of malformed row is refused with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.distill.formats import BadRow, detect, parse

HELLO = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("alpaca", {"instruction": "hi", "input": "", "output": "yo"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}),
        ("messages", {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                    {"role": "assistant", "content": "yo", "tool_calls": None},
                ]
            },
        ),
    ],
)
def test_formats_agree_on_what_is_said(format: str, row: dict[str, Any]) -> None:
    assert detect(row) == format
    assert parse(row, format).messages == HELLO


@pytest.mark.parametrize(
    ("format", "row"),
    [
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                ],
                "tools": json.dumps([{"name": "add"}]),
            },
        ),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
                    },
                ],
                "tools": [{"type": "function", "function": {"name": "add"}}],
            },
        ),
    ],
)
def test_tool_calls_and_tools_have_one_shape(format: str, row: dict[str, Any]) -> None:
    parsed = parse(row, format)
    assert parsed.messages == CALLED
    assert parsed.tools == ({"type": "function", "function": {"name": "add"}},)


def test_questions_and_our_own_rows_become_user_turns() -> None:
    turns = ({"role": "user", "content": "one"}, {"role": "user", "content": "two"})
    question = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]}
    assert detect(question) == "questions"
    assert parse(question, "questions").messages == turns
    own = {"id": "a", "category": "c", "split": "train", "turns": ["one", "two"], "system": "be kind"}
    assert detect(own) == "draftsmith"
    assert parse(own, "draftsmith").messages == ({"role": "system", "content": "be kind"}, *turns)


def test_alpaca_joins_input_and_keeps_history_and_system() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"]]}
    roles = [(message["role"], message["content"]) for message in parse(row, "alpaca").messages]
    assert roles == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "add\n1 2"), ("assistant", "3")]


def test_alpaca_without_output_is_a_prompt() -> None:
    assert [m["role"] for m in parse({"instruction": "hi", "output": ""}, "alpaca").messages] == ["user"]


def test_observations_and_older_role_names_are_known() -> None:
    talk = [{"from": "human", "value": "hi"}, {"from": "observation", "value": "{}"}, {"from": "gpt", "value": "yo"}]
    assert [m["role"] for m in parse({"conversations": talk}, "sharegpt").messages] == ["user", "tool", "assistant"]
    older = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    messages = parse({"messages": older}, "messages").messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert messages[3]["name"] == "add"


def test_plain_text_is_no_conversation() -> None:
    assert detect({"text": "once upon"}) == "text"
    assert parse({"text": "once upon"}, "text").text == "once upon"


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("alpaca", ["hi"], "expected an object, got list"),
        ("alpaca", {"instruction": 3}, "instruction must be text, got 3"),
        ("alpaca", {"instruction": "hi", "output": " "}, "empty assistant message"),
        ("alpaca", {"instruction": "hi", "output": 7}, "content must be text, got int"),
        ("alpaca", {"instruction": "hi", "history": ["a"]}, "history must be a list of"),
        ("alpaca", {"instruction": "\ud800", "output": "x"}, "not valid Unicode"),
        ("text", {"text": "\ud800"}, "not valid Unicode"),
        ("text", {"text": ""}, "text must be text"),
        ("questions", {"turns": ["hi"]}, "question_id is missing"),
        ("sharegpt", {"conversations": "hi"}, "conversations must be a list of objects"),
        ("sharegpt", {"conversations": []}, "there are no messages"),
        ("sharegpt", {"conversations": [{"from": "system", "value": "x"}]}, "there is no user message"),
        (
            "sharegpt",
            {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "x"}]},
            "an answer stands before the first user message",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "add(1)"}]},
            "function_call is not JSON",
        ),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}], "tools": "{"}, "tools is not JSON"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}], "tools": {"a": 1}}, "tools must be a list"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "only text is supported",
        ),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]},
                ]
            },
            "a tool call needs a name",
        ),
    ],
)
def test_malformed_rows_say_what_is_wrong(format: str, row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse(row, format)
