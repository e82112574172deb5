"""One file of the feature cache: what the target computed on consecutive packed rows, read by memory map.

Letters: P positions of all rows, R rows, M taps, D hidden.

A shard is a safetensors file. Padding is not stored: a row takes as many positions as it has tokens, one row after the
other. Every row has a checksum over all its bytes, compared each time the row is read (4 GB/s), so what is trained on
is what was written. A shard that cannot be opened, holds something else, or fails a checksum raises `Damaged`.

    hidden.values    (P, 1, D)   hidden.scale    (P, 1)   hidden.channels    (1, D)     see feature_codec.py
    features.values  (P, M, D)   features.scale  (P, M)   features.channels  (M, D)     only with taps
    checksums        (R,) int64
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .feature_codec import Compression, Stored, encode

IDENTITY = "identity"
"""Key of the file's metadata that names what the cache was made of (`feature_cache.Manifest.identity`)."""

HEADER_BYTES = 1024
"""Room that the estimate allows for one file's header."""


class Damaged(Exception):
    """A shard is missing or its bytes are not those that were written."""


def write_shard(
    path: Path, parts: dict[str, Tensor], lengths: Sequence[int], *, compression: Compression, identity: str
) -> None:
    """Write the shard atomically: `parts` are whole tensors (P, M, D), `lengths` the rows' numbers of positions.

    The temporary file is named after the shard, so the next attempt replaces what a kill left of it (safetensors' own
    `save_file` leaves a file of a name drawn at random). Raises OSError if the disk refuses.
    """
    assert all(len(part) == sum(lengths) for part in parts.values()), "a part does not hold every position"
    tensors = {
        f"{name}.{kind}": tensor for name, part in parts.items() for kind, tensor in encode(part, compression).items()
    }
    starts = _starts(lengths)
    sums = [_checksum(_cut(tensors, first, last)) for first, last in pairwise(starts)]
    tensors["checksums"] = torch.tensor(sums, dtype=torch.int64)
    scratch = path.with_name(f".writing-{path.name}")
    try:
        scratch.write_bytes(save(tensors, metadata={IDENTITY: identity}))
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


class Shard:
    """A shard opened by memory map; no file handle is kept, and opening reads the header alone."""

    def __init__(self, path: Path, lengths: Sequence[int], *, identity: str) -> None:
        """lengths: positions of its rows. Raises Damaged if it is missing, cut short, or holds something else."""
        self.path = path
        self._starts = _starts(lengths)
        try:
            self._file = safe_open(path, "pt")
            found = (self._file.metadata() or {}).get(IDENTITY)
            names = [name for name in self._file.keys() if name != "checksums"]  # noqa: SIM118 (no dict)
            self._tensors = {name: self._file.get_tensor(name) for name in names}
            self._checksums: list[int] = self._file.get_tensor("checksums").tolist()
        except (FileNotFoundError, SafetensorError) as error:
            raise Damaged(f"{path.name}: {error}") from error
        if found != identity or len(self._checksums) != len(lengths):
            raise Damaged(f"{path.name}: it was written for another cache")

    def row(self, index: int) -> dict[str, Stored]:
        """The stored parts of one row, as views of the map. Raises Damaged if its bytes have changed."""
        cut = _cut(self._tensors, self._starts[index], self._starts[index + 1])
        if _checksum(cut) != self._checksums[index]:
            raise Damaged(f"{self.path.name}: the bytes of row {index} are not those that were written")
        row: dict[str, Stored] = {}
        for name, tensor in cut.items():
            part, kind = name.split(".")
            row.setdefault(part, {})[kind] = tensor
        return row


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(dim=0).tolist()]


def _cut(tensors: Stored, first: int, last: int) -> Stored:
    """Positions first..last-1; the channels' scales belong to every position."""
    return {name: tensor if name.endswith(".channels") else tensor[first:last] for name, tensor in tensors.items()}


def _checksum(tensors: Stored) -> int:
    value = 0
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}".encode(), value)
        value = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, value)
    return value
