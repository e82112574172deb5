"""Files of block drafters: the field's tensor names, an explicit layout, and the same numbers in another implementation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from draftsmith.heads import Binding, load_drafter
from draftsmith.heads.dflash import DFlash
from draftsmith.infer.target import Target

from . import laws
from .test_dflash import build


def test_files_have_the_fields_names_and_say_which_layout_they_are(tiny_target: Target, tmp_path: Path) -> None:
    drafter = build(
        tiny_target,
        sample_from_anchor=True,
        markov_head_type="gated",
        enable_confidence_head=True,
        draft_vocab_size=120,
    )
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    drafter.save(tmp_path, binding=binding)
    layer = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"]
    layer += [f"self_attn.{part}" for part in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")]
    names = {f"layers.0.{part}.weight" for part in layer}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    names |= {f"markov_head.{part}.weight" for part in ("markov_w1", "markov_w2", "gate_proj")}
    names |= {"markov_head.gate_proj.bias", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(load_file(tmp_path / "model.safetensors")) == names
    config = json.loads((tmp_path / "config.json").read_text())
    head = config["draftsmith"]["head"]
    assert head["sample_from_anchor"] is config["sample_from_anchor"] is True
    assert head["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"] == [2]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["block_size"], config["mask_token_id"]) == (4, 0)
    assert (config["markov_rank"], config["markov_head_type"]) == (8, "gated")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert build(tiny_target).public_config()["architectures"] == ["DFlashDraftModel"]
    assert [key for key, value in head.items() if value is None and key not in ("tree", "best_first")] == []
    again = load_drafter(tmp_path, tiny_target)
    assert isinstance(again, DFlash)
    assert again.taps == drafter.taps == (2,)


def test_what_the_target_shares_is_neither_saved_nor_trained(tiny_target: Target) -> None:
    names = set(build(tiny_target).state_dict())
    assert not any(part in name for name in names for part in ("embed", "lm_head", "d2t"))


def test_transformers_own_model_computes_the_same_block_from_our_file(tiny_target: Target, tmp_path: Path) -> None:
    """The native class of transformers has other names for two tensors and shares none of our code."""
    drafter = build(tiny_target, num_layers=2, taps=(0, 2), rope_theta=5e4)
    text = laws.write_text(tiny_target, 2, seed=4)
    laws.train(drafter, laws.teach(tiny_target, text, taps=drafter.taps), steps=10)
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    fields = json.loads((tmp_path / "config.json").read_text())
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    known = MuseGlimmerAssistantConfig().to_dict().keys() - {"model_type", "architectures", "dtype"}
    stock = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{key: fields[key] for key in known & fields.keys()}))
    tensors = load_file(tmp_path / "model.safetensors")
    stock.load_state_dict({names.get(name, name): tensor for name, tensor in tensors.items()})
    prompt, anchor = torch.tensor([text.prompts[0]]), text.answers[0][0]
    length = prompt.shape[1]
    reading = tiny_target.read_packed(
        prompt, torch.arange(length)[None], torch.ones_like(prompt), taps=tuple(fields["target_layer_ids"])
    )
    block = torch.tensor([[anchor] + [fields["mask_token_id"]] * (fields["block_size"] - 1)])
    with torch.no_grad():
        theirs = stock(
            noise_embeds=tiny_target.embedding(block),
            context_hidden_states=reading.features,
            position_ids=torch.arange(length + block.shape[1])[None],
        ).last_hidden_state[0, 1:]
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    at = torch.zeros_like(teacher.supervised)
    at[0, length - 1] = True
    drafts, _ = drafter._draft_blocks(teacher, at, torch.stack([at] * drafter.num_steps))
    torch.testing.assert_close(drafts.states[:, 0].detach(), theirs, rtol=1e-5, atol=1e-5)
