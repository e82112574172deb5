"""The yardstick: transformers' own `generate`, with left padding, on an unmodified copy of the target.

Letters: B rows, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..infer.decode import Engine


@dataclass
class Speed:
    """Tokens and seconds, summed; a text counts up to and including its EOS."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, texts: Sequence[Sequence[int]], seconds: float) -> None:
        self.tokens += sum(len(text) for text in texts)
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def load_stock(name: str, *, dtype: str, device: str) -> Any:
    """The target as transformers loads it: its default attention, nothing of ours registered in it."""
    from transformers import AutoModelForCausalLM

    from ..infer.pretrained import DTYPES
    from ..infer.target import model_folder

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=DTYPES[dtype])
    return model.to(device).eval()


def stock_texts(
    model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: tuple[int, ...]
) -> tuple[list[list[int]], float]:
    """Greedy texts (token ids up to and including the EOS) and the wall-clock seconds of one `generate` call."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    pad = eos_ids[0]
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids),
            pad_token_id=pad,
        )  # (B, T + new)
    new = out[:, longest:].tolist()
    return [_until_eos(row, eos_ids) for row in new], time.perf_counter() - began


def our_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> tuple[list[list[int]], float]:
    """The same from our engine, in the order of the prompts."""
    from ..infer.request import Request

    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, max_new_tokens))
    outputs = {output.id: output.tokens for output in engine.run()}
    return [outputs[str(index)] for index in range(len(prompts))], time.perf_counter() - began


def _until_eos(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in eos_ids), len(row) - 1)
    return row[: end + 1]
