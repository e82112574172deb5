"""Chunked losses and ranks against a plain loop over every counted pair."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from draftsmith.distill.objectives import ObjectiveConfig, make_objective
from draftsmith.heads import Objective, TeacherBatch
from draftsmith.heads import compare as comparison
from draftsmith.heads.compare import Drafts, find_ranks, loss_sums
from draftsmith.heads.vocabulary import DraftVocabulary

STEPS, WIDTH, HIDDEN, VOCAB = 3, 6, 5, 20
WEIGHTS = (1.0, 0.8, 0.64)


class World:
    """Random drafts of a random teacher over a vocabulary of the even tokens."""

    def __init__(self, *, supervised: bool = True) -> None:
        head, self.draft_head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB // 2, WIDTH, requires_grad=True)
        self.vocabulary = DraftVocabulary(VOCAB // 2, VOCAB, torch.arange(0, VOCAB, 2))
        segments = torch.tensor([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3])
        mask = (torch.rand(2, 12) < 0.8) & (segments > 0) & supervised

        def logits(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
            return hidden @ (head if vocabulary is None else head[vocabulary]).T

        tokens, hidden = torch.randint(VOCAB, (2, 12)), torch.randn(2, 12, HIDDEN)
        self.teacher = TeacherBatch(tokens, segments, torch.zeros_like(tokens), mask, hidden, None, logits)
        counted = torch.stack([self.teacher.step_mask(step) for step in range(STEPS)]).flatten(1)
        rows = counted.any(dim=0).nonzero()[:, 0]
        self.states = torch.randn(STEPS, len(rows), WIDTH, requires_grad=True)
        self.drafts = Drafts(rows, self.states, counted[:, rows])

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.draft_head.T

    def plain(self, objective: Objective) -> tuple[Tensor, dict[tuple[int, int, int], int]]:
        """Objective summed per step, and the rank at every counted (b, t, step), one pair at a time."""
        sums, ranks = [], {}
        for step in range(STEPS):
            total = torch.zeros(())
            for index, flat in enumerate(self.drafts.rows.tolist()):
                b, t = divmod(flat, 12)
                if not bool(self.teacher.step_mask(step)[b, t]):
                    continue
                token, draft = int(self.teacher.tokens[b, t + 2 + step]), self.logits(self.states[step, index])
                ranks[b, t, step] = VOCAB // 2
                if token % 2 == 0:
                    truth = self.teacher.logits(self.teacher.hidden[b, t + 1 + step])[::2]
                    total = total + objective(draft[None], torch.tensor([token // 2]), truth[None])[0]
                    ranks[b, t, step] = draft.argsort(descending=True).tolist().index(token // 2)
            sums.append(total)
        return torch.stack(sums), ranks


@pytest.mark.parametrize("pairs", [1, 4, 512])
@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl"])
def test_chunked_sums_and_gradients_equal_a_loop_over_pairs(
    monkeypatch: pytest.MonkeyPatch, pairs: int, name: str
) -> None:
    monkeypatch.setattr(comparison, "PAIRS", pairs)
    monkeypatch.setattr(comparison, "LOGITS", 0)
    world, objective = World(), make_objective(ObjectiveConfig.model_validate({"name": name}))
    found = loss_sums(
        world.drafts, world.teacher, objective, logits=world.logits, vocabulary=world.vocabulary, weights=WEIGHTS
    )
    expected, ranks = world.plain(objective)
    torch.testing.assert_close(found.sums, expected)
    leaves = [world.states, world.draft_head]
    scale = torch.tensor([0.3, 1.0, 2.0])
    got = torch.autograd.grad((found.sums * scale).sum(), leaves)
    wanted = torch.autograd.grad((expected * scale).sum(), leaves)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs)
    assert found.counts.tolist() == [int(world.teacher.step_mask(step).sum()) for step in range(STEPS)]
    table = find_ranks(world.drafts, world.teacher, logits=world.logits, vocabulary=world.vocabulary)
    assert {tuple(at): int(table[tuple(at)]) for at in (table >= 0).nonzero().tolist()} == ranks
    alive = torch.ones_like(table[..., 0], dtype=torch.bool)
    for step in range(STEPS):
        alive &= table[..., step] >= 0
        assert int(found.reached[step]) == int(alive.sum())
        alive &= table[..., step] == 0
        assert int(found.survived[step]) == int(alive.sum())


def test_a_batch_without_a_supervised_token_gives_zero_and_a_gradient_of_zero() -> None:
    world, objective = World(supervised=False), make_objective(ObjectiveConfig(name="forward_kl"))
    found = loss_sums(
        world.drafts, world.teacher, objective, logits=world.logits, vocabulary=world.vocabulary, weights=WEIGHTS
    )
    assert found.sums.tolist() == [0.0] * STEPS
    assert found.counts.tolist() == [0] * STEPS
    found.sums.sum().backward()
    assert world.draft_head.grad is not None
    assert bool((world.draft_head.grad == 0).all())


def test_the_backward_pass_keeps_states_and_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at once nor chunk by chunk, where they would fill the memory."""
    monkeypatch.setattr(comparison, "PAIRS", 6)
    monkeypatch.setattr(comparison, "LOGITS", 0)
    monkeypatch.setattr(comparison, "KEPT_BYTES", 0)
    world, kept = World(), [0]

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sums(
            world.drafts,
            world.teacher,
            make_objective(ObjectiveConfig(name="forward_kl")),
            logits=world.logits,
            vocabulary=world.vocabulary,
            weights=WEIGHTS,
        )
    assert sum(kept) < 2 * world.states.numel()


@pytest.mark.parametrize("name", ["forward_kl", "tvd", "cross_entropy"])
def test_logits_kept_and_logits_computed_again_give_the_same_gradient(
    name: Literal["forward_kl", "tvd", "cross_entropy"], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, found = World(), []
    for kept_bytes in (0, 2**28):
        monkeypatch.setattr(comparison, "KEPT_BYTES", kept_bytes)
        out = loss_sums(
            world.drafts,
            world.teacher,
            make_objective(ObjectiveConfig(name=name)),
            logits=world.logits,
            vocabulary=world.vocabulary,
            weights=WEIGHTS,
        )
        found.append((out.sums.detach(), *torch.autograd.grad(out.sums.sum(), world.states)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
