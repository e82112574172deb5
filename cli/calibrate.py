"""`draftsmith calibrate`: how much a drafter's confidences are worth, measured and kept for `--schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Dtype, MaxNewTokens, Rows, Seed, TargetName, Temperature, TopK, TopP
from .opening import open_drafter
from .report import reported

if TYPE_CHECKING:
    from rich.table import Table

    from ..infer.calibration import Calibration, Rounds
    from ..infer.drafter import Drafter
    from ..infer.evaluate import EvalPrompt
    from ..infer.sampling import SamplingParams
    from ..infer.target import Target


def calibrate(
    drafter: Annotated[Path, typer.Option(help="Folder of a trained drafter.", metavar="DIR")],
    target: TargetName = "smollm2-135m",
    prompts: Annotated[
        str | None, typer.Option(help="Any prompts that it was not trained on; the shipped held-out ones if absent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only this many prompts, spread over the file.", min=1)] = 40,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 96,
    rows: Rows = 8,
    dtype: Dtype = "auto",
) -> None:
    """Decode prompts, compare what the drafter expected with what was accepted,
    and write one temperature per draft position into its folder.

    Prints the expected calibration error before and after (cross-validated).
    `evaluate` and `generate` use what was found with --schedule.

    Example: draftsmith calibrate --drafter runs/demo/train/drafter --limit 20
    """
    with reported("the drafter's folder is as it was."):
        from rich.console import Console

        from ..heads.files import note_measured
        from ..infer.calibration import Calibration
        from ..infer.sampling import SamplingParams
        from ..infer.target import Target
        from .evaluate import eval_prompts

        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = Target.load(target, dtype=dtype)
        chain = open_drafter(str(drafter), model, tree="chain", rows=rows)
        asked = eval_prompts(model, prompts, split=None if prompts else "held-out", limit=limit)
        rounds = watch(model, chain, asked, sampling=sampling, max_new_tokens=max_new_tokens, rows=rows)
        calibration = Calibration.fit(rounds, temperature=temperature)
        note_measured(drafter, "confidence", vars(calibration))
        Console().print(table(calibration))
        print(f"written to {drafter}")


def watch(
    target: Target,
    drafter: Drafter,
    prompts: list[EvalPrompt],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    rows: int,
) -> Rounds:
    """Every round of decoding the prompts, with a progress bar."""
    from tqdm import tqdm

    from ..infer.calibration import Recorder
    from ..infer.decode import Engine
    from ..infer.request import Request

    recorder = Recorder(drafter)
    engine = Engine(target, drafter=recorder, rows=rows)
    for prompt in prompts:
        engine.add(Request(prompt.id, prompt.tokens, max_new_tokens, sampling))
    for _ in tqdm(engine.run(), total=len(prompts), desc="calibrate", unit="prompt"):
        pass
    return recorder.rounds()


def table(calibration: Calibration) -> Table:
    """One line per draft position."""
    from rich.table import Table

    title = (
        f"{calibration.rounds} rounds at temperature {calibration.temperature:g}. survival@k: the share that accepted k tokens; "
        "ECE: expected calibration error of its prediction, cross-validated"
    )
    shown = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in ("k", "survival@k", "ECE before", "ECE after", "T"):
        shown.add_column(name, justify="right")
    columns = (calibration.survival, calibration.error_before, calibration.error_after, calibration.temperatures)
    for k, (survival, before, after, chosen) in enumerate(zip(*columns), start=1):
        shown.add_row(str(k), f"{survival:.3f}", f"{100 * before:.1f}%", f"{100 * after:.1f}%", f"{chosen:.2f}")
    return shown
