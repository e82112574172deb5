"""What a checkpoint is bound to: hashes of a target's configuration, of a sample of its weights, of its chat template."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_ARCHITECTURE = ("num_", "hidden", "intermediate", "vocab", "rope", "head_dim", "model_type", "tie_", "rms")
_ENCODER_DECODER = ("d_", "decoder_", "encoder_", "relative_", "max_position", "scale_")


def config_hash(config: PretrainedConfig) -> str:
    """First 16 hex digits over the fields that shape the network."""
    shaping = _ARCHITECTURE + (_ENCODER_DECODER if config.is_encoder_decoder else ())
    fields = {key: value for key, value in config.to_dict().items() if key.startswith(shaping)}
    return _short(json.dumps(fields, sort_keys=True, default=str).encode())


def weights_hash(head: Tensor, layer: nn.Module) -> str:
    """First 16 hex digits over a sample of the head (V, D) and of a layer's first tensor, in fp32 rounded to bf16, so
    that one model in two precisions has one hash."""
    sample = [head[:64, :64], next(iter(layer.state_dict().values())).flatten()[:4096]]
    rounded = [tensor.detach().float().bfloat16().contiguous().view(torch.int16) for tensor in sample]
    return _short(b"".join(tensor.cpu().numpy().tobytes() for tensor in rounded))


def template_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """First 16 hex digits over the chat template; empty if there is no tokenizer or template."""
    template = tokenizer.chat_template if tokenizer is not None else None
    return _short(str(template).encode()) if template else ""


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
