"""Rows as people have them -> messages in the OpenAI style: one function per format, and how a format is recognised.

| name | row |
| --- | --- |
| draftsmith | `id`, `category`, `split`, `turns` (user messages), optionally `system`; nothing else |
| questions | `question_id`, `turns`, optionally `category` (evaluation question files) |
| alpaca | `instruction`, optionally `input`, `output`, `system`, `history` |
| sharegpt | `conversations` of `from` / `value`, with function_call and observation, optionally `tools` |
| messages | `messages` of `role` / `content`, with tool calls and content lists, optionally `tools` |
| text | `text`: no chat, trained on as it stands |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_OPENAI_ROLES = {"developer": "system", "function": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}


class BadRow(ValueError):
    """This row is not what its format promises; the message says what, got and expected."""


@dataclass(frozen=True)
class Parsed:
    """What a row says, before it has an id and a split."""

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""


def parse(row: Any, format: str) -> Parsed:
    """The conversation in `row`; raises BadRow with the reason if it is malformed."""
    if not isinstance(row, dict):
        raise BadRow(f"expected an object, got {type(row).__name__}")
    parsed = FORMATS[format](row)
    _check(parsed)
    return parsed


def detect(row: Any) -> str | None:
    """The format that a row's keys speak for, or None."""
    if not isinstance(row, dict):
        return None
    if "turns" in row:
        return "questions" if "question_id" in row else "draftsmith"
    for key in ("messages", "conversations"):
        entries = row.get(key)
        if isinstance(entries, list) and entries and isinstance(entries[0], dict):
            return "sharegpt" if "from" in entries[0] else "messages"
    return "alpaca" if "instruction" in row else "text" if "text" in row else None


def _draftsmith(row: dict[str, Any]) -> Parsed:
    missing = [key for key in ("id", "category", "split", "turns") if key not in row]
    unknown = sorted(set(row) - {"id", "category", "split", "turns", "system"})
    if missing or unknown:
        raise BadRow(
            f"expected the keys id, category, split, turns and optionally system; missing {missing}, unknown {unknown}"
        )
    return Parsed((*_optional("system", row.get("system")), *_turns(row)))


def _questions(row: dict[str, Any]) -> Parsed:
    if "question_id" not in row:
        raise BadRow("question_id is missing")
    return Parsed(_turns(row))


def _alpaca(row: dict[str, Any]) -> Parsed:
    instruction, given = _text(row, "instruction"), row.get("input") or ""
    past = row.get("history") or []
    if not (isinstance(past, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in past)):
        raise BadRow("history must be a list of [question, answer] pairs")
    earlier = [{"role": role, "content": part} for pair in past for role, part in zip(("user", "assistant"), pair)]
    question = f"{instruction}\n{given}" if given else instruction
    user = {"role": "user", "content": question}
    return Parsed((*_optional("system", row.get("system")), *earlier, user, *_optional("assistant", row.get("output"))))


def _sharegpt(row: dict[str, Any]) -> Parsed:
    messages = [*_optional("system", row.get("system"))]
    for entry in _entries(row, "conversations"):
        speaker = entry.get("from")
        role = _SHAREGPT_ROLES.get(str(speaker))
        if role is None:
            raise BadRow(f"unknown role {speaker!r}; expected one of {', '.join(_SHAREGPT_ROLES)}")
        value = _text(entry, "value")
        if speaker == "function_call":
            messages.append({"role": role, "content": "", "tool_calls": _calls(_json(value, "function_call"))})
        else:
            messages.append({"role": role, "content": value})
    return Parsed(tuple(messages), _tools(row.get("tools")))


def _messages(row: dict[str, Any]) -> Parsed:
    messages = []
    for entry in _entries(row, "messages" if "messages" in row else "conversations"):
        role = _OPENAI_ROLES.get(str(entry.get("role")))
        if role is None:
            raise BadRow(f"unknown role {entry.get('role')!r}; expected one of {', '.join(_OPENAI_ROLES)}")
        message: Message = {"role": role, "content": _flatten(entry.get("content"))}
        if entry.get("tool_calls"):
            message["tool_calls"] = _calls(entry["tool_calls"])
        elif entry.get("function_call"):
            message["tool_calls"] = _calls(entry["function_call"])
        messages.append(message | {key: entry[key] for key in ("tool_call_id", "name") if entry.get(key)})
    return Parsed(tuple(messages), _tools(row.get("tools")))


def _plain(row: dict[str, Any]) -> Parsed:
    return Parsed(text=_text(row, "text"))


FORMATS: dict[str, Callable[[dict[str, Any]], Parsed]] = {
    "draftsmith": _draftsmith,
    "questions": _questions,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "text": _plain,
}


def _check(parsed: Parsed) -> None:
    if parsed.text:
        return _check_text(parsed.text)
    roles = [message["role"] for message in parsed.messages]
    if "user" not in roles:
        raise BadRow("there is no user message" if roles else "there are no messages")
    if "assistant" in roles[: roles.index("user")]:
        raise BadRow("an answer stands before the first user message")
    for message in parsed.messages:
        if not isinstance(message["content"], str):
            raise BadRow(f"content must be text, got {type(message['content']).__name__}")
        if (
            not message["content"].strip()
            and message["role"] in ("user", "assistant")
            and not message.get("tool_calls")
        ):
            raise BadRow(f"empty {message['role']} message")
        _check_text(message["content"])
    return None


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"text is not valid Unicode: {error}") from error


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{key} must be text, got {value!r:.80}")
    return value


def _optional(role: str, content: Any) -> tuple[Message, ...]:
    return ({"role": role, "content": content},) if content else ()


def _turns(row: dict[str, Any]) -> tuple[Message, ...]:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise BadRow(f"turns must be a list of texts, got {turns!r:.80}")
    return tuple({"role": "user", "content": turn} for turn in turns)


def _entries(row: dict[str, Any], key: str) -> Iterable[dict[str, Any]]:
    entries = row.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadRow(f"{key} must be a list of objects, got {entries!r:.80}")
    return entries


def _flatten(content: Any) -> Any:
    """Content lists become one text; anything but text in them cannot be learned from and is refused."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
    if any(kind != "text" for kind in kinds):
        raise BadRow(f"content list with parts of type {kinds}; only text is supported")
    return "".join(str(part["text"]) for part in content)


def _json(value: str, what: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise BadRow(f"{what} is not JSON ({error})") from error


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls in the one shape that chat templates read: arguments are an object, not JSON inside a string."""
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"a tool call needs a name and arguments, got {call!r:.80}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, "tool call arguments") if arguments.strip() else {}
        known = {"id": call["id"]} if call.get("id") else {}
        result.append(known | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return result


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tool descriptions, a list or JSON text of one, in the form {"type": "function", "function": {...}}."""
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else []
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise BadRow(f"tools must be a list of objects, got {tools!r:.80}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or [])
