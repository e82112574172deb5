"""Laws of launch configs: what is shipped is what the engines read, and what contradicts the recipe is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from draftsmith.train import engine
from draftsmith.train.memory import BUCKET, LAUNCHES
from draftsmith.train.recipe import parse_recipe

from .conftest import Content

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LAUNCH = sorted((CONFIGS / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((CONFIGS / "deepspeed").glob("*.json"))


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.name)
def test_launch_configs_are_accelerates(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    assert not config.use_cpu, "use_cpu would switch DeepSpeed off without a word; without a GPU, CPU is taken anyway"
    named = config.deepspeed_config.get("deepspeed_config_file")
    assert (named is not None) == path.name.startswith("zero")
    if named:
        assert (CONFIGS.parent / named) in DEEPSPEED


def test_every_engine_has_a_launch_config() -> None:
    assert sorted(path.stem for path in LAUNCH) == sorted(LAUNCHES)


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.name)
def test_deepspeed_configs_take_the_recipes_numbers(path: Path, content: Content) -> None:
    config = json.loads(path.read_text())
    zero = config["zero_optimization"]
    assert f"zero{zero['stage']}" == path.stem.split("_")[0]
    assert zero["reduce_bucket_size"] == BUCKET, "what `draftsmith plan` counts with"
    assert ("offload_optimizer" in zero) == path.stem.endswith("_offload")
    engine._configure_deepspeed(config, parse_recipe(content, source="test"), 3)
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_clipping": 1.0}, r"sets gradient_clipping to 1.0, the recipe to 0.5; set it to auto there"),
        ({"bf16": {"enabled": True}}, r"enables bf16; leave it out, the recipe's `precision` decides"),
        (
            {"zero_optimization": {"stage": 3}},
            r"ZeRO-3 without stage3_gather_16bit_weights_on_model_save could not save",
        ),
    ],
)
def test_deepspeed_config_against_the_recipe_is_an_error(
    change: dict[str, Any], message: str, content: Content
) -> None:
    config = json.loads((CONFIGS / "deepspeed" / "zero2.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        engine._configure_deepspeed(config, parse_recipe(content, source="test"), 1)
