"""Are two drafters different at all? Their acceptance on the same held-out text, paired by document.

Letters: B rows, T positions, K draft steps, N documents.

At each position at which a draft could begin, a chain draft keeps its leading right tokens; tau is one more than their
mean. Positions of a document depend on each other, so whole documents are drawn again and again (bootstrap), the same
ones for both drafters, and the interval is that of the difference. What drafters see are the target's own states,
whatever they were trained on: this is how the price of a feature cache's compression is measured.

    for kind in exact int6; do draftsmith train RECIPE data.features=disk data.cache.compression=$kind out=runs/$kind; done
    python -m draftsmith.train.paired RECIPE runs/exact/drafter runs/int6/drafter
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..distill.features import teacher_batch
from ..distill.packing import Row
from ..heads import TrainedDrafter, load_drafter
from ..infer.target import Target
from .data import load_rows
from .recipe import Recipe, load_recipe

DRAWS = 4000


@dataclass(frozen=True)
class Compared:
    """One drafter beside the first one."""

    folder: Path
    documents: int
    positions: int
    """Places at which a draft begins."""
    tau: float
    """Teacher-forced: 1 + mean tokens kept of a chain draft."""
    difference: float
    """To the first drafter's tau."""
    low: float
    high: float
    """95 % interval of the difference."""


def paired_tau(recipe: Recipe, folders: Sequence[str | Path]) -> list[Compared]:
    """The drafters in `folders` on the recipe's held-out rows. Raises ValueError if one does not fit the target."""
    target = Target.load(recipe.target, dtype=recipe.target_dtype)
    _, _, rows = load_rows(recipe, target)
    counts = [_count(load_drafter(Path(folder), target), rows) for folder in folders]
    places, kept = counts[0][0], torch.stack([found for _, found in counts])  # (N,), (drafters, N)
    assert all(torch.equal(other, places) for other, _ in counts), "drafters began at different places"
    generator = torch.Generator().manual_seed(recipe.seed)
    drawn = torch.randint(len(places), (DRAWS, len(places)), generator=generator)
    means = kept[:, drawn].sum(dim=-1) / places[drawn].sum(dim=-1)  # (drafters, DRAWS)
    whole = kept.sum(dim=-1) / places.sum()
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return [
        Compared(
            Path(folder),
            len(places),
            int(places.sum()),
            1 + float(whole[index]),
            float(whole[index] - whole[0]),
            *torch.quantile(means[index] - means[0], ends).tolist(),
        )
        for index, folder in enumerate(folders)
    ]


@torch.no_grad()
def _count(drafter: TrainedDrafter, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Places and kept tokens of each document that has places, (N,) float64 both."""
    places: dict[str, float] = {}
    kept: dict[str, float] = {}
    drafter.eval()
    for row in rows:
        ranks = drafter.ranks(teacher_batch(drafter.target, [row], taps=drafter.taps))[0].cpu()  # (T, K)
        leading = (ranks == 0).cumprod(dim=-1).sum(dim=-1)
        for number, id in enumerate(row.ids, start=1):
            here = (row.segments == number) & (ranks[:, 0] >= 0)
            if bool(here.any()):
                places[id] = places.get(id, 0.0) + float(here.sum())
                kept[id] = kept.get(id, 0.0) + float(leading[here].sum())
    ids = sorted(places)
    return tuple(torch.tensor([found[id] for id in ids], dtype=torch.float64) for found in (places, kept))  # type: ignore[return-value]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="draftsmith.train.paired", description="Compare trained drafters.")
    parser.add_argument("recipe", help="YAML file whose target and held-out data they are compared on")
    parser.add_argument("drafters", nargs="+", help="folders of drafters; the others are compared with the first")
    given = parser.parse_args(arguments)
    for found in paired_tau(load_recipe(given.recipe), given.drafters):
        print(
            f"{found.folder}: tau {found.tau:.4f} over {found.positions} positions of {found.documents} documents; "
            f"{found.difference:+.4f} to the first, 95 % [{found.low:+.4f}, {found.high:+.4f}]"
        )


if __name__ == "__main__":
    main()
