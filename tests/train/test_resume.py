"""Laws of being stopped: whatever ends a run, at whatever instant, going on ends where not stopping would have."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from draftsmith.train.checkpoint import checkpoints
from draftsmith.train.interrupt import Interrupt
from draftsmith.train.loop import train
from draftsmith.train.recipe import parse_recipe

from .conftest import Content, Spawn, read_lines

WEIGHTS = "drafter/model.safetensors"


def wait_for(happened: Callable[[], bool], process: BaseProcess, seconds: float = 120) -> None:
    """Until `happened`, or the process has ended."""
    ends = time.monotonic() + seconds
    while not happened() and process.exitcode is None:
        assert time.monotonic() < ends, f"waited {seconds} s in vain"
        time.sleep(0.001)


def last_step(out: Path) -> int:
    """Step of the last whole line of metrics.jsonl; 0 without one."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def is_saving(out: Path) -> bool:
    return any((out / "checkpoints").glob(".writing-*"))


@pytest.mark.slow
def test_killed_at_any_instant_and_resumed_is_bit_identical(
    content: Content, write_recipe: Callable[[Content], Path], spawn: Spawn, tmp_path: Path
) -> None:
    """Twelve kills: a few steps after a start, and in the middle of writing a checkpoint."""
    recipe = write_recipe(content | {"steps": 48, "eval_every": 12, "save_every": 4})
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    process = spawn(recipe, [f"out={whole}"], resume=False, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()

    draw = random.Random(7)
    for kill in range(12):
        begun = last_step(broken)
        process = spawn(recipe, [f"out={broken}"], resume=kill > 0, log=log)
        if kill % 3 == 2:
            wait_for(lambda: is_saving(broken), process)
        else:
            goal = max(1, begun - 4) + draw.randint(1, 6)
            wait_for(lambda: last_step(broken) >= goal, process)  # noqa: B023 (called at once)
            time.sleep(draw.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"kill {kill} came too late: {log.read_text()}"
    process = spawn(recipe, [f"out={broken}"], resume=True, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert (broken / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_says_how_to_go_on_and_resumes_bit_identically(
    content: Content, write_recipe: Callable[[Content], Path], spawn: Spawn, tmp_path: Path
) -> None:
    content |= {"steps": 30, "eval_every": None, "save_every": None}
    recipe = write_recipe(content)
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    train(parse_recipe(content | {"out": str(whole)}, source="test"), resume=False)

    process = spawn(recipe, [f"out={broken}"], resume=False, log=log)
    wait_for(lambda: last_step(broken) >= 3, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130, log.read_text()
    assert "--resume" in log.read_text()
    [saved] = checkpoints(broken / "checkpoints")
    assert 3 <= int(saved.name.removeprefix("step-")) < 30
    assert not (broken / "drafter").exists()

    result = train(parse_recipe(content | {"out": str(broken)}, source="test"), resume=True)
    assert result.is_finished
    assert (broken / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_ctrl_c_before_the_first_step_is_a_checkpoint_too(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Interrupt):
        def __enter__(self) -> Interrupt:
            entered = super().__enter__()
            os.kill(os.getpid(), signal.SIGINT)
            return entered

    recipe = parse_recipe(content, source="test")
    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.train.loop.Interrupt", Asked)
        result = train(recipe, resume=False)
    assert (result.step, result.is_finished) == (0, False)
    assert [place.name for place in checkpoints(result.out / "checkpoints")] == ["step-000000"]
    assert train(recipe, resume=True).is_finished


@pytest.mark.slow
def test_full_disk_while_saving_is_said_and_the_earlier_checkpoint_stays(
    content: Content, write_recipe: Callable[[Content], Path], spawn: Spawn, tmp_path: Path
) -> None:
    """The system refuses every write beyond a size, as a full disk does; with room the run goes on."""
    recipe, out, log = write_recipe(content | {"steps": 30, "save_every": 2}), Path(content["out"]), tmp_path / "log"
    process = spawn(recipe, resume=False, log=log)
    wait_for(lambda: last_step(out) >= 5, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    earlier = checkpoints(out / "checkpoints")[-1]
    before = {file: file.read_bytes() for file in earlier.rglob("*") if file.is_file()}

    process = spawn(recipe, resume=True, log=log, file_limit=60_000)
    process.join()
    text = log.read_text()
    assert process.exitcode == 1, text
    assert "could not be written" in text
    assert f"{earlier}, is whole; continue from it with --resume" in text
    assert checkpoints(out / "checkpoints")[-1] == earlier
    assert not is_saving(out)
    assert {file: file.read_bytes() for file in before} == before

    process = spawn(recipe, resume=True, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()


def test_resuming_a_finished_run_changes_nothing(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    first = train(recipe, resume=False)
    out = Path(content["out"])
    before = {name: (out / name).read_bytes() for name in (WEIGHTS, "metrics.jsonl")}
    again = train(recipe, resume=True)
    assert again == first
    assert {name: (out / name).read_bytes() for name in before} == before


def test_lines_after_the_checkpoint_are_written_again(content: Content) -> None:
    """A kill can leave lines of steps that no checkpoint knows of, and half a line."""
    recipe = parse_recipe(content, source="test")
    train(recipe, resume=False)
    path = Path(content["out"]) / "metrics.jsonl"
    whole = path.read_bytes()
    for place in checkpoints(Path(content["out"]) / "checkpoints")[1:]:
        for file in sorted(place.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        place.rmdir()
    path.write_bytes(whole + b'{"step": 7, "train/loss": 1.0}\n{"step": 8, "tra')
    train(recipe, resume=True)
    assert path.read_bytes() == whole
    assert read_lines(path)[-1]["step"] == 6
