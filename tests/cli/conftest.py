"""The command line as a user drives it, and a drafter on disk for the tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftsmith.cli.main import app
from draftsmith.heads import METHODS, Binding
from draftsmith.infer.target import Target

from ..heads.laws import SMALL

Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("generate", "hi", ...)` in this process, on a wide terminal; stdout and stderr are kept apart."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.delenv("DRAFTSMITH_TRACEBACK", raising=False)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session", params=sorted(METHODS))
def drafter_dir(request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter of every method, saved for the tiny target."""
    config, method = METHODS[request.param]
    folder = tmp_path_factory.mktemp("drafter") / request.param
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    method(config(**SMALL[request.param]), tiny_target).save(folder, binding=binding)
    return folder
