"""Targets that are another target and a LoRA adapter: what joint training leaves behind (train/joint.py).

Such a folder holds adapter_config.json (which names the target it changes) and adapter_model.safetensors in peft's
format, beside the config and the tokenizer. Loading merges the adapter into the weights, so decoding costs nothing
more. The merged model is a target of its own: what decoding gives is its text, not that of the target it came from.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layers import decoder_layers

if TYPE_CHECKING:  # transformers' modelling code takes seconds to load
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSTALL = "peft is not installed; run `pip install 'draftsmith[peft]'`."


def changed_target(folder: str) -> str | None:
    """The target that the adapter in `folder` changes, or None if the folder holds no adapter."""
    file = Path(folder) / CONFIG
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else None


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """`model` with the adapter in `folder` added to its weights. Raises ValueError if peft is not installed or the adapter
    does not fit."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"{folder} holds an adapter and {INSTALL}") from error
    try:
        adapted: Any = PeftModel.from_pretrained(model, folder)
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"the adapter in {folder} does not fit {type(model).__name__}: {error}. Train it again for this target."
        ) from error
    merged: PreTrainedModel = adapted.merge_and_unload()
    mark(decoder_layers(merged)[-1], (Path(folder) / WEIGHTS).read_bytes())
    return merged


def mark(layer: nn.Module, adapter: bytes) -> None:
    """Make an adapter part of a target's fingerprint, which looks at the first tensor of the last `layer`: the merged
    weights themselves may differ in the last bit from machine to machine."""
    digest = hashlib.sha256(adapter).digest()
    layer.register_buffer("adapter_digest", torch.tensor(list(digest), dtype=torch.float32))
