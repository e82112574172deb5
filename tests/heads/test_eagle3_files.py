"""EAGLE-3's config as engines read it: every default written out, both spellings of the rotary base."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.heads import Binding, load_drafter
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.infer.target import Target

from .test_eagle3 import build


def test_the_folder_has_the_engines_keys(tiny_target: Target, tmp_path: Path) -> None:
    drafter = build(tiny_target, draft_vocab_size=150, rope_theta=5e4, norm_before_residual=True)
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (found["vocab_size"], found["draft_vocab_size"]) == (tiny_target.vocab_size, 150)
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == 5e4
    assert found["max_position_embeddings"] == tiny_target.max_length, "shorter, an engine would stop drafting there"
    assert found["tie_word_embeddings"] is False, "an engine that ties takes the embedding for the head"
    assert found["norm_before_residual"] is True
    assert "eagle_aux_hidden_state_layer_ids" not in found, "engines disagree about what it means"
    assert found["target_layer_ids"] == list(drafter.taps)
    assert isinstance(load_drafter(tmp_path, tiny_target), Eagle3)


def test_transformers_builds_a_layer_of_our_shapes_from_it(tiny_target: Target) -> None:
    """But for what is read side by side, which doubles the width of q, k and v."""
    drafter = build(tiny_target)
    config = LlamaConfig.from_dict(drafter.public_config())
    stock = {name: tuple(t.shape) for name, t in LlamaDecoderLayer(config, 0).state_dict().items()}
    own = {name: tuple(t.shape) for name, t in drafter.midlayer.state_dict().items() if name != "hidden_norm.weight"}
    doubled = {name for name in own if own[name] != stock[name]}
    assert doubled == {f"self_attn.{part}_proj.weight" for part in "qkv"}
    assert all(own[name] == (stock[name][0], 2 * stock[name][1]) for name in doubled)
    assert own.keys() == stock.keys()
    assert config.rope_parameters["rope_theta"] == drafter.config.rope_theta
