"""Teacher batches: what the target computes on packed rows, in the training step or once beforehand.

Letters: B rows, T positions, D hidden, F features, V vocabulary.

Logits are never stored: the last hidden state and the target's own head give them when they are asked for, a chunk of
rows at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.base import TeacherBatch, TeacherLogits
from ..infer.target import Target
from .packing import Row


def teacher_batch(target: Target, rows: Sequence[Row], *, taps: tuple[int, ...]) -> TeacherBatch:
    """Read packed rows with the target, on its device. Raises ValueError if it computed a NaN or an infinity."""
    tokens = torch.stack([row.tokens for row in rows]).to(target.device)  # (B, T)
    segments = torch.stack([row.segments for row in rows]).to(target.device)
    positions = torch.stack([row.positions for row in rows]).to(target.device)
    supervised = torch.stack([row.supervised for row in rows]).to(target.device)
    reading = target.read_packed(tokens, positions, segments, taps=taps)
    _check_finite("last hidden state", reading.hidden, rows)
    if reading.features is not None:
        _check_finite(f"outputs of layers {taps}", reading.features, rows)
    return TeacherBatch(
        tokens, segments, positions, supervised, reading.hidden, reading.features, logits=frozen_logits(target)
    )


def frozen_logits(target: Target) -> TeacherLogits:
    """The target's logits, (..., D) -> (..., V), as a function that no gradient flows through."""

    @torch.no_grad()
    def logits(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        return target.logits(hidden, vocabulary)

    return logits


def precompute(target: Target, rows: Sequence[Row], *, taps: tuple[int, ...]) -> list[TeacherBatch]:
    """Every row's teacher batch, (1, T) each, in the target's dtype in main memory; the size is printed first.

    For data that is read more than once and fits. `join` makes training batches of them.
    """
    width = target.hidden_size * (1 + len(taps))
    size = sum(len(row.tokens) for row in rows) * width * target.dtype.itemsize
    print(f"features: {len(rows)} rows need {size / 2**20:.0f} MiB of memory", file=sys.stderr)
    cpu = torch.device("cpu")
    return [_moved(teacher_batch(target, [row], taps=taps), cpu) for row in rows]


def join(batches: Sequence[TeacherBatch], device: torch.device) -> TeacherBatch:
    """Precomputed rows side by side as one batch (B, T) on `device`."""
    features = [batch.features for batch in batches if batch.features is not None]
    return TeacherBatch(
        tokens=torch.cat([batch.tokens for batch in batches]).to(device),
        segments=torch.cat([batch.segments for batch in batches]).to(device),
        positions=torch.cat([batch.positions for batch in batches]).to(device),
        supervised=torch.cat([batch.supervised for batch in batches]).to(device),
        hidden=torch.cat([batch.hidden for batch in batches]).to(device),
        features=torch.cat(features).to(device) if features else None,
        logits=batches[0].logits,
    )


def _moved(batch: TeacherBatch, device: torch.device) -> TeacherBatch:
    return join([batch], device)


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
