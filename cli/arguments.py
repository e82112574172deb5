"""Options that several verbs share, each with one meaning, and what their values stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..heads import TrainedDrafter
    from ..infer.drafter import Drafter
    from ..infer.target import Target

TargetName = Annotated[
    str,
    typer.Option("--target", help="smollm2-135m (embedded), a model folder, or a Hugging Face id.", metavar="NAME"),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="Folder of a trained drafter; prompt-lookup, lookahead or draft:MODEL (no training); none for plain decoding.",
        metavar="DIR|none|...",
    ),
]
Tree = Annotated[
    str,
    typer.Option(
        help="fit: the tree that is fastest on this machine, measured at start; chain: the drafter's first choices only; "
        "saved: the tree in the drafter's config.json.",
        metavar="fit|chain|saved",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="float32 (text identical to plain decoding, to the token), bfloat16 (faster), float16."
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="int8 (CPU, CUDA) or int4 (CUDA) weights for the target; texts are the quantised target's own.",
        metavar="int8|int4",
    ),
]
QuantizeDrafter = Annotated[
    str | None,
    typer.Option(
        "--quantize-drafter", help="The same for a drafter with weights; no text changes.", metavar="int8|int4"
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set of tokens of this probability; 1 is off.")]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Keep the tokens at least this many times as likely as the likeliest; 0 is off."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", help="Above 1: tokens of prompt and answer are less likely to return; 1 is off."
    ),
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="Taken off the logits of tokens that the answer holds; 0 is off.")
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="The same, for each time the answer holds the token; 0 is off.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the answer before this text; may be given several times.", metavar="TEXT"),
]
VerifierName = Annotated[
    str,
    typer.Option(
        "--verifier",
        help="sample-match: with one seed the very text of plain decoding. token-level and block (chains), recursive and "
        "traversal (trees): the target's distribution, for --drafter draft:MODEL. typical: LOSSY, not the target's text.",
        metavar="sample-match|token-level|block|recursive|traversal|typical(LOSSY)",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="One seed, one text, with any drafter or none.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Limit of each answer.")]
Rows = Annotated[int, typer.Option("--rows", help="Answers decoded at the same time.", min=1)]


def open_drafter(
    name: str,
    target: Target,
    *,
    tree: str,
    rows: int,
    verifier: str = "sample-match",
    quantize: str | None = None,
) -> Drafter:
    """The drafter called `name` (see `infer.drafters`), drafting what `verifier` judges.

    tree: which static tree a trained one drafts (see `Tree`); `rows` is the batch size that `fit` optimises for. quantize:
    int8 or int4 weights. Raises ValueError if there is no such drafter, or it fits neither the target nor the verifier.
    """
    if tree not in ("fit", "chain", "saved"):
        raise ValueError(f"--tree must be fit, chain or saved, got {tree!r}.")
    from ..infer.drafters import make_drafter
    from ..infer.verifiers import verifier_named

    draws = verifier_named(verifier).draws
    if draws and name != "none" and not name.startswith("draft:"):
        raise ValueError(
            f"--verifier {verifier} judges drafts by the probabilities they were drawn with, and {name} gives none. Use "
            "--verifier sample-match, which is exact for every drafter, or --drafter draft:MODEL (a draft model that "
            "draftsmith trained is a model folder too)."
        )

    def load_trained(folder: Path, target: Target) -> Drafter:
        from ..heads import load_drafter

        drafter = load_drafter(folder, target)
        if quantize is not None:
            _quantize(drafter, quantize, target)
        if tree == "chain":
            drafter.use_chain()
        return _fitted(drafter, target, rows=rows) if tree == "fit" else drafter

    shape: Literal["", "chain", "tree"] = "chain" if draws and tree == "chain" else draws
    return make_drafter(name, target, load_trained, draws=shape, quantize=quantize)


def _quantize(drafter: TrainedDrafter, kind: str, target: Target) -> None:
    from ..infer import quantized

    if kind != "int8":
        raise ValueError(f"a trained drafter can be quantised to int8, got {kind!r}; draft:MODEL to int4 too.")
    quantized.check_kind(kind, target.device)
    quantized.quantize(drafter, kind, keep=[target.head.weight, *drafter.indexed], device=target.device)


def _fitted(drafter: TrainedDrafter, target: Target, *, rows: int) -> Drafter:
    """The drafter with the tree that is fastest here, or none where drafting does not pay; says which, on stderr."""
    from ..heads.fit import fit_tree
    from ..infer.drafter import NoDraft

    fit = fit_tree(drafter, target, rows=rows)
    if fit is None:
        print("tree: as saved; the drafter carries no measured accuracies to fit one to", file=sys.stderr)
        return drafter
    if not fit.topology.paths:
        print("tree: none; drafting does not pay on this machine, decoding plainly", file=sys.stderr)
        return NoDraft()
    print(
        f"tree: {len(fit.topology.paths)} nodes, depth {fit.topology.depth}, expected tau {fit.expected_tau:.2f} "
        "(from held-out accuracies and this machine's verification times)",
        file=sys.stderr,
    )
    return drafter
