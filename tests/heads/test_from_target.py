"""What a config takes from its target: the papers' own choices for the papers' targets, and refusals in plain words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3Model,
)

from draftsmith.heads.blocks import BlockLayer
from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.from_target import (
    LayeredConfig,
    check_taps,
    mask_token,
    own_shape,
    rotary_base,
    spread_taps,
    start_as_last_layers,
)
from draftsmith.heads.layers import DecoderLayer, LayerShape
from draftsmith.heads.unroll import Blocks, Unroll
from draftsmith.infer.layers import decoder_layers, final_scale
from draftsmith.infer.packed import PackedLinear
from draftsmith.infer.target import Target

from ..infer import architectures


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


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "opt"])
def test_the_final_norms_scale_is_found_however_it_is_kept(kind: str) -> None:
    """A norm's output for any tensor is that of a plain norm times the scale, plus what it shifts by."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8, num_key_value_heads=1))
        norm = model.model.norm
    elif kind == "gemma":
        model = GemmaForCausalLM(GemmaConfig(**sizes, intermediate_size=8, num_key_value_heads=1, head_dim=8))
        norm = model.model.norm
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20))
        norm = model.transformer.ln_f
    else:
        model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=8, word_embed_proj_dim=16))
        norm = model.model.decoder.final_layer_norm
    for weight in norm.parameters():
        torch.nn.init.normal_(weight)
    found = final_scale(model, decoder_layers(model), 16)
    assert found is not None
    x = torch.randn(3, 16)
    is_shifted = hasattr(norm, "bias")
    expected = F.layer_norm(x, (16,)) * found + norm.bias if is_shifted else F.rms_norm(x, (16,)) * found
    assert torch.allclose(norm(x), expected, atol=1e-4)


def test_a_model_without_a_final_norm_has_no_scale() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    assert final_scale(torch.nn.Sequential(torch.nn.LayerNorm(4), layers), layers, 4) is None
    assert final_scale(torch.nn.Identity(), layers, 4) is None


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_started_head_judges_as_the_target_stopped_at_the_last_tap(
    build_target: Callable[..., Target], scale: float
) -> None:
    """Whatever its token, its other taps left aside."""
    target = build_target()
    torch.nn.init.uniform_(target.model.model.norm.weight, 0.5, 2)
    target.logit_scale = scale
    drafter = Eagle3(Eagle3Config(num_layers=2, num_steps=3), target)
    width = target.hidden_size
    with torch.no_grad():
        drafter.fc.weight[:, :-width] = 0
        drafter.fc.weight[:, -width:] = (drafter.fc.weight[:, -width:] > 0.5).float()
        features = torch.randn(5, len(drafter.taps) * width)
        memory = Unroll(Blocks.find(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)))
        found = drafter.advance(torch.arange(5), drafter.fuse(features), torch.arange(5), memory)
        expected = target.logits(target.model.model.norm(features[:, -width:]))
        assert torch.allclose(drafter.logits(found), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_layers_that_start_as_the_targets_last_compute_what_those_do(kind: str) -> None:
    """But for norms of queries and keys, which a block layer has and only Qwen3 too: one is right where it is left at 1."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": architectures.VOCAB}
    gemma = GemmaForCausalLM(GemmaConfig(**sizes, intermediate_size=64, num_key_value_heads=1, head_dim=8))
    target = Target(gemma if kind == "gemma" else architectures.build(kind), None)
    shape = own_shape(target, eps=1e-6)
    layers = [DecoderLayer(shape, layer=0), DecoderLayer(shape, layer=1)]
    if kind == "gemma":
        for parameter in target.model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    is_plain = kind != "qwen3"  # whose layers have norms that a plain decoder layer lacks
    assert start_as_last_layers(layers, target) == is_plain
    blocks = [BlockLayer(shape, layer=0), BlockLayer(shape, layer=1)]
    assert start_as_last_layers(blocks, target)
    x = torch.randn(3, target.hidden_size)
    for own, source in zip(blocks, list(target.layers)[-2:]):
        assert torch.allclose(own.input_layernorm(x), source.input_layernorm(x), atol=1e-5)
        assert torch.equal(own.self_attn.k_proj(x), source.self_attn.k_proj(x))
        normed = own.post_attention_layernorm(x)
        assert torch.allclose(normed, source.post_attention_layernorm(x), atol=1e-5)
        if kind != "gemma":  # whose activation is another
            assert torch.allclose(own.mlp(normed), source.mlp(normed), atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "mixtral", "gpt2"])
def test_layers_of_other_parts_are_not_copied(kind: str) -> None:
    target = Target(architectures.build(kind), None)
    layer = BlockLayer(own_shape(target, eps=1e-6), layer=0)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    assert not start_as_last_layers([layer], target)
    assert all(torch.equal(before[name], parameter) for name, parameter in layer.named_parameters())


def test_more_layers_than_the_target_has_are_not_copied(build_target: Callable[..., Target]) -> None:
    target = build_target()
    shape = own_shape(target, eps=1e-6)
    assert not start_as_last_layers([BlockLayer(shape, layer=i) for i in range(target.num_layers + 1)], target)


def test_layers_of_a_packed_target_are_copied(tiny_target_dir: Path) -> None:
    """As the command line loads it on a CPU: its matrices are held in the layout that they are multiplied in."""
    target = Target.load(str(tiny_target_dir), dtype="auto")
    layers = [BlockLayer(own_shape(target, eps=1e-6), layer=0)]
    assert any(isinstance(module, PackedLinear) for module in target.model.modules())
    assert start_as_last_layers(layers, target)
    source = list(target.layers)[-1].state_dict()
    assert torch.equal(layers[0].mlp.gate_proj.weight, source["mlp.gate_proj.weight"].float())


class Quantised(torch.Tensor):
    """A weight that is no plain matrix."""


def test_quantised_layers_are_not_copied(build_target: Callable[..., Target]) -> None:
    target = build_target()
    layers = [BlockLayer(own_shape(target, eps=1e-6), layer=0)]
    assert start_as_last_layers(layers, target)
    mlp = list(target.layers)[-1].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.detach().as_subclass(Quantised))
    assert not start_as_last_layers(layers, target)
