"""Each file of real training data becomes a trained and evaluated drafter with one recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli

DATA = Path(__file__).parents[3] / "shared" / "data" / "train"
FILES = ("alpaca_en_demo.json", "alpaca_zh_demo.json", "glaive_toolcall_en_demo.json")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.exists(), reason="the real training files are not beside this checkout"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_file_as_people_have_it_becomes_an_evaluated_drafter(
    name: str, cli: Cli, tmp_path: Path, repo_root: Path
) -> None:
    """The embedded target answers some of its conversations, the demo's recipe learns from them, and the loop is exact."""
    answers, run = tmp_path / "answers.jsonl", tmp_path / "run"
    asked = ("--target", "smollm2-135m", "--prompts", DATA / name, "--limit", 6, "--max-new-tokens", 16)
    ran = cli("respond", *asked, "--out", answers)
    assert ran.exit_code == 0, ran.stderr
    assert len(answers.read_text().splitlines()) == 6
    settings = ("steps=2", "epochs=null", "rows_per_step=2", "rows_per_forward=2", "head.draft_vocab_size=512")
    recipe = repo_root / "configs" / "recipes" / "medusa_smollm2_demo.yaml"
    places = (f"data.responses={answers}", f"data.held_out={answers}", f"out={run}", "wandb.mode=disabled")
    ran = cli("train", recipe, *settings, *places)
    assert ran.exit_code == 0, ran.stderr
    found = tmp_path / "evaluation.json"
    shown = ("--prompts", DATA / name, "--limit", 2, "--max-new-tokens", 12, "--dtype", "float32", "--json", found)
    ran = cli("evaluate", "--drafter", run / "drafter", *shown)
    assert ran.exit_code == 0, ran.stderr
    totals = json.loads(found.read_text())["totals"]
    assert totals["identical"] == totals["prompts"] == 2
    assert totals["emitted"] >= totals["rounds"] > 0
