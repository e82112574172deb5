"""What a comparison is told from: the files of each recipe, its line of figures, and the two tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Entry:
    """One recipe of the comparison and where its files are."""

    recipe: Path
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "train"

    @property
    def drafter(self) -> Path:
        return self.run / "drafter"

    @property
    def memory(self) -> Path:
        return self.folder / "memory.json"

    def evaluation(self, temperature: float) -> Path:
        return self.folder / f"evaluation_t{temperature:g}.json"


def line_of(entry: Entry) -> dict[str, Any]:
    """The figures of one recipe; every one is read from what its run and its evaluations wrote."""
    run = json.loads((entry.run / "run.json").read_text(encoding="utf-8"))
    totals = [json.loads(entry.evaluation(t).read_text(encoding="utf-8"))["totals"] for t in TEMPERATURES]
    recipe, position = run["recipe"], run["position"]
    tokens = position["step"] * recipe["rows_per_step"] * recipe["data"]["row_length"]
    memory = json.loads(entry.memory.read_text(encoding="utf-8")) if entry.memory.is_file() else {}
    return {
        "recipe": str(entry.recipe),
        "weights": _count_weights(entry.drafter),
        "steps": position["step"],
        "seconds": position["seconds"],
        "train_tokens_per_s": tokens / position["seconds"],
        "predicted_tau": run["measured"]["predicted_tau"],
        "tau": totals[0]["tau"],
        "tau_at_1": totals[1]["tau"],
        "acceptance": totals[0]["acceptance"],
        "tokens_per_s": totals[0]["tokens_per_s"],
        "speedup": totals[0]["speedup"],
        "speedup_at_1": totals[1]["speedup"],
        "identical": totals[0]["identical"],
        "near_ties": totals[0]["near_ties"],
        "prompts": totals[0]["prompts"],
        "peak_bytes": memory.get("peak_bytes"),
        "curve": curve_of(entry.run),
    }


def curve_of(run: Path) -> list[dict[str, float]]:
    """Step, tokens and seconds of training, and predicted tau, at each held-out evaluation."""
    timing, metrics = (
        [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
        for name in ("timing.jsonl", "metrics.jsonl")
    )
    spent: dict[int, tuple[int, float]] = {}
    before, last = (0, 0.0), (0, 0.0)
    for line in timing:
        if line["tokens"] <= last[0] - before[0]:  # a resumed process counts from 0
            before = last
        last = before[0] + line["tokens"], before[1] + line["seconds"]
        spent[line["step"]] = last
    return [
        {
            "step": line["step"],
            "tokens": spent[line["step"]][0],
            "seconds": spent[line["step"]][1],
            "predicted_tau": tau,
        }
        for line in metrics
        if (tau := line.get("held_out/predicted_tau")) is not None and line["step"] in spent
    ]


def _count_weights(drafter: Path) -> int:
    """Numbers in the drafter's file, the frozen ones that its format holds included."""
    import math

    from safetensors import safe_open

    with safe_open(drafter / "model.safetensors", framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """One row per recipe, the fastest first."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE, pad_edge=False)
    for name in (
        "recipe",
        "weights",
        "train tok/s",
        "chain tau",
        "tau T=0",
        "T=1",
        "acceptance@k",
        "tok/s",
        "speed-up",
        "GiB",
    ):
        shown.add_column(name, justify="left" if name == "recipe" else "right")
    for line in sorted(lines, key=lambda line: -line["speedup"]):
        peak = line["peak_bytes"]
        shown.add_row(
            Path(line["recipe"]).stem,
            f"{line['weights'] / 1e6:.1f}M",
            f"{line['train_tokens_per_s']:,.0f}",
            f"{line['predicted_tau']:.2f}",
            f"{line['tau']:.2f}",
            f"{line['tau_at_1']:.2f}",
            " ".join(f"{value:.2f}".removeprefix("0") for value in line["acceptance"]),
            f"{line['tokens_per_s']:.1f}",
            f"{line['speedup']:.2f}x",
            "" if peak is None else f"{peak / 2**30:.1f}",
        )
    return shown


def curves(lines: Sequence[dict[str, Any]], *, most: int = 6) -> Table:
    """Held-out tau of each recipe against the tokens and minutes it was trained on, at `most` evaluations at most."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE, pad_edge=False, title="tau after thousands of tokens (minutes)", title_justify="left")
    count = max((min(len(line["curve"]), most) for line in lines), default=0)
    for name in ("recipe", *[""] * count):
        shown.add_column(name, justify="left" if name else "right")
    for line in lines:
        curve = line["curve"]
        own = min(count, len(curve))
        picked = [curve[-1 - round(place * (len(curve) - 1) / max(own - 1, 1))] for place in range(own)]
        points = [
            f"{point['predicted_tau']:.2f} {point['tokens'] / 1e3:.0f}k ({point['seconds'] / 60:.1f})"
            for point in reversed(picked)
        ]
        shown.add_row(Path(line["recipe"]).stem, *points)
    return shown
