"""Typical acceptance: Medusa's rule, exact for greedy rows, and shown not to be lossless for sampled ones."""

from __future__ import annotations

from math import exp, log

import torch
from torch import Tensor

from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.tree import TokenTree
from draftsmith.infer.typical import longest_typical, typical_lossy
from draftsmith.infer.verify import sample_match

EPSILON, DELTA = 0.09, 0.3


def chain_of(token: int) -> TokenTree:
    return TokenTree.chain(torch.zeros(1, dtype=torch.int64), torch.tensor([[token]]))


def accepts(p: Tensor, token: int) -> bool:
    rows = torch.stack([p, p])[None].log()
    return bool(longest_typical(chain_of(token), rows, epsilon=EPSILON, delta=DELTA)[0])


def test_a_token_is_kept_above_the_smaller_of_epsilon_and_the_scaled_typicality() -> None:
    sure = torch.tensor([0.85, 0.095, 0.055])  # entropy low: epsilon decides
    assert DELTA * exp(0.5) > EPSILON
    assert [accepts(sure, token) for token in range(3)] == [True, True, False]
    unsure = torch.full((30,), 0.02)  # entropy near log 30: delta * exp(-H) is about 0.01
    unsure[:10] = 0.055
    unsure[10:] = 0.0225
    unsure[29] = 0.009
    unsure = unsure / unsure.sum()
    entropy = -sum(float(value) * log(float(value)) for value in unsure)
    assert 0.0089 < float(unsure[29]) < DELTA * exp(-entropy) < float(unsure[12]) < EPSILON
    assert [accepts(unsure, token) for token in (0, 12, 29)] == [True, True, False]


def test_entropy_ignores_impossible_tokens() -> None:
    assert accepts(torch.tensor([0.5, 0.5, 0.0]), 0)
    assert not accepts(torch.tensor([0.5, 0.5, 0.0]), 2)


def test_the_longest_path_wins_and_the_likelier_of_equals() -> None:
    #        0
    #    1   2   3        2 and 3 lead to leaves, 1 is the likeliest child but ends there
    #        4   5
    parents = torch.tensor([[-1, 0, 0, 0, 2, 3]])
    tokens = torch.tensor([[0, 0, 1, 2, 0, 0]])
    p = torch.full((1, 6, 3), 1 / 3)
    p[0, 0] = torch.tensor([0.5, 0.2, 0.3])
    tree = TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
    assert int(longest_typical(tree, p.log(), epsilon=EPSILON, delta=DELTA)) == 5
    p[0, 3] = torch.tensor([0.0, 0.5, 0.5])  # now 5 is impossible
    assert int(longest_typical(tree, p.log(), epsilon=EPSILON, delta=DELTA)) == 4
    hidden = TokenTree(tokens, parents, torch.tensor([[True, True, False, True, True, True]]))
    assert int(longest_typical(hidden, p.log(), epsilon=EPSILON, delta=DELTA)) == 1


def test_greedy_rows_are_exact() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]]).expand(300, -1)
    tokens = torch.randint(3, (300, 6))
    tokens[:, 2] = (tokens[:, 1] + 1) % 3  # siblings are distinct
    tokens[:, 4] = (tokens[:, 3] + 1) % 3
    tree = TokenTree(tokens, parents, torch.rand(300, 6) < 0.9)
    logits = torch.randn(300, 6, 3)
    greedy = Sampling([SamplingParams()] * 300)
    lengths = torch.arange(300)
    lossy, exact = typical_lossy(tree, logits, lengths, greedy), sample_match(tree, logits, lengths, greedy)
    assert torch.equal(lossy.path, exact.path)
    assert torch.equal(lossy.bonus, exact.bonus)
    assert set(exact.count.tolist()) == {1, 2, 3}


def test_a_round_that_accepts_nothing_is_plain_sampling() -> None:
    sampling = Sampling([SamplingParams(temperature=1.0, seed=seed) for seed in range(50)])
    logits, lengths = torch.randn(50, 1, 9), torch.arange(50)
    tree = TokenTree.root(torch.zeros(50, dtype=torch.int64))
    verdict = typical_lossy(tree, logits, lengths, sampling)
    assert torch.equal(verdict.bonus, sampling.choose(logits, lengths[:, None] + 1)[:, 0])


def test_typical_acceptance_is_not_lossless() -> None:
    """The draft is the likeliest token (0.5): it always comes out, where the target writes it half the time."""
    sampling = Sampling([SamplingParams(temperature=1.0, seed=seed) for seed in range(400)])
    tree = TokenTree.chain(torch.zeros(400, dtype=torch.int64), torch.ones(400, 1, dtype=torch.int64))
    logits = torch.tensor([0.3, 0.5, 0.2]).log().expand(400, 2, 3)
    lossy = typical_lossy(tree, logits, torch.full((400,), 5), sampling)
    exact = sample_match(tree, logits, torch.full((400,), 5), sampling)
    assert lossy.count.tolist() == [2] * 400
    assert 150 < int((exact.count == 2).sum()) < 250
