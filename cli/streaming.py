"""Token ids -> text as it grows, piece by piece, each piece marked as drafted or the target's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a byte-level tokenizer decodes to while a character's bytes are not all there."""


class TextStream:
    """Decodes a growing list of token ids without ever showing half a character.

    Some tokenizers write a token differently at the start of a text than inside it, so a piece is the difference
    between two decodings that both begin at the previous piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._accepted: list[bool] = []
        self._shown = 0  # tokens whose text was given out
        self._before = 0  # start of the piece given out last

    def feed(self, token: int, *, accepted: bool) -> tuple[str, bool] | None:
        """The text that this token completes, and whether all its tokens were drafted; None while it completes none."""
        self._tokens.append(token)
        self._accepted.append(accepted)
        text = self._decode(self._before, len(self._tokens))
        if text.endswith(UNFINISHED):
            return None
        return self._give(text)

    def finish(self) -> tuple[str, bool] | None:
        """What is left when no token follows: an incomplete character is shown as such."""
        if self._shown == len(self._tokens):
            return None
        return self._give(self._decode(self._before, len(self._tokens)))

    def _give(self, text: str) -> tuple[str, bool]:
        known = self._decode(self._before, self._shown)
        piece = text[len(known) :], all(self._accepted[self._shown :])
        self._before, self._shown = self._shown, len(self._tokens)
        return piece

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        return text
