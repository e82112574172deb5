"""`draftsmith plan`: figures of a run before anything of it exists."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from .conftest import Cli


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """For a target that this machine does not have, on data that do not exist yet."""
    content = {
        "target": "somewhere/model-8b",
        "target_dtype": "bfloat16",
        "head": {"method": "medusa", "num_heads": 2},
        "objective": {"name": "forward_kl"},
        "data": {"responses": "not/there/yet.jsonl", "row_length": 64},
        "optimiser": {"lr": 1e-3},
        "epochs": 3,
        "rows_per_step": 8,
        "rows_per_forward": 1,
        "out": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_plan_needs_neither_weights_nor_data(cli: Cli, recipe: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    architecture = tiny_target_dir / "config.json"
    figures = tmp_path / "plan.json"
    ran = cli(
        *("plan", recipe, "--architecture", architecture, "--nodes", 2, "--gpus", 1, "--gpu-memory", 24),
        *("--tokens", "2e6", "--hours", 1, "--json", figures, "rows_per_step=16"),
    )
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(figures.read_text())
    assert f"{found['measured']['trained']:,} trained weights" in ran.stdout
    assert "6,000,000 tokens in 1 hours: 1,667 tokens/s in all" in ran.stdout
    assert "ddp, 1/2" in ran.stdout
    per_token = found["measured"]["features"]
    assert per_token["exact"] == per_token["bf16"] == 2 * 48
    assert f"exact 96, bf16 96, int8 {per_token['int8']}" in ran.stdout
    assert f"{per_token['int8'] * 2_000_000 / 2**30:.1f} GiB as int8 for the data" in ran.stdout
    last = shlex.split(ran.stdout.strip().splitlines()[-1])
    assert last[:2] == ["accelerate", "launch"]
    assert last[-2:] == [str(recipe), "rows_per_step=16"]
    assert not (tmp_path / "run").exists()


def test_what_is_not_known_is_asked_for(cli: Cli, recipe: Path, tiny_target_dir: Path) -> None:
    ran = cli("plan", recipe, "--architecture", tiny_target_dir, "--gpu-memory", 1)
    assert ran.exit_code == 0, ran.stderr
    assert "give --tokens" in ran.stdout
    assert "nothing fits" in ran.stdout
    assert "accelerate launch" not in ran.stdout


def test_an_architecture_out_of_reach_says_which_option_helps(cli: Cli, recipe: Path) -> None:
    ran = cli("plan", recipe)
    assert ran.exit_code == 2
    assert "somewhere/model-8b" in ran.stderr
    assert "--architecture" in ran.stderr
