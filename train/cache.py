"""Builds the feature caches of a recipe without training: ahead of the run, on other machines, in several processes.

draftsmith cache RECIPE [a.b=c ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..distill.feature_build import BuildReport, build
from ..infer.target import Target
from . import data
from .assembly import build_drafter
from .recipe import load_recipe


@dataclass(frozen=True)
class CacheReport:
    """What was done for each split, and where."""

    folder: Path
    train: BuildReport
    held_out: BuildReport


def cache(path: str | Path, overrides: Sequence[str] = (), *, replace: bool = False) -> CacheReport:
    """Complete the feature caches of the recipe in `path` and read every byte that was there before.

    Processes that do this at the same time share the work. Raises ValueError for whatever the user can put right.
    """
    recipe = load_recipe(path, overrides)
    if recipe.data.features != "disk":
        raise ValueError(
            f"{path}: data.features is {recipe.data.features}, so a run would not read a cache. Set data.features=disk."
        )
    if recipe.target_sharding != "none":
        raise ValueError(
            f"{path}: its target is split over processes, and this loads a whole one. Launch the training, which builds the "
            "cache at its start, or set target_sharding=none."
        )
    target = Target.load(recipe.target, dtype=recipe.target_dtype)
    samples, train_rows, held_rows = data.load_rows(recipe, target)
    drafter = build_drafter(recipe, target, samples)
    caches = data.open_caches(recipe, drafter, train_rows, held_rows)
    train, held_out = (build(cache, check=True, replace=replace, progress=True) for cache in caches)
    return CacheReport(recipe.cache_folder, train, held_out)
