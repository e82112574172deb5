"""What a schedule chooses, of drafts whose confidences are given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.infer.calibration import Calibration
from draftsmith.infer.drafter import Drafter, Observation
from draftsmith.infer.sampling import Sampling
from draftsmith.infer.schedule import Scheduled, cut
from draftsmith.infer.tree import TokenTree


class Fixed(Drafter):
    """Drafts zeros with given confidences; the state counts the calls."""

    taps: tuple[int, ...] = ()

    def __init__(self, confidences: list[Tensor]) -> None:
        self.confidences = confidences

    def start(self, *, rows: int, capacity: int) -> list[int]:
        return []

    def move(self, state: list[int], source: int, target: int) -> None:
        pass

    def observe(self, state: list[int], seen: Observation) -> None:
        pass

    def draft(self, state: list[int], anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        sure = self.confidences[len(state)]
        state.append(0)
        return TokenTree.chain(anchors, torch.zeros_like(sure, dtype=torch.int64), confidence=sure)


def verified(scheduled: Scheduled, rounds: int, rows: int) -> list[list[int]]:
    state = scheduled.start(rows=rows, capacity=8)
    anchors = torch.zeros(rows, dtype=torch.int64)
    trees = [scheduled.draft(state, anchors, anchors, Sampling([])) for _ in range(rounds)]
    return [(tree.valid.sum(dim=1) - 1).tolist() for tree in trees]


def test_a_budget_is_the_one_of_the_round_before() -> None:
    """The first round expects a coin's, the second what the first drafted, whatever it drafts itself."""
    high, low = torch.tensor([[0.99, 0.99, 0.99], [0.9, 0.1, 0.1]]), torch.tensor([[0.1, 0.01, 0.01], [0.02, 0.9, 0.9]])
    seconds = {1: 1.0, 2: 1.0, 8: 2.2}  # a token costs a fifth of a step
    lengths = verified(Scheduled(Fixed([high, low, low]), seconds=seconds, rule="budget"), 3, 2)
    calm = verified(Scheduled(Fixed([high, high, low]), seconds=seconds, rule="budget"), 3, 2)
    assert calm == [[2, 0], [3, 1], [1, 3]]
    assert lengths == [[2, 0], [1, 3], [0, 0]]


def test_a_new_request_begins_with_what_was_measured_on_average() -> None:
    calibration = Calibration(survival=(0.95, 0.9, 0.85))
    scheduled = Scheduled(
        Fixed([torch.full((1, 3), 0.5)] * 3), seconds={1: 1.0, 4: 1.6}, rule="budget", calibration=calibration
    )
    state = scheduled.start(rows=2, capacity=8)
    anchor = torch.zeros(1, dtype=torch.int64)
    first = scheduled.draft(state, anchor, anchor, Sampling([]))
    assert first.num_nodes == 4
    torch.testing.assert_close(state.survival[0, :3], torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64))
    scheduled.move(state, 0, 1)
    assert state.survival[1, 2] == 0.125
    one = torch.ones(1, dtype=torch.int64)
    prompt = Observation(slice(0, 1), anchor[None], one, anchor, torch.zeros(1, 1, 4), None, anchor)
    scheduled.observe(state, prompt)
    torch.testing.assert_close(state.survival[0, :3], torch.tensor([0.95, 0.9, 0.85], dtype=torch.float64))
    assert state.survival[1, 2] == 0.125


def test_what_rows_of_different_lengths_cost_besides_is_priced() -> None:
    """Two likely tokens are worth a tenth of a step each, but not a whole one for making the rows differ."""
    unlike, seconds = torch.tensor([[0.9, 0.9], [0.1, 0.1]]), {1: 1.0, 2: 1.0, 4: 1.2, 6: 9.0}
    for uneven, kept in ((0.0, [2, 0]), (1.0, [0, 0])):
        assert verified(Scheduled(Fixed([unlike]), seconds=seconds, uneven=uneven, rule="best"), 1, 2) == [kept]
    alike = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
    assert verified(Scheduled(Fixed([alike]), seconds=seconds, uneven=1.0, rule="best"), 1, 2) == [[1, 1]]
    alone = Scheduled(Fixed([unlike[:1]]), seconds=seconds, uneven=1.0, rule="best")
    assert verified(alone, 1, 1) == [[2]], "a row alone differs from none"


def test_early_stop_climbs_over_what_different_lengths_cost() -> None:
    """The first admission never makes good for it; the round before says whether all of them do."""
    unsure = torch.full((8, 4), 0.1)
    half = torch.where(torch.arange(8)[:, None] < 4, 0.97, unsure)
    seconds = {1: 1.0, 8: 1.0, 40: 4.0}

    def rounds(uneven: float, *drafts: torch.Tensor) -> list[int]:
        scheduled = Scheduled(Fixed(list(drafts)), seconds=seconds, uneven=uneven)
        return [sum(lengths) for lengths in verified(scheduled, len(drafts), 8)]

    assert rounds(0.0, half, half, unsure, half) == [16, 16, 0, 16]
    assert rounds(0.1, half, half, unsure, half) == [0, 16, 0, 0], "0.1 is more than the first token is worth"
    assert rounds(9.0, half, half, unsure, half) == [0, 0, 0, 0]


def test_what_was_not_drafted_is_not_read() -> None:
    """A budget larger than the drafts: a chain that ended early is not filled up."""

    class Short(Fixed):
        def draft(self, state: list[int], anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
            tree = super().draft(state, anchors, lengths, sampling)
            return replace(tree, valid=torch.tensor([[True, True, False, False], [True, True, True, True]]))

    scheduled = Scheduled(Short([torch.ones(2, 3)] * 2), seconds={1: 1.0, 8: 1.0}, rule="budget")
    state = scheduled.start(rows=2, capacity=8)
    tree = scheduled.draft(state, torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), Sampling([]))
    assert tree.read is not None
    assert tree.read.sum(dim=1).tolist() == [2, 4]


def test_cutting_keeps_everything_of_the_prefix() -> None:
    tokens, sure = torch.randint(9, (3, 4)), torch.rand(3, 4)
    probs = torch.rand(3, 4, 9)
    tree = TokenTree.chain(torch.tensor([1, 2, 3]), tokens, probs=probs, confidence=sure)
    short = cut(tree, torch.tensor([2, 0, 3]))
    assert short.num_nodes == 4
    assert (short.valid.sum(dim=1) - 1).tolist() == [2, 0, 3]
    assert short.read is not None
    assert torch.equal(short.read, short.valid)
    assert short.probs is not None
    assert torch.equal(short.probs[:, 1:], probs[:, :3])
    assert torch.equal(short.tokens, tree.tokens[:, :4])
    assert cut(tree, torch.tensor([2, 2, 2])).read is None, "rows of one length need no packing"
    assert cut(tree, torch.tensor([0, 0, 0])).num_nodes == 1
