"""Beginnings that prompts have in common are read once: a row takes the keys and values of another row over.

Chat templates, instructions, examples, the turns before this one, and several answers to one prompt begin alike, and a
token's keys and values depend on nothing but what stands before it; so does what a drafter keeps, but for the token that
follows. What a row holds is known as long as nobody else has joined in its place, so a request may take over from one that
has left, in the same row even without a copy. (Servers know it as automatic prefix caching: SGLang's RadixAttention, Zheng
et al. 2023, arXiv 2312.07104. There is no store beside the rows.)

Letters: R prompts, T their tokens in all, N the most that one of them has to read, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .drafter import Drafter
from .row import Row
from .target import Reading, Target
from .tree import TokenTree

SHORTEST = 16
"""Tokens in common that are worth a copy and the wait for a row that is to be read first."""


@dataclass(frozen=True)
class Share:
    """The first `length` tokens of a text, and the one that follows them, are those of row `row`. (A drafter may have put
    the two last of these together.)"""

    row: int
    length: int


NOTHING = Share(0, 0)


class Prefixes:
    """What the rows of a cache begin with."""

    def __init__(self, *, shares: bool) -> None:
        """shares: False where every row has to be read whole, so that there is nothing to gain."""
        self.shares = shares
        self._left: dict[int, list[int]] = {}  # of rows that nobody has now
        self.reused = 0
        """Tokens that were not read again."""

    def leave(self, index: int, row: Row) -> None:
        """What was read of it stays in its place until somebody joins there."""
        self._left[index] = row.text[: row.length]

    def forget(self) -> None:
        """What was left is nobody's."""
        self._left.clear()

    def gather(self, queue: Iterable[Row], active: Sequence[Row], *, room: int, budget: int) -> list[Row]:
        """The first of the queue, who join next, together: at most `room`, with `budget` tokens to read (filled up to the most
        that one of them has, where some are not read whole) or alone. Who has much in common with one of them waits until
        that one is read."""
        known, group, shares, rests = self._known(active), list[Row](), list[Share](), list[int]()
        for row in islice(queue, room):
            share = _longest(row.text, known)
            among = (
                _longest(row.text, {number: row.text for number, row in enumerate(group)}).length if self.shares else 0
            )
            shares.append(share)
            rests.append(len(row.text) - share.length)
            total = len(rests) * max(rests) if any(each.length for each in shares) else sum(rests)
            if group and (total > budget or among > share.length):
                break
            group.append(row)
        return _placed(group, shares, first=len(active))

    def take(
        self, texts: Sequence[list[int]], active: Sequence[Row], cache: KVCache, drafter: Drafter, state: Any
    ) -> list[int]:
        """Let texts that join behind the active rows have what other rows hold of them, and the drafter's state of those; how
        many tokens that is of each."""
        joining = dict(enumerate(texts, start=len(active)))
        known, found = self._known(active), list[int]()
        best = {row: _longest(text, known) for row, text in joining.items()}
        lost = {row for row, share in best.items() if share.length and share.row != row}  # to others: it is copied into
        cache.reserve(max(map(len, texts)) + 1)
        for row, text in joining.items():
            share = _longest(text, {other: text for other, text in known.items() if other == row or other not in lost})
            if share.length and share.row != row:
                cache.move(share.row, row, length=share.length)
                drafter.move(state, share.row, row)
            found.append(share.length)
            self._left.pop(row, None)
        self.reused += sum(found)
        return found

    def _known(self, active: Sequence[Row]) -> dict[int, list[int]]:
        if not self.shares:
            return {}
        return self._left | {index: row.text[: row.length] for index, row in enumerate(active)}


def read_on(
    target: Target,
    texts: Sequence[list[int]],
    held: Sequence[int],
    cache: KVCache,
    *,
    first_row: int,
    budget: int,
    taps: tuple[int, ...] = (),
) -> Reading:
    """Read what is left of texts of whose rows the first `held` tokens are known; one alone that has more than `budget` left is
    read in chunks. States (1, T, ...), zeros where tokens were not read."""
    rest = [torch.tensor(text[count:]) for text, count in zip(texts, held)]
    size = budget if len(texts) == 1 else max(map(len, rest))
    found: list[Tensor] = []  # hidden and, if any, features
    for start in range(0, max(map(len, rest)), size):
        parts = [tokens[start : start + size] for tokens in rest]
        reading = _read_parts(target, parts, [count + start for count in held], cache, first_row=first_row, taps=taps)
        read = [reading.hidden] if reading.features is None else [reading.hidden, reading.features]
        found = found or [each.new_zeros(sum(map(len, texts)), each.shape[-1]) for each in read]
        end = 0
        for index, (text, count, part) in enumerate(zip(texts, held, parts)):
            for states, each in zip(found, read):
                states[end + count + start : end + count + start + len(part)] = each[index, : len(part)]
            end += len(text)
    return Reading(found[0][None], found[1][None] if taps else None)


def _read_parts(
    target: Target, parts: list[Tensor], held: list[int], cache: KVCache, *, first_row: int, taps: tuple[int, ...]
) -> Reading:
    """(R, N, ...)."""
    tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(target.device)
    counts = torch.tensor([len(part) for part in parts], device=target.device)
    tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
    if len(set(map(len, parts))) > 1:
        read = torch.arange(tree.num_nodes, device=target.device) < counts[:, None]
        tree = replace(tree, valid=read, read=read)
    lengths = torch.tensor(held, device=target.device)
    # As it is for every target: recordings are for the shapes of rounds.
    return Target.verify(target, tree, lengths, cache, longest=max(held), first_row=first_row, taps=taps)


def _placed(group: list[Row], shares: list[Share], *, first: int) -> list[Row]:
    """In another order: who goes on with what lies in one of the rows that they get, first.., gets that one."""
    placed: dict[int, Row] = {}
    for row, share in zip(group, shares):
        if share.length and first <= share.row < first + len(group):
            placed.setdefault(share.row - first, row)
    others = iter([row for row in group if row not in placed.values()])
    return [placed[at] if at in placed else next(others) for at in range(len(group))]


def _longest(text: list[int], known: Mapping[int, list[int]]) -> Share:
    """The row with which a text has most in common. The last token of that is read again, as a text's last one has to be."""
    best, most = 0, NOTHING
    for row, tokens in known.items():
        if tokens[: best + 1] != text[: best + 1]:
            continue
        length = best
        while length < min(len(text), len(tokens)) and tokens[length] == text[length]:
            length += 1
        if length > best:
            best, most = length, Share(row, length - 1)
    return most if most.length >= SHORTEST else NOTHING
