"""`draftsmith preview`: one training sample as a person reads it, learned tokens in green."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import TargetName
from .report import reported


def preview(
    data: Annotated[Path, typer.Argument(help="Response file, or conversations with answers.")],
    target: TargetName = "smollm2-135m",
    index: Annotated[int, typer.Option(help="Which sample, counted from 0 in the order of ids.", min=0)] = 0,
    split: Annotated[str | None, typer.Option(help="Only samples of this split: train or held-out.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens kept of each sample.", min=2)] = 2048,
) -> None:
    """Show one training sample: what is learned is green, what is only read is dim.

    Example: draftsmith preview runs/responses.jsonl --index 3
    """
    with reported("nothing was written."):
        from rich.console import Console
        from transformers import AutoTokenizer

        from ..distill.tokens import load_samples
        from ..distill.tokens import preview as render
        from ..infer.pretrained import model_folder

        tokenizer = AutoTokenizer.from_pretrained(model_folder(target))
        samples = load_samples(data, tokenizer, split=split, max_length=max_length)
        if index >= len(samples):
            raise ValueError(f"--index must be below the number of samples, {len(samples)}, got {index}.")
        sample = samples[index]
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(render(sample, tokenizer), soft_wrap=True)
        learned = f"{len(sample.tokens)} tokens, {sum(sample.supervised)} learned"
        console.print(f"sample {index} of {len(samples)}: {sample.id}, {learned}")
