"""`draftsmith generate`: one answer, streamed, with the accepted draft tokens marked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import (
    DrafterName,
    Dtype,
    MaxNewTokens,
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
    from rich.console import Console

    from ..infer.decode import Engine
    from ..infer.request import Output, Request
    from ..infer.target import Target


def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says; the chat template is applied.")],
    target: TargetName = "smollm2-135m",
    drafter: DrafterName = "none",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    tree: Tree = "fit",
    schedule: ScheduleRule = "none",
    dtype: Dtype = "float32",
) -> None:
    """Stream one answer; tokens that the drafter proposed and the target accepted are green.

    The text is the target's own: with one seed it is the same with any drafter
    and with none. Text goes to stdout, the counts to stderr.

    Example: draftsmith generate "Why is the sky blue?" --drafter runs/demo/drafter --temperature 0.8 --seed 1
    """
    with reported("the text above is all there is; nothing was written."):
        from ..infer.decode import Engine
        from ..infer.request import Request
        from ..infer.sampling import SamplingParams
        from ..infer.target import Target

        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = Target.load(target, dtype=dtype)
        request = Request("prompt", prompt_ids(model, prompt), max_new_tokens, sampling)
        chosen = open_drafter(drafter, model, tree=tree, rows=1, schedule=schedule)
        engine = Engine(model, drafter=chosen, rows=1)
        print(counts(stream(engine, request), engine.clock.total()), file=sys.stderr)


def prompt_ids(target: Target, prompt: str) -> list[int]:
    """Token ids of a user's message in the target's chat template, ready to be answered."""
    from ..distill.template import ChatTemplate

    if not prompt.strip():
        raise ValueError("the prompt is empty; expected some text to answer.")
    return ChatTemplate(target.tokenizer, target.eos_ids).prompt([{"role": "user", "content": prompt}])


def stream(engine: Engine, request: Request) -> Output:
    """Print the answer as it is decoded, drafted tokens in green where stdout is a terminal."""
    from rich.console import Console

    from ..infer.request import Output
    from .streaming import TextStream

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    text = TextStream(engine.target.tokenizer)
    engine.add(request)
    output, shown = Output(request.id), 0
    for progress in engine.stream():
        output = progress.output
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


def _show(console: Console, piece: tuple[str, bool] | None) -> None:
    if piece:
        console.print(piece[0], style="green" if piece[1] else None, end="")
