"""Chat completions of any OpenAI-compatible server, asked many at a time and asked again when something goes wrong.

What passes by itself is tried again, with a delay that doubles and is drawn at random between half and the whole of
it, so that many clients do not come back at the same moment: no connection, a dropped one, a timeout, an answer that
is cut or no JSON, and the statuses 408, 409, 425, 429 and 5xx (a Retry-After is kept to). Everything else is final: of
one prompt (`PromptFault`), or of the whole run where the server refuses the key or does not know the model
(`ServerFault`).

    async with Client(Server("http://localhost:8000", "my-model")) as client:
        completion = await client.complete(messages, max_tokens=64)
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from .formats import BadRow, Message, parse

_PASSING = {408, 409, 425, 429, *range(500, 600)}
_OF_THE_RUN = {401, 403, 404}
_ENDS = {"stop": False, "length": True, "tool_calls": False, "function_call": False}
"""Finish reasons, and whether the answer was cut."""
_LONGEST_DELAY = 60.0


class PromptFault(ValueError):
    """A prompt gets no usable answer."""

    def __init__(self, message: str, *, is_too_long: bool = False, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_too_long, self.is_passing = is_too_long, is_passing
        """Whether the prompt outgrows the server's context; whether it might be answered another time."""


class ServerFault(ValueError):
    """No prompt will get an answer; nothing but the user can change that."""


class _Passing(Exception):
    """Something that may go right the next time, and the seconds that the server asks to wait."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class Server:
    """Where to ask, and how patiently."""

    url: str
    """`http://host:8000`, `.../v1` or `.../chat/completions`."""
    model: str
    """The name under which the server knows the model."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    concurrency: int = 64
    """Requests under way at the same time."""
    timeout_s: float = 600.0
    """Seconds to wait for an answer, the server's queue included."""
    attempts: int = 10
    """How often one question is asked before its prompt counts as failed; with the delays, over some two minutes."""
    first_delay_s: float = 0.5
    """The first delay; it doubles up to a minute."""
    body: dict[str, Any] = field(default_factory=dict)
    """Keys of the request to set, like chat_template_kwargs or return_token_ids; null leaves one out."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"the server's address must look like http://localhost:8000/v1, got {self.url!r}.")

    @property
    def endpoint(self) -> str:
        """The address of chat completions."""
        base = self.url.rstrip("/")
        if base.endswith("/chat/completions"):
            return base
        return f"{base}/chat/completions" if urlsplit(base).path else f"{base}/v1/chat/completions"


@dataclass(frozen=True)
class Completion:
    """One answer, and what the server says about its tokens (None where it says nothing)."""

    message: Message
    """role, content and, if there are any, tool_calls as `formats` has them."""
    is_cut: bool
    """The token limit ended it."""
    num_prompt_tokens: int | None
    num_tokens: int | None
    prompt_ids: list[int] | None
    """The ids that the target read (vLLM's `return_token_ids`)."""
    token_ids: list[int] | None
    """The ids that the target wrote."""


class Client:
    """Asks one server; an async context manager."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.retries = 0
        """Requests that were repeated."""
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        most = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
        timeout = httpx.Timeout(server.timeout_s, connect=min(10.0, server.timeout_s), pool=None)
        self._http = httpx.AsyncClient(headers=headers, limits=most, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def complete(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = (), **settings: Any
    ) -> Completion:
        """The answer to a conversation; `settings` are keys of the request. Raises PromptFault and ServerFault."""
        body: dict[str, Any] = {"model": self.server.model, "messages": as_sent(messages)} | settings
        if tools:
            body["tools"] = list(tools)
        body = {key: value for key, value in (body | self.server.body).items() if value is not None}
        for attempt in range(self.server.attempts):
            if attempt:
                self.retries += 1
            try:
                return await self._ask(body)
            except _Passing as fault:
                reason, wait = str(fault), fault.wait
            if attempt + 1 < self.server.attempts:
                await asyncio.sleep(max(wait, self._delay(attempt)))
        raise PromptFault(f"{reason} (the last of {self.server.attempts} attempts)", is_passing=True)

    async def _ask(self, body: dict[str, Any]) -> Completion:
        try:
            reply = await self._http.post(self.server.endpoint, json=body)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Passing(f"{type(error).__name__} {error}".strip()) from error
        status, said = reply.status_code, " ".join(reply.text[:300].split())
        if status == 200:
            return _read(reply)
        if status in _OF_THE_RUN:
            raise ServerFault(
                f"{self.server.endpoint} answers {status} for model {self.server.model!r}: {said}. Check --server, --model "
                "and --api-key-env."
            )
        if status in _PASSING:
            raise _Passing(f"status {status}: {said}", _retry_after(reply))
        too_long = "context length" in reply.text.lower() or "context_length" in reply.text
        raise PromptFault(f"status {status}: {said}", is_too_long=too_long)

    def _delay(self, attempt: int) -> float:
        whole = min(_LONGEST_DELAY, self.server.first_delay_s * 2.0**attempt)
        return whole * random.uniform(0.5, 1.0)


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the protocol has them: arguments of calls are JSON text, calls have ids, and results name theirs."""
    sent, open_calls, number = [], list[str](), 0
    for message in messages:
        copy = dict(message)
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = []
            for call in calls:
                number += 1
                function = call["function"]
                text = json.dumps(function["arguments"], ensure_ascii=False)
                id = call.get("id") or f"call_{number}"
                open_calls.append(id)
                copy["tool_calls"].append(
                    {"id": id, "type": "function", "function": {"name": function["name"], "arguments": text}}
                )
        if message["role"] == "tool":
            copy.setdefault("tool_call_id", open_calls[0] if open_calls else "call_0")
            open_calls = [id for id in open_calls if id != copy["tool_call_id"]]
        sent.append(copy)
    return sent


def _read(reply: httpx.Response) -> Completion:
    try:
        content = reply.json()
        choice = content["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        usage = content.get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Passing(f"no chat completion ({type(error).__name__}: {error}): {reply.text[:200]!r}") from error
    if message.get("reasoning_content") or message.get("reasoning"):
        raise ServerFault(
            "the server takes the reasoning out of the answers, so what the target wrote is not known. Start it without "
            "a reasoning parser."
        )
    if finish not in _ENDS:
        raise PromptFault(f"the answer ended with {finish!r}, expected one of {', '.join(_ENDS)}")
    return Completion(
        message=_message(message),
        is_cut=_ENDS[finish],
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_tokens=usage.get("completion_tokens"),
        prompt_ids=content.get("prompt_token_ids"),
        token_ids=choice.get("token_ids"),
    )


def _message(found: dict[str, Any]) -> Message:
    if not found.get("tool_calls"):
        return {"role": "assistant", "content": found.get("content") or ""}
    asked = {"role": "user", "content": "-"}
    answer = {"role": "assistant", "content": found.get("content"), "tool_calls": found["tool_calls"]}
    try:
        return parse({"messages": [asked, answer]}, "messages").messages[1]
    except BadRow as error:
        raise PromptFault(f"the answer's tool calls cannot be read: {error}") from error


def _retry_after(reply: httpx.Response) -> float:
    """Seconds that the server asks to wait, at most a minute; a date instead of seconds is not looked at."""
    try:
        return min(_LONGEST_DELAY, max(0.0, float(reply.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0
