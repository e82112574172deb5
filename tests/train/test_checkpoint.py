"""Laws of checkpoints: rotated, checked for damage, and refused in words where they cannot be continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.heads.files import read_config
from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import Position, checkpoints
from draftsmith.train.loop import train
from draftsmith.train.recipe import Recipe, parse_recipe

from .conftest import Content


@pytest.fixture
def finished(content: Content) -> Path:
    """Folder of the checkpoints of a finished run of six steps."""
    train(parse_recipe(content, source="test"), resume=False)
    return Path(content["out"]) / "checkpoints"


def test_newest_checkpoints_stay_and_are_whole(finished: Path) -> None:
    assert [place.name for place in checkpoints(finished)] == ["step-000004", "step-000006"]
    assert sorted(path.name for path in finished.iterdir()) == ["step-000004", "step-000006"]
    run, position = checkpoint.read(checkpoints(finished)[-1])
    assert (position.step, position.engine, position.world) == (6, "replicated", 1)
    assert run["recipe"]["head"]["num_heads"] == 3
    assert run["measured"]["step"] == 6
    assert {"argv", "versions", "source", "machine"} <= run.keys()
    _, binding = read_config(checkpoints(finished)[-1] / "drafter")
    assert binding.measured == run["measured"]


def test_checkpoint_without_a_file_or_cut_short_is_damaged(finished: Path) -> None:
    newest, older = checkpoints(finished)[::-1]
    weights = newest / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"step-000006 is damaged: drafter/model.safetensors is missing or has another size.*before it"
    ):
        checkpoint.read(newest)
    (older / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-000004 is damaged: run.json"):
        checkpoint.read(older)


def test_leftovers_of_a_kill_are_not_checkpoints_and_are_removed(finished: Path) -> None:
    for name in (".writing-step-000008", ".removing-step-000002"):
        (finished / name).mkdir()
        (finished / name / "half").write_text("")
    assert len(checkpoints(finished)) == 2
    checkpoint.clean(finished)
    assert sorted(path.name for path in finished.iterdir()) == ["step-000004", "step-000006"]


def test_newer_damage_is_refused_and_removing_it_continues_from_the_older(content: Content, finished: Path) -> None:
    newest = checkpoints(finished)[-1]
    whole = (Path(content["out"]) / "metrics.jsonl").read_bytes()
    (newest / "state" / "optimizer.bin").unlink()
    with pytest.raises(ValueError, match=r"state/optimizer.bin is missing"):
        train(parse_recipe(content, source="test"), resume=True)
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    assert train(parse_recipe(content, source="test"), resume=True).step == 6
    assert (Path(content["out"]) / "metrics.jsonl").read_bytes() == whole


def position_of(**changes: object) -> Position:
    base = Position(4, 1.0, 0, "replicated", 1, "abc", {"name": "t", "config": "c", "weights": "w"})
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            {"engine": "zero-3", "world": 2},
            {},
            r"saved under zero-3 and this launch is replicated; launch with the same accelerate",
        ),
        (
            {"engine": "zero-2", "world": 2},
            {"engine": "zero-2", "world": 4},
            r"saved by 2 processes of zero-2 and this launch has 4; launch 2",
        ),
        ({"engine": "zero-1"}, {"engine": "zero-2"}, r"saved under zero-1 and this launch is zero-2"),
        ({}, {"data_hash": "xyz"}, r"data.responses holds other samples than then; restore the file"),
        ({}, {"target": {"name": "t", "config": "c", "weights": "other"}}, r"the target differs in weights"),
    ],
)
def test_what_differs_is_said_with_what_to_do(
    then: dict[str, object], now: dict[str, object], message: str, content: Content
) -> None:
    recipe = parse_recipe(content, source="test")
    run = {"recipe": recipe.model_dump(mode="json")}
    place = Path("runs/x/checkpoints/step-000004")
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.check(place, run, position_of(**then), position_of(**now), recipe)
    assert "init=runs/x/checkpoints/step-000004/drafter" in str(caught.value)


def test_same_run_or_more_replicas_may_go_on(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    run = {"recipe": recipe.model_dump(mode="json")}
    for now in (
        position_of(),
        position_of(world=8),
        position_of(target={"name": "moved", "config": "c", "weights": "w"}),
    ):
        checkpoint.check(Path("x"), run, position_of(), now, recipe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimiser": {"lr": 0.5}}, r"the recipe differs \(optimiser.lr: 0.001 then, 0.5 now\); restore it"),
        ({"precision": "bf16"}, r"precision: 'fp32' then, 'bf16' now"),
        ({"steps": 60}, r"steps: 6 then, 60 now"),
        ({"target_dtype": "bfloat16"}, r"target_dtype: 'float32' then, 'bfloat16' now"),
    ],
)
def test_changed_recipe_is_refused(change: Content, message: str, content: Content) -> None:
    recipe: Recipe = parse_recipe(content, source="test")
    train(recipe.model_copy(update={"steps": 2, "eval_every": None}), resume=False)
    changed = parse_recipe(content | {"steps": 2, "eval_every": None} | change, source="test")
    with pytest.raises(ValueError, match=message.replace("6 then", "2 then")):
        train(changed, resume=True)
