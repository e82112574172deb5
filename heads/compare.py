"""Draft states against the text and the target: losses and ranks over a vocabulary too wide to hold for every row.

A pair is a (step, row) that counts. Rows are taken in chunks; within one the target's logits are computed once per token
and serve every step that proposes it; where they would fill the memory, the draft's logits are computed again in the
backward pass instead of kept.

Letters: B, T packed rows and their positions; R rows that draft, S steps, D draft width, D' target hidden, P pairs of
a chunk, U tokens they propose, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .at_once import AtOnce, Judged, again
from .base import LossSums, Objective, TeacherBatch
from .vocabulary import DraftVocabulary

PAIRS = 512
"""Rows of logits held at once at least: (PAIRS, W) in fp32, a few times over, and (PAIRS / S + S, V) of the target's."""

LOGITS = 2**23
"""Logits held at once where the vocabulary is narrow: 32 MiB in fp32. Few rows are no fast product."""

KEPT_BYTES = 2**28
"""Up to this, what the objective keeps of all pairs' logits for the backward pass stays in memory instead of being
computed again: one (P, W) matrix, as gradients are worked out at once (`distill.closed_form`)."""

Logits = Callable[[Tensor], Tensor]
"""The draft's logits over its vocabulary: (P, D) -> (P, W)."""


@dataclass(frozen=True)
class Drafts:
    """What a drafter computed, teacher-forced, at the rows that draft."""

    rows: Tensor
    """(R,) int64: which rows, as flat indices b*T + t, ascending."""
    states: Tensor
    """(S, R, D): state s of row t scores token t+2+s."""
    counted: Tensor
    """(S, R) bool: whether step s of the row counts (`TeacherBatch.step_mask`)."""

    def at(self, steps: Tensor, rows: Tensor) -> Tensor:
        """The states of pairs (P,): (P, D)."""
        return self.states.flatten(0, 1).index_select(0, steps * len(self.rows) + rows)

    def chunks(self, width: int) -> Iterator[Drafts]:
        """The same, some pairs at a time, of `width` logits each."""
        size = max(1, max(PAIRS, LOGITS // width) // len(self.states))
        parts = zip(self.rows.split(size), self.states.split(size, dim=1), self.counted.split(size, dim=1))
        return (Drafts(*part) for part in parts)


def loss_sums(
    drafts: Drafts,
    teacher: TeacherBatch,
    objective: Objective,
    *,
    logits: Logits,
    vocabulary: DraftVocabulary,
    weights: tuple[float, ...],
) -> LossSums:
    """The sums of `LossSums`, step k being state k; a token outside the draft vocabulary adds nothing but counts.
    Where `logits` is a layer that is not trained, the gradient is taken at once and no logits are kept."""
    is_frozen = isinstance(logits, nn.Module) and not any(weight.requires_grad for weight in logits.parameters())
    kept = drafts.counted.numel() * vocabulary.size * drafts.states.element_size()
    is_small = kept <= KEPT_BYTES
    sums, right = [], []
    for part in drafts.chunks(vocabulary.size):

        def judge(states: Tensor, *_: object, part: Drafts = part) -> Judged:
            return _judge(Drafts(part.rows, states, part.counted), teacher, objective, logits, vocabulary)

        if is_frozen and torch.is_grad_enabled():
            found = AtOnce.apply(judge, part.states, None)  # type: ignore[no-untyped-call]
        elif is_small:
            found = judge(part.states)
        else:
            found = again(judge, part.states)
        sums.append(found[0])
        right.append(found[1])
    alive = torch.cat([torch.ones_like(drafts.counted[:1]), torch.cat(right, dim=1)]).cumprod(dim=0).bool()  # (S+1, R)
    # Alive before step s and counted at it: a step that does not count ends a row's run, like a wrong one.
    reached = (alive[:-1] & drafts.counted).sum(dim=1)
    return LossSums(torch.stack(sums).sum(dim=0), drafts.counted.sum(dim=1), weights, alive[1:].sum(dim=1), reached)


def _judge(
    drafts: Drafts, teacher: TeacherBatch, objective: Objective, logits: Logits, vocabulary: DraftVocabulary
) -> Judged:
    """Objective summed per step (S,) float32, which pairs are right (S, R) bool, and nothing else."""
    steps, rows = drafts.counted.nonzero(as_tuple=True)  # (P,)
    draft = logits(drafts.at(steps, rows))  # (P, W)
    proposed = drafts.rows[rows] + steps + 2  # flat indices of the tokens t+2+s
    labels, known = vocabulary.labels(teacher.tokens.flatten()[proposed])
    target = which = None
    if objective.uses_target:
        scoring, which = (proposed - 1).unique(return_inverse=True)  # (U,), the tokens whose logits score them
        target = teacher.logits(teacher.hidden.flatten(0, 1)[scoring], vocabulary.token_map)  # (U, W)
    losses = objective(draft, labels, target, which) * known
    sums = losses.new_zeros(len(drafts.states)).index_add(0, steps, losses)
    right = torch.zeros_like(drafts.counted)  # after the sums: the backward pass stops short of it
    right[steps, rows] = (draft.max(dim=-1).indices == labels) & known
    return sums, right, sums.new_zeros(0)


@torch.no_grad()
def find_ranks(drafts: Drafts, teacher: TeacherBatch, *, logits: Logits, vocabulary: DraftVocabulary) -> Tensor:
    """(B, T, S) int64, as `TrainedDrafter.ranks`."""
    tokens = teacher.tokens.flatten()
    found = torch.full((len(tokens), len(drafts.states)), -1, device=tokens.device)
    for part in drafts.chunks(vocabulary.size):
        steps, rows = part.counted.nonzero(as_tuple=True)
        at = part.rows[rows]
        found[at, steps] = vocabulary.ranks(logits(part.at(steps, rows)), tokens[at + steps + 2])
    return found.view(*teacher.tokens.shape, -1)
