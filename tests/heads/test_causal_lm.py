"""Laws of where a draft model begins and how its folder looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftsmith.heads import causal_lm
from draftsmith.infer.target import Target

from ..infer.architectures import ARCHITECTURES, VOCAB, build


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Every architecture's own forward, with transformers' attention."""
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        out: Tensor = model(input_ids=tokens, use_cache=False).logits
    return out


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_copy_of_all_layers_is_the_target(name: str, tokens: Tensor) -> None:
    model = build(name)
    expected = logits(build(name), tokens)
    copied = causal_lm.prune(Target(model, None), tuple(range(4))).eval()
    assert torch.equal(logits(copied, tokens), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3-moe"])
def test_a_pruned_copy_is_the_target_without_the_other_layers(name: str, tokens: Tensor) -> None:
    model = build(name)
    pruned = causal_lm.prune(Target(model, None), (0, 3)).eval()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    del layers[1:3]
    for number, layer in enumerate(layers.children()):
        assert number < 2, layer
    model.config.num_hidden_layers = 2
    kinds = model.config.to_dict().get("layer_types")
    if kinds:
        model.config.layer_types = [kinds[0], kinds[3]]
        assert pruned.config.layer_types == model.config.layer_types
    assert torch.allclose(logits(pruned, tokens), logits(model, tokens), atol=1e-5)


def test_the_copy_shares_no_memory_with_the_target(tiny_target: Target) -> None:
    pruned = causal_lm.prune(tiny_target, (1, 2))
    mine = {parameter.data_ptr() for parameter in tiny_target.model.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in pruned.parameters()}


@pytest.mark.parametrize("keep", [(), (3, 1), (1, 1), (0, 4), (-1, 2)])
def test_layers_that_are_not_there_are_refused(keep: tuple[int, ...], tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="ascending distinct layers below 4"):
        causal_lm.prune(tiny_target, keep)


def test_a_design_is_the_targets_config_with_the_named_fields_changed(tiny_target: Target) -> None:
    model = causal_lm.design(tiny_target, {"num_hidden_layers": 2, "hidden_size": 24, "tie_word_embeddings": True})
    wanted, found = tiny_target.text_config.to_dict(), model.config.to_dict()
    changed = {key for key in wanted if wanted[key] != found[key]}
    assert changed - {"dtype"} == {"num_hidden_layers", "hidden_size", "tie_word_embeddings"}
    assert next(model.parameters()).dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hiden_size": 24}, r"architecture.hiden_size is no field of LlamaConfig; did you mean hidden_size\?"),
        ({"vocab_size": 24}, "architecture.vocab_size is the target's"),
        ({"model_type": "qwen3"}, "save a model of it with transformers and name its folder as checkpoint"),
        ({"num_attention_heads": 3}, r"\(3\) must be a multiple of num_key_value_heads \(2\)"),
    ],
)
def test_a_design_that_cannot_be_is_refused(fields: dict[str, object], message: str, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match=message):
        causal_lm.design(tiny_target, fields)


def test_a_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"'\./nowhere' does not exist"):
        causal_lm.load_checkpoint("./nowhere")


def test_rotary_settings_are_written_in_both_spellings(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, rope_parameters=scaling | {"rope_theta": 500000.0})
    model = AutoModelForCausalLM.from_config(config)
    written = causal_lm.public_config(model)
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0
    assert written["rope_scaling"] == scaling
    assert (written["dtype"], written["torch_dtype"]) == ("float32", "float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert again.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_tied_weight_is_in_the_state_once_and_loaded_into_both(build_target: Callable[..., Target]) -> None:
    tied, other = (build_target(tie_word_embeddings=True, seed=seed).model for seed in (0, 1))
    names = [causal_lm.keep_tied_once(model) for model in (tied, other)]
    assert names == [{"lm_head.weight": "model.embed_tokens.weight"}] * 2
    state = tied.state_dict()
    assert "lm_head.weight" not in state
    other.load_state_dict(state)
    assert torch.equal(other.lm_head.weight, tied.lm_head.weight)
    assert other.lm_head.weight is other.model.embed_tokens.weight
