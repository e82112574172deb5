"""`draftsmith respond` and `preview`: answers appended one by one, continued by id, and shown as a person reads them."""

from __future__ import annotations

import functools
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Cli


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "category": "general", "split": "train", "turns": [f"count to {n}"]} for n in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(target: Path, prompts: Path, out: Path) -> tuple[object, ...]:
    return (
        "respond",
        "--target",
        target,
        "--prompts",
        prompts,
        "--out",
        out,
        "--max-new-tokens",
        8,
        "--dtype",
        "float32",
    )


def answers(file: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "an id was answered twice"
    return {row["id"]: row["messages"] for row in rows}


def test_the_same_command_goes_on_where_it_was(cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert cli(*settings(tiny_target_dir, prompts, out), "--limit", 2).exit_code == 0
    ran = cli(*settings(tiny_target_dir, prompts, out))
    assert ran.exit_code == 0
    assert "answered 4" in ran.stdout
    assert "kept 2 from before" in ran.stdout
    assert cli(*settings(tiny_target_dir, prompts, whole), "--rows", 2).exit_code == 0
    assert answers(out) == answers(whole)
    assert len(answers(out)) == 6


def test_a_drafter_changes_no_answer(
    cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path, drafter_dir: Path
) -> None:
    out, drafted = tmp_path / "out.jsonl", tmp_path / "drafted.jsonl"
    assert cli(*settings(tiny_target_dir, prompts, out)).exit_code == 0
    assert cli(*settings(tiny_target_dir, prompts, drafted), "--drafter", drafter_dir).exit_code == 0
    assert answers(out) == answers(drafted)


def test_other_settings_do_not_continue_a_file(cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert cli(*settings(tiny_target_dir, prompts, out)).exit_code == 0
    before = out.read_bytes()
    ran = cli(*settings(tiny_target_dir, prompts, out), "--temperature", 0.5)
    assert ran.exit_code == 2
    assert "temperature" in ran.stderr
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": "x", "category": "general", "split": "train", "turns": ["hi"]', "not a JSON line"),
        ('{"id": "x", "category": "general", "split": "train", "turns": "hi"}', "turns must be a list"),
        ('{"id": "x", "category": "general", "split": "test", "turns": ["hi"]}', "split must be train or held-out"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(
    cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path, line: str, named: str
) -> None:
    prompts.write_text(prompts.read_text() + line + "\n")
    ran = cli(*settings(tiny_target_dir, prompts, tmp_path / "out.jsonl"))
    assert ran.exit_code == 2
    assert f"{prompts}:7" in ran.stderr
    assert named in ran.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_an_unknown_role_is_named_with_the_known_ones(cli: Cli, tiny_target_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "wizard", "content": "hi"}]}) + "\n")
    ran = cli(*settings(tiny_target_dir, file, tmp_path / "out.jsonl"))
    assert ran.exit_code == 2
    assert f"{file}:1" in ran.stderr
    assert "unknown role 'wizard'" in ran.stderr


def test_a_prompt_longer_than_the_context_is_named(cli: Cli, tiny_target_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    row = {"id": "endless", "category": "general", "split": "train", "turns": ["the cat sat " * 200]}
    file.write_text(json.dumps(row) + "\n")
    ran = cli(*settings(tiny_target_dir, file, tmp_path / "out.jsonl"))
    assert ran.exit_code == 2
    assert "endless" in ran.stderr
    assert "512" in ran.stderr


def test_a_disk_that_takes_no_more_ends_in_one_line_and_keeps_what_was_written(
    cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """The operating system itself refuses the write (a limit on file size), in the middle of a line."""
    out = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
    try:
        ran = cli(*settings(tiny_target_dir, prompts, out), "--rows", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.exit_code == 2
    assert "File too large" in ran.stderr
    assert "Traceback" not in ran.output
    assert 0 < out.read_bytes().count(b"\n") < 6
    assert cli(*settings(tiny_target_dir, prompts, out)).exit_code == 0
    assert len(answers(out)) == 6


def test_preview_shows_the_sample_and_how_much_is_learned(
    cli: Cli, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert cli(*settings(tiny_target_dir, prompts, out)).exit_code == 0
    ran = cli("preview", out, "--target", tiny_target_dir, "--index", 2)
    assert ran.exit_code == 0
    assert "count to 2<|im_end|>" in ran.stdout
    assert "sample 2 of 6: p2" in ran.stdout
    assert "8 learned" in ran.stdout
    beyond = cli("preview", out, "--target", tiny_target_dir, "--index", 6)
    assert beyond.exit_code == 2
    assert "--index must be below the number of samples, 6, got 6" in beyond.stderr


def test_preview_of_prompts_without_answers_says_what_to_do(cli: Cli, tiny_target_dir: Path, prompts: Path) -> None:
    ran = cli("preview", prompts, "--target", tiny_target_dir)
    assert ran.exit_code == 2
    assert "draftsmith respond" in ran.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_finished_answers_and_the_run_goes_on(cli: Cli, tiny_target_dir: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "many.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": f"p{n}", "category": "general", "split": "train", "turns": [f"count to {n}"]} for n in range(80)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(word) for word in settings(tiny_target_dir, file, out)]
    command[command.index("--max-new-tokens") + 1] = "64"
    program = [str(Path(sys.executable).parent / "draftsmith"), *command, "--rows", "2"]
    # A shell that starts the tests in the background has them ignore SIGINT, and children inherit that.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("interrupted: finished answers are in")
    assert "Traceback" not in errors
    kept = out.read_bytes().count(b"\n")
    assert 3 <= kept < 80
    ran = cli(*command)
    assert ran.exit_code == 0, ran.stderr
    assert f"kept {kept} from before" in ran.stdout
    assert len(answers(out)) == 80
