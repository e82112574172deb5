"""Samples packed into rows of one length: no attention across documents, positions restart in each.

Letters: T row length.

Best fit decreasing: samples from long to short, each into the fullest row that still holds it. Which samples share a
row depends on their lengths and ids alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tokens import Sample


@dataclass(frozen=True)
class Row:
    """One packed row, padded at its end."""

    tokens: Tensor
    """(T,) int64; 0 at padding."""
    segments: Tensor
    """(T,) int64: 0 padding, 1.. the documents in order."""
    positions: Tensor
    """(T,) int64: restart at 0 in each document; 0, 1, ... over the padding too."""
    supervised: Tensor
    """(T,) bool: the token is learned; False at padding."""
    ids: tuple[str, ...] = ()
    """Sample ids of segments 1.. ."""


def pack(samples: Sequence[Sample], *, length: int) -> list[Row]:
    """All samples in rows of `length` tokens. Raises ValueError if a sample is longer than that."""
    longest = max(samples, key=lambda sample: len(sample.tokens), default=None)
    if longest is not None and len(longest.tokens) > length:
        raise ValueError(
            f"sample {longest.id!r} has {len(longest.tokens)} tokens, rows hold {length}. "
            "Load the samples with max_length no larger than the row length."
        )
    rows: list[list[Sample]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row number), sorted
    for sample in sorted(samples, key=lambda sample: (-len(sample.tokens), sample.id)):
        need = len(sample.tokens)
        at = bisect_left(rooms, (need, -1))
        if at < len(rooms):
            free, number = rooms.pop(at)
        else:
            free, number = length, len(rows)
            rows.append([])
        rows[number].append(sample)
        insort(rooms, (free - need, number))
    return [_row(row, length) for row in rows]


def packing_efficiency(rows: Sequence[Row]) -> float:
    """Share of all positions that hold a token; 0 without rows."""
    filled = sum(int((row.segments > 0).sum()) for row in rows)
    return filled / max(1, sum(len(row.segments) for row in rows))


def _row(samples: list[Sample], length: int) -> Row:
    lengths = [len(sample.tokens) for sample in samples]
    rest = length - sum(lengths)
    parts = [*lengths, rest]
    numbers = [*range(1, len(samples) + 1), 0]
    return Row(
        tokens=torch.tensor([token for sample in samples for token in sample.tokens] + [0] * rest),
        segments=torch.repeat_interleave(torch.tensor(numbers), torch.tensor(parts)),
        positions=torch.cat([torch.arange(part) for part in parts]),
        supervised=torch.tensor([flag for sample in samples for flag in sample.supervised] + [False] * rest),
        ids=tuple(sample.id for sample in samples),
    )
