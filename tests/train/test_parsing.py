"""Laws of reading recipes: YAML's silent traps are values or errors, and every error says where and what instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from draftsmith.train.parsing import apply_overrides, nearest, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("-2.5e-1", -0.25),
        (".inf", math.inf),
        ("12", 12),
        ("-7", -7),
        ("0", 0),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'012'", "012"),
        ("1:30", "1:30"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("1.2.3", "1.2.3"),
        ("[1, 2e1, no]", [1, 20.0, "no"]),
        ("{a: 1e-3, b: {c: yes}}", {"a": 0.001, "b": {"c": "yes"}}),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: Any) -> None:
    found = read_yaml(text, source="test")
    assert found == value
    assert type(found) is type(value)


def test_pyyaml_alone_falls_into_the_traps() -> None:
    """Why there is a loader of our own; if this fails, it may go."""
    assert yaml.safe_load("{lr: 1e-3, name: no, size: 012, a: 1, a: 2}") == {
        "lr": "1e-3",
        "name": False,
        "size": 10,
        "a": 2,
    }


def test_leading_zero_is_an_error_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"recipe.yaml:2:7: 012 has a leading zero; write 12 or quote it"):
        read_yaml("a: 1\nsize: 012\n", source="recipe.yaml")


def test_repeated_key_is_an_error_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"recipe.yaml:3:1: key 'steps' occurs twice"):
        read_yaml("steps: 1\nlr: 2\nsteps: 3\n", source="recipe.yaml")


def test_broken_yaml_is_an_error_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"recipe.yaml:3:1: expected"):
        read_yaml("a: 1\nb: [1, 2\n", source="recipe.yaml")


def test_tags_build_no_objects() -> None:
    with pytest.raises(ValueError, match=r"recipe.yaml:1:4: could not determine a constructor"):
        read_yaml("a: !!python/object/apply:os.getcwd []", source="recipe.yaml")


def test_overrides_set_nested_values_and_leave_the_original() -> None:
    content = {"a": {"b": 1, "c": 2}, "d": 3}
    assert apply_overrides(content, ["a.b=1e-3", "d=[1, 2]", "e.f.g=no"]) == {
        "a": {"b": 0.001, "c": 2},
        "d": [1, 2],
        "e": {"f": {"g": "no"}},
    }
    assert content == {"a": {"b": 1, "c": 2}, "d": 3}


def test_override_value_may_hold_an_equals_sign() -> None:
    assert apply_overrides({}, ["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".a=1"])
def test_override_without_a_key_is_an_error(override: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form key.key=value"):
        apply_overrides({}, [override])


def test_override_below_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a.b is a value \(1\)"):
        apply_overrides({"a": {"b": 1}}, ["a.b.c=2"])


def test_nearest_suggests_one_or_lists_all() -> None:
    assert nearest("stpes", ["steps", "epochs"]) == "did you mean steps?"
    assert nearest("zzz", ["steps", "epochs"]) == "known: steps, epochs."
