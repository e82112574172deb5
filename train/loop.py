"""The one training loop: every method, one process or many, from a recipe to a drafter on disk.

Letters: K draft steps.

    loss = sum_k weights[k] * sum over rows of objective_k / N_k

N_k counts the rows of draft step k in the whole global batch, over processes, micro-steps and packed documents. It
follows from the masks alone (`data.Rows.counts`), so each micro-step is divided by it before its backward, and
accumulated and distributed steps are the single-process step up to rounding.

    python -m draftsmith.train RECIPE [a.b=c ...] [--resume]
    accelerate launch --config_file configs/accelerate/ddp.yaml -m draftsmith.train RECIPE [a.b=c ...] [--resume]
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .assembly import RUN, Run, assemble
from .checkpoint import DRAFTER, Position
from .data import seed_draws
from .decoding import decode_held_out
from .engine import unpack
from .interrupt import Interrupt
from .metrics import Tally, Totals, evaluate
from .recipe import Recipe
from .schedule import progress, rate
from .tracking import Tracker


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    out: Path
    """The run's folder."""
    drafter: Path
    """The drafter's folder: `out/drafter`, or the last checkpoint's if the run was interrupted."""
    step: int
    """Steps done."""
    is_finished: bool
    """False if the run was interrupted; it continues with resume."""
    measured: dict[str, Any]
    """The last held-out figures (`metrics.HeldOut.measured`); empty if there was no evaluation yet."""


def train(recipe: Recipe, *, resume: bool) -> TrainResult:
    """Train the drafter that `recipe` describes, or go on from the newest checkpoint in `recipe.out`.

    Ctrl-C finishes the step, saves and returns. Raises ValueError for whatever the user can put right: before the first
    step wherever possible, and at once for a non-finite loss or a checkpoint that cannot be written.
    """
    run = assemble(recipe, resume=resume)
    at, measured = run.position, run.measured
    tracker = Tracker(recipe, run.engine.accelerator, total=run.num_steps, step=at.step, settings=run.description)
    budget = math.inf if recipe.minutes is None else 60 * recipe.minutes
    began, is_asked, saved = time.monotonic() - at.seconds, False, at.step or None
    with Interrupt() as interrupt, tracker:
        while at.step < run.num_steps:
            seconds, is_asked = run.engine.agree(time.monotonic() - began, interrupt.asked)
            at = replace(at, seconds=seconds)
            if is_asked or seconds >= budget:
                break
            batch = run.stream.batch(at.step)  # row numbers, the same in every process
            counts = run.rows.counts[batch].sum(dim=0)  # (K,) over the whole global batch
            lr = rate(progress(at.step, run.num_steps, seconds=seconds, minutes=recipe.minutes), recipe.optimiser)
            at = replace(at, step=at.step + 1)
            if bool(counts.any()):
                totals, norm = take_step(run, batch, counts, step=at.step, lr=lr)
                tracker.log(at.step, totals.values("train") | {"train/lr": lr, "train/grad_norm": norm})
                tokens, waited = run.rows.num_tokens(batch), run.clock.seconds["input"]
                tracker.progress(at.step, loss=totals.loss, tokens=tokens, waited=waited, remaining=budget - seconds)
            else:
                at = replace(at, skipped=at.skipped + 1)
                tracker.log(at.step, {"train/skipped": at.skipped})
            if recipe.eval_every and at.step % recipe.eval_every == 0:
                measured = _evaluate(run, tracker, at.step)
            if recipe.save_every and at.step % recipe.save_every == 0:
                saved = _save(run, tracker, at, measured)
        if not is_asked and measured.get("step") != at.step:
            measured = _evaluate(run, tracker, at.step)
        if saved != at.step:
            _save(run, tracker, at, measured)
        return _finish(run, tracker, at, measured, is_finished=not is_asked)


def take_step(run: Run, batch: Sequence[int], counts: Tensor, *, step: int, lr: float) -> tuple[Totals, float]:
    """One optimiser step on a global batch: its totals and the gradient norm before clipping.

    counts: (K,) int64, rows that count in the whole batch. A collective call.
    """
    accelerator, model, tally = run.engine.accelerator, run.model, Tally()
    for group in run.optimiser.param_groups:
        group["lr"] = lr * group["lr_share"]
    mine = run.share(batch)
    after = run.share(run.stream.batch(step))[0] if step < run.num_steps else None
    for micro, then in zip(mine, [*mine[1:], after]):
        teacher = run.teach(micro, then)
        seed_draws(run.recipe.seed, step, *micro)
        with accelerator.accumulate(model):  # gradients are exchanged in the last micro-step only
            with run.autocast():
                out = unpack(model(teacher, run.objective))
            loss = run.loss(out, counts, batch, step)
            if not bool(torch.isfinite(loss)):
                raise ValueError(_not_finite("loss", loss.item(), step, run.rows.name(micro)))
            accelerator.backward(loss * run.engine.loss_scale)
        tally.add(out)
    clipped: Any = accelerator.clip_grad_norm_(model.parameters(), run.recipe.optimiser.clip)
    norm = float(clipped)
    if not math.isfinite(norm):  # DeepSpeed has stepped by now, but nothing of it is saved
        raise ValueError(_not_finite("gradient norm", norm, step, run.rows.name(batch)))
    run.optimiser.step()
    run.optimiser.zero_grad()
    totals = tally.reduce(accelerator)
    assert totals.counts == counts.tolist(), (
        f"step {step}: the head counted {totals.counts}, the masks {counts.tolist()}"
    )
    return totals, norm


def _evaluate(run: Run, tracker: Tracker, step: int) -> dict[str, Any]:
    with run.engine.whole(run.model), run.autocast():
        found = evaluate(
            run.drafter,
            run.objective,
            run.held_out,
            accelerator=run.engine.accelerator,
            size=run.recipe.rows_per_forward,
        )
    totals, real = found.totals, decode_held_out(run)
    walked = {"held_out/walked_tau": found.walked_tau}
    tracker.log(step, totals.values("held_out") | walked | real.values("held_out"))
    shares = " ".join(f"{share:.3f}" for share in totals.acceptance)
    tracker.say(
        f"step {step}: held-out loss {totals.loss:.4f}, acceptance {shares}, predicted tau {totals.predicted_tau:.3f}, "
        f"walked {found.walked_tau:.3f}{real}"
    )
    return found.measured(step) | real.measured()


def _save(run: Run, tracker: Tracker, at: Position, measured: dict[str, Any]) -> int:
    """Write a checkpoint, then remove the oldest; returns its step."""
    tracker.flush()
    checkpoint.save(
        run.checkpoints,
        at,
        run.description | {"measured": measured},
        engine=run.engine,
        state=run.engine.state(run.model),
        save_drafter=lambda place, state: run.save_drafter(place, measured, state),
    )
    if run.is_main:
        checkpoint.rotate(run.checkpoints, run.recipe.keep_checkpoints)
    return at.step


def _finish(run: Run, tracker: Tracker, at: Position, measured: dict[str, Any], *, is_finished: bool) -> TrainResult:
    out = Path(run.recipe.out)
    drafter = out / DRAFTER if is_finished else checkpoint.checkpoints(run.checkpoints)[-1] / DRAFTER
    state = run.engine.state(run.model)
    if run.is_main:
        if is_finished:
            run.save_drafter(drafter, measured, state)
        checkpoint.write_json(out / RUN, run.description | {"measured": measured, "position": vars(at)})
    if at.skipped:
        tracker.say(f"{at.skipped} steps had no supervised token and were passed over")
    tracker.close()
    run.engine.accelerator.end_training()
    return TrainResult(out, drafter, at.step, is_finished, measured)


def _not_finite(what: str, value: float, step: int, where: str) -> str:
    return (
        f"the {what} of step {step} is {value}, in {where}. The optimiser was not stepped and nothing was saved after the last "
        "checkpoint. Look at those documents, lower optimiser.lr, or run the target in float32; then go on with --resume."
    )
