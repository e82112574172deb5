"""`draftsmith bench`: what decoding costs on this machine, side by side with transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import DrafterName, Dtype, Forwards, TargetName
from .opening import open_target
from .report import reported

if TYPE_CHECKING:
    from rich.table import Table

    from .side_by_side import Row


def bench(
    target: TargetName = "smollm2-135m",
    drafter: DrafterName = "prompt-lookup",
    draft: Annotated[
        str | None,
        typer.Option("--draft", help="Draft model of both sides' assisted generation; the target itself if absent."),
    ] = None,
    singles: Annotated[int, typer.Option(help="Prompts answered one at a time.", min=1)] = 6,
    prompts: Annotated[int, typer.Option(help="Prompts answered in batches of --rows.", min=1)] = 96,
    rows: Annotated[int, typer.Option("--rows", help="Batch size.", min=1)] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Limit of each answer.", min=2)] = 256,
    dtype: Dtype = "auto",
    forwards: Forwards = "eager",
    only: Annotated[
        str | None, typer.Option(help="Measure only what has this in its name, such as 'one at a time'.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure verification by tree size, and decoding against transformers.

    Both sides answer the same shipped prompts, greedily, in turn, in one run; a ratio
    is the median over the prompts (or batches), with its quartiles.

    Example: draftsmith bench --singles 2 --prompts 32 --max-new-tokens 64 --json bench.json
    """
    with reported("nothing was written."):
        from rich.console import Console

        from ..infer.cost import verify_seconds
        from ..infer.evaluate import machine
        from .evaluate import write_json
        from .side_by_side import Bench

        model = open_target(target, dtype=dtype, forwards=forwards)
        run = Bench(model, target, drafter=drafter, draft=draft, rows=rows, max_new_tokens=max_new_tokens)
        console = Console(highlight=False)
        told = machine(model)
        console.print(
            f"{target}, {run.dtype}, on {told['device']} ({told['threads']} threads, {told['processor']}, {told['system']})"
        )
        if only is None:
            title = f"one target forward, {target}, {run.dtype}, 256 tokens read"
            console.print(cost_table(verify_seconds(model), title=title))
        measured = []
        for case in run.cases(singles=singles, prompts=prompts):
            if only is None or only in case.name:
                measured.append(case.measure(console.is_terminal))
        if not measured:
            raise ValueError(
                f"--only {only!r} matches none of: {'; '.join(case.name for case in run.cases(singles=1, prompts=1))}."
            )
        console.print(ratio_table(measured))
        if json_path is not None:
            write_json([row.as_json() for row in measured], json_path)


def cost_table(seconds: dict[int, float], *, title: str) -> Table:
    """Milliseconds of one verification by the number of tree nodes, and what tau must reach for it to pay."""
    from rich.table import Table

    table = Table("nodes", "ms", "pays above tau", title=title, title_justify="left")
    for size, taken in seconds.items():
        table.add_row(str(size), f"{1e3 * taken:.1f}", f"{taken / seconds[1]:.2f}")
    return table


def ratio_table(rows: list[Row]) -> Table:
    """Both sides' rates, the median of the ratios and its quartiles."""
    from rich import box
    from rich.table import Table

    table = Table("", "ours", "peer", "ratio", "quartiles", "n", box=box.SIMPLE)
    for row in rows:
        spread = f"{row.low:.2f} .. {row.high:.2f}"
        table.add_row(row.name, f"{row.ours:.1f}", f"{row.peer:.1f}", f"{row.ratio:.2f}x", spread, str(row.n))
    return table
