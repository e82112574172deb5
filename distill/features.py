"""Teacher batches: what the target computes on packed rows, in the training step or once beforehand.

Beforehand, it is kept in main memory (here) or on disk (feature_cache.py).

Letters: B rows, T positions, D hidden, F features, V vocabulary.

Logits are never stored: the last hidden state and the target's own head give them when they are asked for, a chunk of
rows at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from ..heads.base import TeacherBatch, TeacherLogits
from ..infer.target import Target
from .packing import Row


class TeacherSource(Protocol):
    """Gives teacher batches of some packed rows, in any order."""

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        """These rows as one batch (B, T) on the target's device."""
        ...


@dataclass(frozen=True)
class Online:
    """The target reads the rows each time they are asked for."""

    target: Target
    rows: Sequence[Row]
    taps: tuple[int, ...]

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        return teacher_batch(self.target, [self.rows[index] for index in indices], taps=self.taps)


@dataclass(frozen=True)
class Memory:
    """What the target computed on all rows beforehand (`precompute`)."""

    stored: TeacherBatch
    device: torch.device

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        return pick(self.stored, indices, self.device)


def teacher_batch(target: Target, rows: Sequence[Row], *, taps: tuple[int, ...]) -> TeacherBatch:
    """Read packed rows with the target, on its device. Raises ValueError if it computed a NaN or an infinity."""
    tokens, segments, positions, supervised = stack_rows(rows, target.device)
    reading = target.read_packed(tokens, positions, segments, taps=taps)
    _check_finite("last hidden state", reading.hidden, rows)
    if reading.features is not None:
        _check_finite(f"outputs of layers {taps}", reading.features, rows)
    return TeacherBatch(
        tokens, segments, positions, supervised, reading.hidden, reading.features, logits=frozen_logits(target)
    )


def stack_rows(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, segments, positions and supervised of all rows, each (B, T) on `device`."""
    tokens = torch.stack([row.tokens for row in rows]).to(device)
    segments = torch.stack([row.segments for row in rows]).to(device)
    positions = torch.stack([row.positions for row in rows]).to(device)
    return tokens, segments, positions, torch.stack([row.supervised for row in rows]).to(device)


def frozen_logits(target: Target) -> TeacherLogits:
    """The target's logits, (..., D) -> (..., V), as a function that no gradient flows through."""

    @torch.no_grad()
    def logits(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        return target.logits(hidden, vocabulary)

    return logits


def precompute(target: Target, rows: Sequence[Row], *, taps: tuple[int, ...], progress: bool = False) -> TeacherBatch:
    """What the target computes on all rows, (N, T) in its dtype in main memory; the size is printed first.

    For data that is read more than once and fits; `pick` makes training batches of it. Every row is read alone, so what
    is stored does not depend on how rows are batched later. Memory is taken once, in whole: small pieces kept between
    the large short-lived ones of training would fragment it.
    """
    shape = (len(rows), len(rows[0].tokens))
    width, wide = target.hidden_size, target.hidden_size * len(taps)
    size = shape[0] * shape[1] * (width + wide) * target.dtype.itemsize
    print(f"features: {len(rows)} rows need {size / 2**20:.0f} MiB of memory", file=sys.stderr)
    hidden = torch.empty(*shape, width, dtype=target.dtype)
    features = torch.empty(*shape, wide, dtype=target.dtype) if taps else None
    for index in tqdm(range(len(rows)), desc="features", unit="row", disable=not progress):
        read = teacher_batch(target, [rows[index]], taps=taps)
        hidden[index] = read.hidden[0].cpu()
        if features is not None and read.features is not None:
            features[index] = read.features[0].cpu()
    return TeacherBatch(*stack_rows(rows, torch.device("cpu")), hidden, features, logits=frozen_logits(target))


def pick(stored: TeacherBatch, indices: Sequence[int], device: torch.device) -> TeacherBatch:
    """Some precomputed rows as one batch (B, T) on `device`."""
    which = torch.tensor(indices)
    return TeacherBatch(
        tokens=stored.tokens[which].to(device),
        segments=stored.segments[which].to(device),
        positions=stored.positions[which].to(device),
        supervised=stored.supervised[which].to(device),
        hidden=stored.hidden[which].to(device),
        features=None if stored.features is None else stored.features[which].to(device),
        logits=stored.logits,
    )


def _check_finite(what: str, values: Tensor, rows: Sequence[Row]) -> None:
    """Name the documents at fault: NaN features can be trained on for days without another sign.

    A NaN reaches every document of its packed row (a masked key still multiplies it by 0), so all of them are named.
    """
    bad = ~torch.isfinite(values).all(dim=-1)  # (B, T)
    if not bool(bad.any()):
        return
    first = int(bad.any(dim=-1).nonzero()[0])
    raise ValueError(
        f"the target's {what} is not finite at {int(bad.sum())} positions of this batch, first in row {first}, which holds "
        f"{', '.join(rows[first].ids)}. Run the target in bfloat16 or float32, or remove the document at fault."
    )
