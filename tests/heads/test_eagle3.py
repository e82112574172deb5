"""EAGLE-3 beyond the laws: its variants, its tensors as engines name them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from draftsmith.heads.eagle3 import Eagle3, Eagle3Config
from draftsmith.heads.layers import Rotation
from draftsmith.infer.drafter import Observation
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import Topology

from . import laws
from .test_laws import walk

STATIC = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
VARIANTS: dict[str, dict[str, object]] = {
    "norm-before-residual": {"norm_before_residual": True, "tree": None},
    "norm-before-fc": {"norm_before_fc": True, "tree": STATIC},
    "narrow": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 10, "tree": None},
    "two-layers": {"num_layers": 2, "tree": STATIC},
    "one-tap": {"taps": (2,), "tree": None},
    "reduced-vocabulary": {"draft_vocab_size": 150, "tree": STATIC},
    "dynamic-tree": {"tree": None, "dynamic_tree": {"nodes": 9, "width": 3, "depth": 4}},
}


def build(target: Target, **changes: object) -> Eagle3:
    config = Eagle3Config.model_validate({"num_steps": 3} | changes)
    size = config.draft_vocab_size
    # Every other id, so that half of what the tiny target writes cannot be proposed.
    token_map = None if size is None else torch.cat([torch.tensor([1, 2]), torch.arange(3, 300, 2)])[:size]
    torch.manual_seed(1)
    drafter = Eagle3(config, target, token_map=token_map)
    laws.disturb(drafter)
    return drafter


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=5)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_is_lossless_and_its_chain_accepts_what_was_predicted(
    variant: str, tiny_target: Target, text: laws.Text
) -> None:
    drafter = build(tiny_target, **VARIANTS[variant])
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    laws.train(drafter, teacher, steps=12, lr=5e-3)
    plain = laws.decode(tiny_target, None, text.prompts)
    drafted = laws.decode(tiny_target, drafter, text.prompts, rows=3)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    accepted = sum(output.stats.accepted for output in drafted)
    assert 0 < accepted < sum(output.stats.drafted for output in drafted)
    drafter.use_chain()
    ranks, outputs = drafter.ranks(teacher), laws.decode(tiny_target, drafter, text.prompts, rows=3)
    for number, (prompt, answer, output) in enumerate(zip(text.prompts, text.answers, outputs)):
        start = int((teacher.segments[number // 2] == number % 2 + 1).nonzero()[0]) + len(prompt)
        accepted = walk(ranks[number // 2], start - 1, start + len(answer))
        assert (output.stats.rounds, output.stats.accepted) == (len(accepted), sum(accepted))


# Decoding state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_rejected_drafts_leave_nothing_behind(tiny_target: Target, layers: int) -> None:
    """After rounds of drafting and re-reading, the state is that of having read the text in one go."""
    drafter = build(tiny_target, num_layers=layers, tree=STATIC)
    tokens = torch.randint(3, 300, (2, 20))
    segments = torch.ones_like(tokens)
    reading = tiny_target.read_packed(tokens, torch.arange(20).expand(2, -1), segments, taps=drafter.taps)
    assert reading.features is not None
    once, rounds = drafter.start(rows=2, capacity=8), drafter.start(rows=2, capacity=8)

    def observe(state: object, start: list[int], count: list[int]) -> None:
        width = max(count)
        column = torch.tensor(start)[:, None] + torch.arange(width).minimum(torch.tensor(count)[:, None] - 1)
        take = column[:, :, None]
        assert reading.features is not None
        drafter.observe(
            state,
            Observation(
                rows=slice(0, 2),
                tokens=tokens.gather(1, column),
                count=torch.tensor(count),
                start=torch.tensor(start),
                hidden=reading.hidden.gather(1, take.expand(-1, -1, reading.hidden.shape[2])),
                features=reading.features.gather(1, take.expand(-1, -1, reading.features.shape[2])),
                anchor=tokens.gather(1, torch.tensor(start)[:, None] + torch.tensor(count)[:, None])[:, 0],
            ),
        )

    with torch.inference_mode():
        observe(once, [0, 0], [12, 15])
        start = [0, 0]
        for count in ([3, 5], [4, 1], [1, 4], [4, 5]):
            observe(rounds, start, count)
            start = [s + c for s, c in zip(start, count)]
            sampling = Sampling([SamplingParams()] * 2)
            tree = drafter.draft(rounds, tokens[[0, 1], start], torch.tensor(start), sampling)
        direct = drafter.draft(once, tokens[[0, 1], start], torch.tensor(start), sampling)
    torch.testing.assert_close(rounds.hidden, once.hidden, rtol=1e-4, atol=1e-5)
    assert torch.equal(tree.tokens, direct.tokens)


def test_an_empty_tree_decodes_plainly(tiny_target: Target, text: laws.Text) -> None:
    drafter = build(tiny_target)
    drafter.use_tree(Topology(()))
    outputs = laws.decode(tiny_target, drafter, text.prompts)
    assert [output.tokens for output in outputs] == text.answers
    assert all(output.stats.drafted == 0 for output in outputs)


# Shapes, names, files ----------------------------------------------------------------------------------------------


def test_tensors_are_named_and_shaped_as_engines_load_them(tiny_target: Target) -> None:
    drafter = build(tiny_target, draft_vocab_size=150)
    width, inner, heads, kv, head, vocab = 48, 96, 4, 2, 12, 300
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == {
        "fc.weight": (width, 3 * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv * head, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv * head, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads * head),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (150, width),
        "d2t": (150,),
        "t2d": (vocab,),
    }


def test_another_width_brings_its_own_embedding(tiny_target: Target) -> None:
    drafter = build(tiny_target, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16)
    own = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert own["embed_tokens.weight"] == (300, 32)
    assert own["fc.weight"] == (32, 3 * 48)
    assert isinstance(drafter.embed_tokens, nn.Embedding)
    wide = build(tiny_target, hidden_size=64)
    assert isinstance(wide.embed_tokens, nn.Embedding)
    source = tiny_target.embedding.get_parameter("weight")
    torch.testing.assert_close(
        torch.cdist(wide.embed_tokens.weight[:9], wide.embed_tokens.weight[:9]),
        torch.cdist(source[:9], source[:9]),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize(
    ("layers", "taps"), [(1, (0,)), (2, (0, 1)), (4, (0, 1, 3)), (7, (1, 2, 3)), (30, (1, 14, 26))]
)
def test_default_taps_are_the_papers_or_first_middle_last(
    build_target: Callable[..., Target], layers: int, taps: tuple[int, ...]
) -> None:
    target = build_target(num_hidden_layers=layers)
    drafter = Eagle3(Eagle3Config(), target)
    assert drafter.taps == taps
    assert drafter.config.taps == taps


def test_the_saved_config_leaves_nothing_to_be_derived(tiny_target: Target) -> None:
    config = build(tiny_target).config
    free = {"draft_vocab_size", "tree", "dynamic_tree"}
    assert {name for name, value in config.model_dump().items() if value is None} == free
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 2, 12)
    assert config.resolve(tiny_target) == config


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"taps": (3, 1)}, "ascending"),
        ({"taps": (1, 9)}, "taps"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"tree": STATIC, "dynamic_tree": {}}, "exclude"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(
    tiny_target: Target, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        build(tiny_target, **settings)


def test_rotary_angles_survive_half_precision(tiny_target: Target) -> None:
    drafter = copy.copy(build(tiny_target)).to(torch.bfloat16)
    assert {name for name, _ in drafter.named_buffers()} == set()
    turn = Rotation.at(torch.tensor([1000]), width=drafter.shape.head_width, theta=drafter.config.rope_theta)
    assert turn.cos.dtype == torch.float32
