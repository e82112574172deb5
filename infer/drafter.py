"""What the verified loop needs from anything that proposes tokens.

Letters: B rows, A tokens just read, D hidden, F features (taps concatenated), N nodes, V vocabulary.

One generation owns one state object; a drafter itself is stateless between calls and may serve many generations. The loop
calls, in this order: `start` once, `observe` for the prompt of each joining row, then in every round `draft` for the
active rows and `observe` with what the target read and truly computed for the tokens that were accepted. What the
target computed at rejected nodes (`Observation.logits`) may suggest tokens and nothing else; no drafter state is built on
a rejected token.

Active rows are always 0..B-1: when a row leaves, the last one takes its place through `move`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .sampling import Sampling
from .tree import TokenTree


@dataclass(frozen=True)
class Observation:
    """What the target has just read in some rows, right-padded to A tokens.

    Worked example: the target had read 10 tokens, the anchor "the" stood at position 10 and the draft " cat sat" was
    accepted up to " cat". Then tokens = ["the", " cat"], count = 2, start = 10, and anchor is the bonus token, which
    stands at position 12 and has not been read.
    """

    rows: slice
    """Which rows of the state these are."""
    tokens: Tensor
    """(B, A) int64: the tokens read; the first round of a row holds its prompt."""
    count: Tensor
    """(B,) int64: how many of the A columns are real."""
    start: Tensor
    """(B,) int64: absolute position of column 0."""
    hidden: Tensor
    """(B, A, D): the target's last hidden state (after the final norm) at these tokens."""
    features: Tensor | None
    """(B, A, F): the tapped layer outputs, concatenated in ascending order; None if the drafter taps nothing."""
    anchor: Tensor
    """(B,) int64: the newest emitted token, at position start + count, not read yet."""
    logits: Tensor | None = None
    """(B, N, V): the target's logits at every node of the tree that was drafted, accepted or not; None for a prompt."""
    ends: list[int] | None = None
    """(B): start + count, where the host knows them already."""
    known: int = 0
    """Columns at the beginning, of a prompt, whose states are zeros: another row had read them, and this one has been made
    a copy of that (`Drafter.move`). What a drafter kept of them holds, and of the tokens that follow each."""

    @property
    def is_prompt(self) -> bool:
        """Whether these rows have just joined, so that whatever the state holds of them is of other requests."""
        return self.logits is None

    def news(self) -> Observation:
        """The columns that have states."""
        if not self.known:
            return self
        rest = slice(self.known, None)
        return replace(
            self,
            tokens=self.tokens[:, rest],
            count=self.count - self.known,
            start=self.start + self.known,
            hidden=self.hidden[:, rest],
            features=None if self.features is None else self.features[:, rest],
            known=0,
        )

    def next_tokens(self) -> Tensor:
        """(B, A) int64: the token after each one read; after the newest stands the anchor."""
        return torch.roll(self.tokens, -1, dims=1).scatter(1, self.count[:, None] - 1, self.anchor[:, None])

    def texts(self) -> list[list[int]]:
        """Per row the tokens just read and the anchor, on the host in one transfer."""
        table = torch.cat([self.count[:, None], self.anchor[:, None], self.tokens], dim=1).tolist()
        return [[*tokens[:count], anchor] for count, anchor, *tokens in table]

    def last(self, values: Tensor) -> Tensor:
        """(B, ...): the entry of `values` (B, A, ...) at each row's last real column."""
        return values[torch.arange(len(values), device=values.device), self.count - 1]


class Drafter(Protocol):
    """Anything that proposes tokens."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers read, as 0-based decoder-layer outputs, ascending; may be empty."""
        ...

    @property
    def depth(self) -> int:
        """Tokens of the longest chain that it drafts."""
        ...

    def start(self, *, rows: int, capacity: int) -> Any:
        """A fresh state for up to `rows` rows of up to `capacity` tokens each, draft nodes included."""
        ...

    def move(self, state: Any, source: int, target: int) -> None:
        """Overwrite row `target` of the state with row `source`: a row left and the last one takes its place, or one joins that
        begins like it."""
        ...

    def observe(self, state: Any, seen: Observation) -> None:
        """Take in what the target has read."""
        ...

    def draft(self, state: Any, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        """Propose for rows 0..B-1.

        anchors: (B,) int64, roots of the trees. lengths: (B,) int64, tokens read by the target, so the anchor stands
        at position `lengths` and a first draft token at `lengths + 1`. sampling: the rows' own settings and noise; a
        deterministic drafter ignores it.
        """
        ...


class NoDraft:
    """Proposes nothing, which makes every round a step of plain decoding."""

    taps: tuple[int, ...] = ()
    depth = 0

    def start(self, *, rows: int, capacity: int) -> None:
        return None

    def move(self, state: None, source: int, target: int) -> None:
        pass

    def observe(self, state: None, seen: Observation) -> None:
        pass

    def draft(self, state: None, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        return TokenTree.root(anchors)
