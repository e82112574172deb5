"""`draftsmith cache`: builds what `train` would, says what it did, and explains what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..train.conftest import Content, content, conversations, write_recipe  # noqa: F401 (fixtures)
from .conftest import Cli


@pytest.fixture
def recipe(content: Content, write_recipe: Callable[[Content], Path]) -> Path:  # noqa: F811 (fixtures)
    stored = content["data"] | {"features": "disk", "cache": {"shard_mib": 0.02}}
    return write_recipe(content | {"data": stored})


def test_it_builds_says_sizes_and_leaves_training_nothing_to_write(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    ran = cli("cache", recipe)
    assert ran.exit_code == 0, ran.output
    assert "bytes per token (int8; bf16 has" in ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'run' / 'features' / 'train'}: ")
    assert "held-out: " in second
    assert "wrote 0" not in ran.stdout
    trained = cli("train", recipe, "steps=1", "eval_every=null", "save_every=null")
    assert trained.exit_code == 0, trained.output
    assert trained.stderr.count("0.0 MiB to write") == 2


def test_a_cache_of_something_else_is_refused_and_replaced_when_asked(cli: Cli, recipe: Path) -> None:
    assert cli("cache", recipe).exit_code == 0
    ran = cli("cache", recipe, "data.cache.compression=int6")
    assert ran.exit_code == 2
    assert "compression: int8 there, int6 here" in ran.stderr
    assert "Traceback" not in ran.output
    assert cli("cache", recipe, "data.cache.compression=int6", "--replace").exit_code == 0


def test_a_recipe_without_features_on_disk_says_what_to_set(cli: Cli, recipe: Path) -> None:
    ran = cli("cache", recipe, "data.features=online")
    assert ran.exit_code == 2
    assert "Set data.features=disk" in ran.stderr
