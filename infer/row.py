"""One request on its way: what it has read and written, when it ends, and why it may not begin."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from .penalties import TokenCounts
from .request import Finish, Output, Progress, Request
from .target import Target
from .text import TextStream


@dataclass(eq=False)
class Row:
    """A request that waits for a row of the batch or has one."""

    request: Request
    output: Output
    prompt: list[int]
    counts: TokenCounts | None
    """The text's tokens, for a request with penalties."""
    stream: TextStream | None
    """The answer's text, for a request with stop strings."""
    eos_ids: tuple[int, ...]
    length: int = 0
    """Tokens the target has read."""
    told: int = 0
    """Tokens of the answer that were told of."""

    @classmethod
    def open(cls, request: Request, target: Target) -> Row:
        """Raises ValueError if `target` cannot answer the request, saying why and what would help."""
        prompt = _token_ids(request, target.vocab_size)
        if request.max_new_tokens < 1:
            raise ValueError(f"{_name(request)}: max_new_tokens must be at least 1, got {request.max_new_tokens}.")
        try:
            target.check_room(prompt, request.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{_name(request)}: {error}") from error
        counts = TokenCounts(target.written(prompt)) if request.sampling.has_penalties else None
        stream = _text_stream(request, target) if len(request.stop) else None
        return cls(request, Output(request.id), prompt, counts, stream, target.eos_ids)

    @property
    def text(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.output.tokens

    def can_go_on(self, target: Target) -> bool:
        """Whether prompt and answer so far, read as one prompt, mean the same. An encoder-decoder target that wrote its own
        start token would take what stands before it for the source."""
        return [*target.written(self.text)] == [*target.written(self.prompt), *self.output.tokens]

    def append(self, tokens: Sequence[int], accepted: int) -> int:
        """Add tokens, the first `accepted` of them drafted, up to where the answer ends; returns how many were added."""
        output = self.output
        for count, token in enumerate(tokens):
            output.tokens.append(token)
            output.from_draft.append(count < accepted)
            if self.counts is not None:
                self.counts.add(token)
            if self.stream is not None:
                self.stream.feed(token)
            if token in self.eos_ids:
                self.end("eos")
            elif self.stream is not None and self.stream.is_stopped:
                self.end("stop")
            elif len(output.tokens) == self.request.max_new_tokens:
                self.end("length")
            if output.finish:
                return count + 1
        return len(tokens)

    def end(self, finish: Finish, error: str = "") -> None:
        """The answer is what it is now."""
        self.output.finish, self.output.error = finish, error
        if self.stream is not None:
            self.stream.finish()
            self.output.text = self.stream.text

    def news(self) -> Progress:
        """What has been added since it was last asked."""
        told, self.told = self.told, len(self.output.tokens)
        return Progress(self.output, self.told - told, bool(self.output.finish))

    def why_over(self, fault: str, *, rows: int) -> str:
        """What to tell the user when it has to end; fault: how memory ran out, "" after an interrupt; rows: how many were in use."""
        if not fault:
            return f"{_name(self.request)}: it was interrupted, and its answer holds what begins answers, so it cannot be read again."
        return (
            f"{_name(self.request)}: memory ran out with {len(self.text)} of its tokens and {rows} rows in use ({fault}). "
            "Use fewer rows, a shorter prompt or a lower max_new_tokens."
        )


def _name(request: Request) -> str:
    return f"request {request.id!r}"


def _token_ids(request: Request, vocab_size: int) -> list[int]:
    try:
        prompt = [operator.index(token) for token in request.prompt]
    except TypeError as error:
        raise ValueError(f"{_name(request)}: a prompt is a list of token ids, got {request.prompt!r:.80}.") from error
    if not prompt:
        raise ValueError(f"{_name(request)} has an empty prompt; give at least one token id.")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"{_name(request)}: token ids must lie in [0, {vocab_size}), got {wrong}.")
    return prompt


def _text_stream(request: Request, target: Target) -> TextStream:
    if isinstance(request.stop, str) or not all(isinstance(stop, str) and stop for stop in request.stop):
        raise ValueError(f"{_name(request)}: stop must be a list of non-empty strings, got {request.stop!r:.80}.")
    try:
        tokenizer = target.tokenizer
    except ValueError as error:
        raise ValueError(f"{_name(request)} has stop strings, which need a tokenizer: {error}") from error
    special = {stop for stop in request.stop if stop in tokenizer.all_special_tokens}
    unseen = [stop for stop in special if tokenizer.convert_tokens_to_ids(stop) not in target.eos_ids]
    if unseen:
        raise ValueError(
            f"{_name(request)}: {unseen[0]!r} is a special token, which the text does not show, so it would never stop there. "
            "Use a string of the text; tokens that end an answer are the target's (generation_config.eos_token_id)."
        )
    return TextStream(tokenizer, request.stop)
