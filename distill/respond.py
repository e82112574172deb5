"""The target answers its own prompts: self-distillation data, to the token what decoding will read and write.

The next turn of a conversation joins the running batch when its answer is done. Finished conversations are appended
one by one (`responses.py`), so a killed run continues by id and loses nothing but unfinished ones. A target too large
for this machine answers through a server instead (`remote.py`).

    draftsmith respond --target smollm2-135m --out responses.jsonl
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from ..infer.decode import Engine
from ..infer.drafter import Drafter
from ..infer.request import Output, Request
from ..infer.sampling import SamplingParams
from ..infer.target import Target
from .prompts import Conversation
from .responses import Manifest, append, open_to_append
from .talks import Refused, RespondReport, Talk, account_for, check_ids, conversation_seed
from .template import ChatTemplate


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
    check_ids(conversations)
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
        account_for(rejected, len(conversations), max_bad_share, out)
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


class _Run:
    """Feeds the engine with one question per conversation at a time and takes the answers in."""

    def __init__(self, target: Target, template: ChatTemplate, sampling: SamplingParams, max_new_tokens: int) -> None:
        self.target, self.template, self.sampling, self.max_new_tokens = target, template, sampling, max_new_tokens
        self.tokens = 0

    def answer(self, talks: list[Talk], engine: Engine) -> Iterator[tuple[Talk, bool]]:
        """Yield a conversation after each of its answers, and whether it is finished: most turns first, then by length.

        Only twice the engine's rows are under way at a time, so a next turn does not queue behind every other
        conversation's first, and a kill loses little.
        """
        waiting = iter(sorted(talks, key=lambda talk: (-len(talk.waiting), len(talk.prompt))))
        active: dict[str, Talk] = {}
        for talk in itertools.islice(waiting, 2 * engine.max_rows):
            self._start(talk, active, engine)
        for output in engine.run():
            talk = active.pop(output.id)
            self._take(talk, output.checked())
            if talk.ask(self.template, self.target.max_length):
                self._start(talk, active, engine)
                yield talk, False
                continue
            yield talk, True
            for following in itertools.islice(waiting, 1):
                self._start(following, active, engine)

    def _start(self, talk: Talk, active: dict[str, Talk], engine: Engine) -> None:
        active[talk.source.id] = talk
        engine.add(self._request(talk))

    def _request(self, talk: Talk) -> Request:
        room = self.target.max_length - len(talk.prompt)
        seed = conversation_seed(self.sampling.seed, talk.source.id)
        return Request(talk.source.id, talk.prompt, min(self.max_new_tokens, room), replace(self.sampling, seed=seed))

    def _take(self, talk: Talk, output: Output) -> None:
        self.tokens += len(output.tokens)
        content = self.target.tokenizer.decode(output.tokens, skip_special_tokens=True)
        talk.take({"role": "assistant", "content": content}, output.tokens, truncated=output.finish == "length")


def _first_prompts(
    conversations: Sequence[Conversation], template: ChatTemplate, context: int
) -> tuple[list[Talk], list[tuple[str, str]]]:
    """Conversations with their first prompt, and (id, reason) of those that cannot be asked."""
    talks, rejected = [], []
    for source in conversations:
        try:
            talks.append(Talk.begin(source, template, context))
        except Refused as refusal:
            rejected.append((source.id, str(refusal)))
    return talks, rejected
