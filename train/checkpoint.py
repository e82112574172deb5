"""Checkpoints: written under a temporary name, flushed to disk, then renamed; so each one is whole or not there.

    OUT/checkpoints/step-000200/
        drafter/       the drafter in its public format, full weights under every engine
        target/        the target's adapter, if it is trained too
        state/         optimiser, weights, random state: accelerate's and DeepSpeed's own files
        run.json       the run (recipe, command line, versions), the position, and the size of every file

Learning rate and data order are functions of the step, so the step is the whole position. What a continued run depends
on is compared by us, in one sentence each, before the engine's loader sees a file: DeepSpeed refuses another number of
processes or another stage with errors that name neither.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from .engine import REPLICATED, Engine
from .recipe import Recipe, differences

RUN, STATE, DRAFTER = "run.json", "state", "drafter"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Position:
    """Where a run stands and what its state is bound to."""

    step: int
    """Optimiser steps done, skipped ones included."""
    seconds: float
    """Wall-clock seconds of training so far."""
    skipped: int
    """Steps without a supervised token, which were passed over."""
    engine: str
    """`Engine.name`."""
    world: int
    """Processes."""
    data_hash: str
    """`data.fingerprint` of the training rows."""
    target: dict[str, Any]
    """`Target.fingerprint()`."""


def save(
    folder: Path,
    position: Position,
    run: dict[str, Any],
    *,
    engine: Engine,
    state: dict[str, Tensor],
    save_drafter: Callable[[Path, dict[str, Tensor]], None],
) -> Path:
    """Write the checkpoint of `position` below `folder`; a collective call. state: what `Engine.state` returns, for
    `save_drafter`, which process 0 calls with the drafter's folder. Raises ValueError on a full disk or another
    write error, leaving earlier checkpoints as they are."""
    accelerator, place = engine.accelerator, folder / f"step-{position.step:06d}"
    work = folder / f".writing-{place.name}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
            (work / STATE).mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(work / STATE))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_drafter(work / DRAFTER, state)
            sizes = {str(file.relative_to(work)): file.stat().st_size for file in _files(work)}
            content = run | {"position": vars(position), "files": sizes}
            (work / RUN).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _flush(work)
            shutil.rmtree(place, ignore_errors=True)
            work.rename(place)
            _flush_folder(folder)
    except (
        OSError,
        RuntimeError,
        ValueError,
        SafetensorError,
    ) as error:  # torch and safetensors report a full disk in their own classes
        shutil.rmtree(work, ignore_errors=True)
        raise ValueError(_write_fault(folder, position.step, error)) from error
    accelerator.wait_for_everyone()
    return place


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, each renamed first so that half of one is never taken for one."""
    for place in checkpoints(folder)[:-keep]:
        gone = place.with_name(f".removing-{place.name}")
        place.rename(gone)
        shutil.rmtree(gone)


def clean(folder: Path) -> None:
    """Remove what a kill left half written or half removed."""
    for pattern in (".writing-*", ".removing-*"):
        for rest in folder.glob(pattern):
            shutil.rmtree(rest)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [place for place in folder.glob("step-*") if _NAME.fullmatch(place.name)]
    return sorted(found, key=_step)


def read(place: Path) -> tuple[dict[str, Any], Position]:
    """The run and the position of a checkpoint. Raises ValueError if a file is missing or has another size."""
    try:
        run = json.loads((place / RUN).read_text(encoding="utf-8"))
        position = Position(**run["position"])
        damaged = [name for name, size in run["files"].items() if not _has_size(place / name, size)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        damaged, reason = [RUN], f" ({error})"
    else:
        reason = ""
    if damaged:
        raise ValueError(
            f"checkpoint {place} is damaged: {', '.join(damaged)} is missing or has another size{reason}. Remove that folder to "
            "continue from the checkpoint before it."
        )
    return run, position


def check(place: Path, run: dict[str, Any], then: Position, now: Position, recipe: Recipe) -> None:
    """Raise ValueError if the run cannot be continued from this checkpoint, saying what differs and what to do."""
    faults = []
    if then.engine != now.engine:
        faults.append(
            f"it was saved under {then.engine} and this launch is {now.engine}; launch with the same accelerate config"
        )
    elif then.engine != REPLICATED and then.world != now.world:
        faults.append(
            f"it was saved by {then.world} processes of {then.engine} and this launch has {now.world}; launch {then.world}"
        )
    if then.data_hash != now.data_hash:
        faults.append("data.responses holds other samples than then; restore the file")
    if moved := [key for key in then.target if key != "name" and then.target[key] != now.target.get(key)]:
        faults.append(f"the target differs in {', '.join(moved)}; name the same target")
    if changed := differences(run["recipe"], recipe):
        faults.append(f"the recipe differs ({'; '.join(changed)}); restore it")
    if faults:
        raise ValueError(
            f"checkpoint {place} cannot be continued: {'. Also, '.join(faults)}. Or begin a new run from its weights with "
            f"init={place / DRAFTER} and another `out`."
        )


def load(place: Path, engine: Engine) -> None:
    """Put weights, optimiser and random state back into the prepared objects; a collective call."""
    engine.accelerator.load_state(str(place / STATE))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    work = path.with_name(f".{path.name}.writing")
    work.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(work, path)


def _write_fault(folder: Path, step: int, error: Exception) -> str:
    earlier = checkpoints(folder)
    free = shutil.disk_usage(folder).free / 2**20 if folder.is_dir() else 0.0
    kept = (
        f"The last one, {earlier[-1]}, is whole; continue from it with --resume"
        if earlier
        else "There is no earlier one"
    )
    return (
        f"the checkpoint of step {step} could not be written to {folder} ({free:.0f} MiB free): {error}. {kept}. "
        "Make room, lower keep_checkpoints, or choose another `out`."
    )


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _flush(folder: Path) -> None:
    for file in _files(folder):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _flush_folder(inner)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
