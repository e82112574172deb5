"""Prompt lookup: propose what followed the last time the text ended the way it ends now. No weights, no files.

Saxena 2023, "Prompt lookup decoding"; LLMA (Yang et al. 2023, "Inference with reference") is the same idea. The longest
earlier match of the text's end wins, and of equally long ones the most recent; what followed it is the draft, a chain.
A match that runs into the end of the text is continued periodically, so a loop is proposed whole. It pays where answers
repeat their prompt: summaries, edits, code, extraction.

Each row has an index of its own text, kept as deflate keeps its window (RFC 1951, section 4): a table from the last two
tokens to the newest place where they stood, and from each place a link to the one before. A new token costs one
insertion and a draft one bounded walk; nothing is proportional to the length of the text.

How far a copy can be trusted depends on how long it has been one, and on the text at hand: a `Record` counts, for each
length of the match so far, how often the next token was right. These are the draft's confidences, by which a schedule
(schedule.py) cuts it where verifying it would not pay.

Letters: B rows, K draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .drafter import Observation
from .sampling import Sampling
from .tree import TokenTree

MAX_CANDIDATES = 128
"""Earlier places that are looked at, newest first."""
MAX_MATCH = 32
"""Matches of this length count as equally long."""
PRIOR_WEIGHT = 4.0
"""Tries that a record's first guess counts for: after n matching tokens the next one is right n times in n + 3."""
FADING = 0.99
"""What a try still counts for when the next one of its length is made."""


class SuffixIndex:
    """A growing text that knows where its end has occurred before.

    A *place* is the position of the token that followed an occurrence; 0 means nowhere.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._after: dict[int, int] = {}
        self._after_pair: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each becomes the newest place of the one and of the two tokens before it."""
        text = self.text
        for token in tokens:
            place, earlier = len(text), 0
            if place:
                self._after[text[-1]] = place
            if place > 1:
                pair = (text[-2], text[-1])
                earlier = self._after_pair.get(pair, 0)
                self._after_pair[pair] = place
            self._earlier.append(earlier)
            text.append(token)

    def find(self) -> tuple[int, int]:
        """The place after the longest, most recent earlier occurrence of the text's end, and its length: (0, 0) if none.

        Worked example: "a b c x b c d b c" ends in "b c", which stood before "x" (place 3) and "d" (place 6): (6, 2).
        """
        text = self.text
        if not text:
            return 0, 0
        best = self._after.get(text[-1], 0)
        length = 1 if best else 0
        place = self._after_pair.get((text[-2], text[-1]), 0) if len(text) > 1 else 0
        for _ in range(MAX_CANDIDATES):
            if place == 0 or length == MAX_MATCH:
                break
            longer = place > length and text[place - 1 - length] == text[-1 - length]
            common = self._common(place) if longer else 0
            if common > length:
                best, length = place, common
            place = self._earlier[place]
        return best, length

    def continuation(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; past the end of the text the draft itself goes on being copied."""
        period = len(self.text) - place
        return [self.text[place + step % period] for step in range(count)]

    def _common(self, place: int) -> int:
        """How many tokens before `place` equal the text's last ones."""
        text, length = self.text, 0
        while length < min(place, MAX_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


class Record:
    """How often the next token of a copy was right, by the length of the match so far; old evidence fades.

    Worked example: a match of 2 tokens proposed "a b c" and the target wrote "a b d": right after 2 and 3 matching tokens,
    wrong after 4.
    """

    def __init__(self) -> None:
        self._right = [PRIOR_WEIGHT * length / (length + 3) for length in range(MAX_MATCH + 1)]
        self._tried = [PRIOR_WEIGHT] * (MAX_MATCH + 1)

    def note(self, matched: int, draft: Sequence[int], written: Sequence[int]) -> None:
        """A match of that length was followed by `draft` where it stood before, and now by `written`."""
        for step, (proposed, token) in enumerate(zip(draft, written)):
            length = min(matched + step, MAX_MATCH)
            self._tried[length] = FADING * self._tried[length] + 1
            self._right[length] = FADING * self._right[length] + (proposed == token)
            if proposed != token:
                return

    def confidence(self, matched: int, count: int) -> list[float]:
        """P(token is right | those before it were) for `count` tokens after a match of that length."""
        lengths = (min(matched + step, MAX_MATCH) for step in range(count))
        return [self._right[length] / self._tried[length] for length in lengths]


@dataclass
class LookupState:
    """One generation's texts, what was proposed last in each row, and what became of proposals."""

    texts: list[SuffixIndex]
    drafts: list[tuple[int, list[int]]]
    """Per row the length of the match, and the tokens."""
    record: Record = field(default_factory=Record)


class PromptLookup:
    """Drafts by copying. Deterministic: exact under sample-match, greedy and sampled.

    length: K. min_match: a shorter match drafts nothing. stop_ids: tokens that end an answer; nothing is drafted after.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, *, length: int = 10, min_match: int = 1, stop_ids: Sequence[int] = ()) -> None:
        if length < 1:
            raise ValueError(f"prompt lookup drafts at least 1 token, got length {length}.")
        if not 1 <= min_match <= MAX_MATCH:
            raise ValueError(f"min_match must lie in 1..{MAX_MATCH} tokens, got {min_match}.")
        self.length, self.min_match, self.stop_ids = length, min_match, frozenset(stop_ids)

    @property
    def depth(self) -> int:
        return self.length

    def start(self, *, rows: int, capacity: int) -> LookupState:
        return LookupState([SuffixIndex() for _ in range(rows)], [(0, [])] * rows)

    def move(self, state: LookupState, source: int, target: int) -> None:
        state.texts[target], state.drafts[target] = state.texts[source], state.drafts[source]

    def observe(self, state: LookupState, seen: Observation) -> None:
        for row, text in enumerate(seen.texts(), start=seen.rows.start):
            if seen.is_prompt:
                state.texts[row], state.drafts[row] = SuffixIndex(), (0, [])
                state.texts[row].extend(text)
            else:  # the first token was the anchor, indexed when it was emitted
                state.record.note(*state.drafts[row], text[1:])
                state.texts[row].extend(text[1:])

    def draft(self, state: LookupState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        found = [self._propose(text) for text in state.texts[: len(anchors)]]
        state.drafts[: len(found)] = found
        width = max(len(draft) for _, draft in found)
        if width == 0:
            return TokenTree.root(anchors)
        tokens = torch.tensor([draft + [0] * (width - len(draft)) for _, draft in found], device=anchors.device)
        counts = torch.tensor([len(draft) for _, draft in found], device=anchors.device)
        sure = torch.tensor([state.record.confidence(matched, width) for matched, _ in found], device=anchors.device)
        valid = torch.arange(width, device=anchors.device) < counts[:, None]
        return TokenTree.chain(anchors, tokens, valid=valid, confidence=sure)

    def _propose(self, index: SuffixIndex) -> tuple[int, list[int]]:
        """The length of the match, and what followed it."""
        place, length = index.find()
        if length < self.min_match:
            return length, []
        draft = index.continuation(place, self.length)
        ends = [step for step, token in enumerate(draft) if token in self.stop_ids]
        return length, draft[: ends[0] + 1] if ends else draft
