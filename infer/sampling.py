"""How the target's logits become a choice: per-row temperature, top-k, top-p, min-p and seed; greedy is the limit.

Letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .nucleus import in_nucleus


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings, applied in the order in which transformers applies them.

    1. Penalties on the logits, for the text that stands before the token (see penalties.py). repetition_penalty r, over
       prompt and output as in transformers and vLLM: a logit above 0 is divided by r, one below multiplied; 1 is off.
       frequency_penalty f and presence_penalty p, over the output only as in vLLM and the OpenAI interface: f for each
       time the token was written and p once are subtracted; 0 is off.
    2. temperature; 0 is greedy, after the penalties.
    3. top_k, the k likeliest tokens; 0 is off.
    4. top_p, the smallest set of likeliest tokens whose probability reaches top_p; 1 is off.
    5. min_p, the tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024); 0 is off.

    seed fixes the text: with any drafter, any batch, or no drafter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-5 <= self.temperature < math.inf):  # below, float32 logits overflow
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-5, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], where 1 is off, got {self.top_p}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits (signed), got {self.seed}.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], where 0 is off, got {self.min_p}.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, where 1 is off, got {self.repetition_penalty}.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = vars(self)[name]
            if not -2 <= value <= 2:
                raise ValueError(f"{name} must lie in [-2, 2], where 0 is off, got {value}.")

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on which tokens stand before it, beyond what the target makes of them."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class Sampling:
    """The settings of B rows as tensors."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> None:
        self.params = tuple(params)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        self.seeds = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
        self.is_greedy = all(p.temperature == 0 for p in params)
        self.has_penalties = any(p.has_penalties for p in params)
        self._has_greedy = any(p.temperature == 0 for p in params)
        self._most = max((p.top_k for p in params), default=0)
        self._has_top_p = any(p.top_p < 1 for p in params)
        self._has_min_p = any(p.min_p for p in params)
        self._keeps_few = all(p.temperature == 0 or p.top_k or p.top_p < 1 or p.min_p for p in params)
        self._noise = torch.empty(len(params), 0, 0, device=device)  # (B, S, V): of S positions of each row
        self._noise_of = torch.empty(len(params), 0, dtype=torch.int64, device=device)  # (B, S): which; -1 is none

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log of the distribution that is sampled, float32, -inf outside top-k, top-p and min-p.

        logits: (B, N, V), after penalties. Rows with temperature 0 come out as a point mass on the argmax.
        """
        greedy = (self.temperature == 0)[:, None, None]
        scaled = logits.float() / torch.where(greedy, 1.0, self.temperature[:, None, None])
        if self._most:
            scaled = self._keep_top_k(scaled)
        logp = torch.log_softmax(scaled, dim=-1)
        if self._has_top_p:
            logp = _keep(in_nucleus(logp, self.top_p), logp, rows=self.top_p < 1)
        if self._has_min_p:
            floor = logp.amax(dim=-1, keepdim=True) + self.min_p.log()[:, None, None]
            logp = _keep(logp >= floor, logp, rows=self.min_p > 0)
        if self._has_greedy:
            point = torch.full_like(logp, -torch.inf).scatter_(-1, _best(logits)[..., None], 0.0)
            logp = torch.where(greedy, point, logp)
        return logp

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's token at every node: (B, N) int64.

        logits: (B, N, V), after penalties; positions: (B, N) int64, the absolute position of the token being *chosen*
        (node position + 1). Equal positions of one row share their noise, so the result does not depend on the tree.
        """
        return _best(logits if self.is_greedy else self.scores(logits, positions))

    def scores(self, logits: Tensor, positions: Tensor) -> Tensor:
        """What a sampled choice maximises: log-probability + Gumbel noise, (B, N, V) float32. Arguments as `choose`.

        Noise is made for the tokens that can be chosen: where top-k, top-p or min-p keep few, for those alone, else once
        per position of a row. The numbers are the same.
        """
        logp = self.log_probs(logits)
        if self._keeps_few and not logp.is_cuda:
            row, node, token = (logp > -torch.inf).nonzero(as_tuple=True)
            if 16 * len(token) < logp.numel():
                logp[row, node, token] += noise.gumbel_at(self.seeds[row], positions[row, node], token)
                return logp
        return logp.add_(self.gumbel(positions, logits.shape[-1]))

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        """Noise (B, N, V) float32 for positions (B, N), 0 or more; made once per position of a row.

        It is kept until a later position needs its place, since a round's drafter and verifier ask for the same, and the
        next round for what this one did not reach.
        """
        span = int((positions - positions.amin(dim=1, keepdim=True)).max()) + 1
        if span > self._noise.shape[1] or vocab_size != self._noise.shape[2]:
            self._noise = torch.empty(len(positions), span, vocab_size, device=positions.device)
            self._noise_of = torch.full_like(positions[:, :1], -1).repeat(1, span)
        slots = positions % self._noise.shape[1]  # (B, N); the positions of one call have slots of their own
        asked = torch.full_like(self._noise_of, -1).scatter_(1, slots, positions)  # (B, S)
        row, slot = ((asked >= 0) & (asked != self._noise_of)).nonzero(as_tuple=True)
        if len(row):
            ids = torch.arange(vocab_size, device=positions.device)
            self._noise[row, slot] = noise.gumbel(self.seeds[row], asked[row, slot], ids)
            self._noise_of[row, slot] = asked[row, slot]
        index = torch.arange(len(slots), device=slots.device)[:, None] * self._noise.shape[1] + slots
        return self._noise.flatten(0, 1).index_select(0, index.flatten()).view(*positions.shape, vocab_size)

    def _keep_top_k(self, scaled: Tensor) -> Tensor:
        best = scaled.topk(min(self._most, scaled.shape[-1]), dim=-1).values
        last = (self.top_k - 1).clamp(min=0, max=best.shape[-1] - 1)[:, None, None].expand(*scaled.shape[:2], 1)
        floor = best.gather(-1, last)
        keep = (scaled >= floor) | (self.top_k == 0)[:, None, None]
        return scaled.masked_fill(~keep, -torch.inf)


def _keep(tokens: Tensor, logp: Tensor, *, rows: Tensor) -> Tensor:
    """logp (B, N, V) renormalised over `tokens` (B, N, V) bool in `rows` (B,) bool; the others owe nothing to their batch."""
    kept = torch.log_softmax(logp.masked_fill(~tokens, -torch.inf), dim=-1)
    return torch.where(rows[:, None, None], kept, logp)


def _best(scores: Tensor) -> Tensor:
    """The first of the largest along the last dimension; on a CPU several times faster than argmax."""
    return scores.max(dim=-1).indices
