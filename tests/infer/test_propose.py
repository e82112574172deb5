"""Drawing drafts: without replacement, in the order of drawing, reproducible, and independent where it must be."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from scipy.stats import chi2

from draftsmith.infer.propose import draw_children, draw_next, gumbel_top_k

FALSE_ALARM = 1e-6


def test_ordered_draws_have_the_law_of_draws_without_replacement() -> None:
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 40_000
    positions = torch.arange(rows)
    tokens, valid = gumbel_top_k(q.log().expand(rows, 4), seeds=torch.full((rows,), 7), positions=positions, k=2)
    assert bool(valid.all())
    seen = dict.fromkeys(permutations(range(4), 2), 0)
    for first, second in tokens.tolist():
        seen[first, second] += 1
    expected = {(a, b): rows * float(q[a] * q[b] / (1 - q[a])) for a, b in seen}
    statistic = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in seen)
    assert chi2.sf(statistic, len(seen) - 1) > FALSE_ALARM


def test_a_row_that_runs_out_says_so() -> None:
    log_q = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.5, 0.0, 0.5]])
    log_q[1] = log_q[1].log()
    tokens, valid = gumbel_top_k(log_q, seeds=torch.tensor([1, 2]), positions=torch.tensor([3, 3]), k=3)
    assert valid.tolist() == [[True, False, False], [True, True, False]]
    assert tokens[0, 0] == 0
    assert set(tokens[1, :2].tolist()) == {0, 2}
    assert all(len(set(row)) == 3 for row in tokens.tolist())


def test_more_children_than_tokens_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="4 distinct tokens from a vocabulary of 3"):
        gumbel_top_k(torch.zeros(1, 3), seeds=torch.zeros(1).long(), positions=torch.zeros(1).long(), k=4)


def test_every_node_and_round_has_noise_of_its_own() -> None:
    """Same row of q at two nodes, in two rounds and for two seeds: the drawn orders of 50 tokens all differ."""
    log_q = torch.zeros(2, 2, 50) - torch.tensor(50.0).log()
    nodes, seeds = torch.tensor([[0, 1], [0, 1]]), torch.tensor([1, 2])
    rounds = [draw_children(log_q, nodes, lengths=torch.tensor([9, 9]) + step, seeds=seeds, k=50)[0] for step in (0, 1)]
    orders = {tuple(order) for tokens in rounds for row in tokens.tolist() for order in row}
    assert len(orders) == 8


def test_a_draw_depends_on_its_key_alone() -> None:
    log_q = torch.log_softmax(torch.randn(3, 4, 20), dim=-1)
    nodes = torch.tensor([[0, 1, 2, 3], [0, 2, 4, 6], [5, 1, 9, 0]])
    lengths, seeds = torch.tensor([10, 20, 10]), torch.tensor([1, 1, 5])
    tokens, _ = draw_children(log_q, nodes, lengths=lengths, seeds=seeds, k=3)
    alone, _ = draw_children(log_q[2:, 3:], nodes[2:, 3:], lengths=lengths[2:], seeds=seeds[2:], k=3)
    assert torch.equal(alone[0, 0], tokens[2, 3])


def test_a_chain_draws_the_first_child_of_each_node() -> None:
    log_q = torch.log_softmax(torch.randn(5, 20), dim=-1)
    lengths, seeds = torch.arange(5), torch.arange(5)
    tokens = draw_next(log_q, 2, lengths=lengths, seeds=seeds)
    children, _ = draw_children(log_q[:, None], torch.full((5, 1), 2), lengths=lengths, seeds=seeds, k=4)
    assert torch.equal(tokens, children[:, 0, 0])
