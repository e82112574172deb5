"""The door itself: every verb explains itself with an example that is a valid command, and the README's commands are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from draftsmith.cli.main import app

from .conftest import Cli

GROUP = get_command(app)
VERBS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def check_command(line: str, root: Path) -> None:
    """Parse a `draftsmith ...` line as the CLI would, without running it; files under configs/ must exist."""
    words = shlex.split(line, comments=True)
    assert words[0] == "draftsmith", line
    if words[1] not in VERBS:
        assert words[1] in ("--help", "--version"), line
        return
    command = GROUP.commands[words[1]]  # type: ignore[attr-defined]
    if "--help" not in words:
        command.make_context(words[1], list(words[2:]))
    for word in words:
        if word.startswith("configs/"):
            assert (root / word).is_file(), f"{line}: {word} does not exist"


def test_the_verbs_are_those_of_the_readme() -> None:
    verbs = "audit bench cache calibrate compare demo evaluate generate plan preview respond step train"
    assert verbs.split() == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example_that_is_a_valid_command(cli: Cli, verb: str, repo_root: Path) -> None:
    ran = cli(verb, "--help")
    assert ran.exit_code == 0
    example = re.search(r"Example: (draftsmith .*?)(?:\n\s*\n|$)", ran.stdout, re.DOTALL)
    assert example, f"{verb} --help shows no example"
    line = " ".join(example[1].split())
    assert line.split()[1] == verb
    check_command(line, repo_root)


def test_the_module_of_a_verb_imports_nothing_heavy() -> None:
    code = "import sys, draftsmith.cli.main; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_version_is_the_installed_one(cli: Cli) -> None:
    from importlib.metadata import version

    assert cli("--version").stdout == f"draftsmith {version('draftsmith')}\n"


def test_an_unknown_verb_names_the_nearest(cli: Cli) -> None:
    ran = cli("genrate")
    assert ran.exit_code == 2
    assert "'generate'" in ran.stderr


def readme_commands(root: Path) -> list[str]:
    """Lines of the README's sh blocks that run something of ours; a trailing backslash joins lines."""
    blocks = re.findall(r"```sh\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def test_every_command_of_the_readme_is_one_that_exists(repo_root: Path) -> None:
    lines = readme_commands(repo_root)
    targets = set(re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    shown = set()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0].endswith("draftsmith"):
            check_command(" ".join(["draftsmith", *map(shlex.quote, words[1:])]), repo_root)
            shown.add(words[1])
        elif words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["accelerate", "launch"]:
            assert all((repo_root / word).is_file() for word in words if word.startswith("configs/")), line
        else:
            assert words[0] in ("git", "cd", "source", "python3"), f"unknown command in the README: {line}"
    assert shown >= set(VERBS), f"the README shows no example of {set(VERBS) - shown}"


def test_typer_is_asked_for_no_completion_machinery() -> None:
    """Completion options would be the longest part of `--help`."""
    assert isinstance(app, typer.Typer)
    assert "--install-completion" not in {option for parameter in GROUP.params for option in parameter.opts}
