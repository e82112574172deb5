"""A real HTTP server with the chat completions of the OpenAI protocol, which fails, stalls and drops when it is told to.

What it says is a function of the request (`Words`, or the tiny target itself in `Decoder`), so that any client that
asks often enough must end with the same answers.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from draftsmith.distill.template import ChatTemplate
from draftsmith.infer.decode import Engine
from draftsmith.infer.request import Output, Request
from draftsmith.infer.target import Target

Body = dict[str, Any]
Answer = tuple[int, Body]
"""Status and content."""

FAULTS = ("status 500", "status 429", "status 503", "stall", "drop", "half", "garbage", "nothing")


def completion(text: str, *, finish: str = "stop", usage: tuple[int, int] | None = None, **more: Any) -> Answer:
    """A whole answer: usage is the numbers of prompt and answer tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    counts = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return 200, {"id": "x", "object": "chat.completion", "choices": [choice | more.pop("choice", {})]} | counts | more


class Words:
    """Some words that follow from the messages alone, with true counts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.template = tokenizer, ChatTemplate(tokenizer, (2,))

    def __call__(self, body: Body) -> Answer:
        digest = hashlib.sha256(json.dumps(body["messages"], sort_keys=True).encode()).hexdigest()
        text = " ".join(digest[place : place + 3] for place in range(0, 3 + int(digest[0], 16), 3))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return completion(text, usage=(len(self.template.prompt(body["messages"])), len(ids) + 1))


class Decoder:
    """The target itself, greedy, one request at a time; counts and, when asked for, ids are its own. What it was asked
    before it remembers."""

    def __init__(self, target: Target) -> None:
        self.target, self.template, self.lock = target, ChatTemplate(target.tokenizer, target.eos_ids), threading.Lock()
        self.known: dict[tuple[int, ...], Output] = {}

    def __call__(self, body: Body) -> Answer:
        prompt = self.template.prompt(body["messages"])
        with self.lock:
            output = self.known.get(tuple(prompt))
            if output is None:
                engine = Engine(self.target, rows=1)
                engine.add(Request("x", prompt, body["max_tokens"]))
                (output,) = engine.run()
                self.known[tuple(prompt)] = output
        text = self.target.tokenizer.decode(output.tokens, skip_special_tokens=True)
        finish = "length" if output.finish == "length" else "stop"
        found = completion(text, finish=finish, usage=(len(prompt), len(output.tokens)))
        if body.get("return_token_ids"):
            found[1]["prompt_token_ids"] = prompt
            found[1]["choices"][0]["token_ids"] = output.tokens
        return found


class ChatServer(ThreadingHTTPServer):
    """`with ChatServer(speak) as server:` and `server.url`."""

    daemon_threads = True

    def __init__(
        self,
        speak: Callable[[Body], Answer],
        *,
        faults: Sequence[str] = (),
        share: float = 0.0,
        seed: int = 0,
        stall: float = 1.0,
    ) -> None:
        """share: how many requests meet one of `faults`, drawn with `seed`. stall: seconds that a stalled one takes."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.speak, self.faults, self.share, self.stall = speak, faults, share, stall
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.retry_after: str | None = None
        """Sent with every status but 200."""
        self._draw, self._lock, self._under_way = random.Random(seed), threading.Lock(), 0

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def begin(self, body: Body, key: str | None) -> str | None:
        """Count a request in; the fault it meets, or None."""
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            return self._draw.choice(self.faults) if self._draw.random() < self.share else None

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions", self.path
        fault = self.server.begin(body, self.headers.get("Authorization"))
        try:
            self._answer(body, fault)
        finally:
            self.server.end()

    def _answer(self, body: Body, fault: str | None) -> None:
        if fault == "drop":
            self._hang_up()
            return
        if fault == "stall":
            time.sleep(self.server.stall)
        if fault is not None and fault.startswith("status"):
            self._send(int(fault.split()[1]), b'{"error": {"message": "not now"}}')
            return
        if fault in ("garbage", "nothing"):
            self._send(200, b"<html>" if fault == "garbage" else b"{}")
            return
        status, content = self.server.speak(body)
        self._send(status, json.dumps(content).encode(), is_half=fault == "half")

    def _send(self, status: int, payload: bytes, *, is_half: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if self.server.retry_after is not None and status != 200:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(payload[: len(payload) // 2] if is_half else payload)
        if is_half:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
