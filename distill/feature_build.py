"""Builds a feature cache: one process or many, killed and continued at any instant.

Every process goes through the shards in order and writes whole ones that nobody else is writing, until all are there;
so two builds of one folder, or the processes of one launch, share the work without knowing of each other. What is
needed is compared with what the disk has before the first byte is written.

    draftsmith cache RECIPE        # or `features: disk` in the recipe, which builds what is missing at the start
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass

from tqdm import tqdm

from .feature_cache import FeatureCache
from .feature_claims import WHOLE_CACHE, claim
from .feature_codec import COMPRESSIONS, bytes_per_token
from .feature_manifest import INDEX, Manifest, read_index, write_index

_PAUSE = 0.2
"""Seconds between looks at shards that other processes are writing."""


@dataclass(frozen=True)
class BuildReport:
    """What this process did, and what the cache is now."""

    written: int
    """Shards written by this process."""
    damaged: int
    """Of the shards there before: those whose bytes had changed; they were written anew."""
    num_shards: int
    """All shards."""
    bytes: int
    """Size of all shards."""


def build(cache: FeatureCache, *, check: bool = False, replace: bool = False, progress: bool = False) -> BuildReport:
    """Complete the cache in its folder.

    check: read every byte of the shards that are there already, and write damaged ones anew (reading for training
    compares each row's checksum in any case). replace: give up a cache that was made of something else.
    Raises ValueError if the folder holds a cache of something else (naming what differs) and `replace` is not set, if
    the disk is too small, and for what `FeatureCache.write` raises.
    """
    cache.folder.mkdir(parents=True, exist_ok=True)
    with claim(cache.folder, WHOLE_CACHE, wait=True):
        _settle(cache, replace)
    missing = _missing(cache)
    damaged = _damaged(cache, set(range(cache.num_shards)) - set(missing), progress) if check else set[int]()
    missing = sorted({*missing, *damaged})
    _announce(cache, missing)
    written = _write(cache, missing, damaged, progress)
    sizes = {cache.path(number).name: cache.path(number).stat().st_size for number in range(cache.num_shards)}
    with claim(cache.folder, WHOLE_CACHE, wait=True):
        write_index(cache.folder, cache.manifest, sizes)
    return BuildReport(written, len(damaged), cache.num_shards, sum(sizes.values()))


def _settle(cache: FeatureCache, replace: bool) -> None:
    """Make the folder's manifest this cache's, or this cache's layout the folder's."""
    try:
        found = Manifest.read(cache.folder)
    except ValueError:
        if not replace:
            raise
        found, differ = None, ["it is damaged"]
    else:
        if found is not None:  # how many rows a shard has is decided once
            cache.manifest = cache.manifest.model_copy(update={"rows_per_shard": found.rows_per_shard})
        differ = cache.manifest.differences(found) if found is not None else []
    if differ and not replace:
        raise ValueError(
            f"{cache.folder} holds features made of something else: {'; '.join(differ)}. Name another folder "
            "(data.cache.folder), restore what differs, or write it anew with `draftsmith cache RECIPE --replace`."
        )
    if differ:
        print(f"features: {cache.folder} is replaced ({'; '.join(differ)})", file=sys.stderr)
        (cache.folder / INDEX).unlink(missing_ok=True)
        for pattern in ("shard-*.safetensors", ".writing-shard-*"):
            for file in cache.folder.glob(pattern):
                file.unlink()
    if differ or found is None:
        cache.manifest.write(cache.folder)


def _missing(cache: FeatureCache) -> list[int]:
    """Shards that are not there; those of a complete cache are known by the sizes in its index."""
    sizes = read_index(cache.folder, cache.manifest)
    return [
        number
        for number in range(cache.num_shards)
        if not (_has_size(cache, number, sizes.get(cache.path(number).name)) or cache.is_whole(number))
    ]


def _has_size(cache: FeatureCache, number: int, size: int | None) -> bool:
    path = cache.path(number)
    return size is not None and path.is_file() and path.stat().st_size == size


def _damaged(cache: FeatureCache, present: set[int], progress: bool) -> set[int]:
    found = set()
    for number in tqdm(sorted(present), desc="check", unit="shard", disable=not (progress and present)):
        if not cache.is_whole(number, thoroughly=True):
            print(f"features: {cache.path(number)} is damaged and is written anew", file=sys.stderr)
            found.add(number)
    return found


def _announce(cache: FeatureCache, missing: list[int]) -> None:
    """Say what the cache takes; raise if the disk has less than what is missing."""
    total, need = (sum(map(cache.size, numbers)) for numbers in (range(cache.num_shards), missing))
    free = shutil.disk_usage(cache.folder).free
    target, vectors = cache.target, sum(cache.vectors.values())
    kinds = {kind: bytes_per_token(target.hidden_size, vectors, kind, target.dtype) for kind in COMPRESSIONS}
    ours = cache.bytes_per_token
    print(
        f"features: {ours:,} bytes per token ({cache.compression}; bf16 has {kinds['bf16']:,}, {kinds['bf16'] / ours:.2f} times "
        f"as many) x {cache.manifest.num_tokens:,} tokens = {_size(total)} in {cache.num_shards} shards under {cache.folder}; "
        f"{_size(need)} to write, {_size(free)} free",
        file=sys.stderr,
    )
    if need > free:
        others = ", ".join(f"{kind} {_size(total * size // ours)}" for kind, size in kinds.items())
        raise ValueError(
            f"the feature cache needs {_size(need)} more and {cache.folder} has {_size(free)} free. Name a folder on a "
            f"larger disk (data.cache.folder), another data.cache.compression (in all: {others}), fewer samples "
            "(data.max_samples), or features: online, which stores nothing."
        )


def _write(cache: FeatureCache, missing: list[int], damaged: set[int], progress: bool) -> int:
    """Write missing shards that are not being written by others, and wait for those that are."""
    written, waiting, theirs = 0, deque(missing), deque[int]()
    done = len(cache.rows) - sum(len(cache.indices(number)) for number in missing)
    with tqdm(total=len(cache.rows), initial=done, desc="features", unit="row", disable=not progress) as bar:
        while waiting or theirs:
            number = waiting.popleft() if waiting else theirs.popleft()
            with claim(cache.folder, number, wait=False) as is_mine:
                is_there = is_mine and cache.is_whole(number, thoroughly=number in damaged)
                if is_mine and not is_there:
                    cache.write(number, told=bar.update)
                    written += 1
            if is_mine:
                bar.update(len(cache.indices(number)) if is_there else 0)
                continue
            theirs.append(number)
            if not waiting:
                time.sleep(_PAUSE)
    return written


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"
