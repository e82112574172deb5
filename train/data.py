"""What the loop reads: packed rows, how many positions of each count, and which rows make up which step.

Letters: N packed rows, K draft steps.

The order of the data is a pure function of (seed, epoch), and step s takes the stream's entries s*R .. s*R+R-1 (R rows
per step), so a run is continued by its step number alone. Every process knows the whole global batch and takes its own
rows of it: one process and many see the same batches. As the counts of all rows are known, so is the global count that
a step's loss is divided by, before any forward and without any communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..distill.feature_build import build
from ..distill.feature_cache import FeatureCache
from ..distill.feature_codec import Compression
from ..distill.features import Memory, Online, TeacherSource, precompute
from ..distill.packing import Row, pack
from ..distill.tokens import Sample, load_samples
from ..heads import TeacherBatch, TrainedDrafter
from ..infer.target import Target
from .recipe import Recipe
from .sharded import ShardedTarget


@dataclass(frozen=True)
class Rows:
    """Packed rows, their counts, and what the target computes on them."""

    rows: Sequence[Row]
    """N rows."""
    counts: Tensor
    """(N, K) int64: positions at which draft step k counts in each row (`TeacherBatch.step_mask`)."""
    source: TeacherSource
    """What the target computes on them: in the step, or from memory or disk."""

    def teach(self, indices: Sequence[int]) -> TeacherBatch:
        """The teacher batch of these rows, on the target's device."""
        return self.source.batch(indices)

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Tokens in these rows, padding left out."""
        return sum(int((self.rows[index].segments > 0).sum()) for index in indices)

    def name(self, indices: Sequence[int]) -> str:
        """Rows and documents for an error message: `row 3 (doc-a, doc-b), row 9 (doc-c)`."""
        return ", ".join(f"row {index} ({', '.join(self.rows[index].ids)})" for index in indices)


def load_rows(recipe: Recipe, target: Target) -> tuple[list[Sample], list[Row], list[Row]]:
    """Training samples, their packed rows, and the packed held-out rows. Raises ValueError where there is nothing to
    train on or nothing to evaluate on."""
    data = recipe.data
    longest = data.max_length or data.row_length
    split = "train" if data.held_out is None else None
    held_split = "held-out" if data.held_out is None else None
    samples = load_samples(
        data.responses,
        target,
        split=split,
        max_length=longest,
        max_samples=data.max_samples,
        max_bad_share=data.max_bad_share,
    )
    held_out = load_samples(
        data.held_out or data.responses,
        target,
        split=held_split,
        max_length=longest,
        max_samples=data.max_held_out,
        max_bad_share=data.max_bad_share,
    )
    return samples, pack(samples, length=data.row_length), pack(held_out, length=data.row_length)


def prepare(
    recipe: Recipe, drafter: TrainedDrafter, train_rows: Sequence[Row], held_rows: Sequence[Row]
) -> tuple[Rows, Rows]:
    """Training and held-out rows, ready to be read as the recipe's `data.features` says; every process calls it."""
    features = recipe.data.features
    caches = open_caches(recipe, drafter, train_rows, held_rows) if features == "disk" else (None, None)
    return (
        prepare_rows(train_rows, drafter, features=features, what="training data", cache=caches[0]),
        prepare_rows(held_rows, drafter, features=features, what="held-out data", cache=caches[1]),
    )


def open_caches(
    recipe: Recipe, drafter: TrainedDrafter, train_rows: Sequence[Row], held_rows: Sequence[Row]
) -> tuple[FeatureCache, FeatureCache]:
    """The recipe's feature caches, to be built or read; nothing is written yet.

    Held-out rows are stored exactly: what a drafter is measured on are the states that it will decode from.
    """
    settings, target, taps = recipe.data.cache, drafter.target, drafter.taps
    kinds: tuple[tuple[str, Sequence[Row], Compression], ...] = (
        ("train", train_rows, settings.compression),
        ("held-out", held_rows, "exact"),
    )
    train, held_out = (
        FeatureCache(
            recipe.cache_folder / name,
            target,
            rows,
            taps=taps,
            compression=compression,
            shard_bytes=int(settings.shard_mib * 2**20),
        )
        for name, rows, compression in kinds
    )
    return train, held_out


def prepare_rows(
    rows: Sequence[Row], drafter: TrainedDrafter, *, features: str, what: str, cache: FeatureCache | None = None
) -> Rows:
    """Rows ready to be read; `cache` is where features on disk lie. Raises ValueError if nothing counts at all, with the
    reason, and for what `feature_build.build` raises."""
    if not rows:
        raise ValueError(f"{what}: there are no rows, nothing would be trained. Check data.responses and its split.")
    counts = torch.stack([_counts(row, drafter.num_steps) for row in rows])
    if not bool(counts[:, 0].any()):
        supervised = sum(int(row.supervised.sum()) for row in rows)
        raise ValueError(
            f"{what}: {len(rows)} rows hold {supervised} supervised tokens, but none that a draft could propose (that takes "
            "two supervised tokens in a row), so nothing would be trained. Check the answers and the chat template with "
            "`draftsmith preview`."
        )
    return Rows(rows, counts, _source(rows, drafter, features, cache))


def _source(rows: Sequence[Row], drafter: TrainedDrafter, features: str, cache: FeatureCache | None) -> TeacherSource:
    target, taps = drafter.target, drafter.taps
    if features == "online":
        return Online(target, rows, taps)
    if features == "memory":
        return Memory(precompute(target, rows, taps=taps, progress=True), target.device)
    assert cache is not None, "features on disk need a cache"
    whole = cache
    if isinstance(target, ShardedTarget):
        target.lead(lambda: build(whole, progress=True))
    build(cache, progress=True)  # after that, nothing is missing
    return cache


def fingerprint(rows: Sequence[Row]) -> str:
    """First 16 hex digits of the SHA-256 of all rows: what a checkpoint was trained on."""
    digest = hashlib.sha256()
    for row in rows:
        for tensor in (row.tokens, row.segments, row.supervised):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Stream:
    """The endless order of the training rows."""

    num_rows: int
    rows_per_step: int
    seed: int

    def batch(self, step: int) -> list[int]:
        """Row numbers of the global batch of `step`; epochs follow each other without a gap."""
        first = step * self.rows_per_step
        places = [divmod(place, self.num_rows) for place in range(first, first + self.rows_per_step)]
        return [_permutation(self.num_rows, self.seed, epoch)[place] for epoch, place in places]


def share(batch: Sequence[int], *, rank: int, world: int, most: int) -> list[list[int]]:
    """The rows of process `rank` in micro-batches of at most `most`, equally many in each of `world` processes.

    Where `most` divides a process' rows, the micro-batches of a step are the same for any number of processes.
    """
    assert len(batch) % world == 0, f"{len(batch)} rows do not divide over {world} processes"
    size = len(batch) // world
    mine = batch[rank * size : (rank + 1) * size]
    return [list(mine[first : first + most]) for first in range(0, size, most)]


def seed_draws(*keys: int) -> None:
    """Seed everything that a method draws in one forward, from what it draws for: never from what was drawn before, so
    that a continued run and any number of processes draw the same."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def _counts(row: Row, num_steps: int) -> Tensor:
    teacher = TeacherBatch(
        tokens=row.tokens[None],
        segments=row.segments[None],
        positions=row.positions[None],
        supervised=row.supervised[None],
        hidden=torch.empty(0),
        features=None,
        logits=_nothing,
    )
    return torch.stack([teacher.step_mask(step).sum() for step in range(num_steps)])  # (K,)


def _nothing(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    raise AssertionError("counting rows needs no logits")
