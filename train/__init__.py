"""One training loop for every drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loop import TrainResult


def run(path: str | Path, overrides: Sequence[str] = (), *, resume: bool = False) -> TrainResult:
    """Train the recipe in `path` with `a.b=c` overrides; `draftsmith train` and `python -m draftsmith.train` in code.

    Raises ValueError for whatever the user can put right.
    """
    from .loop import train  # late: it brings accelerate and the target's libraries
    from .recipe import load_recipe

    return train(load_recipe(path, overrides), resume=resume)
