"""Models and tokenizers from disk or hub, in one precision, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from . import embedded, packed

if TYPE_CHECKING:  # transformers' modelling code takes seconds to load
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pretrained(name: str, *, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model called `name`, decoder-only or encoder-decoder as its config says, and its tokenizer.

    Raises ValueError if it cannot be found or loaded, with the reason.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    folder = embedded.resolve(name)
    try:
        config = AutoConfig.from_pretrained(folder)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=DTYPES[dtype])
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target {name!r} could not be loaded: {error}\nExpected `{embedded.NAME}`, a folder with config.json and "
            "weights, or a Hugging Face id that this machine can reach."
        ) from error
    module: nn.Module = model  # its `to` is wrapped in a way that type checkers misread
    module.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not config.is_encoder_decoder:  # T5 looks at its layers' weights in every forward, which unpacking makes dear
        packed.pack(module)
    return model, tokenizer
