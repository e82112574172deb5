"""The learning rate as a function of how far the run is: linear warm-up, then a cosine.

    rate(p) = lr * p / w                                           p < w   (w: warm-up share)
    rate(p) = lr * (f + (1 - f) * (1 + cos(pi (p - w)/(1 - w)))/2)  else    (f: final share)

p is the share of the run that is done at the middle of the step, so neither the first nor the last step has rate 0.
"""

from __future__ import annotations

import math

from .recipe import Optimiser


def progress(step: int, total: int, *, seconds: float, minutes: float | None) -> float:
    """Share of the run done in the middle of `step` (0-based): by steps, or by the clock where that is ahead."""
    by_steps = (step + 0.5) / total
    return by_steps if minutes is None else min(1.0, max(by_steps, seconds / (60 * minutes)))


def rate(share: float, settings: Optimiser) -> float:
    """Learning rate when `share` of the run is done."""
    warm, final = settings.warmup_share, settings.final_lr_share
    if share < warm:
        return settings.lr * share / warm
    cosine = (1 + math.cos(math.pi * (share - warm) / (1 - warm))) / 2
    return settings.lr * (final + (1 - final) * cosine)
