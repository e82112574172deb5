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
from collections.abc import Callable, Iterator
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
def spawn() -> Iterator[Callable[..., BaseProcess]]:
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


def test_killed_in_every_stage_the_end_is_bit_identical(
    spawn: Callable[..., BaseProcess],
    tiny_target_dir: Path,
    content: Content,
    write_recipe: Callable[[Content], Path],
    tmp_path: Path,
) -> None:
    draw, log = random.Random(11), str(tmp_path / "log")
    prompts, count = tmp_path / "prompts.jsonl", 80
    asked = [
        {"id": f"p{n}", "messages": [{"role": "user", "content": " ".join(draw.sample(WORDS, 3))}]}
        for n in range(count)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))

    def respond(name: str) -> BaseProcess:
        words = ["respond", "--target", tiny_target_dir, "--prompts", prompts, "--out", tmp_path / name / "r.jsonl"]
        words += ["--rows", 4, "--max-new-tokens", 24, "--dtype", "float32"]
        return spawn(verb, [str(word) for word in words], log)

    def train(name: str) -> BaseProcess:
        overrides = [f"data.responses={tmp_path / name / 'r.jsonl'}", f"out={tmp_path / name / 'run'}"]
        return spawn(work, str(recipe), overrides, True, log, None)

    cache = {"shard_mib": 0.006}
    held = {
        "responses": "",
        "row_length": 128,
        "held_out": content["data"]["held_out"],
        "features": "disk",
        "cache": cache,
    }
    recipe = write_recipe(content | {"data": held, "steps": 60, "eval_every": 30, "save_every": 5, "decode_prompts": 2})
    respond("whole").join()
    train("whole").join()

    answers, metrics = tmp_path / "killed" / "r.jsonl", tmp_path / "killed" / "run" / "metrics.jsonl"
    responding = Stage(lambda: respond("killed"), lambda: len(whole_lines(answers)), whole=count)
    at = responding.kill(draw)
    responding.finish()
    assert at == sorted(at), f"answers were lost: {at}"
    by_id = {line["id"]: line for line in whole_lines(answers)}
    assert len(whole_lines(answers)) == len(by_id) == count, "an answer is there twice"
    assert by_id == {line["id"]: line for line in whole_lines(tmp_path / "whole" / "r.jsonl")}

    def features() -> int:
        return len(list((metrics.parent / "features").rglob("shard-*.safetensors")))

    shards = len(list((tmp_path / "whole" / "run" / "features").rglob("shard-*.safetensors")))
    assert shards > 20
    Stage(lambda: train("killed"), features, whole=shards).kill(draw)

    def steps() -> int:
        lines = whole_lines(metrics)
        return int(lines[-1]["step"]) if lines else 0

    training = Stage(lambda: train("killed"), steps, whole=60)
    training.kill(draw)
    training.finish()
    for name in ("drafter/model.safetensors", "metrics.jsonl"):
        assert (metrics.parent / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes(), name
    newest = checkpoints(metrics.parent / "checkpoints")[-1].name
    assert newest == checkpoints(tmp_path / "whole" / "run" / "checkpoints")[-1].name == "step-000060"
