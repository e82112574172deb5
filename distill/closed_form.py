"""Divergences with their gradient worked out in the forward pass, a few rows at a time.

Left to autograd, a divergence over a vocabulary makes a dozen passes over (R, W) matrices in float32, which on a CPU cost
more than the matrix products around them. Here a block of rows that fits the processor's cache is taken from logits to
value and gradient at once, and only the gradient is kept, in the logits' own dtype. KL(p, q), whose gradient in the draft
logits is q - p, is written out; any other one is left to autograd within each block.

Several rows of the draft may be compared with one of the target's (`which`), as the steps of an unrolled drafter are: what
depends on the target alone is computed once for all of them.

Letters: R rows, U rows of the target (R, each row's own, unless `which` says otherwise), W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

ELEMENTS = 2**19
"""Logits taken together on a CPU: 2 MiB in float32, what a processor core keeps at hand."""

ELEMENTS_ON_A_CARD = 2**26
"""The same where each kernel has to be launched: 256 MiB in float32."""

Divergence = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Draft logits (R, W), labels (R,), target logits (R, W) -> (R,): of rows that are all of them paired."""

LOWEST = -1e30
"""Stands for the logarithm of 0, whose product with 0 would not be a number."""


class ForwardKL(torch.autograd.Function):
    """KL(softmax(t), softmax(z)) per row: draft logits z (R, W), target logits t (U, W), which (R,) -> (R,), float32 or
    float64.

    No gradient goes to the target. Tokens that the target excludes (-inf) add nothing.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, which: Tensor | None = None) -> Tensor:
        exact = torch.float64 if draft.dtype == torch.float64 else torch.float32
        certain = torch.empty(len(target), dtype=exact, device=draft.device)  # sum p log p
        values = torch.empty(len(draft), dtype=exact, device=draft.device)
        probs, gradient = torch.empty_like(target, dtype=exact), torch.empty_like(draft)
        for rows in _blocks(target):
            log_p = torch.log_softmax(target[rows].to(exact), dim=-1).clamp_(min=LOWEST)
            certain[rows] = _dot(torch.exp(log_p, out=probs[rows]), log_p)
        for rows in _blocks(draft):
            mine = rows if which is None else which[rows]
            p = probs[mine]
            log_q = torch.log_softmax(draft[rows].to(exact), dim=-1)
            values[rows] = certain[mine] - _dot(p, log_q)
            gradient[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * given[0][:, None].to(gradient.dtype), None, None


class Blockwise(torch.autograd.Function):
    """Any divergence of rows: draft logits z (R, W), labels (R,), target logits (U, W) or None, which (R,) -> (R,), float32
    or float64.

    `divergence` takes the three for some of the rows, the logits wide already, and gives one value per row.
    """

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, labels: Tensor, target: Tensor | None, which: Tensor | None, divergence: Divergence
    ) -> Tensor:
        exact = torch.float64 if draft.dtype == torch.float64 else torch.float32
        values = torch.empty(len(draft), dtype=exact, device=draft.device)
        gradient = torch.empty_like(draft)
        for rows in _blocks(draft):
            # A checkpoint around this call keeps no tensor of a graph: it would compute itself anew for every block's gradient.
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                logits = draft[rows].detach().to(exact).requires_grad_()
                mine = rows if which is None else which[rows]
                value = divergence(logits, labels[rows], None if target is None else target[mine].to(exact))
                gradient[rows] = torch.autograd.grad(value.sum(), logits)[0]
            values[rows] = value.detach()
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * given[0][:, None].to(gradient.dtype), None, None, None, None


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """The products of rows with rows: (R, W), (R, W) -> (R,), in one pass and in their own precision."""
    with torch.autocast(left.device.type, enabled=False):
        return torch.bmm(left[:, None], right[:, :, None])[:, 0, 0]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _blocks(draft: Tensor) -> Iterator[slice]:
    size = max(1, (ELEMENTS if draft.device.type == "cpu" else ELEMENTS_ON_A_CARD) // draft.shape[1])
    return (slice(start, start + size) for start in range(0, len(draft), size))
