"""`draftsmith evaluate`: a drafter against plain decoding, side by side, every answer checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import (
    DrafterName,
    Dtype,
    MaxNewTokens,
    Rows,
    ScheduleRule,
    Seed,
    TargetName,
    Temperature,
    TopK,
    TopP,
    Tree,
    open_drafter,
)
from .report import reported

if TYPE_CHECKING:
    from rich.console import Group

    from ..infer.evaluate import EvalPrompt
    from ..infer.sampling import SamplingParams
    from ..infer.target import Target


def evaluate(
    drafter: DrafterName,
    target: TargetName = "smollm2-135m",
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Question file, or any prompts; the shipped held-out prompts if absent. First turns are asked."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only this many prompts, spread over the file.", min=1)] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the evaluation document here.")] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    rows: Rows = 1,
    tree: Tree = "fit",
    schedule: ScheduleRule = "none",
    dtype: Dtype = "bfloat16",
) -> None:
    """Decode prompts with and without the drafter and compare them.

    Prints tau, acceptance and tokens/s per category, and how many texts are
    identical. In bfloat16 near-ties can swap; each difference is audited.

    Example: draftsmith evaluate --drafter runs/demo/drafter --limit 20 --json runs/evaluation.json
    """
    with reported("nothing was written."):
        from rich.console import Console

        from ..infer.sampling import SamplingParams
        from ..infer.target import Target

        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = Target.load(target, dtype=dtype)
        asked = eval_prompts(model, prompts, split=None if prompts else "held-out", limit=limit)
        document = compare(
            model,
            drafter,
            asked,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            rows=rows,
            tree=tree,
            schedule=schedule,
            source=prompts,
        )
        Console().print(table(document))
        if json_out:
            write_json(document, json_out)
            print(f"written to {json_out}")


def compare(
    target: Target,
    drafter: str,
    prompts: list[EvalPrompt],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    rows: int = 1,
    tree: str = "fit",
    schedule: str = "none",
    source: str | None = None,
) -> dict[str, Any]:
    """The evaluation document of the drafter called `drafter`; `source` says where the prompts came from."""
    from ..infer.evaluate import evaluate

    if drafter == "none":
        raise ValueError("--drafter must name one; plain decoding is measured beside it in any case.")
    return evaluate(
        target,
        open_drafter(drafter, target, tree=tree, rows=rows, schedule=schedule),
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        rows=rows,
        settings={"drafter": drafter, "prompts": source or "shipped, held-out", "tree": tree, "schedule": schedule},
    )


def eval_prompts(target: Target, source: str | None, *, split: str | None, limit: int | None) -> list[EvalPrompt]:
    """The first user turn of every conversation, with its system message; `limit` of them, spread over the file."""
    from ..distill.prompts import load_conversations
    from ..distill.template import ChatTemplate
    from ..infer.evaluate import EvalPrompt

    template = ChatTemplate(target.tokenizer, target.eos_ids)
    talks = load_conversations(source, split=split)
    if limit is not None and limit < len(talks):
        talks = [talks[index * len(talks) // limit] for index in range(limit)]
    found = []
    for talk in talks:
        first = next((n for n, message in enumerate(talk.messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{source}: {talk.id!r} has no user message to answer; name a file of prompts.")
        found.append(EvalPrompt(talk.id, talk.category, template.prompt(talk.messages[: first + 1], talk.tools)))
    return found


def table(document: dict[str, Any]) -> Group:
    """The document's figures, one line per category and one for the total: what was decoded, then how fast and whether
    it was the same. Each half fits a terminal of 80 columns."""
    from rich.console import Group
    from rich.table import Table

    counts = Table(title=_title(document["settings"]), title_justify="left", pad_edge=False, box=None)
    told = (
        "tokens/s plain and drafted, ms per step in draft, verify and host, texts identical (of the others: near-ties)"
    )
    speeds = Table(title=told, title_justify="left", pad_edge=False, box=None)
    for shown, columns in ((counts, _COUNTS), (speeds, _SPEEDS)):
        for name in ("category", *columns):
            shown.add_column(name, justify="left" if name == "category" else "right", no_wrap=True)
        for name, figures in sorted(document["categories"].items()):
            shown.add_row(name, *_cells(figures, columns))
        shown.add_section()
        shown.add_row("all", *_cells(document["totals"], columns), style="bold")
    return Group(counts, "", speeds)


_COUNTS = ("rounds", "drafted", "accepted", "emitted", "tau", "acceptance@k")
_SPEEDS = ("plain", "tok/s", "speed-up", "draft", "verify", "host", "identical", "ties")


def _title(settings: dict[str, Any]) -> str:
    sampling = settings["sampling"]
    how = (
        "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}, seed {sampling['seed']}"
    )
    return f"{settings['target']}, {settings['dtype']}, {how}, {settings['max_new_tokens']} new tokens, {settings['rows']} at a time"


def _cells(figures: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    cells = {name: str(figures[name]) for name in ("rounds", "drafted", "accepted", "emitted")} | {
        "tau": f"{figures['tau']:.2f}",
        "acceptance@k": " ".join(f"{value:.2f}".removeprefix("0") for value in figures["acceptance"]),
        "plain": f"{figures['tokens_per_s_plain']:.1f}",
        "tok/s": f"{figures['tokens_per_s']:.1f}",
        "speed-up": f"{figures['speedup']:.2f}x",
        "draft": f"{figures['ms_draft']:.1f}",
        "verify": f"{figures['ms_verify']:.1f}",
        "host": f"{figures['ms_host']:.1f}",
        "identical": f"{figures['identical']}/{figures['prompts']}",
        "ties": str(figures["near_ties"]),
    }
    return [cells[name] for name in columns]


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write the document under a temporary name, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
