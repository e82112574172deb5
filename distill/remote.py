"""The target answers through an OpenAI-compatible server: for targets that do not fit here, on any number of machines.

Same questions, same file and same continuation by id as `respond.py`. Each worker takes one conversation at a time and
asks its turns in order; a conversation is appended when it is finished, so a kill loses nothing but those under way. A
prompt that gets no answer is listed in <out>.failures.jsonl with the reason, and asked again by the next run.

    draftsmith respond --server http://localhost:8000 --model NAME --out responses.jsonl
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from ..infer.sampling import SamplingParams
from .prompts import Conversation
from .responses import Manifest, Spelling, append, open_to_append
from .served import ServedTarget
from .server import Client, PromptFault, Server, ServerFault
from .talks import Refused, RespondReport, Talk, account_for, check_ids, conversation_seed
from .template import template_hash

_SHOWN = 5
"""Failures named at the end; all are in the list."""
_FEWEST_IN_A_ROW = 3
"""Prompts given up one after the other, at least, before the server counts as gone."""


def respond_through(
    server: Server,
    target: ServedTarget,
    conversations: Sequence[Conversation],
    out: Path,
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    progress: bool = True,
    max_bad_share: float = 0.01,
) -> RespondReport:
    """Have every conversation answered that `out` does not hold yet, appending each as it is finished.

    Raises ValueError as `respond.respond` does; also, with every finished answer kept, if the server refuses the run as
    a whole, if it stops answering, and if more than `max_bad_share` of the conversations got no answer.
    """
    check_ids(conversations)
    manifest = Manifest(
        target=target.fingerprint(server.model),
        dtype="served",
        template_hash=template_hash(target.tokenizer),
        sampling=asdict(sampling),
        max_new_tokens=max_new_tokens,
        request=server.body,
    )
    with open_to_append(out, manifest) as (file, done):
        todo = [conversation for conversation in conversations if conversation.id not in done]
        resumed = len(conversations) - len(todo)
        with tqdm(total=len(conversations), initial=resumed, unit="talk", disable=not progress, desc="respond") as bar:
            run = _Run(server, target, sampling, max_new_tokens, file, bar, Failures(out))
            asyncio.run(run.answer(todo))
    run.say_spelling()
    account_for(run.rejected, len(conversations), max_bad_share, out)
    run.failures.account(len(conversations), max_bad_share)
    return RespondReport(
        out,
        run.answered,
        resumed,
        len(run.rejected),
        run.truncated,
        run.tokens,
        run.seconds,
        failed=len(run.failures.found),
    )


class Failures:
    """Prompts without an answer, as far as this run has come; the list is for the user alone."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_suffix(".failures.jsonl")
        self.path.unlink(missing_ok=True)  # those in it are asked again now
        self.found: list[tuple[str, str]] = []

    def add(self, id: str, reason: str) -> None:
        self.found.append((id, reason))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": id, "reason": reason}) + "\n")

    def account(self, total: int, max_share: float) -> None:
        """Name the first few; raises ValueError if they are more than `max_share` of all conversations."""
        if not self.found:
            return
        first = "; ".join(f"{id!r}: {reason}" for id, reason in self.found[:_SHOWN])
        summary = (
            f"{len(self.found)} of {total} conversations got no answer, the first: {first}. All are in {self.path}; the "
            "same command asks them again"
        )
        if len(self.found) > max_share * total:
            raise ValueError(f"{summary}. Every other answer is kept.")
        print(f"respond: {summary}", file=sys.stderr)


class _Run:
    """Workers that share what is to be asked, and what they have found so far."""

    def __init__(
        self,
        server: Server,
        target: ServedTarget,
        sampling: SamplingParams,
        max_new_tokens: int,
        file: BinaryIO,
        bar: tqdm[Any],
        failures: Failures,
    ) -> None:
        self.server, self.target, self.sampling, self.max_new_tokens = server, target, sampling, max_new_tokens
        self.file, self.bar, self.failures = file, bar, failures
        self.rejected: list[tuple[str, str]] = []
        self.spelled: dict[Spelling, list[str]] = {}
        self.answered = self.truncated = self.tokens = 0
        self.seconds = 0.0
        self.given_up = 0
        """Prompts given up since the server last answered."""

    async def answer(self, todo: Sequence[Conversation]) -> None:
        """Until every conversation is kept, rejected or failed. Raises ServerFault."""
        waiting, began = iter(todo), time.perf_counter()
        async with Client(self.server) as client:
            workers = [
                asyncio.create_task(self._work(waiting, client, began))
                for _ in range(min(self.server.concurrency, len(todo)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self.seconds = time.perf_counter() - began

    async def _work(self, waiting: Iterator[Conversation], client: Client, began: float) -> None:
        for source in waiting:
            talk = await self._talk(source, client)
            if talk is not None:
                append(self.file, talk.response())
                self.answered, self.truncated = self.answered + 1, self.truncated + talk.truncated
                self.spelled.setdefault(talk.spelling, []).append(source.id)
            rate = self.tokens / (time.perf_counter() - began)
            self.bar.set_postfix_str(
                f"{rate:.0f} tokens/s, {self.answered} answered, {client.retries} retries, {len(self.failures.found)} failed"
            )
            self.bar.update()

    async def _talk(self, source: Conversation, client: Client) -> Talk | None:
        """The finished conversation; None if it was rejected or failed."""
        template, context = self.target.template, self.target.max_length
        try:
            talk = Talk.begin(source, template, context)
        except Refused as refusal:
            self.rejected.append((source.id, str(refusal)))
            return None
        try:
            is_asked = True
            while is_asked:
                await self._turn(talk, client)
                is_asked = talk.ask(template, context)
        except PromptFault as fault:
            if fault.is_too_long and talk.cut():
                return talk
            self.failures.add(source.id, str(fault))
            self._count_given_up(fault)
            return None
        return talk

    async def _turn(self, talk: Talk, client: Client) -> None:
        messages, tools = self.target.template.as_read(talk.messages, talk.source.tools)
        room = min(self.max_new_tokens, self.target.max_length - len(talk.prompt))
        settings = request_settings(self.sampling, talk.source.id)
        answer = await client.complete(messages, tools=tools, max_tokens=room, **settings)
        self.given_up = 0
        ids, spelling = self.target.spell(talk, answer)
        self.tokens += len(ids)
        talk.take(answer.message, ids, truncated=answer.is_cut, spelling=spelling)

    def _count_given_up(self, fault: PromptFault) -> None:
        """Stop where the server is gone, and do not have every prompt wait its time for nothing."""
        self.given_up += fault.is_passing
        if self.given_up >= max(_FEWEST_IN_A_ROW, self.server.concurrency):
            raise ServerFault(
                f"{self.server.endpoint} has answered none of the last {self.given_up} prompts, the last: {fault}. Every "
                "answer before is kept; the same command goes on from there."
            )

    def say_spelling(self) -> None:
        """Where the ids are not known to be those that the target wrote."""
        meanings: dict[Spelling, str] = {
            "differs": "have ids that are not the target's own: the server counts other tokens in a prompt or an answer",
            "unknown": "have ids that could not be compared: the server does not say how many tokens it read and wrote",
        }
        for spelling, meaning in meanings.items():
            if ids := self.spelled.get(spelling):
                print(
                    f"respond: {len(ids)} of {self.answered} conversations {meaning} (the first is {ids[0]!r})",
                    file=sys.stderr,
                )


def request_settings(sampling: SamplingParams, id: str) -> dict[str, Any]:
    """Sampling as the protocol has it; every conversation has its own seed, as with our engine."""
    if sampling.temperature == 0:
        return {"temperature": 0}
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": conversation_seed(sampling.seed, id) % 2**31,  # some servers take no more
    }
    return settings | ({"top_k": sampling.top_k} if sampling.top_k else {})
