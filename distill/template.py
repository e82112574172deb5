"""Chat templates: messages -> text -> token ids, and what each answer adds to them.

A training text must be the text that decoding reads and writes, to the token. So everything follows from two
renderings per answer: the *prompt* (messages before it, with the generation prompt) and the *full* text up to and
including it. The prompt's ids must be a prefix of the full ids; what follows is the answer, up to its EOS.

Worked example (ChatML): prompt "<im_start>user\\nhi<im_end>\\n<im_start>assistant\\n", full = prompt + "yo<im_end>\\n".
The answer is "yo<im_end>": the EOS is learned, the line end after it is the template's and is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .formats import Message


class TemplateFault(ValueError):
    """The chat template cannot express a conversation, or rewrites what decoding would have read."""


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """As `Target.template_hash`, for a tokenizer alone."""
    template = tokenizer.chat_template
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, and the ids that end an answer."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template, so conversations cannot be written as it reads them. "
                "Use an instruction-tuned target, set tokenizer.chat_template, or train on plain {'text': ...} rows."
            )

    @property
    def has_tools(self) -> bool:
        """Whether the template writes tool calls itself; else they are written into the text (see `_without_tools`)."""
        return "tool_calls" in str(self.tokenizer.chat_template)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids that decoding starts from: `messages` and the generation prompt."""
        return self._ids(messages, tools, generate=True)

    def answer(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the answer, for messages that end with an assistant turn.

        Raises TemplateFault if the prompt is not a prefix of the full text.
        """
        prompt, full = self.prompt(messages[:-1], tools), self._ids(messages, tools, generate=False)
        if full[: len(prompt)] != prompt:
            fault = next((i for i, (a, b) in enumerate(zip(prompt, full)) if a != b), min(len(prompt), len(full)))
            raise TemplateFault(
                "the chat template does not continue its own generation prompt: with the answer, the text differs from "
                f"token {fault} of {len(prompt)} on ({self._show(full, fault)}, not {self._show(prompt, fault)}), "
                "so the answer cannot be told from what decoding reads"
            )
        answer = full[len(prompt) :]
        ends = [index for index, token in enumerate(answer) if token in self.eos_ids]
        return prompt, answer[: ends[-1] + 1] if ends else answer

    def as_read(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[dict[str, Any]]]:
        """What the template is given: the same, or without tools where it has none and they are written into the text."""
        return (messages, tools) if self.has_tools else (_without_tools(messages, tools), ())

    def _ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generate: bool) -> list[int]:
        messages, tools = self.as_read(messages, tools)
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, add_generation_prompt=generate, tokenize=False
                )
            )
        except TemplateError as error:
            raise TemplateFault(f"the chat template refuses the conversation: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _show(self, ids: list[int], start: int) -> str:
        return repr(self.tokenizer.decode(ids[start : start + 6]))


@dataclass
class Transcript:
    """The token sequences of one conversation, answer by answer.

    An answer continues the last sequence if its prompt begins with that sequence. Where a template rewrites history
    (thinking removed from earlier turns) or a sampled answer is not spelled as the tokenizer would spell it, its prompt
    starts another sequence: always exactly what the target reads at that turn.
    """

    sequences: list[tuple[list[int], list[tuple[int, int]]]] = field(default_factory=list)
    """Token ids, and the [start, end) spans of them that are answers."""

    def add(self, prompt: list[int], answer: list[int]) -> None:
        span = (len(prompt), len(prompt) + len(answer))
        if self.sequences:
            tokens, spans = self.sequences[-1]
            if prompt[: len(tokens)] == tokens:
                self.sequences[-1] = (prompt + answer, [*spans, span])
                return
        self.sequences.append((prompt + answer, [span]))


def _without_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The same conversation as text, for templates without tools: descriptions in the system message, calls and
    results in tags of their own."""
    plain: list[Message] = []
    for message in messages:
        content, role = message["content"], message["role"]
        for call in message.get("tool_calls", ()):
            function = {key: call["function"][key] for key in ("name", "arguments")}
            content += f"<tool_call>{json.dumps(function, ensure_ascii=False)}</tool_call>"
        if role == "tool":
            role, content = "user", f"<tool_response>{content}</tool_response>"
        plain.append({"role": role, "content": content})
    if tools:
        listing = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        notice = f"You can call these tools:\n{listing}"
        if plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{notice}"}
        else:
            plain.insert(0, {"role": "system", "content": notice})
    return plain
