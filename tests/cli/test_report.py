"""What a user sees when something goes wrong: one line and an exit code; a traceback only for our own faults."""

from __future__ import annotations

import pytest
import typer

from draftsmith.cli.report import reported


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit, reported("nothing."):
        raise ValueError("rows must be at least 1, got 0.")
    assert exit.value.exit_code == 2
    assert capsys.readouterr().err == "error: rows must be at least 1, got 0.\n"


def test_a_message_is_printed_as_it_is_and_not_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), reported("nothing."):
        raise ValueError("unknown keys [red] and [/]" + " long" * 100)
    assert capsys.readouterr().err == "error: unknown keys [red] and [/]" + " long" * 100 + "\n"


def test_a_full_disk_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit, reported("nothing."):
        raise OSError(28, "No space left on device", "runs/demo")
    assert exit.value.exit_code == 2
    assert "No space left on device: 'runs/demo'" in capsys.readouterr().err


def test_ctrl_c_says_what_was_kept_and_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit, reported("finished answers are in out.jsonl."):
        raise KeyboardInterrupt
    assert exit.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted: finished answers are in out.jsonl.\n"


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(AssertionError, match="cannot happen"), reported("nothing."):
        raise AssertionError("this cannot happen")


def test_a_reader_that_goes_away_is_no_error_of_ours() -> None:
    with pytest.raises(BrokenPipeError), reported("nothing."):
        raise BrokenPipeError


def test_the_traceback_of_a_users_mistake_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_TRACEBACK", "1")
    with pytest.raises(ValueError, match="where was this"), reported("nothing."):
        raise ValueError("where was this?")
