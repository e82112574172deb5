"""The command line as a user drives it: what goes wrong is one line that says what to do, and exit status 1."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.train.__main__ import main

from .conftest import Content

Write = Callable[[Content], Path]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["draftsmith.train", *(str(argument) for argument in arguments)])
    return main()


def test_recipe_with_overrides_trains_and_says_where(
    content: Content,
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "other"
    assert run(monkeypatch, write_recipe(content), "steps=2", f"out={out}", "--resume", "optimiser.lr=2e-3") == 0
    assert f"trained 2 steps; the drafter is in {out / 'drafter'}" in capsys.readouterr().out
    assert (out / "drafter" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "stepz: unknown key; did you mean steps?"),
        ("target=./nowhere", "nowhere"),
        ("data.responses=nowhere.jsonl", "nowhere.jsonl"),
        ("head.draft_vocab_size=400", "400"),
        ("init=nowhere", "nowhere holds no config.json"),
    ],
)
def test_fault_is_one_message_and_exit_status_one(
    override: str,
    message: str,
    content: Content,
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, write_recipe(content), override) == 1
    errors = capsys.readouterr().err
    assert "error: " in errors
    assert message in errors[errors.index("error: ") :]


def test_malformed_line_is_named_with_its_file(
    content: Content,
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lines = Path(content["data"]["responses"]).read_text().splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([*lines[:3], '{"messages": [', *lines[3:6]]) + "\n")
    assert run(monkeypatch, write_recipe(content), f"data.responses={broken}") == 1
    assert "broken.jsonl:4" in capsys.readouterr().err


def test_empty_data_is_an_error_with_the_reason(
    content: Content,
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert run(monkeypatch, write_recipe(content), f"data.responses={empty}") == 1
    assert "empty.jsonl" in capsys.readouterr().err
