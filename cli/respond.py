"""`draftsmith respond`: the target answers prompts; a killed run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def respond(
    out: Annotated[Path, typer.Option("--out", help="Response file to write or to continue (jsonl).")],
    target: TargetName = "smollm2-135m",
    prompts: Annotated[
        str | None,
        typer.Option(
            help="File, folder or hub data set (alpaca, sharegpt, messages, ...); the shipped prompts if absent."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only prompts of this split: train or held-out.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.", min=1)] = None,
    drafter: DrafterName = "none",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    rows: Rows = 32,
    tree: Tree = "fit",
    dtype: Dtype = "bfloat16",
) -> None:
    """Let the target answer prompts, as training data for its drafter.

    Answers are appended one by one; the same command after an interruption answers what is missing.

    Example: draftsmith respond --out runs/responses.jsonl --limit 100 --max-new-tokens 128
    """
    with reported(f"finished answers are in {out}; the same command goes on from there."):
        from ..distill.prompts import load_conversations
        from ..distill.respond import respond as let_target_respond
        from ..infer.sampling import SamplingParams
        from ..infer.target import Target

        conversations = load_conversations(prompts, split=split, limit=limit)
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = Target.load(target, dtype=dtype)
        report = let_target_respond(
            model,
            conversations,
            out,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            rows=rows,
            drafter=open_drafter(drafter, model, tree=tree, rows=rows),
        )
        print(
            f"{report.path}: answered {report.answered} ({report.truncated} truncated), "
            f"kept {report.resumed} from before, refused {report.rejected}; "
            f"{report.tokens} tokens, {report.tokens_per_s:.0f} tokens/s"
        )
