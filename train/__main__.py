"""`python -m draftsmith.train RECIPE [a.b=c ...] [--resume]`, alone or under `accelerate launch -m draftsmith.train`."""

from __future__ import annotations

import argparse
import os
import sys

from . import run
from .leave import leave

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="draftsmith.train", description="Train a drafter from a recipe.")
    parser.add_argument("recipe", help="YAML file, like those in configs/recipes")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="recipe values to set, like optimiser.lr=1e-3")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in `out`")
    arguments = parser.parse_intermixed_args()
    try:
        result = run(arguments.recipe, arguments.overrides, resume=arguments.resume)
    except ValueError as error:
        rank = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"error: {rank}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted between checkpoints; those of the run are whole, --resume goes on from the newest",
            file=sys.stderr,
        )
        return INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:
        if not result.is_finished:
            print(
                f"stopped after step {result.step}, saved in {result.drafter.parent}. Go on with the same command and --resume."
            )
        else:
            print(f"trained {result.step} steps; the drafter is in {result.drafter}")
    return 0 if result.is_finished else INTERRUPTED


if __name__ == "__main__":
    if "RANK" in os.environ:
        leave(main())
    sys.exit(main())
