"""A target that a server runs, as far as this machine knows it: its tokenizer and its config, no weights.

A server gives text, so the ids of an answer are those of this tokenizer, unless the server gives ids too (vLLM does
when it is asked for `return_token_ids`). What it says about its own counts is compared for every prompt and every
answer: `responses.Spelling` says with what result. A prompt of another length means another chat template; an answer of
another length, that the target spelled its text differently than its tokenizer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ..infer.pretrained import model_folder
from .responses import Spelling
from .server import Completion, PromptFault, ServerFault
from .talks import Talk
from .template import ChatTemplate, TemplateFault


@dataclass(frozen=True)
class ServedTarget:
    """The tokenizer and what else decides how text becomes ids."""

    name: str
    """Folder or Hugging Face id that it was loaded from."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_length: int
    """Tokens of its context, by its config; the server may allow fewer."""

    @classmethod
    def load(cls, name: str) -> Self:
        """From a folder or a Hugging Face id. Raises ValueError if there is no such model."""
        folder = model_folder(name)
        try:
            config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"the tokenizer and config of {name!r} could not be loaded: {error}\nName the folder or Hugging Face id of "
                "the model that the server runs with --target."
            ) from error
        try:
            ends = GenerationConfig.from_pretrained(folder).eos_token_id
        except OSError:  # not every model has one
            ends = None
        ends = config.eos_token_id if ends is None else ends
        eos_ids = tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),)
        return cls(name, tokenizer, eos_ids, config.vocab_size, config.max_position_embeddings)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.eos_ids)

    @cached_property
    def end(self) -> int:
        """The id that ends an answer in this chat template, else the first of those that may."""
        if not self.eos_ids:
            raise ValueError(f"{self.name} names no EOS token, so no answer would have an end. Set it in its config.")
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            _, answer = self.template.answer(talk)
        except TemplateFault:
            return self.eos_ids[0]
        return answer[-1] if answer and answer[-1] in self.eos_ids else self.eos_ids[0]

    def fingerprint(self, served_as: str) -> dict[str, Any]:
        """For the manifest: the server's name for it, and what a tokenizer must agree with."""
        return {"name": self.name, "served as": served_as, "weights": None, "vocab_size": self.vocab_size}

    def spell(self, talk: Talk, answer: Completion) -> tuple[list[int], Spelling]:
        """The ids of an answer to the question under way, EOS included where it has one, and how sure they are."""
        if answer.token_ids is not None:
            ids = answer.token_ids
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise ServerFault(
                    f"the server's token ids do not fit {self.name}, of {self.vocab_size} tokens; see --target."
                )
            ended = answer.is_cut or (bool(ids) and ids[-1] in self.eos_ids)
            same = answer.prompt_ids is None or answer.prompt_ids == talk.prompt
            return ids if ended else [*ids, self.end], "written" if same else "differs"
        ids = self._ids(talk, answer)
        fitting = {len(ids)} if answer.is_cut else {len(ids), len(ids) - 1}  # not every server counts the EOS
        counts = ((answer.num_prompt_tokens, {len(talk.prompt)}), (answer.num_tokens, fitting))
        if any(count is not None and count not in fits for count, fits in counts):
            return ids, "differs"
        return ids, "unknown" if any(count is None for count, _ in counts) else "counted"

    def _ids(self, talk: Talk, answer: Completion) -> list[int]:
        if answer.message.get("tool_calls"):  # written out by the template, as the target did before it was parsed
            try:
                return self.template.answer([*talk.messages, answer.message], talk.source.tools)[1]
            except TemplateFault as fault:
                raise PromptFault(str(fault)) from fault
        ids: list[int] = self.tokenizer(answer.message["content"], add_special_tokens=False, verbose=False)["input_ids"]
        return ids if answer.is_cut else [*ids, self.end]
