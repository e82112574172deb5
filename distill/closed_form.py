"""Forward KL with its gradient worked out in the forward pass, a few rows at a time.

Left to autograd, KL(p, q) over a vocabulary makes a dozen passes over (R, W) matrices in float32, which on a CPU cost
more than the matrix products around them. Its gradient in the draft logits is q - p: here a block of rows that fits the
processor's cache is taken from logits to value and gradient at once, and only q - p is kept, in the logits' own dtype.

Letters: R rows, W draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ELEMENTS = 2**19
"""Logits taken together: 2 MiB in float32, what a processor core keeps at hand."""

LOWEST = -1e30
"""Stands for the logarithm of 0, whose product with 0 would not be a number."""


class ForwardKL(torch.autograd.Function):
    """KL(softmax(t), softmax(z)) per row: draft logits z (R, W), target logits t (R, W) -> (R,), float32 or float64.

    No gradient goes to the target. Tokens that the target excludes (-inf) add nothing.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor) -> Tensor:
        exact = torch.float64 if draft.dtype == torch.float64 else torch.float32
        values = torch.empty(len(draft), dtype=exact, device=draft.device)
        gradient = torch.empty_like(draft)
        size = max(1, ELEMENTS // draft.shape[1])
        for start in range(0, len(draft), size):
            rows = slice(start, start + size)
            log_q = torch.log_softmax(draft[rows].to(exact), dim=-1)
            log_p = torch.log_softmax(target[rows].to(exact), dim=-1).clamp_(min=LOWEST)
            p = log_p.exp()
            values[rows] = log_p.sub_(log_q).mul_(p).sum(dim=-1)
            gradient[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * given[0][:, None].to(gradient.dtype), None
