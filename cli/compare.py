"""`draftsmith compare`: several recipes on the same responses for the same time, then measured on the same prompts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import Dtype, MaxNewTokens, Tree, check_tree
from .report import reported

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


def compare(
    recipes: Annotated[list[Path], typer.Argument(help="Training recipes, one line of the table each.")],
    responses: Annotated[Path, typer.Option(help="What all of them learn from (draftsmith respond).")],
    minutes: Annotated[
        float, typer.Option(help="Training time of each, at most; its schedule fits it.", min=0.01)
    ] = 10,
    out: Annotated[Path, typer.Option("--out", help="Folder for runs, evaluations and the table.")] = Path(
        "runs/compare"
    ),
    prompts: Annotated[
        str | None, typer.Option(help="Prompts to measure on; the shipped held-out ones if absent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only this many prompts, spread over the file.", min=1)] = 20,
    set_values: Annotated[
        list[str] | None,
        typer.Option("--set", help="A recipe value for all, like rows_per_step=8.", metavar="KEY=VALUE"),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    dtype: Dtype = "auto",
    tree: Tree = "fit",
) -> None:
    """Train each recipe on the same responses for the same time; print one table, and
    held-out tau against data and time as each was trained (--set eval_every=50).

    Measured at temperature 0 and 1 with the tree that is fastest here, or the same
    for all: --tree 16. What is done already in --out is kept, so the command goes
    on after an interruption.

    Example: draftsmith compare configs/recipes/eagle3_smollm2.yaml --responses runs/demo/responses.jsonl
    """
    with reported(f"what is done is in {out}; the same command goes on from there."):
        from rich.console import Console

        from .evaluate import write_json

        check_tree(tree)
        entries = _entries(recipes, out)
        settings = [f"data.responses={responses}", f"minutes={minutes}", *(set_values or ())]
        for entry in entries:
            _check(entry, settings)
        for number, entry in enumerate(entries, start=1):
            print(f"{number}/{len(entries)} {entry.recipe}", flush=True)
            _train(entry, settings)
            for temperature in TEMPERATURES:
                _evaluate(entry, temperature, prompts, limit, max_new_tokens, dtype, tree, settings)
        lines = [_line(entry) for entry in entries]
        asked = {"responses": str(responses), "minutes": minutes, "tree": tree}
        write_json(asked | {"recipes": lines}, out / "compare.json")
        Console().print(table(lines))
        Console().print(curves(lines))
        print(f"written to {out / 'compare.json'}")


def _entries(recipes: Sequence[Path], out: Path) -> list[Entry]:
    names = [recipe.stem for recipe in recipes]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"recipes need distinct file names, {', '.join(repeated)} occurs twice.")
    return [Entry(recipe, out / name) for recipe, name in zip(recipes, names)]


def _check(entry: Entry, settings: list[str]) -> None:
    """A fault in any recipe shows before the first is trained."""
    from ..train.recipe import load_recipe

    load_recipe(entry.recipe, [*settings, f"out={entry.run}"])


def _train(entry: Entry, settings: list[str]) -> None:
    """In a process of its own, whose peak memory is therefore the training's."""
    if entry.drafter.is_dir():
        print(f"{entry.drafter} is there already")
        return
    command = [sys.executable, "-m", "draftsmith.train", str(entry.recipe), *settings, f"out={entry.run}"]
    if (entry.run / "checkpoints").is_dir():
        command.append("--resume")
    with subprocess.Popen(command) as child:
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:  # the child got it as well and is saving
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode == 130:
        raise KeyboardInterrupt
    if child.returncode:
        raise ValueError(f"training {entry.recipe} ended with status {child.returncode}; see its message above.")
    kibibyte = 1 if sys.platform == "darwin" else 1024
    entry.memory.write_text(json.dumps({"peak_bytes": usage.ru_maxrss * kibibyte}), encoding="utf-8")


def _evaluate(
    entry: Entry,
    temperature: float,
    source: str | None,
    limit: int | None,
    max_new_tokens: int,
    dtype: str,
    tree: str,
    settings: list[str],
) -> None:
    import torch

    from ..infer.sampling import SamplingParams
    from ..infer.target import Target
    from ..train.joint import FOLDER
    from ..train.recipe import load_recipe
    from .evaluate import compare, eval_prompts, write_json

    path = entry.evaluation(temperature)
    asked_for = {"tree": tree, "max_new_tokens": max_new_tokens}
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if all(there[name] == value for name, value in asked_for.items()):
            return
        print(f"{path} was measured otherwise; measuring again")
    recipe = load_recipe(entry.recipe, settings)
    # A target that was trained too lies beside the drafter.
    target = Target.load(str(entry.run / FOLDER) if recipe.backbone else recipe.target, dtype=dtype)
    asked = eval_prompts(target, source, split=None if source else "held-out", limit=limit)
    sampling = SamplingParams(temperature=temperature)
    document = compare(
        target, str(entry.drafter), asked, sampling=sampling, max_new_tokens=max_new_tokens, source=source, tree=tree
    )
    write_json(document, path)
    del target
    gc.collect()
    torch.cuda.empty_cache()  # the next recipe trains in a process of its own, on the same card


def _line(entry: Entry) -> dict[str, Any]:
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
        "curve": _curve(entry.run),
    }


def _curve(run: Path) -> list[dict[str, float]]:
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
