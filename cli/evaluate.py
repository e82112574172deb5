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
    from rich.table import Table

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
    source: str | None = None,
) -> dict[str, Any]:
    """The evaluation document of the drafter called `drafter`; `source` says where the prompts came from."""
    from ..infer.evaluate import evaluate

    if drafter == "none":
        raise ValueError("--drafter must name one; plain decoding is measured beside it in any case.")
    return evaluate(
        target,
        open_drafter(drafter, target, tree=tree, rows=rows),
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        rows=rows,
        settings={"drafter": drafter, "prompts": source or "shipped, held-out", "tree": tree},
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


def table(document: dict[str, Any]) -> Table:
    """The document's figures, one line per category and one for the total."""
    from rich.table import Table

    columns = (
        "category",
        "rounds",
        "drafted",
        "accepted",
        "emitted",
        "tau",
        "acceptance@k",
        "tokens/s plain",
        "tokens/s",
    )
    shown = Table(title=_title(document["settings"]), title_justify="left")
    for name in (*columns, "speed-up", "ms draft", "verify", "host", "identical"):
        shown.add_column(name, justify="left" if name == "category" else "right")
    for name, figures in sorted(document["categories"].items()):
        shown.add_row(name, *_cells(figures))
    shown.add_section()
    shown.add_row("all", *_cells(document["totals"]), style="bold")
    return shown


def _title(settings: dict[str, Any]) -> str:
    sampling = settings["sampling"]
    how = (
        "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}, seed {sampling['seed']}"
    )
    return f"{settings['target']}, {settings['dtype']}, {how}, {settings['max_new_tokens']} new tokens, {settings['rows']} at a time"


def _cells(figures: dict[str, Any]) -> list[str]:
    identical = f"{figures['identical']}/{figures['prompts']}"
    if figures["near_ties"]:
        identical += f" +{figures['near_ties']} near-tie"
    return [
        *(str(figures[name]) for name in ("rounds", "drafted", "accepted", "emitted")),
        f"{figures['tau']:.2f}",
        " ".join(f"{value:.2f}" for value in figures["acceptance"]),
        f"{figures['tokens_per_s_plain']:.1f}",
        f"{figures['tokens_per_s']:.1f}",
        f"{figures['speedup']:.2f}x",
        *(f"{figures[name]:.1f}" for name in ("ms_draft", "ms_verify", "ms_host")),
        identical,
    ]


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write the document under a temporary name, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
