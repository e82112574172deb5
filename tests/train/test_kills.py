"""Nothing is lost: every stage is killed at random instants and goes on to the very end it would have reached.

The stages are answering, building the feature cache, and training. KILLS=20 kills each of them twenty times instead of
twice. The instants are drawn from a seed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from draftsmith.train.checkpoint import checkpoints

from .child import verb, work
from .conftest import WORDS, Content

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "2"))
"""Of each stage."""


class Stage:
    """A command that is killed now and then, and what it has done so far."""

    def __init__(self, start: Callable[[], BaseProcess], done: Callable[[], int], *, whole: int) -> None:
        """start: the process, begun anew or continued; done: units of work on disk; whole: those of an uninterrupted run."""
        self.start, self.done, self.whole = start, done, whole

    def kill(self, draw: random.Random) -> list[int]:
        """Kill it KILLS times, spread over its work. Returns how far it was each time."""
        at = []
        for kill in range(KILLS):
            process = self.start()
            goal = max(self.done(), kill * self.whole // (KILLS + 1)) + draw.randint(
                0, max(1, self.whole // (KILLS + 1))
            )
            ends = time.monotonic() + 200
            while self.done() < min(goal, self.whole - 1) and process.exitcode is None:
                assert time.monotonic() < ends, f"kill {kill}: waited in vain for {goal} of {self.whole}"
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.02))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"kill {kill} came too late"
            at.append(self.done())
        return at

    def finish(self) -> None:
        process = self.start()
        process.join()
        assert process.exitcode == 0


@pytest.fixture(scope="module")
def spawn() -> Callable[..., BaseProcess]:
    """`spawn(function, *arguments)`: a process forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.train.loop", "draftsmith.distill.respond", "draftsmith.cli.main"])

    def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = context.Process(target=function, args=arguments)
        process.start()
        return process

    return start


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """A random target writes every character there is, those among them at which Python would split lines."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return [json.loads(line) for line in lines[:-1]]


@dataclass(frozen=True)
class Commands:
    """What is killed: answering prompts, and training on the answers with features on disk."""

    spawn: Callable[..., BaseProcess]
    folder: Path
    target: Path
    recipe: Path

    def respond(self, name: str) -> BaseProcess:
        words = ["respond", "--target", self.target, "--prompts", self.folder / "prompts.jsonl"]
        words += ["--out", self.folder / name / "r.jsonl", "--rows", 4, "--max-new-tokens", 24, "--dtype", "float32"]
        return self.spawn(verb, [str(word) for word in words], str(self.folder / "log"))

    def train(self, name: str) -> BaseProcess:
        place = self.folder / name
        overrides = [f"data.responses={place / 'r.jsonl'}", f"out={place / 'run'}"]
        return self.spawn(work, str(self.recipe), overrides, True, str(self.folder / "log"), None)


def write_prompts(path: Path, count: int, draw: random.Random) -> None:
    asked = [" ".join(draw.sample(WORDS, 3)) for _ in range(count)]
    lines = [{"id": f"p{n}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(asked)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_killed_in_every_stage_the_end_is_bit_identical(
    spawn: Callable[..., BaseProcess],
    tiny_target_dir: Path,
    content: Content,
    write_recipe: Callable[[Content], Path],
    tmp_path: Path,
) -> None:
    draw, count = random.Random(11), 80
    write_prompts(tmp_path / "prompts.jsonl", count, draw)
    data = {"responses": "", "held_out": content["data"]["held_out"], "row_length": 128}
    data |= {"features": "disk", "cache": {"shard_mib": 0.006}}
    recipe = write_recipe(content | {"data": data, "steps": 60, "eval_every": 30, "save_every": 5, "decode_prompts": 2})
    commands = Commands(spawn, tmp_path, tiny_target_dir, recipe)
    commands.respond("whole").join()
    commands.train("whole").join()
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    responding = Stage(lambda: commands.respond("killed"), lambda: len(whole_lines(killed / "r.jsonl")), whole=count)
    at = responding.kill(draw)
    assert at == sorted(at), f"answers were lost: {at}"
    responding.finish()
    by_id = {line["id"]: line for line in whole_lines(killed / "r.jsonl")}
    assert len(whole_lines(killed / "r.jsonl")) == len(by_id) == count, "an answer is there twice"
    assert by_id == {line["id"]: line for line in whole_lines(whole / "r.jsonl")}

    def features(run: Path = killed / "run") -> int:
        return len(list((run / "features").rglob("shard-*.safetensors")))

    assert features(whole / "run") > 20
    Stage(lambda: commands.train("killed"), features, whole=features(whole / "run")).kill(draw)

    def steps() -> int:
        lines = whole_lines(killed / "run" / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    training = Stage(lambda: commands.train("killed"), steps, whole=60)
    training.kill(draw)
    training.finish()
    for name in ("drafter/model.safetensors", "metrics.jsonl"):
        assert (killed / "run" / name).read_bytes() == (whole / "run" / name).read_bytes(), name
    newest = [checkpoints(place / "run" / "checkpoints")[-1].name for place in (killed, whole)]
    assert newest == ["step-000060", "step-000060"]
