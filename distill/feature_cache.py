"""The feature cache: what the target computes on packed rows, kept on disk and read by memory map in any order.

Letters: B rows, T positions, P positions that hold a token, M vectors per position, D hidden.

    FOLDER/manifest.json            what the cache was made of (feature_manifest.py)
    FOLDER/index.json               written when it is complete: every shard and its size
    FOLDER/shard-00000.safetensors  consecutive rows (feature_shard.py)
    FOLDER/.claims                  who writes what (feature_claims.py)

Logits are not stored: the last hidden state and the target's own head give them. Which row is read when is the
caller's business; a row is a slice of one map, so a shuffled order costs no more than a straight one.

A shard found damaged while it is read is written anew on the spot. Each row is read by the target alone, so its values
do not depend on how rows were batched or shared out, and training goes on as if nothing had happened.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..heads.base import TeacherBatch
from ..infer.target import Target
from .feature_claims import claim
from .feature_codec import Compression, Stored, bytes_per_shard, bytes_per_token, decode
from .feature_manifest import Manifest, hash_rows
from .feature_shard import HEADER_BYTES, Damaged, Shard, write_shard
from .features import frozen_logits, stack_rows, teacher_batch
from .packing import Row

_MOST_OPEN = 4096
"""Shards mapped at the same time; a system allows some tens of thousands of maps per process."""


class FeatureCache:
    """Teacher batches from disk. `feature_build.build` completes a cache; reading repairs what it finds damaged."""

    def __init__(
        self,
        folder: Path,
        target: Target,
        rows: Sequence[Row],
        *,
        taps: tuple[int, ...],
        compression: Compression,
        shard_bytes: int,
    ) -> None:
        """shard_bytes: about as large as a shard becomes, at least one row. Nothing is read or written yet."""
        assert rows, "a cache of no rows"
        self.folder, self.target, self.rows = folder, target, rows
        self.compression: Compression = compression
        self.lengths = [int((row.segments > 0).sum()) for row in rows]
        self.vectors = {"hidden": 1} | ({"features": len(taps)} if taps else {})
        self.bytes_per_token = bytes_per_token(target.hidden_size, 1 + len(taps), compression, target.dtype)
        self.manifest = Manifest(
            target=target.fingerprint(),
            dtype=str(target.dtype).removeprefix("torch."),
            taps=taps,
            template_hash=target.template_hash,
            rows_hash=hash_rows(rows),
            num_rows=len(rows),
            num_tokens=sum(self.lengths),
            compression=compression,
            rows_per_shard=max(1, shard_bytes // (self.bytes_per_token * len(rows[0].tokens))),
        )
        self._open: dict[int, Shard] = {}

    @property
    def num_shards(self) -> int:
        return -(-len(self.rows) // self.manifest.rows_per_shard)

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"shard-{number:05d}.safetensors"

    def indices(self, number: int) -> range:
        """The rows of a shard."""
        size = self.manifest.rows_per_shard
        return range(number * size, min((number + 1) * size, len(self.rows)))

    def size(self, number: int) -> int:
        """About the bytes of a shard's file, known before it is written."""
        indices = self.indices(number)
        scales = bytes_per_shard(self.target.hidden_size, sum(self.vectors.values()), self.compression)
        tokens = sum(self.lengths[index] for index in indices)
        return tokens * self.bytes_per_token + 8 * len(indices) + scales + HEADER_BYTES

    def open(self, number: int) -> Shard:
        """Map a shard anew. Raises Damaged if it is missing, cut short or another cache's."""
        lengths = [self.lengths[index] for index in self.indices(number)]
        return Shard(self.path(number), lengths, identity=self.manifest.identity)

    def write(self, number: int, *, told: Callable[[], object] = lambda: None) -> None:
        """Let the target read a shard's rows, calling `told` after each, and write the shard; the caller holds its claim.
        Raises ValueError if the target computed something that is not finite, or if the disk refuses."""
        indices, parts = self.indices(number), dict[str, list[Tensor]]()
        for index in indices:
            read = teacher_batch(self.target, [self.rows[index]], taps=self.manifest.taps)
            for name, values in (("hidden", read.hidden), ("features", read.features)):
                if values is not None:  # (1, T, M*D) -> (P, M, D)
                    vectors = values[0, : self.lengths[index]].unflatten(-1, (-1, self.target.hidden_size))
                    parts.setdefault(name, []).append(vectors.cpu())
            told()
        try:
            write_shard(
                self.path(number),
                {name: torch.cat(values) for name, values in parts.items()},
                [self.lengths[index] for index in indices],
                compression=self.compression,
                identity=self.manifest.identity,
            )
        except OSError as error:
            free = shutil.disk_usage(self.folder).free / 2**20
            raise ValueError(
                f"{self.path(number)} could not be written ({free:.0f} MiB free): {error}. The shards before it are "
                "whole; make room and start again, or name another folder."
            ) from error

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        """Some rows as one batch (B, T) on the target's device, in its dtype; padding reads as zeros."""
        device, dtype = self.target.device, self.target.dtype
        tokens, segments, positions, supervised = stack_rows([self.rows[index] for index in indices], device)
        read = {
            name: torch.zeros(*tokens.shape, count * self.target.hidden_size, dtype=dtype, device=device)
            for name, count in self.vectors.items()
        }
        for place, index in enumerate(indices):
            for name, stored in self._row(index).items():
                moved = {kind: tensor.to(device) for kind, tensor in stored.items()}
                read[name][place, : self.lengths[index]] = decode(moved, self.compression, dtype).flatten(1)
        features, logits = read.get("features"), frozen_logits(self.target)
        return TeacherBatch(tokens, segments, positions, supervised, read["hidden"], features, logits=logits)

    def _row(self, index: int) -> dict[str, Stored]:
        number, place = divmod(index, self.manifest.rows_per_shard)
        try:
            return self._mapped(number).row(place)
        except Damaged as fault:
            self._repair(number, fault)
        try:
            return self._mapped(number).row(place)
        except Damaged as fault:
            raise ValueError(f"{self.folder}: {fault}, again after it was written anew. Check the disk.") from fault

    def _mapped(self, number: int) -> Shard:
        if number not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[number] = self.open(number)
        return self._open[number]

    def _repair(self, number: int, fault: Damaged) -> None:
        found = Manifest.read(self.folder)
        if found is None or found.identity != self.manifest.identity:
            raise ValueError(
                f"{self.folder} was removed or replaced by another cache while it was read. Start again."
            ) from fault
        self._open.pop(number, None)
        with claim(self.folder, number, wait=True):
            if not self.is_whole(number, thoroughly=True):  # another process may have been faster
                print(f"features: {self.folder}: {fault}; the target reads its rows again", file=sys.stderr)
                self.write(number)

    def is_whole(self, number: int, *, thoroughly: bool = False) -> bool:
        """Whether a shard is there and this cache's; thoroughly: whether all its bytes are those that were written."""
        try:
            shard = self.open(number)
            for place in range(len(self.indices(number)) if thoroughly else 0):
                shard.row(place)
        except Damaged:
            return False
        return True
