"""`draftsmith plan`: what a run takes, from config files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .evaluate import write_json
from .report import reported

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..train.plan import Plan


def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML file, like those in configs/recipes.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Fields to set, like rows_per_step=64 data.row_length=4096.", metavar="KEY=VALUE"),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            help="config.json of the target, like those in configs/targets; the recipe's own target if absent."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each.", min=1)] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each GPU.", min=1)] = 80,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the training data, prompts included, like 2e8.", min=1)
    ] = None,
    hours: Annotated[float | None, typer.Option(help="When the run should be done.", min=0.01)] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print what a run takes before anything is loaded: memory, disk, speed, command.

    Only config files are read. Weights, memory and operations of a training step
    are counted by running it on tensors without contents.

    Example: draftsmith plan configs/recipes/eagle3_llama31_8b.yaml --architecture configs/targets/llama31_70b.json --tokens 2e8
    """
    with reported("nothing was written."):
        from rich.console import Console

        from ..train.blueprint import read_architecture
        from ..train.plan import Cluster, launch_command, make_plan
        from ..train.recipe import load_recipe

        loaded, cluster = load_recipe(recipe, overrides or ()), Cluster(nodes, gpus, gpu_memory)
        found = make_plan(
            loaded,
            read_architecture(architecture or loaded.target),
            cluster,
            epoch_tokens=None if tokens is None else int(tokens),
            hours=hours,
        )
        console = Console()
        for part in describe(found, row_length=loaded.data.row_length):
            console.print(part, soft_wrap=True)
        if found.chosen:
            print(launch_command(found.chosen, cluster, str(recipe), overrides or ()))
        if json_out:
            write_json(json.loads(found.to_json()), json_out)


def describe(found: Plan, *, row_length: int) -> list[RenderableType]:
    """The plan as it is printed, up to the command."""
    told = [*_models(found), *_data(found, row_length), *_speed(found)]
    width = max(len(name) for name, _ in told)
    lines: list[RenderableType] = [f"{name:<{width}}  {value}" for name, value in told]
    cluster = found.cluster
    if found.chosen is None:
        ending = "nothing fits; lower rows_per_forward or data.row_length, or take more or larger GPUs"
    else:
        ending = "the simplest that fits"
        if cluster.nodes > 1:
            ending += ", on every node with its number as RANK and the address of node 0 as HOST"
        ending += ":"
    return [*lines, "", _table(found), "", ending]


def _models(found: Plan) -> list[tuple[str, str]]:
    measured = found.measured
    experts = "" if measured.active == measured.weights else f", {measured.active:,} of them per token"
    taps = f", reads layers {', '.join(map(str, measured.taps))}" if measured.taps else ""
    frozen = f" and {measured.frozen:,} frozen" if measured.frozen else ""
    return [
        ("target", f"{measured.weights:,} weights{experts}, {_gib(measured.target)} GiB"),
        ("drafter", f"{measured.trained:,} trained weights{frozen}{taps}"),
    ]


def _data(found: Plan, row_length: int) -> list[tuple[str, str]]:
    measured, form = found.measured, found.compression
    sizes = ", ".join(f"{kind} {size:,}" for kind, size in measured.features.items())
    known = found.epoch_tokens
    whole = "" if known is None else f"; {_gib(measured.features[form] * known)} GiB as {form} for the data"
    together = found.answers(row_length)
    room = (
        f"{together} of {row_length} tokens fit beside the target on one GPU" if together else "the target fills a GPU"
    )
    return [
        ("feature cache", f"bytes per token: {sizes}{whole}"),
        ("answers", f"{measured.cache:,} bytes of keys and values per token; {room}"),
    ]


def _speed(found: Plan) -> list[tuple[str, str]]:
    measured, each = found.measured, found.measured.read_flops + found.measured.step_flops
    work = f"{each / 1e9:,.1f} GFLOP per token, {measured.read_flops / each:.0%} of it the target's"
    told = [("work", f"{work}; {found.micro_steps} micro-steps per step and process")]
    if found.tokens is None:
        return [*told, ("training", "give --tokens for its length, and --hours for the speed it needs")]
    length = f"{found.tokens:,} tokens"
    rate, flops = found.tokens_per_second, found.flops_per_second
    if rate is None or flops is None:
        return [*told, ("training", f"{length}; give --hours for the speed it needs")]
    needed = f"{rate:,.0f} tokens/s in all, {flops / 1e12:,.1f} TFLOP/s on each GPU"
    return [*told, ("training", f"{length} in {found.hours:g} hours: {needed}")]


def _table(found: Plan) -> RenderableType:
    from rich.table import Table

    cluster = found.cluster
    title = f"GiB per GPU, {cluster.nodes} x {cluster.gpus} of {cluster.gpu_memory:g}, 2 of them left to CUDA; main: main memory;"
    title += "\n1/N: layers of the target split over N GPUs"
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in ("launch", "target", "weights", "gradients", "optimiser", "step", "main", "total", "fits"):
        table.add_column(name, justify="left" if name == "launch" else "right", no_wrap=True)
    for option in found.options:
        drafter, name = option.drafter, option.launch + (f", 1/{option.shards}" if option.shards > 1 else "")
        sizes = (option.target, drafter.weights, drafter.gradients, drafter.optimiser)
        rest = (drafter.working + option.activations, drafter.host, option.total)
        table.add_row(name, *map(_gib, (*sizes, *rest)), "yes" if option.fits else "no")
    if found.whole_target_only:
        table.caption = f"the target cannot be split: {found.whole_target_only}"
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
