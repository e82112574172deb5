"""Training from disk is training: the same losses from an exact cache, close ones from a compressed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.distill.feature_manifest import Manifest
from draftsmith.heads import METHODS
from draftsmith.train.cache import cache
from draftsmith.train.loop import train
from draftsmith.train.recipe import differences, parse_recipe

from ..heads.laws import SMALL
from .conftest import Content, Spawn, read_lines

WEIGHTS, METRICS = "drafter/model.safetensors", "metrics.jsonl"


def on_disk(content: Content, out: Path, **settings: object) -> Content:
    stored = {"compression": "exact", "shard_mib": 0.1} | settings
    return content | {"out": str(out), "data": content["data"] | {"features": "disk", "cache": stored}}


def run(content: Content) -> Path:
    return train(parse_recipe(content, source="test"), resume=False).out


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_exact_cache_trains_the_very_weights_that_memory_does(method: str, content: Content, tmp_path: Path) -> None:
    content |= {"head": {"method": method} | SMALL[method], "objective": {"name": "forward_kl"}, "steps": 4}
    memory = run(content | {"out": str(tmp_path / "memory"), "data": content["data"] | {"features": "memory"}})
    disk = run(on_disk(content, tmp_path / "disk"))
    assert len(list((disk / "features" / "train").glob("shard-*"))) > 2
    assert (disk / METRICS).read_bytes() == (memory / METRICS).read_bytes()
    assert (disk / WEIGHTS).read_bytes() == (memory / WEIGHTS).read_bytes()


@pytest.mark.parametrize(("compression", "rel"), [("bf16", 2e-3), ("int8", 5e-3), ("int6", 3e-2)])
def test_a_compressed_cache_follows_and_is_evaluated_on_exact_states(
    compression: str, rel: float, content: Content, tmp_path: Path
) -> None:
    content |= {"objective": {"name": "forward_kl"}, "optimiser": {"lr": 1e-3, "warmup_share": 0.5}}
    exact = run(on_disk(content, tmp_path / "exact"))
    close = run(on_disk(content, tmp_path / "close", compression=compression))
    lines = list(zip(read_lines(exact / METRICS), read_lines(close / METRICS)))
    losses = [[line["train/loss"] for line in pair] for pair in lines if "train/loss" in pair[0]]
    assert losses[0][0] != losses[0][1], "it does read what was compressed"
    for wanted, found in losses:
        assert found == pytest.approx(wanted, rel=rel)
    for folder, kind in ((exact, "exact"), (close, "exact")):
        held_out = Manifest.read(folder / "features" / "held-out")
        assert held_out is not None
        assert held_out.compression == kind


def test_runs_share_a_folder_and_only_the_first_one_builds(
    content: Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"folder": str(tmp_path / "features")}
    run(on_disk(content, tmp_path / "a", **shared))
    assert "to write" in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("shard-*")}
    run(on_disk(content | {"seed": 3, "optimiser": {"lr": 5e-4}}, tmp_path / "b", **shared))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("shard-*")} == before
    assert not (tmp_path / "b" / "features").exists()
    with pytest.raises(ValueError, match=r"holds features made of something else: .*rows hash"):
        run(on_disk(content | {"data": content["data"] | {"row_length": 256}}, tmp_path / "c", **shared))


def test_where_features_lie_is_free_on_resume_and_how_they_are_stored_is_not(content: Content, tmp_path: Path) -> None:
    saved = parse_recipe(on_disk(content, tmp_path), source="test").model_dump(mode="json")
    moved = parse_recipe(on_disk(content, tmp_path, folder="elsewhere", shard_mib=3), source="test")
    assert differences(saved, moved) == []
    other = parse_recipe(on_disk(content, tmp_path, compression="int8"), source="test")
    assert differences(saved, other) == ["data.cache.compression: 'exact' then, 'int8' now"]
    without = content["data"] | {"features": "memory"}
    saved = parse_recipe(content | {"data": without}, source="test").model_dump(mode="json")
    unread = parse_recipe(content | {"data": without | {"cache": {"compression": "int6"}}}, source="test")
    assert differences(saved, unread) == [], "without features on disk it decides nothing"


def test_built_beforehand_checked_and_then_only_read(
    content: Content, write_recipe: Callable[[Content], Path], tmp_path: Path
) -> None:
    recipe = write_recipe(on_disk(content, tmp_path / "run"))
    first = cache(recipe)
    assert first.train.written == first.train.num_shards > 2
    assert first.held_out.written == first.held_out.num_shards
    again = cache(recipe)
    assert (again.train.written, again.held_out.written) == (0, 0)
    shard = sorted((first.folder / "train").glob("shard-*"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert (cache(recipe).train.damaged, shard.read_bytes()) == (1, whole)
    with pytest.raises(ValueError, match=r"data.features is memory, so a run would not read a cache"):
        cache(recipe, ["data.features=memory"])
    with pytest.raises(ValueError, match=r"compression: exact there, int6 here"):
        cache(recipe, ["data.cache.compression=int6"])
    assert cache(recipe, ["data.cache.compression=int6"], replace=True).train.written > 0


@pytest.mark.slow
def test_killed_while_building_or_training_and_resumed_is_bit_identical(
    content: Content, write_recipe: Callable[[Content], Path], spawn: Spawn, tmp_path: Path
) -> None:
    """The first kills hit the build, the later ones the training; damage done in between is repaired."""
    content |= {"steps": 24, "eval_every": 8, "save_every": 3}
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    run(on_disk(content, whole, compression="int8", shard_mib=0.02))
    recipe = write_recipe(on_disk(content, broken, compression="int8", shard_mib=0.02))
    draw, shards = random.Random(3), broken / "features" / "train"
    goals: list[tuple[Path, str, int]] = [(shards, "shard-*", 1), (shards, "shard-*", 4)]
    goals += [(broken / "checkpoints", "step-0*", 1)] * 3
    for number, (folder, pattern, count) in enumerate(goals):
        process = spawn(recipe, resume=number > 0, log=log)
        ends = time.monotonic() + 120
        while process.exitcode is None and len(list(folder.glob(pattern))) < count:
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"kill {number} came too late: {log.read_text()}"
        victim = draw.choice(sorted(shards.glob("shard-*")))
        victim.write_bytes(victim.read_bytes()[: draw.choice([100, -1])])
    process = spawn(recipe, resume=True, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    for name in (WEIGHTS, METRICS):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    built, wanted = (
        {path.name: path.read_bytes() for path in (out / "features" / "train").iterdir()} for out in (broken, whole)
    )
    assert sorted(built) == sorted(wanted), "kills leave nothing behind"
    assert [name for name in wanted if built[name] != wanted[name]] == []
    report = cache(recipe)
    assert (report.train.damaged, report.train.written) == (0, 0), "every byte is one that was written"


@pytest.mark.slow
def test_the_processes_of_a_launch_build_together_and_follow_one(
    content: Content, write_recipe: Callable[[Content], Path], repo_root: Path, tmp_path: Path
) -> None:
    content |= {"rows_per_forward": 1, "optimiser": {"lr": 1e-3, "warmup_share": 0.5}}
    settings = {"compression": "int8", "shard_mib": 0.02}
    recipe = write_recipe(on_disk(content, tmp_path / "two", **settings))
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(repo_root / "configs/accelerate/ddp.yaml"), "-m", "draftsmith.train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launched = subprocess.Popen(command, cwd=repo_root, env=environment, stderr=subprocess.PIPE, text=True)
    one = run(on_disk(content, tmp_path / "one", **settings))
    _, said = launched.communicate(timeout=300)
    assert launched.returncode == 0, said
    for line, wanted in zip(read_lines(tmp_path / "two" / METRICS), read_lines(one / METRICS), strict=True):
        for name, value in wanted.items():
            assert line[name] == (pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, float) else value), name
    shards = [{path.name: path.read_bytes() for path in out.rglob("shard-*")} for out in (one, tmp_path / "two")]
    assert sorted(shards[0]) == sorted(shards[1])
    assert [name for name in shards[0] if shards[0][name] != shards[1][name]] == []
