"""A tiny random model of every supported architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCAB = 120

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gemma2() -> PreTrainedModel:
    config = hf.Gemma2Config(
        **_SMALL,
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
    )
    return hf.Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_SMALL, head_dim=8, sliding_window=8, query_pre_attn_scalar=8))


def _gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def _gpt_neox() -> PreTrainedModel:
    small = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**small))


def _moe(kind: str) -> PreTrainedModel:
    if kind == "mixtral":
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        )
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SMALL, head_dim=8)),
    "mistral with a window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_SMALL, sliding_window=8)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_SMALL)),
    "gpt2": _gpt2,
    "gpt-neox": _gpt_neox,
    "granite, whose logits are divided": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**_SMALL, logits_scaling=3.0)),
    "cohere2, whose logits are multiplied": lambda: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**_SMALL, logit_scale=0.3, sliding_window=8)
    ),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_SMALL)),
    "smollm3, some of whose layers have no positions": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**_SMALL)),
    "mixtral": lambda: _moe("mixtral"),
    "qwen3-moe": lambda: _moe("qwen3-moe"),
}


def build(name: str, *, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ARCHITECTURES[name]().float().eval()
