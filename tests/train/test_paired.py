"""Two drafters are compared on the same documents, and what a feature cache's compression costs is within the noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.train.loop import TrainResult, train
from draftsmith.train.paired import main, paired_tau
from draftsmith.train.recipe import Recipe, parse_recipe

from .conftest import Content


def trained(content: Content, out: Path, **changes: object) -> tuple[Recipe, TrainResult]:
    recipe = parse_recipe(content | {"out": str(out)} | changes, source="test")
    return recipe, train(recipe, resume=False)


def test_a_drafter_does_not_differ_from_itself_and_a_longer_trained_one_does(
    content: Content, write_recipe: Callable[[Content], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"eval_every": None, "save_every": None}
    recipe, short = trained(content, tmp_path / "short", **quick, steps=1)
    _, long = trained(content, tmp_path / "long", **quick, steps=60, optimiser={"lr": 5e-3})
    first, same, better = paired_tau(recipe, [short.drafter, short.drafter, long.drafter])
    assert (first.difference, first.low, first.high) == (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)
    assert first.positions > first.documents == 12
    assert 0 < better.low < better.difference < better.high
    assert better.tau == pytest.approx(first.tau + better.difference)
    main([str(write_recipe(content)), str(short.drafter), str(long.drafter)])
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(
        f"{long.drafter}: tau {better.tau:.4f} over {first.positions} positions of 12 documents; +"
    )


def test_tau_is_that_of_the_trainer_s_own_evaluation(content: Content, tmp_path: Path) -> None:
    """The trainer divides at each step by the rows that have one; here a draft ends with its document. One head, and
    both are the same."""
    head = content["head"] | {"num_heads": 1}
    recipe, result = trained(content, tmp_path / "one", head=head, steps=30)
    (found,) = paired_tau(recipe, [result.drafter])
    assert found.tau == pytest.approx(result.measured["predicted_tau"], rel=1e-5)


@pytest.mark.slow
def test_compressed_features_train_drafters_that_accept_as_much(content: Content, tmp_path: Path) -> None:
    content |= {"steps": 120, "eval_every": None, "save_every": None}
    content |= {"optimiser": {"lr": 5e-3}}
    folders = []
    for kind in ("bf16", "int8", "int6"):
        data = content["data"] | {"features": "disk", "cache": {"compression": kind}}
        recipe, result = trained(content, tmp_path / kind, data=data)
        folders.append(result.drafter)
    bf16, *others = paired_tau(recipe, folders)
    assert bf16.tau > 1.1, "there is something to lose"
    for found in others:
        print(
            f"{found.folder.parent.name}: tau {found.tau:.4f}, {found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        )
        assert found.low <= 0 <= found.high or abs(found.difference) < 0.02
