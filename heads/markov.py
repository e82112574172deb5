"""Heads on top of a block drafter's slots, which were computed without knowing each other's tokens.

DSpark's sequential heads add to slot k's logits a bias that depends on the token x_{k-1} before it (x_{-1} is the
anchor), through a factor of rank r; e = W1[x_{k-1}], h the slot's normalised output:

| kind | code c_k, bias = W2 c_k |
| --- | --- |
| vanilla | e |
| gated | sigmoid(Wg [h; e] + bg) * e |
| rnn | tanh(o), with [g; z; o] = Wj [s; e; h] + bj and s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(z), s = 0 at first |

The softmax of the sum is the slot's exact distribution given that token. The confidence head estimates, from h and e,
the probability that slot k's token is accepted if those before it were.

Letters: B, R rows, K slots, D draft width, r rank, V vocabulary, W draft vocabulary, n nodes, m candidates.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """A bias on the logits of each slot, given the token before it."""

    def __init__(self, kind: Kind, *, rank: int, width: int, vocab_size: int, drafted: int) -> None:
        """width: D; vocab_size: V, of the tokens read; drafted: W, of those proposed."""
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if kind == "rnn" else None
        for weight in (self.markov_w1.weight, self.markov_w2.weight):
            nn.init.normal_(weight, std=0.02)

    def begin(self, tokens: Tensor) -> Tensor:
        """The state before slot 0: zeros (..., r) for tokens (...)."""
        return self.markov_w1.weight.new_zeros(*tokens.shape, self.rank)

    def step(self, state: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """state (..., r), hidden (..., D), previous (...) int64 target ids -> code and next state, (..., r) each."""
        embedded = self.markov_w1(previous)
        if self.gate_proj is not None:
            return self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded, state
        if self.joint_proj is None:
            return embedded, state
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        keep = gate.sigmoid()
        return out.tanh(), keep * state + (1 - keep) * candidate.tanh()

    def codes(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """All slots of known text: hidden (K, R, D), previous (K, R) int64 -> (K, R, r)."""
        state, found = self.begin(previous[0]), []
        for slot, tokens in zip(hidden, previous):
            code, state = self.step(state, slot, tokens)
            found.append(code)
        return torch.stack(found)

    def rescore(self, code: Tensor, candidates: Tensor) -> Tensor:
        """The bias of some tokens only: code (B, n, r), candidates (B, m) int64 draft ids -> (B, n, m)."""
        return code @ self.markov_w2.weight[candidates].transpose(1, 2)


class ConfidenceHead(nn.Module):
    """logit of P(slot's token accepted | those before it accepted) = w . [h; e] + b."""

    def __init__(self, reads: int) -> None:
        """reads: D, or D + r where there is a Markov head."""
        super().__init__()
        self.proj = nn.Linear(reads, 1)

    def forward(self, hidden: Tensor, markov: MarkovHead | None, previous: Tensor) -> Tensor:
        """hidden (..., D), previous (...) int64 target ids -> (...). Nothing it reads learns from it."""
        read = hidden if markov is None else torch.cat([hidden, markov.markov_w1(previous)], dim=-1)
        out: Tensor = self.proj(read.detach())[..., 0]
        return out
