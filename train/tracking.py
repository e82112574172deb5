"""Where a run's figures go: metrics.jsonl and timing.jsonl always, Weights & Biases and others where wanted, a progress
line.

metrics.jsonl holds one line per step (`train/...`) and per evaluation (`held_out/...`), nothing that depends on the
clock, so a run that was killed and continued leaves the same file as one that was not. timing.jsonl has the clock:
seconds and tokens since the process began its first step.
"""

from __future__ import annotations

import json
import netrc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO
from urllib.parse import urlsplit

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .metrics import Values
from .recipe import Recipe
from .trackers import flat

if TYPE_CHECKING:
    import wandb

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
Mode = Literal["online", "offline", "disabled"]
_MODES: tuple[Mode, ...] = ("online", "offline", "disabled")
_QUIET_SECONDS = 20.0
"""Between two plain progress lines, where the output is no terminal."""


class Tracker:
    """Writes on process 0; elsewhere every call does nothing."""

    def __init__(
        self, recipe: Recipe, accelerator: Accelerator, *, total: int, step: int, settings: dict[str, Any]
    ) -> None:
        """step: steps already done; later lines of an earlier attempt are removed. total: steps of the whole run."""
        self._is_main, self._total, self._begun = accelerator.is_main_process, total, step
        if not self._is_main:
            return
        out = Path(recipe.out)
        self._files = {name: _continue(out / name, step) for name in (METRICS, TIMING)}
        self._wandb = _start_wandb(recipe, settings)
        self._others = accelerator if recipe.trackers else None
        if self._others:
            self._others.init_trackers(recipe.wandb.name or out.name, config=flat(recipe.model_dump(mode="json")))
        self._console = Console(stderr=True)
        self._clock = self._spoken = time.monotonic()
        self._tokens = 0
        self._tau: float | None = None
        columns = (
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("train", total=total, completed=step, line="")
        self._progress.start()
        self._input = ""

    def log(self, step: int, values: Values) -> None:
        """One line of metrics.jsonl; its plain numbers go to the other trackers as well."""
        if not self._is_main:
            return
        _write(self._files[METRICS], {"step": step} | values)
        numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
        if self._wandb:
            self._wandb.log(numbers, step=step)
        if self._others:
            self._others.log(numbers, step=step)
        tau = values.get("held_out/predicted_tau")
        self._tau = float(tau) if isinstance(tau, int | float) else self._tau

    def progress(self, step: int, *, loss: float, tokens: int, waited: float, remaining: float) -> None:
        """The step is done. tokens: read in it by all processes; waited: seconds that all steps so far waited for their
        input in this one; remaining: seconds of the wall-clock budget."""
        if not self._is_main:
            return
        self._tokens += tokens
        spent = time.monotonic() - self._clock
        self._input = (
            f"{self._tokens / spent:,.0f} tokens/s, {waited / spent:.1%} of the time spent on getting the batches"
        )
        timing = {"step": step, "seconds": round(spent, 3), "waited": round(waited, 3), "tokens": self._tokens}
        _write(self._files[TIMING], timing)
        left = min(remaining, (self._total - step) * spent / (step - self._begun))
        held_out = "" if self._tau is None else f"  predicted tau {self._tau:.2f}"
        line = f"loss {loss:.4f}{held_out}  {self._tokens / spent:,.0f} tokens/s  {_clock(left)} left"
        self._progress.update(self._task, completed=step, line=line)
        if not self._console.is_terminal and time.monotonic() - self._spoken > _QUIET_SECONDS:
            self._spoken = time.monotonic()
            self.say(f"step {step}/{self._total}  {line}")

    def say(self, line: str) -> None:
        """A line for the user, above the progress line."""
        if self._is_main:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def flush(self) -> None:
        """Bring the files to disk, so that no checkpoint knows of lines they lack."""
        if self._is_main:
            for file in self._files.values():
                os.fsync(file.fileno())

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *fault: object) -> None:
        """Whatever ends the run, the terminal gets its cursor back."""
        if self._is_main:
            self._progress.stop()

    def close(self) -> None:
        if not self._is_main:
            return
        if self._input:
            self.say(self._input)
        self._progress.stop()
        for file in self._files.values():
            file.close()
        if self._wandb:
            self._wandb.finish()


def _continue(path: Path, step: int) -> TextIO:
    """Open for appending after the lines of steps up to `step`; a torn last line and later ones go, atomically."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    work = path.with_name(f".{path.name}.writing")
    work.write_text("".join(kept), encoding="utf-8")
    os.replace(work, path)
    return path.open("a", encoding="utf-8", buffering=1)


def _write(file: TextIO, content: dict[str, Any]) -> None:
    file.write(json.dumps(content) + "\n")


def _start_wandb(recipe: Recipe, settings: dict[str, Any]) -> wandb.Run | None:
    mode = _wandb_mode(recipe.wandb.mode)
    if mode == "disabled":
        return None
    import wandb

    return wandb.init(
        project=recipe.wandb.project,
        name=recipe.wandb.name or Path(recipe.out).name,
        dir=recipe.out,
        mode=mode,
        config=settings,
        settings=wandb.Settings(silent=True, console="off"),
    )


def _wandb_mode(mode: str) -> Mode:
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
    for known in _MODES:
        if mode == known:
            return known
    raise ValueError(f"WANDB_MODE is {mode!r}; set it to {', '.join(_MODES)}, or set wandb.mode in the recipe.")


def _has_wandb_key() -> bool:
    """Where wandb itself looks: the environment, then the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
