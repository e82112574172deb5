"""`draftsmith train` and `demo`: from a recipe to a drafter that decodes, and mistakes that show before the long part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState

from draftsmith.cli.step import measure
from draftsmith.infer.target import Target
from draftsmith.train.recipe import load_recipe

from .conftest import Cli


@pytest.fixture
def recipe(tmp_path: Path, tiny_target_dir: Path) -> Path:
    """Three steps on a dozen conversations."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count to {n}"},
                {"role": "assistant", "content": " ".join(map(str, range(n)))},
            ]
        }
        for n in range(2, 26)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "target": str(tiny_target_dir),
        "head": {"method": "medusa", "num_heads": 2},
        "objective": {"name": "cross_entropy"},
        "data": {"responses": str(tmp_path / "data.jsonl"), "row_length": 256},
        "optimiser": {"lr": 1e-3},
        "steps": 3,
        "rows_per_step": 2,
        "rows_per_forward": 2,
        "out": str(tmp_path / "run"),
        "wandb": {"mode": "disabled"},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def draftsmith(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the launcher's state is per process."""
    program = [str(Path(sys.executable).parent / "draftsmith"), *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True)


@pytest.mark.slow
def test_a_recipe_becomes_a_drafter_that_decodes(cli: Cli, recipe: Path, tiny_target_dir: Path) -> None:
    ran = draftsmith("train", recipe, "steps=2")
    assert ran.returncode == 0, ran.stderr
    drafter = recipe.parent / "run" / "drafter"
    assert f"trained 2 steps; the drafter is in {drafter}" in ran.stdout
    settings = ("generate", "count to 9", "--target", tiny_target_dir, "--max-new-tokens", 16)
    drafted = cli(*settings, "--drafter", drafter)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == cli(*settings).stdout
    again = draftsmith("train", recipe, "steps=2")
    assert again.returncode == 2
    assert "--resume" in again.stderr


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimiser.warmup=0.1", "did you mean warmup_share?"),
        ("steps=many", "steps"),
        ("head.method=clairvoyance", "clairvoyance"),
        ("steps", "key.key=value"),
        ("data.responses=nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_a_fault_in_the_recipe_ends_in_one_message(cli: Cli, recipe: Path, override: str, named: str) -> None:
    ran = cli("train", recipe, override)
    assert ran.exit_code == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.output


def test_a_recipe_that_does_not_exist_is_named(cli: Cli) -> None:
    ran = cli("train", "nowhere.yaml")
    assert ran.exit_code == 2
    assert "nowhere.yaml" in ran.stderr


def test_demo_without_its_recipe_says_so_before_the_long_part(cli: Cli, tmp_path: Path) -> None:
    ran = cli("demo", "--out", tmp_path / "demo", "--recipe", tmp_path / "nowhere.yaml")
    assert ran.exit_code == 2
    assert "nowhere.yaml" in ran.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_demo_goes_from_prompts_to_an_evaluation(
    cli: Cli, recipe: Path, build_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing on the tiny target, with short answers."""
    for name, value in {"ANSWER_TOKENS": 4, "EVALUATED": 8, "EVALUATED_TOKENS": 8, "EXACT": 4}.items():
        monkeypatch.setattr(f"draftsmith.cli.demo.{name}", value)
    roomy = build_target(max_position_embeddings=8192)
    roomy.model.save_pretrained(tmp_path / "target")
    roomy.tokenizer.save_pretrained(tmp_path / "target")
    out = tmp_path / "demo"
    command = ("demo", "--out", out, "--target", tmp_path / "target", "--recipe", recipe)
    ran = cli(*command)
    AcceleratorState._reset_state(reset_partial_state=True)  # the launcher's state is per process
    assert ran.exit_code == 0, ran.stderr
    document = json.loads((out / "evaluation.json").read_text())
    assert document["float32"]["totals"]["identical"] == document["float32"]["totals"]["prompts"]
    assert document["totals"]["drafted"] > 0, "whether it pays or not"
    assert all(str(out / name) in ran.stdout for name in ("responses.jsonl", "evaluation.json", "train/drafter"))
    assert "try next:" in ran.stdout
    again = cli(*command)
    assert again.exit_code == 0, again.stderr
    assert "0 answers," in again.stdout
    assert "is there already" in again.stdout


def test_a_step_is_timed_beside_its_arithmetic(cli: Cli, recipe: Path) -> None:
    """The products of one step: per head a block (no gradient to the frozen features) and a projection."""
    cost = measure(load_recipe(recipe), steps=2, threads=1)
    rows, width, vocabulary = 2 * 256, 48, 300
    assert cost.floating_operations == 2 * rows * (4 * width**2 + 6 * width * vocabulary)
    assert cost.tokens == rows
    assert cost.peak_bytes > 2**27
    ran = cli("step", recipe, "--steps", 1)
    assert ran.exit_code == 0, ran.stderr
    assert "512 tokens per step" in ran.stdout
