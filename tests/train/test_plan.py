"""Laws of plans: sums are right, the first layout that fits is chosen, and the command is one that can be run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from draftsmith.train.blueprint import Measured
from draftsmith.train.memory import LAUNCHES
from draftsmith.train.plan import GIB, RESERVED, Cluster, Plan, launch_command, make_plan
from draftsmith.train.recipe import Recipe, parse_recipe
from draftsmith.train.sharded import unsplittable

from .conftest import Content

MEASURED = Measured(
    weights=8_000_000_000,
    active=8_000_000_000,
    target=16_000_000_000,
    splittable=14_000_000_000,
    cache=131_072,
    features={"exact": 32_768, "int8": 16_392},
    taps=(1, 15, 28),
    trained=400_000_000,
    frozen=100_000_000,
    reading=3 * GIB,
    taught=GIB,
    stepping=4 * GIB,
    read_flops=16_000_000_000,
    step_flops=20_000_000_000,
)


@pytest.fixture
def recipe(content: Content) -> Recipe:
    return parse_recipe(content | {"steps": None, "epochs": 2, "rows_per_step": 48}, source="test")


@pytest.fixture
def architecture(tiny_target_dir: Path) -> object:
    from draftsmith.train.blueprint import read_architecture

    return read_architecture(str(tiny_target_dir))


def plan_of(
    recipe: Recipe, architecture: object, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **changes: int
) -> Plan:
    """With the figures of an 8B target, two key-value heads as the tiny one has, and 2e8 tokens."""
    monkeypatch.setattr("draftsmith.train.plan.measure", lambda *_: replace(MEASURED, **changes))
    return make_plan(recipe, architecture, cluster, epoch_tokens=200_000_000, hours=10)  # type: ignore[arg-type]


def test_the_total_is_what_lies_on_the_gpu_at_the_worst_moment(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan_of(recipe, architecture, Cluster(1, 2, 80), monkeypatch)
    assert [option.launch for option in found.options] == [*LAUNCHES, *LAUNCHES]
    plain, split = found.options[0], found.options[len(LAUNCHES)]
    assert plain.activations == 8 * GIB, "teacher batch and step, and the forward that makes the next batch meanwhile"
    assert split.activations == 5 * GIB, "one after the other"
    assert plain.total == 16_000_000_000 + plain.drafter.total + 8 * GIB + RESERVED
    assert (plain.shards, split.shards) == (1, 2)
    assert split.target == 2_000_000_000 + 7_000_000_000


def test_muon_is_laid_out_where_it_trains(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    orthogonal = recipe.model_copy(update={"optimiser": recipe.optimiser.model_copy(update={"name": "muon"})})
    found = plan_of(orthogonal, architecture, Cluster(1, 2, 80), monkeypatch)
    assert [(option.launch, option.shards) for option in found.options] == [("ddp", 1), ("ddp", 2)]


def test_the_simplest_layout_that_fits_is_chosen(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(memory: float) -> tuple[str, int] | None:
        option = plan_of(recipe, architecture, Cluster(1, 2, memory), monkeypatch).chosen
        return option and (option.launch, option.shards)

    plain = plan_of(recipe, architecture, Cluster(1, 2, 80), monkeypatch).options[0]
    assert chosen(plain.total / GIB) == ("ddp", 1)
    assert chosen(plain.total / GIB - 0.1) == ("zero1", 1)
    split = plan_of(recipe, architecture, Cluster(1, 2, 80), monkeypatch).options[len(LAUNCHES)]
    assert chosen(split.total / GIB) == ("ddp", 2)
    assert chosen(10) is None


def test_speed_follows_from_tokens_hours_and_operations(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan_of(recipe, architecture, Cluster(2, 4, 80), monkeypatch)
    assert found.tokens == 400_000_000, "two epochs"
    assert found.tokens_per_second == pytest.approx(400_000_000 / 36_000)
    assert found.flops_per_second == pytest.approx(400_000_000 / 36_000 * 36e9 / 8)
    assert found.micro_steps == 3
    assert found.answers(2048) == int((80 * GIB - RESERVED - 16_000_000_000) // (131_072 * 2048))
    stepped = recipe.model_copy(update={"steps": 10, "epochs": None})
    assert plan_of(stepped, architecture, Cluster(2, 4, 80), monkeypatch).tokens == 10 * 48 * 128
    figures = json.loads(found.to_json())
    assert figures["totals"] == [option.total for option in found.options]
    assert figures["measured"]["trained"] == 400_000_000
    assert figures["tokens_per_second"] == found.tokens_per_second


def test_a_batch_that_does_not_divide_is_refused_as_in_training(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="rows_per_step 48 does not divide over 10 processes"):
        plan_of(recipe, architecture, Cluster(2, 5, 80), monkeypatch)


def test_a_target_is_split_over_the_fewest_processes_that_it_takes(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny target's two key-value heads go to two processes, not to four."""
    found = plan_of(recipe, architecture, Cluster(1, 4, 80), monkeypatch)
    assert [option.shards for option in found.options] == [1] * len(LAUNCHES) + [2] * len(LAUNCHES)
    assert found.whole_target_only is None
    monkeypatch.setattr("draftsmith.train.plan.unsplittable", lambda *_: None)
    small = plan_of(recipe, architecture, Cluster(2, 4, 14), monkeypatch, trained=1)
    assert small.chosen is not None
    assert small.chosen.shards == 4
    assert small.chosen.target == 2_000_000_000 + 14_000_000_000 // 4
    assert plan_of(recipe, architecture, Cluster(2, 4, 8), monkeypatch).options[-1].shards == 8


def test_a_target_that_cannot_be_split_says_why(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan_of(recipe, architecture, Cluster(1, 3, 80), monkeypatch, trained=3)
    assert found.whole_target_only == "its 2 key-value heads do not divide over 3 processes"
    assert {option.shards for option in found.options} == {1}
    assert unsplittable(architecture, 2) is None  # type: ignore[arg-type]
    architecture.base_model_tp_plan = None  # type: ignore[attr-defined]
    assert unsplittable(architecture, 2) == "transformers has no tensor-parallel plan for llama"  # type: ignore[arg-type]


def test_the_command_is_one_that_accelerate_takes(
    recipe: Recipe, architecture: object, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    cluster = Cluster(2, 4, 80)
    option = plan_of(recipe, architecture, cluster, monkeypatch).options[0]
    line = launch_command(replace(option, shards=4), cluster, "my recipe.yaml", ["out=a b"])
    words = shlex.split(line.replace("RANK", "1").replace("HOST", "node0"))
    assert words[:2] == ["accelerate", "launch"]
    taken = launch_command_parser().parse_args(words[2:])
    assert (taken.num_processes, taken.num_machines, taken.machine_rank) == (8, 2, 1)
    assert (taken.main_process_ip, taken.main_process_port) == ("node0", 29500)
    assert (repo_root / taken.config_file).is_file()
    assert (taken.module, taken.training_script) == (True, "draftsmith.train")
    assert taken.training_script_args == ["my recipe.yaml", "out=a b", "target_sharding=tensor", "target_shards=4"]
    alone = launch_command(option, Cluster(1, 8, 80), "r.yaml", [])
    assert "machine" not in alone
    assert alone.endswith("--num_processes 8 -m draftsmith.train r.yaml")
