"""`draftsmith evaluate`: a drafter against plain decoding, side by side, every answer checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import (
    DrafterName,
    Dtype,
    Forwards,
    FrequencyPenalty,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    Quantize,
    QuantizeDrafter,
    RepetitionPenalty,
    Rows,
    ScheduleRule,
    Seed,
    TargetName,
    Temperature,
    TopK,
    TopP,
    Tree,
    VerifierName,
)
from .opening import open_drafter, open_target, schedule_for
from .report import reported

if TYPE_CHECKING:
    from rich.console import Group

    from ..infer.evaluate import EvalPrompt
    from ..infer.sampling import SamplingParams
    from ..infer.target import Target


SHIPPED = "shipped, held-out"
"""How a document calls the prompts that are asked where none are named."""


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
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    verifier: VerifierName = "sample-match",
    rows: Rows = 1,
    tree: Tree = "fit",
    schedule: ScheduleRule = "none",
    quantize: Quantize = None,
    quantize_drafter: QuantizeDrafter = None,
    dtype: Dtype = "auto",
    forwards: Forwards = "eager",
) -> None:
    """Decode prompts with and without the drafter and compare them.

    Prints tau, acceptance and tokens/s per category, and how many texts are
    identical. In bfloat16 near-ties can swap; each difference is audited.
    Texts of verifiers that do not promise identity are not compared.

    Example: draftsmith evaluate --drafter runs/demo/train/drafter --limit 20 --json runs/evaluation.json
    """
    with reported("nothing was written."):
        from ..infer.sampling import SamplingParams

        penalties = (repetition_penalty, presence_penalty, frequency_penalty)
        sampling = SamplingParams(temperature, top_k, top_p, seed, min_p, *penalties)
        run: Any = partial(_run, target, drafter, (prompts, limit), dtype=dtype, forwards=forwards)
        run = partial(run, sampling=sampling, rows=rows)
        run = partial(run, tree=tree, verifier=verifier, schedule=schedule, quantize_drafter=quantize_drafter)
        _show(partial(run, max_new_tokens=max_new_tokens), quantize, json_out)


def _show(run: Callable[[str | None], dict[str, Any]], quantize: str | None, json_out: Path | None) -> None:
    from rich.console import Console

    from .memory import beside, memory_table

    document = run(quantize)
    Console().print(table(document))
    if quantize:  # the target as it was, on the same prompts, once the quantised one has left the memory
        document["unquantized"] = beside(document, run(None))
        Console().print("", memory_table(document))
    if json_out:
        write_json(document, json_out)
        print(f"written to {json_out}")


def _run(
    name: str,
    drafter: str,
    asked: tuple[str | None, int | None],
    quantize: str | None,
    *,
    dtype: str,
    forwards: str,
    **options: Any,
) -> dict[str, Any]:
    """The evaluation document of the target called `name`, quantised or not; asked: source and limit of the prompts."""
    source, limit = asked
    model = open_target(name, dtype=dtype, quantize=quantize, forwards=forwards)
    prompts = eval_prompts(model, source, split=None if source else "held-out", limit=limit)
    document = compare(model, drafter, prompts, source=source, **options)
    document["settings"]["forwards"] = forwards
    return document


def compare(
    target: Target,
    drafter: str,
    prompts: list[EvalPrompt],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    rows: int = 1,
    tree: str = "fit",
    verifier: str = "sample-match",
    schedule: str = "none",
    source: str | None = None,
    quantize_drafter: str | None = None,
) -> dict[str, Any]:
    """The evaluation document of the drafter called `drafter`; `source` says where the prompts came from."""
    from ..infer.evaluate import evaluate

    if drafter == "none":
        raise ValueError("--drafter must name one; plain decoding is measured beside it in any case.")
    return evaluate(
        target,
        open_drafter(
            drafter, target, tree=tree, rows=rows, verifier=verifier, schedule=schedule, quantize=quantize_drafter
        ),
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        rows=rows,
        verifier=verifier,
        settings={"drafter": drafter, "prompts": source or SHIPPED, "tree": tree}
        | {"schedule": schedule_for(drafter, schedule)}
        | ({"quantize_drafter": quantize_drafter} if quantize_drafter else {}),
    )


def eval_prompts(target: Target, source: str | None, *, split: str | None, limit: int | None) -> list[EvalPrompt]:
    """The first user turn of every conversation, with its system message; `limit` of them, spread over the file."""
    from ..distill.prompts import load_conversations
    from ..infer.evaluate import EvalPrompt
    from .prompts import encode

    talks = load_conversations(source, split=split)
    if limit is not None and limit < len(talks):
        talks = [talks[index * len(talks) // limit] for index in range(limit)]
    found = []
    for talk in talks:
        first = next((n for n, message in enumerate(talk.messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{source}: {talk.id!r} has no user message to answer; name a file of prompts.")
        found.append(EvalPrompt(talk.id, talk.category, encode(target, talk.messages[: first + 1], talk.tools)))
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


MOST_SHOWN = 6
"""Acceptances in one cell."""
_COUNTS = ("rounds", "drafted", "accepted", "emitted", "tau", "acceptance@k")
_SPEEDS = ("plain", "tok/s", "speed-up", "draft", "verify", "host", "identical", "ties")


def _title(settings: dict[str, Any]) -> str:
    sampling = settings["sampling"]
    how = (
        "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}, seed {sampling['seed']}"
    )
    precision = settings["fingerprint"].get("quantization", settings["dtype"])
    rule = "" if settings["promise"] == "same text" else f"\nverifier {settings['verifier']}: {_meaning(settings)}"
    return (
        f"{settings['target']}, {precision}, {how}, {settings['max_new_tokens']} new tokens, "
        f"{settings['rows']} at a time{rule}"
    )


def _meaning(settings: dict[str, Any]) -> str:
    from ..infer.verifiers import verifier_named

    return verifier_named(settings["verifier"]).meaning


def _cells(figures: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    shown = [f"{value:.2f}".removeprefix("0") for value in figures["acceptance"]]
    if len(shown) > MOST_SHOWN:  # the document has them all; a wider line would not fit a terminal
        shown[MOST_SHOWN - 1 :] = [".."]
    cells = {name: str(figures[name]) for name in ("rounds", "drafted", "accepted", "emitted")} | {
        "tau": f"{figures['tau']:.2f}",
        "acceptance@k": " ".join(shown),
        "plain": f"{figures['tokens_per_s_plain']:.1f}",
        "tok/s": f"{figures['tokens_per_s']:.1f}",
        "speed-up": f"{figures['speedup']:.2f}x",
        "draft": f"{figures['ms_draft']:.1f}",
        "verify": f"{figures['ms_verify']:.1f}",
        "host": f"{figures['ms_host']:.1f}",
        "identical": "-" if figures["identical"] is None else f"{figures['identical']}/{figures['prompts']}",
        "ties": "-" if figures["near_ties"] is None else str(figures["near_ties"]),
    }
    return [cells[name] for name in columns]


def write_json(document: dict[str, Any] | list[dict[str, Any]], path: Path) -> None:
    """Write the document under a temporary name, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
