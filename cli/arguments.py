"""Options that several verbs share, each with one meaning, and what their values stand for."""

from __future__ import annotations

from typing import Annotated

import typer

TargetName = Annotated[
    str,
    typer.Option("--target", help="smollm2-135m (embedded), a model folder, or a Hugging Face id.", metavar="NAME"),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="Folder of a trained drafter; prompt-lookup, lookahead, draft:MODEL, or mtp, the target's own extra layer where it "
        "ships one (no training); none for plain decoding. DIR+prompt-lookup (or any other with that behind it) drafts both.",
        metavar="DIR|none|...",
    ),
]
Tree = Annotated[
    str,
    typer.Option(
        help="fit: the tree that is fastest on this machine, measured at start; chain: the drafter's first choices only; "
        "saved: the tree in the drafter's config.json; a number: the best tree of so many draft tokens.",
        metavar="fit|chain|saved|N",
    ),
]
ScheduleRule = Annotated[
    str,
    typer.Option(
        "--schedule",
        help="early-stop or budget: of each chain verify only what is worth its time, by the drafter's confidence and this "
        "machine's step times (calibrate first); none: verify the whole draft (prompt-lookup is always cut so).",
        metavar="none|early-stop|budget",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32 (text identical to plain decoding, to the token), bfloat16, float16; auto: bfloat16 where this machine "
        "multiplies it, else float32.",
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
Forwards = Annotated[
    str,
    typer.Option(
        "--forwards",
        help="eager: the target's verification forwards as transformers runs them; compiled: fused by torch.compile, and "
        "what drafters compute too (a C++ compiler, up to a minute for every tree and length; --tree fit still goes by "
        "eager ones); graphs: CUDA graphs.",
        metavar="eager|compiled|graphs",
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
