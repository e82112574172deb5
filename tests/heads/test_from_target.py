"""What a config takes from its target: the papers' own choices for the papers' targets, and refusals in plain words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import Qwen3Config, Qwen3Model

from draftsmith.heads.blocks import BlockLayer
from draftsmith.heads.from_target import LayeredConfig, check_taps, mask_token, rotary_base, spread_taps
from draftsmith.heads.layers import LayerShape
from draftsmith.infer.target import Target


def test_five_taps_of_36_layers_are_the_released_ones(build_target: Callable[..., Target]) -> None:
    deep = build_target(num_hidden_layers=36, hidden_size=16, intermediate_size=16)
    assert spread_taps(5, deep) == (1, 9, 17, 25, 33)
    assert spread_taps(1, deep) == (18,)
    deep = build_target(num_hidden_layers=40, hidden_size=16, intermediate_size=16)
    assert spread_taps(5, deep) == (1, 10, 19, 28, 37)


@pytest.mark.parametrize("layers", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_default_taps_are_legal_for_every_depth(build_target: Callable[..., Target], layers: int, count: int) -> None:
    target = build_target(num_hidden_layers=layers)
    check_taps(spread_taps(count, target), target)


@pytest.mark.parametrize("taps", [(3,), (1, 0), (1, 1), (-1,)])
def test_taps_out_of_order_or_at_the_last_layer_are_refused(tiny_target: Target, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"taps must be ascending.*below 3"):
        check_taps(taps, tiny_target)


def test_the_mask_is_the_first_token_that_no_text_can_hold(build_target: Callable[..., Target]) -> None:
    assert mask_token(build_target(vocab_size=320), None) == 300
    assert mask_token(build_target(vocab_size=320), 7) == 7
    with pytest.raises(ValueError, match=r"uses all of the target's 300 tokens.*Set mask_token_id"):
        mask_token(build_target(), None)
    with pytest.raises(ValueError, match="mask_token_id 300 is not among"):
        mask_token(build_target(), 300)


def test_sizes_are_the_targets_unless_given(tiny_target: Target) -> None:
    open_config = LayeredConfig(method="any", num_layers=1)
    assert open_config.resolve(tiny_target).shape(tiny_target) == LayerShape(48, 96, 4, 2, 12, 1e-6)
    given = open_config.model_copy(
        update={"intermediate_size": 64, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "rope_theta": 5e5}
    ).resolve(tiny_target)
    assert given.shape(tiny_target) == LayerShape(48, 64, 6, 3, 8, 1e-6)
    assert (given.rope_theta, given.taps) == (5e5, (2,))
    with pytest.raises(ValueError, match="must be a multiple"):
        open_config.model_copy(update={"num_heads": 5}).resolve(tiny_target)


def test_public_fields_build_the_transformers_model_of_the_same_shape(tiny_target: Target) -> None:
    config = LayeredConfig(method="any", num_layers=2).resolve(tiny_target)
    fields = config.public_fields(tiny_target)
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == config.rope_theta
    assert fields["max_position_embeddings"] == tiny_target.max_length
    model = Qwen3Model(Qwen3Config.from_dict(fields))
    for number, layer in enumerate(model.layers):
        own = BlockLayer(config.shape(tiny_target), layer=number)
        shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
        assert {name: tensor.shape for name, tensor in own.state_dict().items()} == shapes


def test_the_rotary_base_is_the_targets(build_target: Callable[..., Target]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    assert rotary_base(build_target(rope_parameters=rope)) == 1e6
    assert rotary_base(build_target()) == 10000.0
