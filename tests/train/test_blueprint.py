"""Laws of blueprints: every weight is counted, of the target, of what a token uses of it, and of the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

from draftsmith.infer.target import Target
from draftsmith.train.blueprint import measure, read_architecture
from draftsmith.train.recipe import parse_recipe

from ..heads.laws import SMALL, build
from .conftest import TARGETS, Content, small_experts


def size_of(model: Any) -> int:
    """Parameters once, and saved buffers (a router's correction bias is one)."""
    saved = {name for name in model.state_dict() if name in dict(model.named_buffers())}
    return sum(p.numel() for p in [*model.parameters(), *(model.get_buffer(name) for name in saved)])


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("method", sorted(SMALL))
def test_the_drafter_has_the_weights_that_are_built(method: str, content: Content, tiny_target: Target) -> None:
    head = SMALL[method] | ({"train_embedding": False} if method == "draft_model" else {})
    recipe = parse_recipe(content | {"head": {"method": method} | head}, source="test")
    found = measure(recipe, read_architecture(content["target"]))
    drafter = build(method, tiny_target, **head)
    sizes = {flag: sum(p.numel() for p in drafter.parameters() if p.requires_grad == flag) for flag in (True, False)}
    assert (found.trained, found.frozen) == (sizes[True], sizes[False])
    assert (found.frozen > 0) == (method == "draft_model")
    assert found.taps == drafter.taps
    assert found.features["exact"] == tiny_target.hidden_size * (1 + len(drafter.taps)) * 4
    assert found.features["bf16"] == found.features["exact"] // 2
    assert found.weights == sum(p.numel() for p in tiny_target.model.parameters()) == found.active
    assert found.target == 4 * found.weights
    assert 0 < found.taught < found.reading
    assert found.taught >= found.features["exact"] * 2 * 128


def test_a_reduced_draft_vocabulary_and_eos_ids_beyond_it_are_no_obstacle(content: Content) -> None:
    architecture = read_architecture(str(TARGETS / "llama31_8b.json"))
    architecture.num_hidden_layers = 8
    head = {"method": "eagle3", "draft_vocab_size": 32000, "taps": [1, 3, 5]}
    small = content | {"head": head, "data": content["data"] | {"row_length": 16}, "rows_per_forward": 1}
    found = measure(parse_recipe(small, source="test"), architecture)
    width, inner, kv = 4096, 14336, 1024
    layer = 2 * width * (width + 2 * kv) + width * width + 3 * width * inner + 3 * width
    assert found.trained == 3 * width * width + layer + width + 32000 * width
    assert found.splittable == 4 * 8 * (2 * width * (width + kv) + 3 * width * inner)
    assert found.cache == 8 * 2 * 1024 * 4
    per_token = 2 * (found.weights - 2 * 128256 * width)
    assert per_token < found.read_flops < 1.02 * per_token, "each weight is multiplied once; attention is the rest"


def test_a_mixture_counts_the_experts_that_a_token_uses(content: Content) -> None:
    architecture = DeepseekV3Config(**small_experts())
    recipe = parse_recipe(content | {"target_dtype": "bfloat16"}, source="test")
    found = measure(recipe, architecture)
    assert found.weights == size_of(on_meta(architecture))
    per_layer = 16 * 3 * 64 * 32
    assert found.active == found.weights - 2 * per_layer // 2, "two layers of experts, half of which are chosen"
    assert found.cache == 5 * (16 + 8) * 2, "compressed keys and values, and the rotary part of the keys"


PUBLISHED = {"llama31_8b": 8_030_261_248, "llama31_70b": 70_553_706_496, "deepseek_v3": 671_026_419_200}
"""Weights as their model cards and files have them; DeepSeek-V3's without the extra prediction layer."""


def test_every_target_that_is_shipped_has_a_published_number() -> None:
    assert sorted(path.stem for path in TARGETS.iterdir()) == sorted(PUBLISHED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_targets_have_the_weights_of_their_real_models(name: str, content: Content) -> None:
    """Of the real depth and width, from the config file alone."""
    architecture = read_architecture(str(TARGETS / f"{name}.json"))
    small = content | {"target_dtype": "bfloat16", "data": content["data"] | {"row_length": 8}, "rows_per_forward": 1}
    found = measure(parse_recipe(small | {"head": {"method": "medusa", "num_heads": 1}}, source="test"), architecture)
    assert found.weights == PUBLISHED[name] == size_of(on_meta(architecture))
    assert found.target == 2 * PUBLISHED[name]
    if name == "deepseek_v3":
        assert 37.0e9 < found.active < 38.0e9, "37B activated, as published"


def test_a_draft_model_from_a_checkpoint_needs_its_config_only(
    content: Content, tiny_target_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "draft").mkdir()
    settings = json.loads((tiny_target_dir / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(settings))
    head = {"method": "draft_model", "checkpoint": str(tmp_path / "draft")}
    found = measure(parse_recipe(content | {"head": head}, source="test"), read_architecture(content["target"]))
    model = on_meta(AutoConfig.from_pretrained(tmp_path / "draft"))
    assert found.trained == sum(p.numel() for p in model.parameters())


def test_what_is_no_architecture_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere' does not exist|nowhere.*cannot be read.*--architecture"):
        read_architecture(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="encoder-decoder"):
        read_architecture(str(tmp_path / "config.json"))
