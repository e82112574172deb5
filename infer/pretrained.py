"""Models and tokenizers from disk or hub, in one precision, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import embedded, packed, quantized
from .adapter import changed_target, merge_adapter
from .fingerprint import weights_hash
from .layers import decoder_layers
from .precision import resolve_dtype
from .quantized import Quantization

if TYPE_CHECKING:  # transformers' modelling code takes seconds to load
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ASKED_FOR_WEIGHT = ("wo",)
"""Linear layers that stay as they are: T5 looks at the dtype of this one's weight in every forward."""


@dataclass(frozen=True)
class Pretrained:
    """What was loaded."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    quantization: Quantization | None


def load_pretrained(name: str, *, dtype: str, device: str | None, quantize: str | None) -> Pretrained:
    """The language model called `name`, decoder-only or encoder-decoder as its config says, and its tokenizer.

    Raises ValueError if it cannot be found, loaded or quantised, with the reason.
    """
    dtype = resolve_dtype(dtype, device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if quantize is not None:
        quantized.check_kind(quantize, device)  # before anything large is read
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    folder = embedded.resolve(name)
    changed = changed_target(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(folder if changed is None else embedded.resolve(changed), dtype=DTYPES[dtype])
        model = model if changed is None else merge_adapter(model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target {name!r} could not be loaded: {error}\nExpected `{embedded.NAME}`, a folder with config.json and "
            "weights, or a Hugging Face id that this machine can reach."
        ) from error
    quantization = None if quantize is None else _quantize(model, quantize, device=device)
    nn.Module.to(model, device)  # its own `to` is wrapped in a way that type checkers misread
    packed.pack(model, skip=_ASKED_FOR_WEIGHT, together=not config.is_encoder_decoder)
    return Pretrained(model, tokenizer, quantization)


def _quantize(model: PreTrainedModel, kind: str, *, device: str) -> Quantization:
    head: Any = model.get_output_embeddings()
    before = weights_hash(head.weight, decoder_layers(model)[-1])
    quantized.quantize(model.eval().requires_grad_(False), kind, keep=[head.weight], device=device)
    return Quantization(kind, before)


def model_folder(name: str) -> Path:
    """Where the files of the model `name` are, for tools that need the folder itself."""
    return Path(embedded.resolve(name))
