"""The five-line front of the engine: one target, one drafter, text in, text out.

from draftsmith.heads import load_drafter
from draftsmith.infer import SpeculativeDecoder, Target

target = Target.load("smollm2-135m", dtype="auto")
decoder = SpeculativeDecoder(target, load_drafter("runs/demo/train/drafter", target))
print(decoder.generate("Why is the sky blue?").text)

Many at a time, joining and leaving as they like:

decoder = SpeculativeDecoder(target, drafter, rows=8)
decoder.add("sky", "Why is the sky blue?", max_new_tokens=64, stop=["\\n\\n"])
decoder.add("dice", "Name a number.", sampling=SamplingParams(temperature=0.8, min_p=0.1, seed=1))
for update in decoder.updates():  # add and cancel may be called here
    print(update.id, update.text)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from .decode import Engine
from .drafter import Drafter
from .request import Finish, Progress, Request, Stats
from .sampling import SamplingParams
from .tapes import weights_of
from .target import Target
from .text import TextStream
from .verifiers import verifier_named

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""A user message, token ids, or chat messages of role and content."""


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    """Without special tokens, and up to the stop string where one ended it."""
    tokens: list[int]
    """The EOS, or the token that completed the stop string, included."""
    finish: Finish
    """'eos', 'stop', 'length', 'cancelled' or 'error'."""
    stats: Stats
    error: str = ""
    """What went wrong, where finish is 'error'."""


@dataclass(frozen=True)
class Update:
    """What one step added to one answer."""

    id: str
    text: str
    """New text, never taken back; may be empty, since half a character, or what may begin a stop string, is held."""
    tokens: list[int]
    """New token ids."""
    answer: Answer | None
    """The whole answer, once it is finished."""


class SpeculativeDecoder:
    """Decodes with a drafter; the text is the target's own, whatever the drafter is.

    A call reads on from what calls before it have read, so the next turn of a conversation costs its new text, as long as the
    weights stay what they are (changes through `.data` are not noticed: call `forget`).

    rows: requests decoded at the same time. verifier: a name of verifiers.py; "sample-match" gives with one seed the very
    text of plain decoding, "typical" is LOSSY, and the others give text of the same distribution.

    Of the settings of a request, `sampling` is greedy if absent, and `stop` lists strings that end the answer.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, rows: int = 1, verifier: str = "sample-match"
    ) -> None:
        self.target, self.drafter, self.rows = target, drafter, rows
        self._verify = verifier_named(verifier).verify
        self._idle: list[_Session] = []
        self._known = self._weights()
        self._shared = self._new_session()

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """One answer. Raises ValueError if the request cannot be answered, with the reason."""
        (answer,) = self.generate_batch([prompt], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
        if answer.finish == "error":
            raise ValueError(answer.error)
        return answer

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> list[Answer]:
        """Answers in the order of the prompts; one that failed says why in its `error`, and the others are whole."""
        with self._session() as session:
            for index, prompt in enumerate(prompts):
                session.add(self._request(str(index), prompt, max_new_tokens, sampling, stop))
            answers = {update.id: update.answer for update in session.updates() if update.answer is not None}
        return [answers[str(index)] for index in range(len(prompts))]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Pieces of text as they become certain; leaving the loop cancels the rest. Raises ValueError as `generate`."""
        with self._session() as session:
            session.add(self._request("0", prompt, max_new_tokens, sampling, stop))
            for update in session.updates():
                if update.answer is not None and update.answer.finish == "error":
                    raise ValueError(update.answer.error)
                if update.text:
                    yield update.text

    def add(
        self,
        id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """Queue a request for `updates`. Raises ValueError if its id is in use; other faults come as its answer."""
        self._shared.add(self._request(id, prompt, max_new_tokens, sampling, stop))

    def updates(self) -> Iterator[Update]:
        """Decode what was added until nothing is left, yielding what every step added to every answer."""
        return self._shared.updates()

    def cancel(self, id: str) -> bool:
        """End a request that was added; its answer so far is its last update. False if it is finished or unknown."""
        return self._shared.engine.cancel(id)

    def forget(self) -> None:
        """Read nothing on from earlier calls and requests."""
        self._idle = []
        self._shared.engine.forget()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text and messages go through the target's chat template, or are an encoder's source."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if not messages:
            try:
                return [operator.index(part) for part in prompt if not isinstance(part, Mapping)]
            except TypeError as error:
                raise ValueError(
                    f"a prompt is a text, token ids, or messages of role and content; got {prompt!r:.80}."
                ) from error
        if len(messages) < len(prompt):
            raise ValueError(f"a prompt is either token ids or messages, not both; got {prompt!r:.80}.")
        return self.target.encode(messages)

    def _request(
        self, id: str, prompt: Prompt, limit: int, sampling: SamplingParams | None, stop: Sequence[str]
    ) -> Request:
        return Request(id, self.encode(prompt), limit, sampling or SamplingParams(), stop)

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        """One that nobody else uses now, with what earlier calls have read; what was interrupted is not used again."""
        weights = self._weights()
        if weights != self._known:  # what was computed and recorded with others is of no use
            self._known, self._idle = weights, []
        try:
            session = self._idle.pop()
        except IndexError:
            session = self._new_session()
        yield session
        if weights == self._known:
            self._idle.append(session)

    def _weights(self) -> tuple[object, ...]:
        """Of the target and of a drafter that has some: equal as long as they are the same numbers in the same places."""
        modules = [part for part in (self.target.model, self.drafter) if isinstance(part, nn.Module)]
        versions = [0 if each.is_inference() else each._version for part in modules for each in part.parameters()]
        return (*map(weights_of, modules), *versions)

    def _new_session(self) -> _Session:
        return _Session(Engine(self.target, drafter=self.drafter, rows=self.rows, verifier=self._verify))


class _Session:
    """An engine and the text of each of its answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tokenizer = engine.target.tokenizer
        self._texts: dict[str, TextStream] = {}

    def add(self, request: Request) -> None:
        self.engine.add(request)
        self._texts[request.id] = TextStream(self._tokenizer, request.stop)

    def updates(self) -> Iterator[Update]:
        return map(self._update, self.engine.stream())

    def _update(self, progress: Progress) -> Update:
        output = progress.output
        text, known = self._texts[output.id], len(output.tokens) - progress.new_tokens
        pieces = [piece for token in output.tokens[known:] for piece in text.feed(token)]
        answer = None
        if progress.is_last:
            pieces += text.finish()
            answer = Answer(text.text, output.tokens, output.finish, output.stats, output.error)
            del self._texts[output.id]
        return Update(output.id, "".join(piece.text for piece in pieces), output.tokens[known:], answer)
