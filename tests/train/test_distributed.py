"""Two real processes under `accelerate launch`, over gloo on CPU: with every engine every method follows the loss of one
process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from draftsmith.train.checkpoint import checkpoints
from draftsmith.train.loop import TrainResult, train
from draftsmith.train.memory import share
from draftsmith.train.recipe import parse_recipe

from ..heads.laws import SMALL
from .conftest import Content, read_lines, small_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def uneven(content: Content) -> Content:
    """Two processes take two micro-steps each, one takes four; rows hold different numbers of supervised tokens."""
    return content | {"rows_per_forward": 1, "optimiser": {"lr": 1e-3, "warmup_share": 0.5}}


PATIENCE = 550.0
"""Seconds until a launch is given up: on a busy machine each process waits for the others."""


@pytest.fixture
def launch(repo_root: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`launch("zero2", recipe, "a.b=c", ...)`: the launcher, started, with its output in `tmp_path/log`; whatever still
    runs after the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(engine: str, *arguments: object, module: str = "draftsmith.train") -> subprocess.Popen[str]:
        config = repo_root / "configs" / "accelerate" / f"{engine}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
        command += ["--main_process_port", "0", "-m", module, *map(str, arguments)]
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(
                command,
                cwd=repo_root,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                stdout=log,
                stderr=log,
                text=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """The launcher and what it launched, at once."""
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        member.send_signal(signal.SIGKILL)
    process.wait()


def end_of(log: Path) -> str:
    """What a report has room for: where a process died."""
    return log.read_text()[-6000:]


def assert_follows(found: Path, alone: TrainResult, *, rel: float, weight: float = 3e-6) -> None:
    """Same figures, same integers, and the same full weights to within `weight`, whatever the engine split up."""
    lines, expected = read_lines(found / "metrics.jsonl"), read_lines(alone.out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, want in zip(lines, expected):
        for name, value in want.items():
            assert line[name] == (pytest.approx(value, rel=rel, abs=1e-7) if isinstance(value, float) else value), name
    weights, wanted = (load_file(folder / "drafter" / "model.safetensors") for folder in (found, alone.out))
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=weight)


@pytest.fixture(scope="module")
def every_method(
    tiny_target_dir: Path, conversations: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Content, TrainResult]]:
    """Each method's recipe, with decoding, and what one process makes of it."""
    found = {}
    for method, head in SMALL.items():
        content: Content = {
            "target": str(tiny_target_dir),
            "head": json.loads(json.dumps({"method": method, **head})),  # lists for tuples, as YAML has them
            "objective": {"name": "forward_kl"},
            "data": {**conversations, "row_length": 128},
            "optimiser": {"lr": 1e-3, "warmup_share": 0.5},
            "steps": 4,
            "rows_per_step": 4,
            "rows_per_forward": 1,
            "decode_prompts": 5,
            "decode_tokens": 12,
            "out": str(tmp_path_factory.mktemp("alone") / method),
            "wandb": {"mode": "disabled"},
        }
        found[method] = content, train(parse_recipe(content, source="test"), resume=False)
    return found


@pytest.fixture(scope="module")
def jointly(
    every_method: dict[str, tuple[Content, TrainResult]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Content, TrainResult]]:
    """Heads whose target is trained along with them."""
    content, _ = every_method["medusa"]
    backbone = {"backbone": {"rank": 4, "head_weight": 1.0}, "out": str(tmp_path_factory.mktemp("joint") / "run")}
    recipe: Content = content | backbone
    return {"joint": (recipe, train(parse_recipe(recipe, source="test"), resume=False))}


@pytest.fixture(scope="module")
def with_a_frozen_head(
    every_method: dict[str, tuple[Content, TrainResult]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Content, TrainResult]]:
    """A weight of the drafter's own that is not trained, nor of the target's."""
    content, _ = every_method["eagle3"]
    recipe: Content = content | {
        "head": content["head"] | {"train_head": False},
        "out": str(tmp_path_factory.mktemp("frozen") / "run"),
    }
    return {"frozen": (recipe, train(parse_recipe(recipe, source="test"), resume=False))}


@pytest.fixture(scope="module")
def with_muon(
    every_method: dict[str, tuple[Content, TrainResult]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Content, TrainResult]]:
    """The optimiser that takes whole matrices."""
    content, _ = every_method["eagle3"]
    recipe: Content = content | {
        "optimiser": content["optimiser"] | {"name": "muon"},
        "out": str(tmp_path_factory.mktemp("muon") / "run"),
    }
    return {"muon": (recipe, train(parse_recipe(recipe, source="test"), resume=False))}


@pytest.fixture(scope="module")
def for_split_targets(
    every_method: dict[str, tuple[Content, TrainResult]],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Content, TrainResult]]:
    """Features on disk, which no process reads alone, and a mixture of experts with compressed keys and values."""
    content, _ = every_method["eagle3"]
    folder = tmp_path_factory.mktemp("split")
    experts = DeepseekV3Config(**small_experts() | {"initializer_range": 0.2, "eos_token_id": 2, "bos_token_id": 1})
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(experts).float().save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    changed = {
        "disk": {"data": content["data"] | {"features": "disk"}},
        "experts": {"target": str(folder / "target"), "head": content["head"] | {"taps": [0, 1, 3]}},
    }
    found = {}
    for name, changes in changed.items():
        recipe: Content = content | changes | {"out": str(folder / name)}
        found[name] = recipe, train(parse_recipe(recipe, source="test"), resume=False)
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_every_method_follows_the_loss_of_one_process(
    engine: str,
    every_method: dict[str, tuple[Content, TrainResult]],
    jointly: dict[str, tuple[Content, TrainResult]],
    with_a_frozen_head: dict[str, tuple[Content, TrainResult]],
    with_muon: dict[str, tuple[Content, TrainResult]],
    launch: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Losses, weights, predicted and real tau; the target's adapters too where it is trained jointly."""
    runs = every_method | (jointly if engine in ("ddp", "zero1", "zero2") else with_a_frozen_head)
    runs |= with_muon if engine == "ddp" else {}
    if engine in ("zero1", "zero2_offload", "zero3_offload"):  # what they share with zero2 and zero3 is not run again
        runs = {name: run for name, run in runs.items() if name in ("medusa", "dflash", "joint", "frozen")}
    assert_all_follow(runs, launch, tmp_path, engine)
    assert_optimiser_takes_what_is_planned(tmp_path / "medusa", engine)


def test_every_method_follows_with_a_target_that_is_split_over_the_processes(
    every_method: dict[str, tuple[Content, TrainResult]],
    for_split_targets: dict[str, tuple[Content, TrainResult]],
    launch: Callable[..., Any],
    tmp_path: Path,
) -> None:
    assert_all_follow(every_method | for_split_targets, launch, tmp_path, "ddp", "target_sharding=tensor")


def assert_all_follow(
    runs: dict[str, tuple[Content, TrainResult]], launch: Callable[..., Any], folder: Path, engine: str, *overrides: str
) -> None:
    recipes = []
    for name, (content, _) in runs.items():
        recipes.append(folder / f"{name}.yaml")
        recipes[-1].write_text(yaml.safe_dump(content | {"out": str(folder / name)}))
    process = launch(engine, *recipes, *overrides, module="tests.train.many")
    assert process.wait(PATIENCE) == 0, end_of(folder / "log")
    for name, (_, alone) in runs.items():
        # Where the target rounds differently, a gradient of nearly 0 may turn: AdamW's steps are at most of size lr, 1e-3,
        # and Muon lifts what is nearly 0 to the size of the rest.
        weight = 1e-3 if overrides or name == "joint" else 5e-5 if name == "muon" else 3e-6
        assert_follows(folder / name, alone, rel=1e-4, weight=weight)
        assert "held_out/real_tau" in read_lines(folder / name / "metrics.jsonl")[-1]


def assert_optimiser_takes_what_is_planned(run: Path, launch: str) -> None:
    """On disk the optimiser's tensors are what they were in memory; a few bytes per tensor name them."""
    trained = sum(
        tensor.numel()
        for tensor in load_file(run / "drafter" / "model.safetensors").values()
        if tensor.is_floating_point()
    )
    state = checkpoints(run / "checkpoints")[-1] / "state"
    files = [path for path in state.rglob("*") if "optim" in str(path.relative_to(state)) and path.is_file()]
    size = sum(path.stat().st_size for path in files)
    planned = share(launch, trained=trained, frozen=0, world=2)
    if launch.endswith("_offload"):
        each = planned.host * 3 // 4  # without the gradients
    else:
        each = planned.optimiser
    processes = 1 if launch == "ddp" else 2
    assert processes * each < size < 1.1 * processes * each + 80_000, (size, each, files)


@pytest.mark.parametrize(
    ("engine", "name"), [("zero3", "zero-3"), ("fsdp2", "fsdp2"), ("zero2_offload", "zero-2-offload")]
)
def test_split_weights_killed_and_resumed_follow_too_and_refuse_another_engine(
    engine: str,
    name: str,
    uneven: Content,
    write_recipe: Callable[[Content], Path],
    launch: Callable[..., Any],
    tmp_path: Path,
) -> None:
    uneven |= {"steps": 12, "save_every": 3}
    recipe, split, log = write_recipe(uneven), tmp_path / "split", tmp_path / "log"
    process = launch(engine, recipe, f"out={split}")
    alone = train(parse_recipe(uneven, source="test"), resume=False)
    ends = time.monotonic() + PATIENCE
    while not checkpoints(split / "checkpoints"):
        assert process.poll() is None, end_of(log)
        assert time.monotonic() < ends, end_of(log)
        time.sleep(0.01)
    kill_all(process)

    with pytest.raises(ValueError, match=f"saved under {name} and this launch is replicated; launch with the same"):
        train(parse_recipe(uneven | {"out": str(split)}, source="test"), resume=True)

    assert launch(engine, recipe, f"out={split}", "--resume").wait(PATIENCE) == 0, end_of(log)
    assert_follows(split, alone, rel=1e-5)


def test_bf16_under_deepspeed_keeps_fp32_weights_and_follows_loosely(
    uneven: Content, write_recipe: Callable[[Content], Path], launch: Callable[..., Any], tmp_path: Path
) -> None:
    uneven |= {"precision": "bf16", "target_dtype": "bfloat16"}
    process = launch("zero2", write_recipe(uneven), f"out={tmp_path / 'zero2'}")
    alone = train(parse_recipe(uneven, source="test"), resume=False)
    assert process.wait(PATIENCE) == 0, end_of(tmp_path / "log")
    losses, expected = (
        [line["train/loss"] for line in read_lines(out / "metrics.jsonl") if "train/loss" in line]
        for out in (tmp_path / "zero2", alone.out)
    )
    assert losses == pytest.approx(expected, rel=5e-3)
    weights = load_file(tmp_path / "zero2" / "drafter" / "model.safetensors")
    floating = [tensor for tensor in weights.values() if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.float32 for tensor in floating)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in floating)
