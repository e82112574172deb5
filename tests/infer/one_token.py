"""The law of the next token in double precision, as the settings of a request define it, one text at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftsmith.infer.sampling import SamplingParams


def next_law(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """Penalties, temperature, top-k and min-p; no top-p."""
    scores = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = list(output).count(token)
        scores.append(
            (logit - params.frequency_penalty * count - params.presence_penalty * (count > 0)) / params.temperature
        )
    least = sorted(scores)[-params.top_k] if params.top_k else -math.inf
    weights = [math.exp(score) if score >= least else 0.0 for score in scores]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]
