"""`draftsmith compare`: several recipes on the same responses for the same time, then measured on the same prompts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .arguments import Dtype, MaxNewTokens, Tree
from .compare_table import TEMPERATURES, Entry, curves, line_of, table
from .opening import check_tree
from .report import reported


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
        lines = [line_of(entry) for entry in entries]
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
    """A fault in any recipe shows before the first is trained, and so does a drafter that was trained otherwise."""
    from ..train.recipe import differences, load_recipe

    recipe = load_recipe(entry.recipe, [*settings, f"out={entry.run}"])
    if not entry.drafter.is_dir():
        return
    saved = json.loads((entry.run / "run.json").read_text(encoding="utf-8"))["recipe"]
    if changed := differences(saved, recipe):
        raise ValueError(
            f"the drafter in {entry.drafter} was trained with other settings: {'; '.join(changed)}. Ask for the same, give "
            f"another --out, or remove {entry.folder} to train it again."
        )


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

    from ..infer.precision import resolve_dtype
    from ..infer.sampling import SamplingParams
    from ..infer.target import Target
    from ..train.joint import FOLDER
    from ..train.recipe import load_recipe
    from .evaluate import SHIPPED, compare, eval_prompts, write_json

    path = entry.evaluation(temperature)
    asked_for = {
        "tree": tree,
        "max_new_tokens": max_new_tokens,
        "prompts": source or SHIPPED,
        "limit": limit,
        "dtype": resolve_dtype(dtype),
    }
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if all(name in there and there[name] == value for name, value in asked_for.items()):
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
    document["settings"]["limit"] = limit
    write_json(document, path)
    del target
    gc.collect()
    torch.cuda.empty_cache()  # the next recipe trains in a process of its own, on the same card
