"""`draftsmith compare`: every figure of the table is one that a run or an evaluation wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from draftsmith.cli.compare_table import curve_of, curves

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


def test_a_curve_goes_on_where_an_interrupted_process_stopped(tmp_path: Path) -> None:
    """Each process counts tokens and seconds from 0; step 3 was done twice, as the checkpoint was step 2's."""
    spent = [(1, 10, 1.0), (2, 20, 2.0), (3, 30, 3.0), (3, 10, 1.5), (4, 20, 2.5)]
    timing = [{"step": step, "tokens": tokens, "seconds": seconds} for step, tokens, seconds in spent]
    metrics = [{"step": 2, "held_out/predicted_tau": 1.2}, {"step": 4, "held_out/predicted_tau": 1.4}, {"step": 4}]
    for name, lines in (("timing.jsonl", timing), ("metrics.jsonl", metrics)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = curve_of(tmp_path)
    assert [tuple(point.values()) for point in curve] == [(2, 20, 2.0, 1.2), (4, 50, 5.5, 1.4)]


def test_a_curve_shows_its_ends_and_no_point_twice() -> None:
    def line(name: str, count: int) -> dict[str, object]:
        points = [{"step": n, "tokens": 1000 * n, "seconds": 60.0, "predicted_tau": 1.0} for n in range(1, count + 1)]
        return {"recipe": name, "curve": points}

    shown = curves([line("long.yaml", 9), line("short.yaml", 2), line("none.yaml", 0)], most=4)
    cells = [list(column.cells) for column in shown.columns]
    assert cells[0] == ["long", "short", "none"]
    tokens = [[str(cell).split()[1] for row, cell in enumerate(column) if row == 0] for column in cells[1:]]
    assert [found[0] for found in tokens] == ["1k", "4k", "6k", "9k"]
    assert [str(column[1]).split()[1:2] for column in cells[1:]] == [["1k"], ["2k"], [], []]


@pytest.mark.slow
def test_two_recipes_become_two_lines(recipes: list[Path], tmp_path: Path) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"question_id": n, "category": "counting", "turns": [f"count to {n}"]}) + "\n" for n in (3, 7)
        )
    )
    options = ("--responses", tmp_path / "data.jsonl", "--out", tmp_path / "all", "--prompts", prompts)
    command = (
        "compare",
        *recipes,
        *options,
        "--max-new-tokens",
        12,
        "--dtype",
        "float32",
        "--set",
        "steps=2",
        "--tree",
        2,
    )
    ran = draftsmith(*command)
    assert ran.returncode == 0, ran.stderr
    lines = json.loads((tmp_path / "all" / "compare.json").read_text())["recipes"]
    assert [Path(line["recipe"]).stem for line in lines] == ["heads2", "heads3"]
    for line in lines:
        folder = tmp_path / "all" / Path(line["recipe"]).stem
        totals = json.loads((folder / "evaluation_t0.json").read_text())["totals"]
        assert (line["tau"], line["speedup"]) == (totals["tau"], totals["speedup"])
        assert totals["drafted"] == 2 * totals["rounds"]
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
    other = draftsmith(*command, "--tree", "chain", "--limit", 1)
    assert other.returncode == 0, other.stderr
    assert other.stdout.count("measured otherwise") == 4
    found = json.loads((tmp_path / "all" / "compare.json").read_text())
    assert found["tree"] == "chain"
    assert {line["prompts"] for line in found["recipes"]} == {1}
    longer = draftsmith(*command, "--set", "steps=3")
    assert longer.returncode == 2
    assert "trained with other settings: steps: 2 then, 3 now" in longer.stderr


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


def test_a_tree_that_there_is_not_shows_before_the_first_is_trained(
    cli: Cli, recipes: list[Path], tmp_path: Path
) -> None:
    options = ("--responses", tmp_path / "data.jsonl", "--out", tmp_path / "all", "--tree", "sixteen")
    ran = cli("compare", *recipes, *options)
    assert ran.exit_code == 2
    assert "number of nodes, got 'sixteen'" in ran.stderr
    assert not (tmp_path / "all").exists()
