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


@dataclass(frozen=True)
class Answers:
    """Texts as token ids, each up to and including its EOS, and the wall-clock seconds they took together."""

    texts: list[list[int]]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for text in self.texts)


def load_stock(name: str, *, dtype: str, device: str, draft_length: int | None = None) -> Any:
    """The target as transformers loads it: its default attention, nothing of ours registered in it.

    draft_length: for an assistant, the tokens it always proposes (no schedule, no confidence threshold).
    """
    from transformers import AutoModelForCausalLM

    from ..infer.pretrained import DTYPES, model_folder

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=DTYPES[dtype])
    if draft_length is not None:
        model.generation_config.num_assistant_tokens = draft_length
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
    return model.to(device).eval()


def stock_texts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    assistant: Any = None,
    lookup: int = 0,
) -> Answers:
    """One greedy `generate` call. No eos_ids: every text has `max_new_tokens`. assistant: a draft model of batch 1;
    lookup: tokens proposed from the prompt, at batch 1."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    pad = eos_ids[0] if eos_ids else 0
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    options: dict[str, Any] = {"pad_token_id": pad}
    if eos_ids:
        options["eos_token_id"] = list(eos_ids)
    else:
        model.generation_config.eos_token_id = None  # what the call names takes the place of this, and cannot be "none"
    if assistant is not None:
        options["assistant_model"] = assistant
    if lookup:
        options["prompt_lookup_num_tokens"] = lookup
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **options
        )  # (B, T + new)
    new = out[:, longest:].tolist()
    return Answers([_until_eos(row, eos_ids) for row in new], time.perf_counter() - began)


def our_texts(engine: Engine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> Answers:
    """The same from our engine, in the order of the prompts; the longest start first, so that the batch stays full."""
    from ..infer.clock import now
    from ..infer.request import Request

    engine.forget()
    began = now()
    for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
        engine.add(Request(str(index), list(prompts[index]), max_new_tokens))
    outputs = {output.id: output.checked().tokens for output in engine.run()}
    return Answers([outputs[str(index)] for index in range(len(prompts))], now() - began)


def _until_eos(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in eos_ids), len(row) - 1)
    return row[: end + 1]
