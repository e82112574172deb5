"""The loss of drafted blocks: a divergence per slot, weighted by position, and what a confidence head learns.

    loss of slot k = weight_k (divergence(p_k, q_k) + BCE(confidence_k, 1 - TV(p_k, q_k)))

1 - TV(p, q) = sum min(p, q) is the probability that a token drawn from q is accepted. It is a label: no gradient flows
through it, and none from the confidence into what is drafted.

Blocks are taken in chunks, and no chunk's logits are kept. Within one, every token's target logits are computed once,
whichever slots propose it.

Letters: B, T packed rows and their positions; R anchors, S slots that propose, D draft width, P pairs (slot, anchor) of a
chunk that count, U tokens they propose, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .at_once import AtOnce, Judged, again
from .base import LossSums, Objective, TeacherBatch
from .compare import Drafts, Logits
from .position_weights import PositionWeights
from .vocabulary import DraftVocabulary


@dataclass(frozen=True)
class BlockLoss:
    """How the blocks of one teacher batch are judged."""

    teacher: TeacherBatch
    objective: Objective
    logits: Logits
    """The draft's logits: (P, D) -> (P, W)."""
    is_frozen: bool
    """Whether nothing in `logits` is trained. Then the gradient of the states is taken at once, while the logits are
    there, and they need not be computed again."""
    vocabulary: DraftVocabulary
    positions: PositionWeights

    def sums(self, drafts: Drafts, *, scale: Tensor, confidence: Tensor | None) -> LossSums:
        """scale: (R,) float32, what each anchor stands for; confidence: (S, R) logits, or None without such a head.

        `counts` are those of these anchors. A token outside the draft vocabulary has no divergence but counts.
        """
        parts = list(drafts.chunks(self.vocabulary.size))
        sizes = [len(part.rows) for part in parts]
        sure: Sequence[Tensor | None] = [None] * len(parts) if confidence is None else confidence.split(sizes, dim=1)
        found = []
        for part, factor, logits in zip(parts, scale.split(sizes), sure):

            def judge(states: Tensor, logits: Tensor | None, part: Drafts = part, factor: Tensor = factor) -> Judged:
                return self._judge(part.rows, states, part.counted, factor, logits)

            if self.is_frozen and torch.is_grad_enabled():
                found.append(AtOnce.apply(judge, part.states, logits))  # type: ignore[no-untyped-call]
            else:
                found.append(again(judge, part.states, logits))
        losses, right, errors = zip(*found)
        counted, steps = drafts.counted, len(drafts.states)
        alive = torch.cat([torch.ones_like(counted[:1]), torch.cat(right, dim=1)]).cumprod(dim=0).bool()  # (S+1, R)
        # Alive before a slot and counted at it: a slot that does not count ends a block's run, like a wrong one.
        reached = (alive[:-1] & counted).sum(dim=1)
        pairs = counted.sum().to(torch.float32)
        names = () if confidence is None else ("confidence_loss", "confidence_error")
        extra = {name: torch.stack([value, pairs]) for name, value in zip(names, torch.stack(errors).sum(dim=0))}
        return LossSums(
            torch.stack(losses).sum(dim=0),
            counted.sum(dim=1),
            self.positions.fixed(steps),
            alive[1:].sum(dim=1),
            reached,
            extra,
        )

    def _judge(self, rows: Tensor, states: Tensor, counted: Tensor, scale: Tensor, confidence: Tensor | None) -> Judged:
        """Weighted losses per slot (S,) float32, which pairs are right (S, R) bool, and the sums of the confidence's
        cross entropy and absolute error (2,)."""
        steps, which = counted.nonzero(as_tuple=True)  # (P,)
        draft = self.logits(Drafts(rows, states, counted).at(steps, which))  # (P, W)
        proposed = rows[which] + steps + 2  # flat indices of the tokens t+2+k
        labels, known = self.vocabulary.labels(self.teacher.tokens.flatten()[proposed])
        is_exact = confidence is not None or self.positions.reads_target
        target = scored = None
        if is_exact or self.objective.uses_target:
            scoring, scored = (proposed - 1).unique(return_inverse=True)  # (U,)
            target = self._target(scoring, is_exact=is_exact)  # (U, W)
        losses = self.objective(draft, labels, target, scored) * known
        if is_exact and target is not None:
            target = target[scored]  # (P, W)
        errors = losses.new_zeros(2)
        if confidence is not None:
            assert target is not None, "a confidence is compared with the target's distribution"
            given, label = confidence[steps, which].float(), overlap(target, draft)
            entropy = F.binary_cross_entropy_with_logits(given, label, reduction="none")
            losses = losses + entropy
            errors = torch.stack([entropy.sum(), (given.sigmoid() - label).abs().sum()]).detach()
        if self.positions.reads_draft or self.positions.reads_target:
            probs = torch.zeros(counted.shape, device=counted.device)
            source = draft if self.positions.reads_draft else target
            assert source is not None, "cat weights read the target's distribution"
            probs[steps, which] = probability(source, labels, is_normal=source is target) * known
            losses = losses * self.positions.of(probs, counted)[steps, which]
        right = torch.zeros_like(counted)
        right[steps, which] = (draft.max(dim=-1).indices == labels) & known
        losses = losses * scale[which]
        return losses.new_zeros(len(states)).index_add(0, steps, losses), right, errors

    def _target(self, scoring: Tensor, *, is_exact: bool) -> Tensor:
        """The target's logits (U, W) at the tokens `scoring` (U,), flat indices; log-probabilities if `is_exact`, of the
        whole vocabulary even where the draft's is reduced."""
        hidden = self.teacher.hidden.flatten(0, 1)[scoring]
        if not is_exact:
            return self.teacher.logits(hidden, self.vocabulary.token_map)
        whole = self.teacher.logits(hidden).float().log_softmax(dim=-1)  # (U, V)
        return whole if self.vocabulary.token_map is None else whole[:, self.vocabulary.token_map]


def count_steps(teacher: TeacherBatch, num_steps: int) -> Tensor:
    """(S, B, T) bool: `teacher.step_mask` of all steps."""
    return torch.stack([teacher.step_mask(step) for step in range(num_steps)])


def add_up(parts: Sequence[LossSums], *, counts: Tensor) -> LossSums:
    """The sums of several shares of one teacher batch, whose rows that count are `counts` (S,) in all."""
    sums, survived, reached = (
        torch.stack(values).sum(dim=0) for values in zip(*((part.sums, part.survived, part.reached) for part in parts))
    )
    extra = {name: torch.stack([part.extra[name] for part in parts]).sum(dim=0) for name in parts[0].extra}
    return LossSums(sums, counts, parts[0].weights, survived, reached, extra)


@torch.no_grad()
def overlap(log_p: Tensor, draft: Tensor) -> Tensor:
    """sum min(p, q) = 1 - TV(p, q) per row: log_p (P, W), the target's log-probabilities; draft (P, W) logits -> (P,)."""
    return torch.minimum(log_p.exp(), draft.float().softmax(dim=-1)).sum(dim=-1).clamp(0, 1)


@torch.no_grad()
def probability(logits: Tensor, labels: Tensor, *, is_normal: bool) -> Tensor:
    """Probability (P,) float32 of each row's label; `is_normal` if the logits (P, W) are log-probabilities already."""
    logits = logits.float()
    own = logits.gather(-1, labels[:, None])[:, 0]
    return (own if is_normal else own - logits.logsumexp(dim=-1)).exp()
