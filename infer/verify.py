"""Verification: which drafted tokens the target keeps, and its own token that ends the round.

Sample-match (the default): draw the target's token at every node, with noise that belongs to the position, and
descend from the root while the drawn token is a child. Every emitted token is a fresh draw from the target given what
was emitted before, so the law is the target's for any draft that depends on the past and on independent noise only;
temperature 0 is the same rule with argmax. EAGLE-2's and lookahead's loops have the same law.

Letters: B rows, N nodes, A kept nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .sampling import Sampling
from .tree import TokenTree

if TYPE_CHECKING:
    from .target import Target


@dataclass(frozen=True)
class Verdict:
    """What one round keeps.

    path: (B, A) int64 node indices from the root down; columns from `count` on repeat the last kept node.
    count: (B,) int64, nodes kept, the root included, so count - 1 draft tokens were accepted.
    bonus: (B,) int64, the target's own token after the last kept node.
    """

    path: Tensor
    count: Tensor
    bonus: Tensor


@dataclass(frozen=True)
class Settled:
    """What a verdict means for the texts, on the host."""

    counts: list[int]
    """Nodes kept, the root included."""
    tokens: list[list[int]]
    """What each row emits: its accepted draft tokens, then its bonus."""
    drafted: list[int]
    """Valid draft nodes."""
    offered: list[int]
    """Depth of the deepest of them."""
    is_in_place: bool
    """Whether in every row the nodes kept are the first of the tree, one below the other."""

    @classmethod
    def of(cls, tree: TokenTree, verdict: Verdict) -> Settled:
        """In one transfer."""
        steps = torch.arange(verdict.path.shape[1], device=verdict.path.device)
        moved = (verdict.path != steps.minimum(verdict.count[:, None] - 1)).any(dim=1)
        offered = torch.where(tree.valid, tree.depths, 0).amax(dim=1)
        columns = [verdict.count, verdict.bonus, tree.valid.sum(dim=1) - 1, offered, moved.long()]
        nodes = tree.tokens.gather(1, verdict.path)
        table: list[list[int]] = torch.cat([torch.stack(columns, dim=1), nodes], dim=1).tolist()
        counts, bonus, drafted, deepest, displaced = (list(column) for column in list(zip(*table))[:5])
        tokens = [[*row[6 : 5 + count], last] for row, count, last in zip(table, counts, bonus)]
        return cls(counts, tokens, drafted, deepest, is_in_place=not any(displaced))


class Verifier(Protocol):
    """A pure function from a draft and the target's logits to a verdict."""

    def __call__(self, tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
        """logits: (B, N, V) of the target at the nodes; lengths: (B,) int64 tokens read before the root."""
        ...


def score(target: Target, tree: TokenTree, hidden: Tensor) -> Tensor:
    """The target's logits (B, N, V) at its hidden states (B, N, D), zeros at nodes that it did not read."""
    if tree.read is None:
        return target.logits(hidden)
    logits = target.logits(hidden[tree.read])  # (R, V)
    return logits.new_zeros(*tree.tokens.shape, logits.shape[-1]).index_put_((tree.read,), logits)


def sample_match(tree: TokenTree, logits: Tensor, lengths: Tensor, sampling: Sampling) -> Verdict:
    """Keep the longest path on which every token is the one the target drew. Exact."""
    choice = sampling.choose(logits, lengths[:, None] + tree.depths + 1)
    return follow(tree, choice)


def follow(tree: TokenTree, choice: Tensor) -> Verdict:
    """The path that the target's tokens `choice` (B, N) int64 trace through the tree; no loop, no host sync."""
    parents = tree.parents.clamp(min=0)
    agrees = (tree.tokens == choice.gather(1, parents)) & tree.valid
    agrees[:, 0] = True
    broken = (tree.ancestors & ~agrees[:, None, :]).any(dim=-1)
    last = torch.where(broken, -1, tree.depths).argmax(dim=1)  # the first of the deepest
    return trace(tree, last, choice.gather(1, last[:, None])[:, 0])


def trace(tree: TokenTree, last: Tensor, bonus: Tensor) -> Verdict:
    """The verdict that keeps node `last` (B,) and its ancestors and emits `bonus` (B,) after it."""
    count = tree.depths.gather(1, last[:, None])[:, 0] + 1
    kept = tree.ancestors[torch.arange(len(last), device=last.device), last]  # (B, N)
    index = torch.arange(tree.num_nodes, device=last.device)
    path = torch.where(kept, index, last[:, None]).masked_fill(~kept, tree.num_nodes).sort(dim=1).values
    return Verdict(torch.where(path == tree.num_nodes, last[:, None], path), count, bonus)
