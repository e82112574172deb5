"""From an answer's text back to the token ids that the target wrote it with.

A text has many spellings in tokens, and a model does not always write the one its tokenizer would. So the text is
tokenized, and wherever the target would have chosen another token that spells the same text, that token is taken and
what follows it is tokenized anew: "walk" + "ing" for "walking", say. What is left to differ is a difference in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .audit import choices
from .sampling import SamplingParams
from .target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def spell(target: Target, prompt: Sequence[int], text: str, *, sampling: SamplingParams | None = None) -> list[int]:
    """Ids of `text` as the target would spell it after `prompt`; one forward over the answer per unusual spelling.

    Raises ValueError if the tokenizer cannot spell the text at all (it normalises, or has no token for something in it).
    """
    tokenizer = target.tokenizer
    tokens, place = _tokenized(tokenizer, text), 0
    if _text(tokenizer, tokens) != text:
        raise ValueError(
            f"the tokenizer cannot spell this text exactly, it would read {_text(tokenizer, tokens)[:60]!r}. "
            "Keep the token ids of outputs, then nothing needs to be spelled."
        )
    while True:
        wanted = choices(target, prompt, tokens, sampling=sampling) if tokens else []
        differs = [index for index in range(place, len(tokens)) if wanted[index] != tokens[index]]
        other = _respelled(tokenizer, text, tokens[: differs[0]], wanted[differs[0]]) if differs else None
        if other is None:
            return tokens
        tokens, place = other, differs[0] + 1


def _respelled(tokenizer: PreTrainedTokenizerBase, text: str, before: list[int], token: int) -> list[int] | None:
    """The same text with `token` after the tokens `before`; None if it is no part of the text there."""
    start = _text(tokenizer, [*before, token])
    if not text.startswith(start) or len(start) <= len(_text(tokenizer, before)):
        return None
    tokens = [*before, token, *_tokenized(tokenizer, text[len(start) :])]
    return tokens if _text(tokenizer, tokens) == text else None


def _tokenized(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
