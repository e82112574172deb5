"""How target and draft distributions are compared: the divergence that training minimises, by name.

Letters: R rows, W draft vocabulary. With p the target's and q the draft's distribution at one row, z the draft logits:

| name | value | gradient in z_i |
| --- | --- | --- |
| cross_entropy | -log q(label) | q_i - [i = label] |
| forward_kl | sum p log(p/q) | q_i - p_i |
| reverse_kl | sum q log(q/p) | q_i (log(q_i/p_i) - value) |
| jsd | b KL(p, m) + (1-b) KL(q, m), m = b p + (1-b) q | (1-b) q_i (log(q_i/m_i) - KL(q, m)) |
| tvd | 1 - sum min(p, q): the rejection rate | q_i (s_i - sum q s), s = sign(q - p) / 2 |
| lk | -log sum min(p, q): the acceptance rate's logarithm | tvd's gradient / sum min(p, q) |

DistillSpec (arXiv 2310.08461), GKD (arXiv 2306.13649) for jsd, LK losses (arXiv 2602.23881) for lk. On a reduced draft
vocabulary p is the target's distribution restricted to it and renormalised. Plain tvd is nearly flat from a cold start.

With `teacher_top_k` the target is known by its k likeliest tokens and one bucket for all others, and both distributions
are compared on these k+1 outcomes. No divergence can grow by that; what is lost is the divergence inside the bucket,
weighted with its probability (p's in forward_kl, q's in reverse_kl; in tvd at most the larger of the two).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ..heads.base import Objective
from .closed_form import Blockwise, ForwardKL

Name = Literal["cross_entropy", "forward_kl", "reverse_kl", "jsd", "tvd", "lk"]


class ObjectiveConfig(BaseModel):
    """Which divergence, or which mix of them, training minimises."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name | None = None
    """One divergence; leave it out when `mix` is given."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight b of the target in jsd (GKD's value); only jsd uses it."""
    temperature: float = Field(default=1.0, gt=0)
    """Both distributions are softened by it: the temperature that drafts will be verified at. Cross entropy compares
    with tokens and ignores it."""
    teacher_top_k: int | None = Field(default=None, ge=1)
    """Tokens by which the target is known, the rest being one outcome; None compares token by token. Cross entropy
    ignores it."""
    mix: dict[Name, float] | None = None
    """Several divergences, name -> weight, summed."""

    @model_validator(mode="after")
    def _one_or_mix(self) -> ObjectiveConfig:
        if (self.name is None) == (not self.mix):
            raise ValueError("give either objective.name or objective.mix (name -> weight), not both and not neither.")
        names = self.terms
        if any(not weight > 0 for weight in names.values()):
            raise ValueError(f"objective.mix weights must be positive, got {self.mix}. Leave a divergence out instead.")
        if "jsd" not in names and self.beta != 0.5:
            raise ValueError("objective.beta applies to jsd only; remove it or choose jsd.")
        if set(names) == {"cross_entropy"} and self.temperature != 1:
            raise ValueError(
                "objective.temperature does not apply to cross_entropy, which compares with tokens; remove it."
            )
        if set(names) == {"cross_entropy"} and self.teacher_top_k is not None:
            raise ValueError(
                "objective.teacher_top_k does not apply to cross_entropy, which asks no target; remove it."
            )
        return self

    @property
    def terms(self) -> dict[Name, float]:
        """Name -> weight of every divergence in use."""
        if self.mix:
            return dict(self.mix)
        return {self.name: 1.0} if self.name is not None else {}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The divergence that `config` describes (see `heads.base.Objective` for how it is called)."""
    return Divergence(config)


class Divergence:
    """A weighted sum of divergences per row. Softmax in fp32 whatever the logits are (float64 stays float64)."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.terms, self.beta, self.temperature = config.terms, config.beta, config.temperature
        self.top_k = config.teacher_top_k
        self.uses_target = set(self.terms) != {"cross_entropy"}
        self._is_plain_kl = self.terms == {"forward_kl": 1.0} and self.temperature == 1.0 and self.top_k is None

    def __call__(
        self, draft_logits: Tensor, labels: Tensor, target_logits: Tensor | None, which: Tensor | None = None
    ) -> Tensor:
        """draft_logits (R, W), labels (R,) int64 draft ids, target_logits (U, W), which (R,) int64 -> (R,)."""
        if self.uses_target:
            assert target_logits is not None, f"objective {list(self.terms)} needs the target's logits"
            if self._is_plain_kl:
                return ForwardKL.apply(draft_logits, target_logits.detach(), which)  # type: ignore[no-untyped-call,no-any-return]
            target_logits = target_logits.detach()
        if torch.is_grad_enabled() and draft_logits.requires_grad:
            given = draft_logits, labels, target_logits, which, self._of_wide
            return Blockwise.apply(*given)  # type: ignore[no-untyped-call,no-any-return]
        if target_logits is not None and which is not None:
            target_logits = target_logits[which]
        return self._of_wide(_wide(draft_logits), labels, None if target_logits is None else _wide(target_logits))

    def _of_wide(self, draft_logits: Tensor, labels: Tensor, target_logits: Tensor | None) -> Tensor:
        """The same, of logits in the precision of the softmax."""
        total = draft_logits.new_zeros(len(labels))
        if self.uses_target and target_logits is not None:
            log_p = torch.log_softmax(target_logits / self.temperature, dim=-1)
            log_q = torch.log_softmax(draft_logits / self.temperature, dim=-1)
            if self.top_k is not None and self.top_k + 1 < log_p.shape[-1]:
                log_p, log_q = top_and_tail(log_p, log_q, self.top_k)
        for name, weight in self.terms.items():
            if name == "cross_entropy":
                value = F.cross_entropy(draft_logits, labels, reduction="none")
            elif name == "jsd":
                value = _jsd(log_p, log_q, self.beta)
            else:
                value = _DIVERGENCES[name](log_p, log_q)
            total = total + weight * value
        return total


def top_and_tail(log_p: Tensor, log_q: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both distributions (R, W) on the k likeliest tokens of the first and the bucket of all others, last: (R, k+1)."""
    best = log_p.topk(k, dim=-1).indices
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter_(-1, best, True)
    tails = (log.masked_fill(inside, -torch.inf).logsumexp(dim=-1, keepdim=True) for log in (log_p, log_q))
    tail_p, tail_q = tails
    return torch.cat([log_p.gather(-1, best), tail_p], dim=-1), torch.cat([log_q.gather(-1, best), tail_q], dim=-1)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) per row; a token of probability 0 under p adds 0, and takes no part in the gradient."""
    apart = torch.where(log_p > -torch.inf, log_p - log_q, 0.0)
    return (log_p.exp() * apart).sum(dim=-1)


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = torch.logaddexp(log_p + log(beta), log_q + log(1 - beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _tvd(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(dim=-1)


def _lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """In logarithms throughout, so that it has a gradient where no probability is shared to within rounding."""
    return -torch.minimum(log_p, log_q).logsumexp(dim=-1)


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": _kl,
    "reverse_kl": lambda log_p, log_q: _kl(log_q, log_p),
    "tvd": _tvd,
    "lk": _lk,
}
