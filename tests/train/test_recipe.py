"""Laws of the recipe: what is written is what runs, and every fault is named at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from draftsmith.heads import METHODS
from draftsmith.train.recipe import Cache, Data, Optimiser, Recipe, Wandb, differences, load_recipe, parse_recipe

from ..heads.laws import SMALL
from .conftest import Content

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs" / "recipes").glob("*.yaml"))


def test_recipe_is_read_back_as_it_was_saved(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    saved = json.loads(json.dumps(recipe.model_dump(mode="json")))
    assert parse_recipe(saved, source="test") == recipe
    assert saved["head"]["num_heads"] == 3, "the head's own fields are saved"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_can_stand_in_a_recipe(method: str, content: Content) -> None:
    recipe = parse_recipe(content | {"head": {"method": method} | SMALL[method]}, source="test")
    assert type(recipe.head) is METHODS[method][0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    load_recipe(path)


def test_recipes_are_shipped() -> None:
    assert RECIPES


def test_overrides_change_the_file(content: Content, write_recipe: Callable[[Content], Path]) -> None:
    recipe = load_recipe(write_recipe(content), ["optimiser.lr=3e-4", "steps=null", "epochs=1.5", "head.num_heads=2"])
    assert (recipe.optimiser.lr, recipe.steps, recipe.epochs) == (3e-4, None, 1.5)
    assert recipe.head.model_dump()["num_heads"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stpes=3", r"  stpes: unknown key; did you mean steps\?"),
        ("optimiser.lrr=3", r"  optimiser.lrr: unknown key; did you mean lr\?"),
        ("head.num_head=3", r"  head.num_head: unknown key; did you mean num_heads\?"),
        ("objective.temprature=3", r"  objective.temprature: unknown key; did you mean temperature\?"),
        ("head.method=medsua", r"  head: unknown method 'medsua'; did you mean medusa\?"),
        ("head={num_heads: 3}", r"  head: needs the key method"),
        ("optimiser={}", r"  optimiser.lr: is required and has no default"),
        ("steps=3.5", r"  steps: .*fractional part, got 3.5"),
        ("steps=many", r"  steps: .*got 'many'"),
        ("wandb.mode=no", r"  wandb.mode: .*'auto', 'online', 'offline' or 'disabled', got 'no'"),
        ("epochs=2", r"  recipe: give exactly one of `steps` and `epochs`; both were given"),
        ("steps=null", r"  recipe: give exactly one of `steps` and `epochs`; neither was given"),
        ("data.max_length=500", r"  recipe: data.max_length 500 does not fit into data.row_length 128"),
        ("rows_per_forward=8", r"  recipe: rows_per_forward 8 exceeds rows_per_step 4; lower it to that"),
        ("objective={}", r"  objective: give either objective.name or objective.mix"),
    ],
)
def test_fault_says_where_and_what_instead(
    override: str, message: str, content: Content, write_recipe: Callable[[Content], Path]
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write_recipe(content), [override])
    assert str(caught.value).startswith(str(write_recipe(content)))


def test_all_faults_are_named_at_once(content: Content, write_recipe: Callable[[Content], Path]) -> None:
    with pytest.raises(ValueError, match="lrr") as caught:
        load_recipe(write_recipe(content), ["optimiser.lrr=1", "stepps=2", "seed=-1"])
    assert "stepps" in str(caught.value)
    assert "seed" in str(caught.value)


def test_missing_file_and_wrong_shape_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.yaml' cannot be read"):
        load_recipe(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="expected keys and values"):
        load_recipe(tmp_path / "list.yaml")


def test_recipe_is_frozen(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    with pytest.raises(ValidationError):
        recipe.steps = 3


def test_differences_name_what_decides_the_training_only(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    saved = recipe.model_dump(mode="json") | {"out": "elsewhere", "save_every": 77, "keep_checkpoints": 9}
    assert differences(saved, recipe) == []
    saved["optimiser"] = saved["optimiser"] | {"lr": 0.5}
    assert differences(saved, recipe) == ["optimiser.lr: 0.5 then, 0.001 now"]


def test_a_field_that_came_after_a_run_has_its_default_there(content: Content) -> None:
    recipe = parse_recipe(content, source="test")
    saved = recipe.model_dump(mode="json")
    del saved["data"]["max_bad_share"], saved["head"]["head_decay"]
    assert differences(saved, recipe) == []
    other = parse_recipe(content | {"head": content["head"] | {"head_decay": 0.5}}, source="test")
    assert differences(saved, other) == ["head.head_decay: 0.8 then, 0.5 now"]


@pytest.mark.parametrize("model", [Recipe, Data, Cache, Optimiser, Wandb])
def test_every_field_is_documented_under_it(model: type[BaseModel]) -> None:
    """Pydantic reads the docstrings only when asked, so they are read here from the source."""
    import ast
    import inspect

    [body] = [node for node in ast.parse(inspect.getsource(model)).body if isinstance(node, ast.ClassDef)]
    documented = {
        first.target.id
        for first, then in zip(body.body, body.body[1:])
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name) and isinstance(then, ast.Expr)
    }
    assert documented == set(model.model_fields)
