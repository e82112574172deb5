"""What a feature cache was made of, and which of its files are known to be complete.

A cache is continued and read only by a run that needs the very same features: the same target in the same precision,
the same taps, chat template and packed rows, stored the same way. Otherwise it is refused with what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from .feature_codec import Compression
from .packing import Row

MANIFEST, INDEX = "manifest.json", "index.json"


class Manifest(BaseModel):
    """What a cache was made of. Two caches are the same one if all of it but the target's name agrees."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["draftsmith features 1"] = "draftsmith features 1"
    """Name and version of the layout."""
    target: dict[str, Any]
    """`Target.fingerprint()`; its name is informative and not compared."""
    dtype: str
    """Precision the target computes in."""
    taps: tuple[int, ...]
    """Layers read, 0-based layer outputs."""
    template_hash: str
    """Chat template of the target's tokenizer."""
    rows_hash: str
    """Hash of the packed rows: every token and document border (`hash_rows`)."""
    num_rows: int
    """Packed rows."""
    num_tokens: int
    """Their tokens, padding left out."""
    compression: Compression
    """How hidden states are stored (`feature_codec`)."""
    rows_per_shard: int
    """Rows of every shard but the last."""

    @property
    def identity(self) -> str:
        """16 hex digits that each shard carries, so that none is taken for one of another cache."""
        return hashlib.sha256(json.dumps(_flat(self), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, there: Manifest) -> list[str]:
        """`field: value there, value here` for all in which the manifest on disk differs from this one."""
        ours, theirs = _flat(self), _flat(there)
        differ = [key for key in ours if theirs.get(key) != ours[key]]
        return [f"{key.replace('_', ' ')}: {theirs.get(key)} there, {ours[key]} here" for key in differ]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a cache; None if there is none. Raises ValueError if it is damaged."""
        path = folder / MANIFEST
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ValueError(
                f"{path} is damaged ({reason}). Write the cache anew (`draftsmith cache RECIPE --replace`) or name another folder."
            ) from error

    def write(self, folder: Path) -> None:
        _write(folder / MANIFEST, self.model_dump(mode="json"))


def write_index(folder: Path, manifest: Manifest, sizes: dict[str, int]) -> None:
    """List the complete shards and their bytes."""
    _write(folder / INDEX, {"identity": manifest.identity, "bytes": sum(sizes.values()), "shards": sizes})


def read_index(folder: Path, manifest: Manifest) -> dict[str, int]:
    """Bytes of each shard, by file name; empty while the cache is not complete, or if the index is another's."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return dict(content["shards"]) if content["identity"] == manifest.identity else {}
    except (OSError, ValueError, KeyError, TypeError):  # then each shard is looked at, which says the same more slowly
        return {}


def hash_rows(rows: Sequence[Row]) -> str:
    """First 16 hex digits of the SHA-256 of what the target reads; which tokens are learned does not matter to it."""
    digest = hashlib.sha256()
    for row in rows:
        for tensor in (row.tokens, row.segments, row.positions):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = manifest.model_dump(mode="json")
    target = fields.pop("target")
    return fields | {f"target {key}": value for key, value in target.items() if key != "name"}
