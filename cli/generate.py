"""`draftsmith generate`: one answer, streamed, with the accepted draft tokens marked."""

from __future__ import annotations

import sys
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
    ScheduleRule,
    Seed,
    Stop,
    TargetName,
    Temperature,
    TopK,
    TopP,
    Tree,
    VerifierName,
)
from .opening import open_drafter, open_target
from .report import reported

if TYPE_CHECKING:
    from rich.console import Console

    from ..infer.decode import Engine
    from ..infer.request import Output, Request
    from ..infer.target import Target
    from ..infer.text import Piece


def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says; the chat template is applied.")],
    target: TargetName = "smollm2-135m",
    drafter: DrafterName = "none",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    stop: Stop = None,
    verifier: VerifierName = "sample-match",
    tree: Tree = "fit",
    schedule: ScheduleRule = "none",
    quantize: Quantize = None,
    quantize_drafter: QuantizeDrafter = None,
    dtype: Dtype = "float32",
    forwards: Forwards = "eager",
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write prompt, answer and settings here, for `draftsmith audit --run`."),
    ] = None,
) -> None:
    """Stream one answer; tokens that the drafter proposed and the target accepted are green.

    The text is the target's own: with one seed it is the same with any drafter
    and with none (other verifiers than sample-match promise less, and say so).
    Text goes to stdout, the counts to stderr.

    Example: draftsmith generate "Why is the sky blue?" --drafter runs/demo/train/drafter --temperature 0.8 --seed 1
    """
    with reported("the text above is all there is; nothing was written."):
        from ..infer.decode import Engine
        from ..infer.request import Request
        from ..infer.sampling import SamplingParams
        from ..infer.verifiers import verifier_named
        from .evaluate import write_json
        from .prompts import encode

        penalties = (repetition_penalty, presence_penalty, frequency_penalty)
        sampling = SamplingParams(temperature, top_k, top_p, seed, min_p, *penalties)
        rule = verifier_named(verifier)
        model = open_target(target, dtype=dtype, quantize=quantize, forwards=forwards)
        request = Request("prompt", encode(model, prompt), max_new_tokens, sampling, stop or ())
        chosen = open_drafter(
            drafter, model, tree=tree, rows=1, verifier=verifier, schedule=schedule, quantize=quantize_drafter
        )
        engine = Engine(model, drafter=chosen, rows=1, verifier=rule.verify)
        if not rule.keeps_text(temperature):
            print(f"verifier {verifier}: {rule.meaning}", file=sys.stderr)
        output = stream(engine, request)
        print(counts(output, engine.clock.total()), file=sys.stderr)
        if json_out:
            write_json(document(model, request, output, verifier=verifier), json_out)


def document(target: Target, request: Request, output: Output, *, verifier: str) -> dict[str, Any]:
    """What `draftsmith audit --run` needs to replay the answer, in the shape of an evaluation document."""
    answer = {"id": output.id, "prompt": list(request.prompt), "tokens": output.tokens, "finish": output.finish}
    settings = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "fingerprint": target.fingerprint(),
        "sampling": vars(request.sampling),
        "max_new_tokens": request.max_new_tokens,
        "verifier": verifier,
    }
    return {"format": 1, "answers": [answer], "settings": settings}


def stream(engine: Engine, request: Request) -> Output:
    """Print the answer as it is decoded, drafted tokens in green where stdout is a terminal."""
    from rich.console import Console

    from ..infer.request import Output
    from ..infer.text import TextStream

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    text = TextStream(engine.target.tokenizer, request.stop)
    engine.add(request)
    output, shown = Output(request.id), 0
    for progress in engine.stream():
        output = progress.output.checked()
        for token, accepted in zip(output.tokens[shown:], output.from_draft[shown:]):
            _show(console, text.feed(token, accepted=accepted))
        shown = len(output.tokens)
        console.file.flush()
    _show(console, text.finish())
    console.print()
    return output


def counts(output: Output, seconds: float) -> str:
    """The integers of one answer on one line; `seconds` include the prefill."""
    stats = output.stats
    return (
        f"rounds {stats.rounds}  drafted {stats.drafted}  accepted {stats.accepted}  emitted {stats.emitted}  "
        f"tau {stats.tau:.2f}  {len(output.tokens) / seconds:.1f} tokens/s"
    )


def _show(console: Console, pieces: list[Piece]) -> None:
    for piece in pieces:
        console.print(piece.text, style="green" if piece.accepted else None, end="")
