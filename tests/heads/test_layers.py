"""Our decoder layer against transformers' Llama layer, and the precision of what must not be cast."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.heads.layers import DecoderLayer, FusedLayer, LayerShape, ResidualBlock, RMSNorm, Rotation
from draftsmith.heads.unroll import Blocks, Unroll

SHAPE = LayerShape(width=32, inner=64, heads=4, kv_heads=2, head_width=8, eps=1e-5)


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    )


def test_layer_equals_llamas_and_has_its_tensor_names() -> None:
    ours, theirs = DecoderLayer(SHAPE, layer=0), LlamaDecoderLayer(llama(), 0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, length = torch.randn(11, 32), 11
    segments = torch.ones(1, length, dtype=torch.int64)
    positions = torch.arange(length) + 40
    mine = ours(x, Rotation.at(positions, width=8, theta=5e3), Unroll(Blocks.find(segments, segments > 0)))
    embeddings = LlamaRotaryEmbedding(llama())(x, positions[None])
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    reference = theirs(x[None], attention_mask=mask, position_embeddings=embeddings)
    torch.testing.assert_close(mine, reference[0], rtol=1e-5, atol=1e-5)


def test_asking_a_few_gives_their_answers_only() -> None:
    for layer in (DecoderLayer(SHAPE, layer=0), FusedLayer(SHAPE, layer=0, norm_before_residual=True)):
        segments, some = torch.ones(1, 9, dtype=torch.int64), torch.tensor([2, 7])
        streams = [torch.randn(9, 32) for _ in range(1 if isinstance(layer, DecoderLayer) else 2)]
        turn = Rotation.at(torch.arange(9), width=8, theta=1e4)
        everyone = layer(*streams, turn, Unroll(Blocks.find(segments, segments > 0)))
        active = torch.zeros(1, 9, dtype=torch.bool)
        active[0, some] = True
        blocks = Blocks.find(segments, active)
        few = layer(*(x[:8] for x in streams), turn.of(torch.arange(8)), Unroll(blocks), blocks.ask)
        torch.testing.assert_close(few, everyone[some])


def test_casting_the_module_does_not_touch_rotary_angles() -> None:
    """bf16 frequencies are off by half a radian at a distance of 1000."""
    layer = DecoderLayer(SHAPE, layer=0).to(torch.bfloat16)
    assert not any("inv_freq" in name for name, _ in layer.named_buffers())
    turn = Rotation.at(torch.tensor([100_000]), width=64, theta=1e4)
    exact = 100_000 * 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert turn.cos.dtype == torch.float32
    torch.testing.assert_close(turn.cos.double().flatten(), exact.cos(), rtol=0, atol=0.02)
    x = torch.randn(1, 3, 64, dtype=torch.bfloat16)
    assert turn.apply(x).dtype == torch.bfloat16


def test_norm_is_computed_in_fp32() -> None:
    norm = RMSNorm(64, 1e-5).to(torch.bfloat16)
    x = (torch.randn(5, 64) * 300).bfloat16()
    expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), expected.bfloat16())


def test_a_residual_block_begins_as_the_identity_on_its_first_entries() -> None:
    x = torch.randn(5, 12)
    assert torch.equal(ResidualBlock(12)(x), x)
    torch.testing.assert_close(ResidualBlock(4, reads=12)(x), x[:, :4])
    wide = ResidualBlock(4, reads=12)
    for parameter in wide.parameters():
        torch.nn.init.normal_(parameter)
    assert wide.skip is not None
    torch.testing.assert_close(wide(x), wide.skip(x) + torch.nn.functional.silu(wide.linear(x)))
