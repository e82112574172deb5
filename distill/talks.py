"""A conversation on its way: what has been said, what is still to be asked, and the tokens of both.

Shared by everything that lets a target answer (`respond.py`, `remote.py`): every assistant turn is written by the
target, those that the data came with included.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .formats import Message
from .prompts import Conversation
from .responses import Response, Spelling, TokenSequence, worse
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
    failed: int = 0
    """Conversations that a server gave no usable answer to (listed beside the output); the next run asks again."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Refused(ValueError):
    """A conversation cannot be asked at all; the message says why."""


@dataclass
class Talk:
    """One conversation. Begin it, then alternate `take` and `ask` until there is nothing left to ask."""

    source: Conversation
    waiting: list[list[Message]]
    """Questions not asked yet."""
    messages: list[Message]
    """What has been said, the question under way included."""
    prompt: list[int]
    """Ids that the answer under way continues."""
    transcript: Transcript = field(default_factory=Transcript)
    truncated: bool = False
    spelling: Spelling = "written"

    @classmethod
    def begin(cls, source: Conversation, template: ChatTemplate, context: int) -> Talk:
        """Set up the first question. Raises Refused if there is none or it does not fit `context` tokens."""
        waiting = questions(source.messages)
        if not waiting:
            raise Refused("plain text holds no question to answer")
        try:
            prompt = template.prompt(waiting[0], source.tools)
        except TemplateFault as fault:
            raise Refused(str(fault)) from fault
        if len(prompt) >= context:
            raise Refused(f"its prompt of {len(prompt)} tokens leaves no room in the target's context of {context}")
        return cls(source, waiting[1:], messages=waiting[0], prompt=prompt)

    def take(self, message: Message, tokens: list[int], *, truncated: bool, spelling: Spelling = "written") -> None:
        """The answer to the question under way, and its ids with the EOS, if it has one."""
        self.transcript.add(self.prompt, tokens)
        self.messages = [*self.messages, message]
        self.truncated |= truncated
        self.spelling = worse(self.spelling, spelling)

    def ask(self, template: ChatTemplate, context: int) -> bool:
        """Set up the next question; False if there is none or it no longer fits, which counts as truncated."""
        if not self.waiting:
            return False
        messages = self.messages + self.waiting.pop(0)
        try:
            prompt = template.prompt(messages, self.source.tools)
        except TemplateFault:
            self.truncated = True
            return False
        if len(prompt) >= context:
            self.truncated = True
            return False
        self.messages, self.prompt = messages, prompt
        return True

    def cut(self) -> bool:
        """Give up the question under way; False if there is no answer before it, and so nothing to keep."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.messages, self.truncated = self.messages[: asked[-1] + 1] if asked else [], True
        return bool(asked)

    def response(self) -> Response:
        source = self.source
        return Response(
            id=source.id,
            category=source.category,
            split=source.split,
            messages=self.messages,
            tools=list(source.tools),
            truncated=self.truncated,
            spelling=self.spelling,
            sequences=[TokenSequence(token_ids=ids, supervised=spans) for ids, spans in self.transcript.sequences],
        )


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


def conversation_seed(seed: int, id: str) -> int:
    """The sampling seed of one conversation: a function of the run's seed and its id, whatever else is in the run."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{id}".encode()).digest()[:7], "big")


def check_ids(conversations: Sequence[Conversation]) -> None:
    """Raises ValueError if an id occurs twice: a file could not be continued by id."""
    counts = Counter(conversation.id for conversation in conversations)
    if repeated := [id for id, count in counts.items() if count > 1]:
        raise ValueError(f"conversation ids must be distinct; {repeated[0]!r} occurs {counts[repeated[0]]} times.")


def account_for(rejected: list[tuple[str, str]], total: int, max_share: float, out: Path) -> None:
    """List what cannot be asked in `<out>.rejects.jsonl`; raises ValueError if it is more than `max_share`."""
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
