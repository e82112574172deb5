"""How the target's logits become a choice: per-row temperature, top-k, top-p and seed; greedy is the limit.

Letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= 1e-5):  # below, float32 logits overflow
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-5, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], where 1 is off, got {self.top_p}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits (signed), got {self.seed}.")


class Sampling:
    """The settings of B rows as tensors."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> None:
        self.params = tuple(params)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.seeds = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
        self.is_greedy = all(p.temperature == 0 for p in params)
        self._has_top_k = any(p.top_k for p in params)
        self._has_top_p = any(p.top_p < 1 for p in params)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log of the distribution that is sampled, float32, -inf outside top-k and top-p.

        logits: (B, N, V). Rows with temperature 0 come out as a point mass on the argmax.
        """
        greedy = (self.temperature == 0)[:, None, None]
        scaled = logits.float() / torch.where(greedy, 1.0, self.temperature[:, None, None])
        if self._has_top_k:
            scaled = self._keep_top_k(scaled)
        logp = torch.log_softmax(scaled, dim=-1)
        if self._has_top_p:
            logp = self._keep_top_p(logp)
        if bool(greedy.any()):
            point = torch.full_like(logp, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
            logp = torch.where(greedy, point, logp)
        return logp

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's token at every node: (B, N) int64.

        logits: (B, N, V); positions: (B, N) int64, the absolute position of the token being *chosen* (node position
        + 1). Equal positions of one row share their noise, so the result does not depend on the tree.
        """
        if self.is_greedy:
            return logits.argmax(dim=-1)
        logp = self.log_probs(logits)
        return (logp + self.gumbel(positions, logits.shape[-1])).argmax(dim=-1)

    def gumbel(self, positions: Tensor, vocab_size: int, *, stream: int = 0) -> Tensor:
        """Noise (B, N, V) float32 for positions (B, N); computed once per distinct position of a row."""
        batch, count = positions.shape
        ids = torch.arange(vocab_size, device=positions.device)
        first = positions.min(dim=1).values
        span = int((positions - first[:, None]).max()) + 1
        levels = first[:, None] + torch.arange(span, device=positions.device)  # (B, span)
        seeds = self.seeds[:, None].expand(batch, span)
        rows = noise.gumbel(seeds.reshape(-1), levels.reshape(-1), ids, stream=stream).view(batch, span, vocab_size)
        which = (positions - first[:, None])[:, :, None].expand(batch, count, vocab_size)
        return rows.gather(1, which) if span != count or count > 1 else rows

    def _keep_top_k(self, scaled: Tensor) -> Tensor:
        widest = int(self.top_k.max())
        best = scaled.topk(min(widest, scaled.shape[-1]), dim=-1).values
        last = (self.top_k - 1).clamp(min=0, max=best.shape[-1] - 1)[:, None, None].expand(*scaled.shape[:2], 1)
        floor = best.gather(-1, last)
        keep = (scaled >= floor) | (self.top_k == 0)[:, None, None]
        return scaled.masked_fill(~keep, -torch.inf)

    def _keep_top_p(self, logp: Tensor) -> Tensor:
        """The smallest set of most likely tokens whose mass reaches top_p (the token that crosses it is kept)."""
        ordered, order = logp.sort(dim=-1, descending=True)
        mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        drop = mass_before >= self.top_p[:, None, None]
        drop[..., 0] = False
        kept = logp.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
        kept = kept - kept.logsumexp(dim=-1, keepdim=True)
        return torch.where(self.top_p[:, None, None] < 1, kept, logp)  # a row without top_p owes nothing to its batch
