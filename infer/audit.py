"""Was this text the target's own? Replays an answer teacher-forced and looks at the first token that was not its choice.

In fp32 the verified loop repeats plain decoding token for token. In bf16 a forward over 1 and over 32 tokens may round
differently, so two tokens that are nearly tied can swap; that is a property of the precision, not of the loop. The
audit tells the two apart: a *near-tie* is a first difference at which the target's two best scores are closer than a
few units in the last place of its logits, anything else is *wrong*.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .sampling import Sampling, SamplingParams
from .target import Target

NEAR_TIE_ULPS = 8
"""Units in the last place of the logits' dtype, at the size of the largest logit, below which two scores are tied."""

Judgement = Literal["exact", "near-tie", "wrong"]


@dataclass(frozen=True)
class Audit:
    """The finding for one answer."""

    verdict: Judgement
    position: int | None = None
    """Index into the answer of the first token that is not the target's choice; None if there is none."""
    gap: float | None = None
    """By how much the target's choice there beats the emitted token (logits; with noise added when sampling)."""
    tolerance: float | None = None
    """The gap up to which this precision calls it a tie."""


@torch.inference_mode()
def audit(
    target: Target, prompt: Sequence[int], answer: Sequence[int], *, sampling: SamplingParams | None = None
) -> Audit:
    """Replay `answer` after `prompt` in one forward. sampling: the settings it was made with (greedy if None)."""
    if len(answer) == 0:
        return Audit("exact")
    device = target.device
    tokens = torch.tensor([*prompt, *answer], device=device)[None]
    positions = torch.arange(tokens.shape[1], device=device)[None]
    hidden = target.read_packed(tokens, positions, torch.ones_like(tokens)).hidden
    logits = target.logits(hidden[:, len(prompt) - 1 : -1])  # (1, T, V): row i scores answer token i
    settings = Sampling([sampling or SamplingParams()], device)
    scores = logits.float()
    if not settings.is_greedy:
        scores = settings.log_probs(logits) + settings.gumbel(positions[:, len(prompt) :], logits.shape[-1])
    emitted = tokens[:, len(prompt) :]
    best = scores.max(dim=-1).values[0]
    gaps = best - scores.gather(-1, emitted[..., None])[0, :, 0]
    differs = (gaps > 0).nonzero()[:, 0]
    if len(differs) == 0:
        return Audit("exact")
    worst: Audit | None = None
    for position in differs.tolist():
        gap = float(gaps[position])
        tolerance = _tolerance(
            float(logits[0, position].float().abs().max()), target.dtype, settings.params[0].temperature
        )
        if gap > tolerance:
            return Audit("wrong", position, gap, tolerance)
        worst = worst or Audit("near-tie", position, gap, tolerance)
    assert worst is not None
    return worst


def _tolerance(largest: float, dtype: torch.dtype, temperature: float) -> float:
    """NEAR_TIE_ULPS units in the last place at `largest`, divided by the temperature that scores were divided by."""
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1.0)))
    return NEAR_TIE_ULPS * ulp / (temperature or 1.0)
