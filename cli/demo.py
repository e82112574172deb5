"""`draftsmith demo`: from prompts to a faster answer with the embedded target, in one go."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import TargetName
from .report import reported

if TYPE_CHECKING:
    from ..infer.evaluate import EvalPrompt
    from ..infer.target import Target

ASKED, ANSWER_TOKENS, ROWS = 800, 112, 128
"""Shipped prompts that the target answers, the limit of each answer that the heads learn from, and the batch."""
ANSWERING_SECONDS, PROMPT_TOKENS = 300, 100
"""What the answers may take, and the usual length of a prompt: a slower machine asks fewer prompts (hundreds of them)."""
EVALUATED, EVALUATED_TOKENS = 16, 96
"""Held-out prompts decoded with and without the drafter, and the limit of each answer."""
EXACT = 4
"""Of those, prompts decoded again in float32, where the text must be identical."""
SHOWN = 4
"""Nodes that are drafted where no tree pays."""
QUESTION = "Explain in a few sentences why leaves change their colour in autumn."


@dataclass(frozen=True)
class Places:
    """Where the demo keeps what."""

    out: Path

    @property
    def responses(self) -> Path:
        return self.out / "responses.jsonl"

    @property
    def run(self) -> Path:
        return self.out / "train"

    @property
    def drafter(self) -> Path:
        return self.run / "drafter"

    @property
    def evaluation(self) -> Path:
        return self.out / "evaluation.json"


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything the demo makes.")] = Path("runs/demo"),
    target: TargetName = "smollm2-135m",
    recipe: Annotated[Path, typer.Option(help="Training recipe.")] = Path("configs/recipes/medusa_smollm2_demo.yaml"),
) -> None:
    """Train heads for the embedded target, then answer faster with them.

    Prompts, responses, training, evaluation and one streamed answer; ten to fifteen
    minutes on two cores. Run it again and finished steps are not repeated.

    Example: draftsmith demo --out runs/demo
    """
    with reported(f"what is done is in {out}; the same command goes on from there."):
        from ..infer.target import Target
        from ..train.recipe import load_recipe

        places = Places(out)
        settings = [f"target={target}", f"data.responses={places.responses}", f"out={places.run}"]
        load_recipe(recipe, settings)  # a fault in it shows before the long part
        _say(1, f"{target} answers the shipped prompts")
        model = Target.load(target, dtype="auto")
        _respond(model, places)
        _say(2, f"heads learn from the answers ({recipe})")
        _train(recipe, settings, places)
        _say(3, "held-out prompts with and without the heads")
        tree = _tree(model, places)
        document = _evaluate(model, places, tree=tree)
        _say(4, "one answer, streamed; green tokens were drafted and accepted")
        _answer(model, places, tree=tree)
        _close(places, document)


def _say(step: int, what: str) -> None:
    from rich.console import Console

    Console(highlight=False).rule(f"[bold]{step}/4[/] {what}", align="left")
    sys.stdout.flush()


def _respond(target: Target, places: Places) -> None:
    from ..distill.prompts import load_conversations
    from ..distill.respond import respond
    from ..infer.sampling import SamplingParams

    report = respond(
        target,
        load_conversations(None, limit=_affordable(target)),
        places.responses,
        sampling=SamplingParams(),
        max_new_tokens=ANSWER_TOKENS,
        rows=ROWS,
    )
    print(f"{report.answered} answers, {report.resumed} from before, {report.tokens_per_s:.0f} tokens/s")


def _affordable(target: Target) -> int:
    """How many of the prompts this machine answers in time."""
    import time

    import torch

    from ..infer.cost import verify_seconds

    step = verify_seconds(target, sizes=(1,), rows=ROWS, repeats=2)[1]
    cache = target.new_cache(rows=8, capacity=PROMPT_TOKENS)
    began = time.perf_counter()
    with torch.inference_mode():
        target.read_prompts([torch.zeros(PROMPT_TOKENS, dtype=torch.int64)] * 8, cache, first_row=0, budget=1024)
    prompt = (time.perf_counter() - began) / 8
    count = int(ANSWERING_SECONDS / (prompt + ANSWER_TOKENS * step / ROWS)) // 100 * 100
    if count < ASKED:
        print(
            f"this machine answers about {max(100, count)} of the {ASKED} prompts in time; more answers, better heads"
        )
    return min(ASKED, max(100, count))


def _train(recipe: Path, settings: list[str], places: Places) -> None:
    from ..train import run

    if places.drafter.is_dir():
        print(f"{places.drafter} is there already; remove {places.run} to train again")
        return
    result = run(recipe, settings, resume=(places.run / "checkpoints").is_dir())
    if not result.is_finished:
        raise KeyboardInterrupt


def _tree(target: Target, places: Places) -> str:
    """The tree that is fastest here; where none pays, a small one all the same, since a demo shows the heads at work."""
    from ..heads import load_drafter
    from ..heads.fit import fit_tree

    fit = fit_tree(load_drafter(places.drafter, target), target, rows=1)
    if fit is None:
        return "saved"
    if not fit.topology.paths:
        print(
            f"no tree pays on this machine with what the heads know; drafting {SHOWN} nodes all the same, to show them"
        )
    return str(len(fit.topology.paths) or SHOWN)


def _evaluate(target: Target, places: Places, *, tree: str) -> dict[str, Any]:
    """Speed in the precision this machine is fast at, identity in float32; both are in the document that is written."""
    from rich.console import Console

    from ..infer.target import Target
    from .evaluate import compare, eval_prompts, table, write_json

    prompts = eval_prompts(target, None, split="held-out", limit=EVALUATED)
    document = compare(target, str(places.drafter), prompts, max_new_tokens=EVALUATED_TOKENS, tree=tree)
    Console().print(table(document))
    exact = document
    if document["settings"]["dtype"] != "float32":
        some = _spread(prompts, EXACT)
        whole = Target.load(target.name)
        exact = compare(whole, str(places.drafter), some, max_new_tokens=EVALUATED_TOKENS, tree=tree)
    totals = exact["totals"]
    print(f"in float32, {totals['identical']}/{totals['prompts']} texts are identical to plain decoding's")
    document["float32"] = {"totals": totals, "settings": exact["settings"]}
    write_json(document, places.evaluation)
    return document


def _spread(prompts: list[EvalPrompt], count: int) -> list[EvalPrompt]:
    return [prompts[index * len(prompts) // count] for index in range(min(count, len(prompts)))]


def _answer(target: Target, places: Places, *, tree: str) -> None:
    from ..infer.decode import Engine
    from ..infer.request import Request
    from .generate import counts, stream
    from .opening import open_drafter
    from .prompts import encode

    engine = Engine(target, drafter=open_drafter(str(places.drafter), target, tree=tree, rows=1), rows=1)
    output = stream(engine, Request("demo", encode(target, QUESTION), EVALUATED_TOKENS))
    print(counts(output, engine.clock.total()))


def _close(places: Places, document: dict[str, Any]) -> None:
    totals = document["totals"]
    print(
        f"\ntau {totals['tau']:.2f}, {totals['tokens_per_s']:.1f} tokens/s against {totals['tokens_per_s_plain']:.1f} plain: "
        f"{totals['speedup']:.2f}x\n\n"
        f"drafter     {places.drafter}\nevaluation  {places.evaluation}\nanswers     {places.responses}\n"
        f"training    {places.run}\n\ntry next:\n"
        f'  draftsmith generate "Why is the sky blue?" --drafter {places.drafter} --dtype auto\n'
        f"  draftsmith preview {places.responses}\n"
        f"  draftsmith evaluate --drafter {places.drafter} --temperature 0.8 --limit 20"
    )
