"""Hydra heads: K heads in a row, each of which knows the tokens drafted before its own.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k reads the
target's last hidden state at row t, the anchor, and the k tokens drafted after it:

    read_k = [h_t ; E(x_{t+1}) ; ... ; E(x_{t+1+k})]                 E: the target's own embedding, frozen
    p(x_{t+2+k}) = softmax(P_k blocks_k(read_k))                     first block: skip(read) + SiLU(W read + b)

Worked example, "a b c d e", row t = 1 (the target has read "a b", the anchor is "c"): head 0 reads [h_b; c] and proposes
"d"; head 1 reads [h_b; c; d] and proposes "e". The loss is sum_k 0.8^k objective_k, with the text's own tokens in `read`.

| method | prefix_layer | num_layers | dropout | objective |
| --- | --- | --- | --- | --- |
| Hydra | False | 1 | 0 | cross entropy |
| Hydra++ | True | 4 | 0.2 | forward KL: the target's distribution |

The prefix layer of Hydra++ is a decoder layer over the hidden states of the whole text: the heads then read its output
at row t instead of h_t. It runs once per token that the target has read, not per draft node.

Letters: B rows, T positions, N tokens with keys, R rows that draft, K heads, D hidden, V vocabulary, W draft vocabulary, n
nodes of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..infer.drafter import Observation
from ..infer.dynamic_tree import StaticGrowth
from ..infer.sampling import Sampling
from ..infer.tapes import Tensors
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from .base import HeadConfig, LossSums, Objective, TeacherBatch, TrainedDrafter
from .block_loss import count_steps
from .compare import Drafts, find_ranks, loss_sums
from .from_target import own_shape, rotary_base
from .layers import DecoderLayer, Memory, ResidualBlock, Rotation
from .own_cache import OwnCache
from .unroll import Blocks, Unroll
from .vocabulary import DraftVocabulary

EPS = 1e-6
"""Of the prefix layer's norms, where the target's config names none."""


class HydraConfig(HeadConfig):
    """Shape of the heads."""

    method: Literal["hydra"] = "hydra"
    num_heads: int = Field(4, ge=1)
    """K: heads, hence draft depth (paper: 4)."""
    num_layers: int = Field(1, ge=1)
    """Blocks per head (Hydra: 1, Hydra++: 4)."""
    prefix_layer: bool = False
    """Whether the heads read a decoder layer over the text's hidden states instead of the newest one alone (Hydra++)."""
    own_lm_head: bool = True
    """True: each head has its own projection (the paper's form). False: all share the frozen target head."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """W: size of a reduced draft vocabulary; None proposes from all of the target's tokens."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of what a head reads that is dropped in training (Hydra++: 0.2)."""
    head_decay: float = Field(0.8, gt=0)
    """Weight of head k in the loss is head_decay^k."""
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of the static draft tree (see infer.tree.Topology); None drafts the top-1 chain."""

    @model_validator(mode="after")
    def _tree_fits(self) -> HydraConfig:
        deepest = max(map(len, self.tree or ()), default=0)
        if deepest > self.num_heads:
            raise ValueError(f"tree is {deepest} deep, but there are {self.num_heads} heads; prune it or add heads.")
        return self


@dataclass
class HydraState:
    """What the heads read of each row, (rows, D), and the keys and values of the prefix layer."""

    hidden: Tensor
    cache: OwnCache


class Hydra(TrainedDrafter):
    """K dependent heads; drafting runs each once, on all nodes of its depth."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, target: Target, *, token_map: Tensor | None = None) -> None:
        """token_map: (W,) int64 ascending target ids of a reduced draft vocabulary."""
        super().__init__(config, target)
        width, shape = target.hidden_size, own_shape(target, eps=EPS)
        self.head_width, self.rope_theta = shape.head_width, rotary_base(target)
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, target.vocab_size, token_map)
        self.prefix = DecoderLayer(shape, layer=0) if config.prefix_layer else None
        if self.prefix is not None:  # the identity at first, as the blocks are
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(width, reads=(head + 2) * width),
                *(ResidualBlock(width) for _ in range(config.num_layers - 1)),
            )
            for head in range(config.num_heads)
        )
        self.projections = nn.ModuleList()
        if config.own_lm_head:
            start = self.vocabulary.select(target.head.weight.detach().float())
            for _ in range(config.num_heads):
                projection = nn.Linear(width, len(start))
                projection.weight.data.copy_(start)
                nn.init.zeros_(projection.bias)
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

    # The layers, shared by training and decoding --------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _encode(self, hidden: Tensor, positions: Tensor, memory: Memory, ask: Tensor | None) -> Tensor:
        """The prefix layer, if there is one: hidden (N, D), positions (N,) -> (R, D) of the tokens `ask`, all if None."""
        hidden = hidden.to(self._dtype)
        if self.prefix is None:
            return hidden if ask is None else hidden[ask]
        turn = Rotation.at(positions, width=self.head_width, theta=self.rope_theta)
        out: Tensor = self.prefix(hidden, turn, memory, ask)
        return out

    def _append(self, read: Tensor, tokens: Tensor) -> Tensor:
        """What the next head reads: (..., m*D) and the tokens (...) after it -> (..., (m+1)*D)."""
        return torch.cat([read, self.target.embedding(tokens).to(read.dtype)], dim=-1)

    def _project(self, states: Tensor, head: int) -> Tensor:
        """Output of a head's blocks (..., D) -> logits (..., W)."""
        if self.config.own_lm_head:
            logits: Tensor = self.projections[head](states)
            return logits
        return self.target.logits(states.to(self.target.dtype), self.vocabulary.token_map)

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        weights = tuple(self.config.head_decay**head for head in range(self.num_steps))
        drafts, vocabulary = self._unroll(teacher), self.vocabulary
        return loss_sums(drafts, teacher, objective, logits=self._judged, vocabulary=vocabulary, weights=weights)

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        return find_ranks(self._unroll(teacher), teacher, logits=self._judged, vocabulary=self.vocabulary)

    def _unroll(self, teacher: TeacherBatch) -> Drafts:
        """Every head at every row at which some head counts, each state followed by the number of its head. What a head
        reads beyond its document is of use to no head that counts."""
        counted = count_steps(teacher, self.num_steps)  # (K, B, T)
        blocks = Blocks.find(teacher.segments, counted.any(dim=0))
        hidden, positions = teacher.hidden.flatten(0, 1)[blocks.keys], teacher.positions.flatten()[blocks.keys]
        read = self._encode(hidden, positions, Unroll(blocks), blocks.ask)  # (R, D)
        tokens, states = teacher.tokens.flatten(), []
        for head, block in enumerate(self.blocks):
            read = self._append(read, tokens[(blocks.rows + head + 1).clamp(max=len(tokens) - 1)])
            state = block(self.dropout(read))
            states.append(torch.cat([state, state.new_full((len(state), 1), head)], dim=-1))  # (R, D + 1)
        return Drafts(blocks.rows, torch.stack(states), counted.flatten(1)[:, blocks.rows])

    def _judged(self, states: Tensor) -> Tensor:
        """Logits (P, W) of states (P, D + 1) that stand head by head."""
        sizes = torch.bincount(states[:, -1].detach().long(), minlength=self.num_steps).tolist()
        parts = states[:, :-1].split(sizes)
        return torch.cat([self._project(part, head) for head, part in enumerate(parts)])

    # Decoding -------------------------------------------------------------------------------------------------------

    def start(self, *, rows: int, capacity: int) -> HydraState:
        hidden = torch.zeros(rows, self.target.hidden_size, dtype=self._dtype, device=self.target.device)
        return HydraState(hidden, OwnCache(rows=rows, capacity=capacity, tapes=self.tapes))

    def move(self, state: HydraState, source: int, target: int) -> None:
        state.cache.move(source, target)
        state.hidden[target] = state.hidden[source]

    def observe(self, state: HydraState, seen: Observation) -> None:
        if self.prefix is None:
            state.hidden[seen.rows] = seen.last(seen.hidden)
            return

        seen = seen.news()

        def read(hidden: Tensor, start: Tensor, count: Tensor) -> Tensors:
            batch, width, _ = hidden.shape
            positions = start[:, None] + torch.arange(width, device=start.device)
            memory = state.cache.observe(self, seen.rows.start, start, count, width, last=True)
            newest = torch.arange(batch, device=start.device) * width + count - 1
            return (self._encode(hidden.flatten(0, 1), positions.flatten(), memory, newest),)

        (newest,) = state.cache.take(seen, read, seen.hidden, seen.start, seen.count)
        state.hidden[seen.rows] = newest

    def draft(self, state: HydraState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        if self.topology.depth == 0:
            return TokenTree.root(anchors)
        return state.cache.draft(self.topology, None, self._grow, anchors, state.hidden[: len(anchors)])

    def _grow(self, anchors: Tensor, hidden: Tensor) -> TokenTree:
        growth = StaticGrowth(self.topology, anchors)
        read, tokens = hidden[:, None], anchors[:, None]  # (B, n, D), (B, n)
        while True:
            read = self._append(read, tokens)
            frontier = growth.add(*self._candidates(read, head=growth.depth, width=growth.width))
            if frontier is None:
                return growth.finish()
            read = read.gather(1, frontier.origin[:, :, None].expand(-1, -1, read.shape[-1]))
            tokens = frontier.tokens

    def _candidates(self, read: Tensor, *, head: int, width: int) -> tuple[Tensor, Tensor]:
        """The best tokens (B, n, width) int64, as target ids, and their log-probabilities, float32."""
        logits = self._project(self.blocks[head](read), head).float()
        best = logits.topk(width, dim=-1)
        return self.vocabulary.to_target(best.indices), best.values - logits.logsumexp(dim=-1, keepdim=True)
