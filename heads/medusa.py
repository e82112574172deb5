"""Medusa heads: K heads over the target's last hidden state, each proposing one future token.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". One head is L
residual blocks x + SiLU(W x + b), zero-initialised and distinct modules, and a projection to the vocabulary: its own,
started as a copy of the target's head, or the frozen target head shared by all. Head k (0-based), reading the target
at position t, proposes token t+2+k; loss sum_k 0.8^k CE_k over frozen features (Medusa-1).

Letters: B rows, T positions, D hidden, V vocabulary, W draft vocabulary, K heads, R candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..infer.drafter import Observation
from ..infer.sampling import Sampling
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from .at_once import again
from .base import HeadConfig, LossSums, Objective, TeacherBatch, TrainedDrafter
from .compare import KEPT_BYTES
from .layers import ResidualBlock
from .own_cache import OwnCache
from .vocabulary import DraftVocabulary

ROWS = 256
"""Rows whose logits are held at once, of all heads, where those of all rows would fill the memory."""


class MedusaConfig(HeadConfig):
    """Shape of the heads."""

    method: Literal["medusa"] = "medusa"
    num_heads: int = Field(4, ge=1)
    """K: heads, hence draft depth. The paper trains 5 and uses 4."""
    num_layers: int = Field(1, ge=0)
    """L: residual blocks per head. The paper uses 1."""
    own_lm_head: bool = True
    """True: each head has its own projection (the paper's form). False: all share the frozen target head."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """W: size of a reduced draft vocabulary; None proposes from all of the target's tokens."""
    head_decay: float = Field(0.8, gt=0)
    """Weight of head k in the loss is head_decay^k (paper: 0.8)."""
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of the static draft tree (see infer.tree.Topology); None drafts the top-1 chain."""

    @model_validator(mode="after")
    def _has_weights(self) -> MedusaConfig:
        if not self.own_lm_head and self.num_layers == 0:
            raise ValueError(
                "heads without blocks and without their own lm_head have nothing to train; set num_layers: 1."
            )
        return self


@dataclass
class MedusaState:
    """hidden: (rows, D), the target's last hidden state at each row's newest read token; a cache without keys, to play back
    what is computed from it."""

    hidden: Tensor
    cache: OwnCache


class Medusa(TrainedDrafter):
    """K independent heads; no state but the newest hidden vector, no forward pass of its own between rounds."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target, *, token_map: Tensor | None = None) -> None:
        super().__init__(config, target)
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, target.vocab_size, token_map)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(target.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        self.projections = nn.ModuleList()
        if config.own_lm_head:
            start = self.vocabulary.select(target.head.weight.detach().float())
            for _ in range(config.num_heads):
                projection = nn.Linear(target.hidden_size, len(start), bias=False)
                projection.weight.data.copy_(start)
                self.projections.append(projection)
        self.topology = Topology(config.tree) if config.tree else Topology.chain(config.num_heads)

    def use_tree(self, topology: Topology) -> None:
        self.topology = topology

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def num_steps(self) -> int:
        return self.config.num_heads

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """Head `step` on rows of the target's last hidden state: (..., D) -> (..., W)."""
        states: Tensor = self.blocks[step](hidden)
        if self.config.own_lm_head:
            logits: Tensor = self.projections[step](states)
            return logits
        return self.target.logits(states.to(self.target.dtype), self.vocabulary.token_map)

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        masks = torch.stack([teacher.step_mask(step) for step in range(self.num_steps)]).flatten(1)  # (K, B*T)
        rows = _rounded(masks.any(dim=0))  # (R,)
        counted = masks[:, rows]
        counted[:, int(masks.any(dim=0).sum()) :] = False  # the rows that fill up

        def judge(rows: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
            return self._judge(rows, counted, teacher, objective)

        dtype = next(self.parameters(), self.target.head.weight).dtype
        if counted.numel() * self.vocabulary.size * dtype.itemsize <= KEPT_BYTES:
            sums, right = judge(rows, counted)
        else:  # too many logits to keep: they are computed again in the backward pass
            parts = zip(rows.split(ROWS), counted.split(ROWS, dim=1))
            found = [again(judge, *part) for part in parts]
            sums = torch.stack([part[0] for part in found]).sum(dim=0)
            right = torch.cat([part[1] for part in found], dim=1)
        alive = torch.cat([torch.ones_like(counted[:1]), counted & right]).cumprod(dim=0).bool()  # (K+1, R)
        weights = tuple(self.config.head_decay**step for step in range(self.num_steps))
        reached = (alive[:-1] & counted).sum(dim=1)
        return LossSums(sums, masks.sum(dim=1), weights, alive[1:].sum(dim=1), reached)

    def _judge(
        self, rows: Tensor, counted: Tensor, teacher: TeacherBatch, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """Objective summed per head (K,) float32 over the rows (R,) at which it is `counted` (K, R), and at which its first
        choice is right (K, R) bool."""
        hidden = teacher.hidden.flatten(0, 1)[rows].to(next(self.parameters(), self.target.head.weight).dtype)
        truth, which = self._target_logits(teacher, rows) if objective.uses_target else (None, None)
        sums, right = [], []
        for step in range(self.num_steps):
            labels, known = self.vocabulary.labels(teacher.step_labels(step).flatten()[rows])
            logits = self.logits(hidden, step)
            losses = objective(logits, labels, truth, None if which is None else which[step])
            sums.append((losses * (known & counted[step])).sum())
            right.append((logits.max(dim=-1).indices == labels) & known)
        return torch.stack(sums), torch.stack(right)

    def _target_logits(self, teacher: TeacherBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits (U, W) for what the heads propose at `rows` (R,), and which of them (K, R) int64: a token of
        head k stands at position t+1+k. Every position is computed once, although up to K heads ask for it."""
        length = teacher.hidden.shape[0] * teacher.hidden.shape[1]
        ahead = torch.stack([(rows + step + 1).clamp(max=length - 1) for step in range(self.num_steps)])
        needed = torch.zeros(length, dtype=torch.bool, device=rows.device)
        needed[ahead] = True
        chosen = _rounded(needed, 256 if len(rows) > ROWS else 32)
        logits = teacher.logits(teacher.hidden.flatten(0, 1)[chosen], self.vocabulary.token_map)
        return logits, (needed.cumsum(0) - 1)[ahead]

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        ranks = torch.full((*teacher.tokens.shape, self.num_steps), -1, device=teacher.tokens.device)
        hidden = teacher.hidden.to(next(self.parameters(), self.target.head.weight).dtype)
        for step in range(self.num_steps):
            rows = teacher.step_mask(step)
            logits = self.logits(hidden[rows], step)
            ranks[..., step][rows] = self.vocabulary.ranks(logits, teacher.step_labels(step)[rows])
        return ranks

    def start(self, *, rows: int, capacity: int) -> MedusaState:
        hidden = torch.zeros(rows, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        return MedusaState(hidden, OwnCache(rows=rows, capacity=capacity, tapes=self.tapes))

    def move(self, state: MedusaState, source: int, target: int) -> None:
        state.hidden[target] = state.hidden[source]

    def observe(self, state: MedusaState, seen: Observation) -> None:
        state.hidden[seen.rows] = seen.last(seen.hidden)

    def draft(self, state: MedusaState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        if not self.topology.paths:  # fit_tree found that drafting does not pay here
            return TokenTree.root(anchors)
        return state.cache.draft(self.topology, None, self._fill, anchors, state.hidden[: len(anchors)])

    def _fill(self, anchors: Tensor, hidden: Tensor) -> TokenTree:
        width = self.topology.width
        tokens, log_probs = [], []
        for step in range(self.topology.depth):
            logits = self.logits(hidden, step).float()
            best = logits.topk(width, dim=-1)
            tokens.append(self.vocabulary.to_target(best.indices))
            log_probs.append(best.values - logits.logsumexp(dim=-1, keepdim=True))
        return self.topology.fill(anchors, torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1))  # (B, K, R)


def _rounded(chosen: Tensor, multiple: int = 256) -> Tensor:
    """Indices of a mask (N,), the first one repeated until their number is a multiple.

    Matrix products of ever new shapes make the CPU's kernel cache and the allocator grow without end.
    """
    found = chosen.nonzero()[:, 0]
    short = -len(found) % multiple
    return torch.cat([found, found[:1].expand(short) if len(found) else found.new_zeros(short)])
