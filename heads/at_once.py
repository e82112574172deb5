"""Losses of which no logits are kept: where the head is frozen, their gradient is taken in the forward pass; else what the
backward pass needs is computed again in it.

Letters: S steps, R rows, D draft width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Judged = tuple[Tensor, Tensor, Tensor]
"""Losses (S,), which pairs are right (S, R) bool, and whatever else is summed."""


class AtOnce(torch.autograd.Function):
    """Losses (S,) of states (S, R, D) and confidences (S, R), whose gradients are taken in the forward pass. A state takes
    part in the loss of its own slot only, so the gradient of that loss scales it."""

    @staticmethod
    def forward(
        ctx: Any, judge: Callable[[Tensor, Tensor | None], Judged], states: Tensor, confidence: Tensor | None
    ) -> Judged:
        learned = [part.detach().requires_grad_() for part in (states, confidence) if part is not None]
        with torch.enable_grad():
            losses, right, errors = judge(*learned, *[None] * (2 - len(learned)))
            gradients = torch.autograd.grad(losses.sum(), learned)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(right, errors)
        return losses.detach(), right, errors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, *confidence = ctx.saved_tensors
        scaled = [states * grads[0][:, None, None].to(states.dtype), *(part * grads[0][:, None] for part in confidence)]
        return None, *scaled, *[None] * (2 - len(scaled))


def again(function: Callable[..., Any], *given: Any) -> Any:
    """What the function returns; nothing it computed on the way is kept, the backward pass calls it once more. It must draw
    nothing: the state of the generators is not restored."""
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
