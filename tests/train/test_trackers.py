"""Laws of further trackers: accelerate's own interface is served for real, and nothing is left out without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process

from draftsmith.train.loop import train
from draftsmith.train.recipe import parse_recipe
from draftsmith.train.trackers import find_trackers, flat

from .conftest import Content, read_lines

OWN = "tests.train.test_trackers:Notebook"


class Notebook(GeneralTracker):
    """A tracker as a user would write one: a text file."""

    name = "notebook"
    requires_logging_directory = True
    main_process_only = True
    finished: ClassVar[list[str]] = []

    def __init__(self, run_name: str, logging_dir: str, **unused: Any) -> None:
        super().__init__()
        self.run_name, self.path = run_name, Path(logging_dir) / f"{run_name}.notes"

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(values) + "\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **unused: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | values) + "\n")

    @on_main_process
    def finish(self) -> None:
        self.finished.append(self.run_name)


def test_a_tracker_of_ones_own_gets_configuration_curves_and_the_end(content: Content) -> None:
    result = train(parse_recipe(content | {"trackers": [OWN]}, source="test"), resume=False)
    config, *lines = read_lines(result.out / "run.notes")
    assert config["optimiser.lr"] == 1e-3
    assert config["head.method"] == "medusa"
    assert all(isinstance(value, str | int | float | bool) for value in config.values())
    expected = [
        {name: value for name, value in line.items() if not isinstance(value, list)}
        for line in read_lines(result.out / "metrics.jsonl")
    ]
    assert lines == expected
    assert Notebook.finished[-1:] == ["run"]


def test_a_tracker_that_would_be_left_out_is_an_error() -> None:
    missing = next(name for name in ("tensorboard", "aim", "dvclive") if name not in get_available_trackers())
    with pytest.raises(ValueError, match=f"the package of {missing} is not installed; run `pip install {missing}`"):
        find_trackers([missing])
    with pytest.raises(ValueError, match=r"'tensorbord' is unknown; accelerate has .*tensorboard.*module:Class"):
        find_trackers(["tensorbord"])
    with pytest.raises(ValueError, match=r"set wandb.mode"):
        find_trackers(["wandb"])
    with pytest.raises(ValueError, match=r"'nowhere:Tracker' cannot be imported"):
        find_trackers(["nowhere:Tracker"])
    with pytest.raises(ValueError, match=r"'json:Nothing' cannot be imported"):
        find_trackers(["json:Nothing"])
    with pytest.raises(ValueError, match=r"'pathlib:Path' is no accelerate.tracking.GeneralTracker"):
        find_trackers(["pathlib:Path"])
    assert find_trackers([OWN]) == ["notebook"] == find_trackers([OWN])


def test_configurations_are_flat() -> None:
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": True}) == {
        "a.b": 1,
        "a.c": "[1, 2]",
        "d": "None",
        "e": True,
    }
