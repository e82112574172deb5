"""How much each draft position counts in the loss: a choice of its own, independent of the divergence.

A draft is worth its accepted prefix, so early positions matter more. With k = 0..K-1 the position in the draft:

| kind | weight of position k | paper |
| --- | --- | --- |
| none | 1 | JetSpec (arXiv 2606.18394) |
| exponential | exp(-k / gamma) | DFlash, DSpark |
| d_pace | sum over m >= k of P_m, P_m = prod over i <= m of ((1 - alpha) q_i + alpha) | D-PACE (arXiv 2605.18810) |
| cat | prod over i < k of p_i | CAT of PARD-2 (arXiv 2605.08632) |

q_i is the draft's probability of the text's own token at position i, p_i the target's; neither carries a gradient. With
alpha = 0 the gradient of d_pace with cross entropy is minus that of the expected accepted length, sum_m prod_{i<=m} q_i.

None and exponential weights are divided by their sum over the K positions, the others by K: the loss is a mean over
positions, and a learning rate does not depend on the block size.

Letters: K draft positions, R rows.
"""

from __future__ import annotations

from math import exp
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor


class PositionWeights(BaseModel):
    """Which weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "exponential", "d_pace", "cat"] = "none"
    """See the module docstring."""
    gamma: float | None = Field(default=None, gt=0)
    """Positions after which an exponential weight has fallen to 1/e. DFlash: 7 for blocks of 16, 5 for 10, 4 for 8."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """Smoothing of d_pace. None: 0.5, the paper's."""

    @model_validator(mode="after")
    def _belongs_to_its_kind(self) -> PositionWeights:
        if (self.gamma is None) == (self.kind == "exponential"):
            raise ValueError("position_weights.gamma belongs to kind exponential, which needs it; set both or neither.")
        if self.alpha is not None and self.kind != "d_pace":
            raise ValueError("position_weights.alpha belongs to kind d_pace; remove it or choose that kind.")
        return self

    def fixed(self, num_steps: int) -> tuple[float, ...]:
        """(K,): the part of the weights that depends on the position alone."""
        raw = [exp(-k / self.gamma) if self.gamma else 1.0 for k in range(num_steps)]
        return tuple(weight / sum(raw) for weight in raw)

    @property
    def reads_draft(self) -> bool:
        """Whether the draft's probability of the text's token is needed."""
        return self.kind == "d_pace"

    @property
    def reads_target(self) -> bool:
        """Whether the target's probability of the text's token is needed."""
        return self.kind == "cat"

    def of(self, probs: Tensor, counted: Tensor) -> Tensor:
        """The part that depends on the text, (K, R) float32, to be multiplied with `fixed`.

        probs: (K, R), the draft's or the target's probability of the text's tokens (see `reads_draft`); counted: (K, R)
        bool. A position that does not count neither ends a prefix nor adds to one.
        """
        if self.kind == "cat":
            before = torch.ones_like(probs[:1])
            return torch.cat([before, torch.where(counted, probs, 1.0)[:-1].cumprod(dim=0)])
        assert self.kind == "d_pace", f"weights of kind {self.kind} do not depend on the text"
        alpha = 0.5 if self.alpha is None else self.alpha
        prefix = torch.where(counted, (1 - alpha) * probs + alpha, 1.0).cumprod(dim=0) * counted
        return prefix.flip(0).cumsum(dim=0).flip(0)
