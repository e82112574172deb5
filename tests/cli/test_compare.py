"""`draftsmith compare`: every figure of the table is one that a run or an evaluation wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from .conftest import Cli
from .test_train import draftsmith, recipe

__all__ = ["recipe"]


@pytest.fixture
def recipes(recipe: Path) -> list[Path]:
    """The same small run with two and with three heads."""
    content = yaml.safe_load(recipe.read_text())
    files = []
    for heads in (2, 3):
        file = recipe.with_name(f"heads{heads}.yaml")
        file.write_text(yaml.safe_dump(content | {"head": {"method": "medusa", "num_heads": heads}}))
        files.append(file)
    return files


@pytest.mark.slow
def test_two_recipes_become_two_lines(recipes: list[Path], tmp_path: Path) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"question_id": n, "category": "counting", "turns": [f"count to {n}"]}) + "\n" for n in (3, 7)
        )
    )
    options = ("--responses", tmp_path / "data.jsonl", "--out", tmp_path / "all", "--prompts", prompts)
    command = ("compare", *recipes, *options, "--max-new-tokens", 12, "--dtype", "float32", "--set", "steps=2")
    ran = draftsmith(*command)
    assert ran.returncode == 0, ran.stderr
    lines = json.loads((tmp_path / "all" / "compare.json").read_text())["recipes"]
    assert [Path(line["recipe"]).stem for line in lines] == ["heads2", "heads3"]
    for line in lines:
        folder = tmp_path / "all" / Path(line["recipe"]).stem
        totals = json.loads((folder / "evaluation_t0.json").read_text())["totals"]
        assert (line["tau"], line["speedup"]) == (totals["tau"], totals["speedup"])
        assert line["steps"] == 2
        assert line["identical"] == line["prompts"] == 2
        assert line["peak_bytes"] > 2**27
        measured = json.loads((folder / "train" / "run.json").read_text())["measured"]
        assert [(point["step"], point["predicted_tau"]) for point in line["curve"]][-1] == (
            2,
            measured["predicted_tau"],
        )
        assert 0 < line["curve"][0]["tokens"] <= line["curve"][-1]["tokens"]
        assert Path(line["recipe"]).stem in ran.stdout
    assert lines[1]["weights"] == lines[0]["weights"] * 3 / 2
    again = draftsmith(*command)
    assert again.returncode == 0, again.stderr
    assert "is there already" in again.stdout
    assert json.loads((tmp_path / "all" / "compare.json").read_text())["recipes"] == lines


def test_recipes_of_one_name_are_refused(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    ran = cli("compare", recipe, recipe, "--responses", tmp_path / "data.jsonl", "--out", tmp_path / "all")
    assert ran.exit_code == 2
    assert "recipe occurs twice" in ran.stderr


def test_a_fault_in_the_last_recipe_shows_before_the_first_is_trained(
    cli: Cli, recipes: list[Path], tmp_path: Path
) -> None:
    recipes[1].write_text(recipes[1].read_text() + "\nstpes: 3\n")
    ran = cli("compare", *recipes, "--responses", tmp_path / "data.jsonl", "--out", tmp_path / "all")
    assert ran.exit_code == 2
    assert "stpes" in ran.stderr
    assert not (tmp_path / "all").exists()
