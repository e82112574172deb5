"""The five-line front of the engine: one target, one drafter, text in, text out.

from draftsmith.heads import load_drafter
from draftsmith.infer import SpeculativeDecoder, Target

target = Target.load("smollm2-135m", dtype="bfloat16")
decoder = SpeculativeDecoder(target, load_drafter("runs/demo/drafter", target))
print(decoder.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .decode import Engine
from .drafter import Drafter
from .request import Output, Request, Stats
from .sampling import SamplingParams
from .target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""A user message, token ids, or chat messages of role and content."""


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: list[int]
    finish: str
    stats: Stats


class SpeculativeDecoder:
    """Decodes with a drafter; the text is the target's own, whatever the drafter is."""

    def __init__(self, target: Target, drafter: Drafter | None = None, *, rows: int = 1) -> None:
        self.target, self.drafter, self.rows = target, drafter, rows

    def generate(self, prompt: Prompt, *, max_new_tokens: int = 256, sampling: SamplingParams | None = None) -> Answer:
        """One answer. Greedy unless `sampling` says otherwise."""
        return self.generate_batch([prompt], max_new_tokens=max_new_tokens, sampling=sampling)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int = 256, sampling: SamplingParams | None = None
    ) -> list[Answer]:
        """Answers in the order of the prompts, `rows` of them decoded at a time."""
        engine = Engine(self.target, drafter=self.drafter, rows=self.rows)
        for index, prompt in enumerate(prompts):
            engine.add(self._request(str(index), prompt, max_new_tokens, sampling))
        outputs = {output.id: output for output in engine.run()}
        return [self._answer(outputs[str(index)]) for index in range(len(prompts))]

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 256, sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """Pieces of text as they become certain; a piece never ends inside a multi-byte character."""
        engine = Engine(self.target, drafter=self.drafter, rows=1)
        engine.add(self._request("0", prompt, max_new_tokens, sampling))
        sent = ""
        for progress in engine.stream():
            text = self._text(progress.output)
            if not progress.output.finish and text.endswith("\ufffd"):
                continue
            if len(text) > len(sent):
                yield text[len(sent) :]
                sent = text

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text and messages go through the target's chat template, or are an encoder's source."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return ids
        return self.target.encode([message for message in prompt if isinstance(message, Mapping)])

    def _request(self, name: str, prompt: Prompt, limit: int, sampling: SamplingParams | None) -> Request:
        return Request(name, self.encode(prompt), limit, sampling or SamplingParams())

    def _text(self, output: Output) -> str:
        return str(self.target.tokenizer.decode(output.tokens, skip_special_tokens=True))

    def _answer(self, output: Output) -> Answer:
        return Answer(self._text(output), output.tokens, output.finish, output.stats)
