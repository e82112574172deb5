"""`draftsmith train`: one recipe, one process; `accelerate launch -m draftsmith.train` runs the same on many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .report import INTERRUPTED, reported


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file, like those in configs/recipes.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Fields to set, like optimiser.lr=1e-3 steps=200.", metavar="KEY=VALUE"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")] = False,
) -> None:
    """Train a drafter for a frozen target by a recipe.

    On several devices: accelerate launch --config_file configs/accelerate/ddp.yaml -m draftsmith.train RECIPE

    Example: draftsmith train configs/recipes/medusa_smollm2_demo.yaml epochs=1 out=runs/try
    """
    with reported("checkpoints of the run are whole; add --resume to go on from the newest."):
        from ..train import run

        result = run(recipe, overrides or (), resume=resume)
        if not result.is_finished:
            print(f"stopped after step {result.step}, saved in {result.drafter.parent}; add --resume to go on.")
            raise typer.Exit(INTERRUPTED)
        print(f"trained {result.step} steps; the drafter is in {result.drafter}")
