"""The target answers its own prompts: self-distillation data, to the token what decoding will read and write.

Every assistant turn is written by the target, those that the data came with included; the next turn of a conversation
joins the running batch when its answer is done. Finished conversations are appended one by one (`responses.py`), so a
killed run continues by id and loses nothing but unfinished ones.

    draftsmith respond --target smollm2-135m --out responses.jsonl
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from ..infer.decode import Engine
from ..infer.drafter import Drafter
from ..infer.request import Output, Request
from ..infer.sampling import SamplingParams
from ..infer.target import Target
from .formats import Message
from .prompts import Conversation
from .responses import Manifest, Response, TokenSequence, append, open_to_append
from .template import ChatTemplate, TemplateFault, Transcript


@dataclass(frozen=True)
class RespondReport:
    """What a run did; `tokens` and `seconds` are of this run alone."""

    path: Path
    answered: int
    """Conversations written by this run."""
    resumed: int
    """Conversations that an earlier run had written."""
    rejected: int
    """Conversations whose first prompt does not fit the context or the chat template (listed beside the output)."""
    truncated: int
    """Of those answered: some answer or the conversation was cut."""
    tokens: int
    """New tokens of finished conversations."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Talk:
    """A conversation on its way."""

    source: Conversation
    waiting: list[list[Message]]
    """Questions not asked yet."""
    messages: list[Message]
    """What has been said, the question under way included."""
    transcript: Transcript = field(default_factory=Transcript)
    prompt: list[int] = field(default_factory=list)
    truncated: bool = False

    def response(self) -> Response:
        source = self.source
        return Response(
            id=source.id,
            category=source.category,
            split=source.split,
            messages=self.messages,
            tools=list(source.tools),
            truncated=self.truncated,
            sequences=[TokenSequence(token_ids=ids, supervised=spans) for ids, spans in self.transcript.sequences],
        )


def respond(
    target: Target,
    conversations: Sequence[Conversation],
    out: Path,
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    rows: int = 32,
    drafter: Drafter | None = None,
    progress: bool = True,
    max_bad_share: float = 0.01,
) -> RespondReport:
    """Let the target answer every conversation that `out` does not hold yet, appending each as it is finished.

    A drafter makes it faster and changes no text. An answer gets fewer than `max_new_tokens` where the context ends
    first, and is marked truncated. Raises ValueError if `out` was made under other settings, if an id occurs twice,
    and if more than `max_bad_share` of the conversations cannot be asked (naming the first).
    """
    _check_ids(conversations)
    manifest = Manifest(
        target=target.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        template_hash=target.template_hash,
        sampling=asdict(sampling),
        max_new_tokens=max_new_tokens,
    )
    template = ChatTemplate(target.tokenizer, target.eos_ids)
    with open_to_append(out, manifest) as (file, done):
        todo = [conversation for conversation in conversations if conversation.id not in done]
        resumed = len(conversations) - len(todo)
        talks, rejected = _first_prompts(todo, template, target.max_length)
        _account_for(rejected, len(conversations), max_bad_share, out)
        run = _Run(target, template, sampling, max_new_tokens)
        start, answered, truncated = time.perf_counter(), 0, 0
        turns = sum(1 + len(talk.waiting) for talk in talks)
        with tqdm(total=turns, unit="answer", disable=not progress, desc="respond") as bar:
            for talk, is_finished in run.answer(talks, Engine(target, drafter=drafter, rows=rows)):
                if is_finished:
                    append(file, talk.response())
                    answered, truncated = answered + 1, truncated + talk.truncated
                rate = run.tokens / (time.perf_counter() - start)
                bar.set_postfix_str(
                    f"{rate:.0f} tokens/s, {resumed + answered}/{len(conversations)} conversations kept"
                )
                bar.update()
        seconds = time.perf_counter() - start
    return RespondReport(out, answered, resumed, len(rejected), truncated, run.tokens, seconds)


def conversation_seed(seed: int, id: str) -> int:
    """The sampling seed of one conversation: a function of the run's seed and its id, whatever else is in the run."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{id}".encode()).digest()[:7], "big")


def questions(messages: Sequence[Message]) -> list[list[Message]]:
    """What each answer reads first: messages up to every user turn, or tool result, that an answer follows.

    user, user -> two questions (turns without answers); user, gpt, tool, gpt -> two; answers themselves are left out.
    """
    groups: list[list[Message]] = [[]]
    for message, after in zip(messages, [*(later["role"] for later in messages[1:]), "end"]):
        if message["role"] == "assistant":
            continue
        groups[-1].append(message)
        is_asked = after in ("assistant", "end") or (message["role"] == "user" and after != "tool")
        if is_asked and message["role"] != "system":
            groups.append([])
    return [group for group in groups if group]


class _Run:
    """Feeds the engine with one question per conversation at a time and takes the answers in."""

    def __init__(self, target: Target, template: ChatTemplate, sampling: SamplingParams, max_new_tokens: int) -> None:
        self.target, self.template, self.sampling, self.max_new_tokens = target, template, sampling, max_new_tokens
        self.tokens = 0

    def answer(self, talks: list[_Talk], engine: Engine) -> Iterator[tuple[_Talk, bool]]:
        """Yield a conversation after each of its answers, and whether it is finished: most turns first, then by length.

        Only twice the engine's rows are under way at a time, so a next turn does not queue behind every other
        conversation's first, and a kill loses little.
        """
        waiting = iter(sorted(talks, key=lambda talk: (-len(talk.waiting), len(talk.prompt))))
        active: dict[str, _Talk] = {}
        for talk in itertools.islice(waiting, 2 * engine.max_rows):
            self._start(talk, active, engine)
        for output in engine.run():
            talk = active.pop(output.id)
            self._take(talk, output)
            if self._ask(talk):
                self._start(talk, active, engine)
                yield talk, False
                continue
            yield talk, True
            for following in itertools.islice(waiting, 1):
                self._start(following, active, engine)

    def _start(self, talk: _Talk, active: dict[str, _Talk], engine: Engine) -> None:
        active[talk.source.id] = talk
        engine.add(self._request(talk))

    def _request(self, talk: _Talk) -> Request:
        room = self.target.max_length - len(talk.prompt)
        seed = conversation_seed(self.sampling.seed, talk.source.id)
        return Request(talk.source.id, talk.prompt, min(self.max_new_tokens, room), replace(self.sampling, seed=seed))

    def _take(self, talk: _Talk, output: Output) -> None:
        self.tokens += len(output.tokens)
        talk.transcript.add(talk.prompt, output.tokens)
        content = self.target.tokenizer.decode(output.tokens, skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": content})
        talk.truncated |= output.finish == "length"

    def _ask(self, talk: _Talk) -> bool:
        """Set up the next question; False if there is none or it no longer fits, which counts as truncated."""
        if not talk.waiting:
            return False
        messages = talk.messages + talk.waiting.pop(0)
        try:
            talk.prompt = self.template.prompt(messages, talk.source.tools)
        except TemplateFault:
            talk.truncated = True
            return False
        if len(talk.prompt) >= self.target.max_length:
            talk.truncated = True
            return False
        talk.messages = messages
        return True


def _first_prompts(
    conversations: Sequence[Conversation], template: ChatTemplate, context: int
) -> tuple[list[_Talk], list[tuple[str, str]]]:
    """Conversations with their first prompt, and (id, reason) of those that cannot be asked."""
    talks, rejected = [], []
    for source in conversations:
        waiting = questions(source.messages)
        if not waiting:
            rejected.append((source.id, "plain text holds no question to answer"))
            continue
        talk = _Talk(source, waiting[1:], messages=waiting[0])
        try:
            talk.prompt = template.prompt(talk.messages, source.tools)
        except TemplateFault as fault:
            rejected.append((source.id, str(fault)))
            continue
        if len(talk.prompt) >= context:
            rejected.append(
                (
                    source.id,
                    f"its prompt of {len(talk.prompt)} tokens leaves no room in the target's context of {context}",
                )
            )
        else:
            talks.append(talk)
    return talks, rejected


def _check_ids(conversations: Sequence[Conversation]) -> None:
    counts = Counter(conversation.id for conversation in conversations)
    if repeated := [id for id, count in counts.items() if count > 1]:
        raise ValueError(f"conversation ids must be distinct; {repeated[0]!r} occurs {counts[repeated[0]]} times.")


def _account_for(rejected: list[tuple[str, str]], total: int, max_share: float, out: Path) -> None:
    """List what cannot be asked in `<out>.rejects.jsonl`; raise if it is too much."""
    if not rejected:
        return
    listing = out.with_suffix(".rejects.jsonl")
    scratch = listing.with_name(listing.name + ".tmp")
    scratch.write_text(
        "".join(json.dumps({"id": id, "reason": reason}) + "\n" for id, reason in rejected), encoding="utf-8"
    )
    os.replace(scratch, listing)
    id, reason = rejected[0]
    summary = (
        f"{len(rejected)} of {total} conversations cannot be answered, the first is {id!r}: {reason}. See {listing}"
    )
    if len(rejected) > max_share * total:
        raise ValueError(f"{summary}. At most {max_share:.1%} may be; shorten or remove them.")
    print(f"respond: {summary}", file=sys.stderr)
