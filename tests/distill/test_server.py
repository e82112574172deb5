"""A question is asked until it is answered, as often and as gently as promised, over a real connection."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.distill.server import Client, Completion, PromptFault, Server, ServerFault, as_sent

from .chat_server import FAULTS, Answer, Body, ChatServer, completion

HELLO = [{"role": "user", "content": "hello"}]


def ask(server: ChatServer, messages: list[dict[str, Any]] = HELLO, **changes: Any) -> Completion:
    settings: dict[str, Any] = {"attempts": 12, "first_delay_s": 0.001, "timeout_s": 0.3} | changes

    async def once() -> Completion:
        async with Client(Server(server.url, "tiny", **settings)) as client:
            return await client.complete(messages, max_tokens=7)

    return asyncio.run(once())


def echo(body: Body) -> Answer:
    return completion(body["messages"][-1]["content"], usage=(3, 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_passes_by_itself_is_asked_again(fault: str) -> None:
    with ChatServer(echo, faults=[fault], share=0.5, seed=1, stall=0.5) as server:
        for number in range(4):
            found = ask(server, [{"role": "user", "content": f"n{number}"}])
            assert found.message == {"role": "assistant", "content": f"n{number}"}
        assert len(server.bodies) > 4, "some were asked again"
        repeated = {body["messages"][0]["content"] for body in server.bodies}
        assert repeated == {"n0", "n1", "n2", "n3"}


def test_the_answer_comes_with_what_the_server_says_of_its_tokens() -> None:
    with ChatServer(echo) as server:
        found = ask(server)
        assert (found.num_prompt_tokens, found.num_tokens, found.token_ids, found.is_cut) == (3, 2, None, False)
        server.speak = lambda body: completion("x", finish="length", choice={"token_ids": [4]}, prompt_token_ids=[1, 2])
        found = ask(server)
        assert (found.num_prompt_tokens, found.num_tokens) == (None, None)
        assert (found.prompt_ids, found.token_ids, found.is_cut) == ([1, 2], [4], True)


def test_it_gives_up_after_the_attempts_it_was_given_with_the_last_reason() -> None:
    with ChatServer(echo, faults=["status 503"], share=1.0) as server:
        with pytest.raises(PromptFault, match=r"status 503: .*not now.* \(the last of 4 attempts\)") as caught:
            ask(server, attempts=4)
        assert caught.value.is_passing
        assert len(server.bodies) == 4


@pytest.mark.parametrize(("status", "times"), [(400, 1), (413, 1), (422, 1), (408, 3), (429, 3), (502, 3)])
def test_only_what_may_pass_is_asked_again(status: int, times: int) -> None:
    with ChatServer(lambda body: (status, {"error": "no"})) as server:
        with pytest.raises(PromptFault, match=f"status {status}"):
            ask(server, attempts=3)
        assert len(server.bodies) == times


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_the_run_is_not_asked_again(status: int) -> None:
    with ChatServer(lambda body: (status, {"error": "who are you"})) as server:
        with pytest.raises(ServerFault, match=f"answers {status} for model 'tiny': .*who are you.* Check --server"):
            ask(server)
        assert len(server.bodies) == 1


def test_no_server_at_all_is_said_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        server = Server(f"http://127.0.0.1:{taken.getsockname()[1]}", "tiny", attempts=2, first_delay_s=0.001)

        async def once() -> Completion:
            async with Client(server) as client:
                return await client.complete(HELLO)

        with pytest.raises(PromptFault, match=r"ConnectError .*\(the last of 2 attempts\)") as caught:
            asyncio.run(once())
    assert caught.value.is_passing


def test_a_retry_after_is_kept_to() -> None:
    times: list[float] = []

    def busy_once(body: Body) -> Answer:
        times.append(time.monotonic())
        return echo(body) if len(times) > 1 else (429, {})

    with ChatServer(busy_once) as server:
        server.retry_after = "0.4"
        ask(server)
    assert times[1] - times[0] >= 0.4


def test_delays_double_up_to_a_minute_and_are_drawn_apart() -> None:
    client = Client(Server("http://localhost", "m", first_delay_s=0.5))
    for attempt, whole in enumerate([0.5, 1, 2, 4, 8, 16, 32, 60, 60]):
        delays = {client._delay(attempt) for _ in range(20)}
        assert len(delays) == 20
        assert whole / 2 <= min(delays) <= max(delays) <= whole


def test_a_prompt_too_long_for_the_server_says_so() -> None:
    said = {"error": {"message": "This model's maximum context length is 20 tokens."}}
    with ChatServer(lambda body: (400, said)) as server, pytest.raises(PromptFault) as caught:
        ask(server)
    assert caught.value.is_too_long
    assert not caught.value.is_passing


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (completion("x", finish="content_filter"), PromptFault, "ended with 'content_filter'"),
        (completion("x", choice={"message": {"content": "x", "reasoning_content": "hm"}}), ServerFault, "reasoning"),
        (
            completion("x", choice={"message": {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}}),
            PromptFault,
            "tool calls cannot be read",
        ),
    ],
    ids=["filtered", "reasoning", "calls"],
)
def test_an_answer_that_is_not_what_the_target_wrote_is_refused(
    answer: Answer, error: type[ValueError], message: str
) -> None:
    with ChatServer(lambda body: answer) as server:
        with pytest.raises(error, match=message):
            ask(server)
        assert len(server.bodies) == 1


def test_the_request_is_what_was_asked_for_and_the_key_goes_with_it() -> None:
    body = {"top_k": 3, "max_tokens": None, "max_completion_tokens": 9}
    with ChatServer(echo) as server:
        ask(server, body=body, api_key="secret")
        assert server.bodies[0] == {"model": "tiny", "messages": HELLO, "top_k": 3, "max_completion_tokens": 9}
        assert server.keys == ["Bearer secret"]
        ask(server)
        assert server.bodies[1]["max_tokens"] == 7
        assert server.keys[1] is None
    assert "secret" not in repr(Server("http://h", "m", "secret"))


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://host:8000", "http://host:8000/v1/chat/completions"),
        ("http://host:8000/", "http://host:8000/v1/chat/completions"),
        ("https://host/api/v1/", "https://host/api/v1/chat/completions"),
        ("http://host/v1/chat/completions", "http://host/v1/chat/completions"),
    ],
)
def test_an_address_is_taken_as_people_write_it(url: str, endpoint: str) -> None:
    assert Server(url, "m").endpoint == endpoint


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must look like http://localhost:8000/v1"):
        Server(url, "m")


def test_calls_are_sent_as_the_protocol_has_them_and_results_name_their_call() -> None:
    def call(a: int) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "add", "arguments": {"a": a}}}

    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call(3) | {"id": "own"}]},
        {"role": "tool", "content": "three"},
    ]
    sent = as_sent(messages)
    assert [made["id"] for made in sent[0]["tool_calls"]] == ["call_1", "call_2"]
    assert sent[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == ["call_1", "call_2", "own"]
    assert "id" not in messages[0]["tool_calls"][0], "what was given is left alone"


def test_calls_in_an_answer_are_read_as_our_formats_have_them(calling: Callable[[Body], Answer]) -> None:
    with ChatServer(calling) as server:
        message = ask(server).message
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert message["content"] == ""


@pytest.fixture
def calling() -> Callable[[Body], Answer]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return lambda body: completion("", finish="tool_calls", choice={"message": message}, usage=(3, 2))
