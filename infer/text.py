"""Token ids -> text as it grows, piece by piece, up to a stop string.

What is given out is never taken back: half a character is held until its bytes are all there, and text that could be the
beginning of a stop string until it is known not to be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a byte-level tokenizer decodes to while a character's bytes are not all there."""


class Piece(NamedTuple):
    """Some text, and whether all tokens that it took were drafted."""

    text: str
    accepted: bool


class TextStream:
    """The text of a growing list of token ids; special tokens are not in it.

    stop: strings that end the text. The text ends before the stop string that is complete first, whichever tokens it
    consists of; of several complete with the same character the longest counts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.text = ""
        """What was given out so far."""
        self.is_stopped = False
        """Whether a stop string was met; nothing follows."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._accepted: list[bool] = []
        self._decoded = 0  # tokens whose text is known
        self._before = 0  # start of the piece that was decoded last
        self._held: list[Piece] = []

    def feed(self, token: int, *, accepted: bool = False) -> list[Piece]:
        """The pieces of text that this token makes certain."""
        assert not self.is_stopped, "a token was fed after a stop string"
        self._tokens.append(token)
        self._accepted.append(accepted)
        text = self._undecoded()
        if text.endswith(UNFINISHED):
            text = text.rstrip(UNFINISHED)
            if self._stop_in(self._pending + text) is None:
                return []
        return self._take(text)

    def finish(self) -> list[Piece]:
        """What is left when no token follows: an incomplete character is shown as such."""
        last: list[Piece] = []
        if self._decoded < len(self._tokens) and not self.is_stopped:
            last = self._take(self._undecoded())
        return last + self._give(len(self._pending))

    @property
    def _pending(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _undecoded(self) -> str:
        """The text of the tokens that have none yet. Some tokenizers write a token differently at the start of a text than
        inside it, so it is the difference of two decodings that both begin at the previous piece."""
        known = self._decode(self._before, self._decoded)
        return self._decode(self._before, len(self._tokens))[len(known) :]

    def _take(self, text: str) -> list[Piece]:
        """Give out what is certain now that `text` has been added."""
        self._held.append(Piece(text, all(self._accepted[self._decoded :])))
        self._before, self._decoded = self._decoded, len(self._tokens)
        pending = self._pending
        end = self._stop_in(pending)
        if end is None:
            return self._give(len(pending) - max((_overlap(pending, stop) for stop in self._stop), default=0))
        given = self._give(end)
        self._held, self.is_stopped = [], True
        return given

    def _stop_in(self, text: str) -> int | None:
        """Where the stop string begins that is complete first, the longest of several."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _give(self, count: int) -> list[Piece]:
        """Give out the first `count` characters of what is held."""
        given: list[Piece] = []
        while self._held and count >= len(self._held[0].text):
            given.append(self._held.pop(0))
            count -= len(given[-1].text)
        if count:
            text, accepted = self._held[0]
            given.append(Piece(text[:count], accepted))
            self._held[0] = Piece(text[count:], accepted)
        given = [piece for piece in given if piece.text]
        self.text += "".join(piece.text for piece in given)
        return given

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    return next((len(tail) - at for at in range(len(tail)) if stop.startswith(tail[at:])), 0)
