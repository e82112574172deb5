"""A language model's plain next-token predictions, seen as draft steps.

The logits at position p score token p+1, so step k of row t is the prediction at position t+1+k. Values are computed
once per position and read by as many steps as ask for them, up to K.

Letters: B packed rows, T positions, K draft steps, P scored positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .at_once import again
from .base import TeacherBatch
from .compare import KEPT_BYTES

POSITIONS = 512
"""Rows of logits held at once, in fp32, a few times over."""


@dataclass(frozen=True)
class Scored:
    """Which positions are scored, for which rows and steps."""

    counted: Tensor
    """(K, B, T) bool: rows t at which step k counts (`TeacherBatch.step_mask`)."""
    asked: Tensor
    """(B, T) bool: positions whose prediction some step of some row asks for."""

    @classmethod
    def find(cls, teacher: TeacherBatch, num_steps: int) -> Scored:
        counted = torch.stack([teacher.step_mask(step) for step in range(num_steps)])
        asked = [torch.roll(rows, step + 1, dims=1) for step, rows in enumerate(counted)]
        return cls(counted, torch.stack(asked).any(dim=0))

    def compute(
        self, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, *, width: int
    ) -> tuple[Tensor, ...]:
        """`function` of the states (P, D) of asked positions and of their flat indices (P,), each result (P,) put at its
        place in (B, T), zeros elsewhere.

        POSITIONS at a time; where logits of `width` tokens would fill the memory, they are computed again in the backward
        pass instead of kept.
        """
        places = self.asked.flatten()
        is_small = int(places.sum()) * width * hidden.element_size() <= KEPT_BYTES
        parts = []
        for at in places.nonzero()[:, 0].split(POSITIONS):
            states = hidden.flatten(0, 1)[at]
            if is_small:
                parts.append(function(states, at))
            else:
                parts.append(again(function, states, at))
        found = (torch.cat(values) for values in zip(*parts))
        return tuple(v.new_zeros(len(places)).masked_scatter(places, v).view_as(self.asked) for v in found)

    def of_step(self, values: Tensor, step: int) -> Tensor:
        """(B, T): at row t what `values` (B, T) has at position t+1+step; of use where the step counts."""
        return torch.roll(values, -(step + 1), dims=1)
