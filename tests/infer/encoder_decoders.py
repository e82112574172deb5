"""A tiny random model of every supported encoder-decoder architecture, restless enough not to repeat one token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCAB = 120
CONTEXT = 64
"""Positions of the encoder and of the decoder, where an architecture has a limit."""


def _t5(model: Any, config: Any, **more: Any) -> PreTrainedModel:
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "initializer_factor": 3.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    return model(config(**settings | more))


def _bart(model: Any, config: Any, forced: int | None = None, **more: Any) -> PreTrainedModel:
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": CONTEXT,
        "init_std": 0.3,
        "scale_embedding": True,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "tie_word_embeddings": False,  # a tied random head repeats its input
        "forced_eos_token_id": None,  # stock generate would end every answer at its limit with an EOS
    }
    built = model(config(**settings | more))
    for name, parameter in built.named_parameters():  # sharp attention, or every position sees the same average
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 4
        if name.endswith("fc2.weight"):
            parameter.data *= 0.4
    built.generation_config.forced_bos_token_id = forced
    built.final_logits_bias.normal_(std=0.5)
    return built


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "t5": partial(_t5, hf.T5ForConditionalGeneration, hf.T5Config),
    "t5 1.1": partial(
        _t5, hf.T5ForConditionalGeneration, hf.T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": partial(_t5, hf.MT5ForConditionalGeneration, hf.MT5Config),
    "umt5": partial(_t5, hf.UMT5ForConditionalGeneration, hf.UMT5Config),
    "bart": partial(_bart, hf.BartForConditionalGeneration, hf.BartConfig, forced=0),
    "mbart": partial(_bart, hf.MBartForConditionalGeneration, hf.MBartConfig),
    "marian": partial(_bart, hf.MarianMTModel, hf.MarianConfig),
    "pegasus": partial(_bart, hf.PegasusForConditionalGeneration, hf.PegasusConfig),
    "blenderbot": partial(_bart, hf.BlenderbotForConditionalGeneration, hf.BlenderbotConfig),
}


def build(name: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """The architecture with random float32 weights, always the same for one seed; its relative position bias is
    large. `settings` go to its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[name](**settings).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if "relative_attention_bias" in parameter_name:
                parameter.data.normal_(std=3.0)
    return model
