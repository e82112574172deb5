"""`draftsmith cache`: what the target computes on a recipe's data, written to disk before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .report import reported


def cache(
    recipe: Annotated[Path, typer.Argument(help="YAML file with `features: disk`, like those in configs/recipes.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Fields to set, like data.features=disk data.cache.folder=DIR.", metavar="KEY=VALUE"),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Write a cache of other data, taps or another target anew.")
    ] = False,
) -> None:
    """Write what the target computes on a recipe's data to disk, for `train`.

    `train` builds what is missing itself; this does it ahead, and checks every byte
    that is there. Size and free disk are compared first. Start it several times, one
    per GPU or machine, and the processes share the work; a killed one is continued.

    Example: draftsmith cache configs/recipes/eagle3_smollm2.yaml data.features=disk data.cache.folder=runs/features
    """
    with reported("finished shards are kept; the same command goes on from there."):
        from ..train.cache import cache as build_caches

        report = build_caches(recipe, overrides or (), replace=replace)
        for name, done in (("train", report.train), ("held-out", report.held_out)):
            damaged = f" ({done.damaged} of them damaged)" if done.damaged else ""
            print(
                f"{report.folder / name}: {done.num_shards} shards, {done.bytes / 2**20:.1f} MiB; "
                f"wrote {done.written}{damaged}"
            )
