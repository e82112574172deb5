"""`draftsmith calibrate`, and the `--schedule` that uses what it found: for every method, the text stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.heads import METHODS, Binding, load_drafter
from draftsmith.infer.target import Target

from ..heads.laws import SMALL
from .conftest import Cli


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "category": "a", "turns": [f"count to {n}"]} for n in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_calibrated_drafter_is_scheduled_and_its_text_stays(
    cli: Cli, tiny_target: Target, tiny_target_dir: Path, drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "drafter", tmp_path / "evaluation.json"
    shutil.copytree(drafter_dir, folder)
    settings = ("--target", tiny_target_dir, "--drafter", folder, "--prompts", questions, "--dtype", "float32")
    ran = cli("calibrate", *settings, "--max-new-tokens", 24)
    assert ran.exit_code == 0, ran.stderr
    assert "ECE before" in ran.stdout
    found = load_drafter(folder, tiny_target).measured["confidence"]
    depth = load_drafter(folder, tiny_target).num_steps
    assert all(len(found[name]) == depth for name in ("temperatures", "survival", "error_before", "error_after"))
    assert f"{100 * found['error_before'][0]:.1f}%" in ran.stdout
    assert f"{100 * found['error_after'][0]:.1f}%" in ran.stdout
    ran = cli("evaluate", *settings, "--max-new-tokens", 10, "--schedule", "budget", "--rows", 4, "--json", out)
    assert ran.exit_code == 0, ran.stderr
    assert "confidences calibrated on" in ran.stderr
    assert "ms of a step by tokens verified: 1: " in ran.stderr
    document = json.loads(out.read_text())
    assert document["totals"]["identical"] == document["totals"]["prompts"] == 8
    assert document["settings"]["schedule"] == "budget"


@pytest.fixture
def one_drafter(tiny_target: Target, tmp_path: Path) -> Path:
    """Of one method, for what no method changes."""
    config, method = METHODS["medusa"]
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    method(config(**SMALL["medusa"]), tiny_target).save(tmp_path / "one", binding=binding)
    return tmp_path / "one"


def test_an_uncalibrated_drafter_is_scheduled_too_and_told_so(
    cli: Cli, tiny_target_dir: Path, one_drafter: Path
) -> None:
    settings = ("generate", "count to five", "--target", tiny_target_dir, "--max-new-tokens", 12)
    plain = cli(*settings, "--drafter", "none")
    scheduled = cli(*settings, "--drafter", one_drafter, "--schedule", "early-stop")
    assert scheduled.exit_code == 0, scheduled.stderr
    assert scheduled.stdout == plain.stdout
    assert "draftsmith calibrate measures what they are worth" in scheduled.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--schedule", "late"), "--schedule must be none, early-stop or budget, got 'late'"),
        (("--drafter", "lookahead", "--schedule", "budget"), "does not say how sure it is"),
        (("--drafter", "none", "--schedule", "budget"), "does not say how sure it is"),
    ],
)
def test_what_cannot_be_scheduled_ends_in_one_line(
    cli: Cli, tiny_target_dir: Path, arguments: tuple[str, ...], named: str
) -> None:
    ran = cli("generate", "hello", "--target", tiny_target_dir, *arguments)
    assert ran.exit_code == 2
    assert named in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.output


def test_too_few_rounds_leave_the_folder_as_it_was(
    cli: Cli, tiny_target_dir: Path, one_drafter: Path, questions: Path
) -> None:
    before = (one_drafter / "config.json").read_bytes()
    settings = ("--target", tiny_target_dir, "--drafter", one_drafter, "--prompts", questions, "--limit", 2)
    ran = cli("calibrate", *settings, "--max-new-tokens", 6)
    assert ran.exit_code == 2
    assert "too few to calibrate by" in ran.stderr
    assert (one_drafter / "config.json").read_bytes() == before


def test_calibrate_wants_a_trained_drafter(cli: Cli, tiny_target_dir: Path, questions: Path) -> None:
    ran = cli("calibrate", "--target", tiny_target_dir, "--drafter", "prompt-lookup", "--prompts", questions)
    assert ran.exit_code == 2
    assert "Traceback" not in ran.output
