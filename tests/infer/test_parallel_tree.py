"""Laws of the best-first tree over parallel candidates: the most likely nodes, exactly, for either kind of scores."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from draftsmith.infer.parallel_tree import best_first
from draftsmith.infer.tree import TokenTree

Path = tuple[int, ...]


def candidates(batch: int, depths: int, ranks: int, *, seed: int, conditioned: bool) -> tuple[Tensor, Tensor]:
    """Distinct random token ids (B, K, R), in no order, and normalised log-probabilities with some mass elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(1000, generator=generator)[: depths * ranks] for _ in range(batch)])
    shape = (batch, depths, ranks, ranks) if conditioned else (batch, depths, ranks)
    logits = 2 * torch.randn(*shape, generator=generator)
    rest = torch.randn(*shape[:-1], 1, generator=generator)
    return tokens.view(batch, depths, ranks), torch.cat([logits, rest], dim=-1).log_softmax(dim=-1)[..., :-1]


def value(path: Path, log_probs: Tensor) -> float:
    """log-probability of candidates `path`, from one row's scores."""
    total = 0.0
    for depth, rank in enumerate(path):
        scores = log_probs[depth] if log_probs.dim() == 2 else log_probs[depth, path[depth - 1] if depth else 0]
        total += float(scores[rank])
    return total


def brute_force(log_probs: Tensor, *, nodes: int) -> set[Path]:
    depths, ranks = log_probs.shape[0], log_probs.shape[-1]
    every = [path for depth in range(1, depths + 1) for path in product(range(ranks), repeat=depth)]
    return set(sorted(every, key=lambda path: -value(path, log_probs))[:nodes])


def paths(tree: TokenTree, row: int, tokens: Tensor) -> list[Path]:
    """The candidates along each valid node's path, in the order of the nodes; tokens: (K, R) of that row."""
    found: list[Path] = [()]
    for node in range(1, tree.num_nodes):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node, "a child stands before its parent"
        above = found[parent]
        rank = int((tokens[len(above)] == tree.tokens[row, node]).nonzero()[0])
        found.append((*above, rank))
    return [path for path, is_valid in zip(found, tree.valid[row].tolist()) if is_valid][1:]


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize(("depths", "ranks", "nodes"), [(1, 4, 3), (3, 3, 1), (3, 3, 12), (4, 2, 30), (2, 5, 17)])
def test_the_tree_holds_the_most_likely_nodes(conditioned: bool, depths: int, ranks: int, nodes: int) -> None:
    anchors = torch.tensor([7, 8, 9])
    tokens, log_probs = candidates(3, depths, ranks, seed=depths + nodes, conditioned=conditioned)
    tree = best_first(anchors, tokens, log_probs, nodes=nodes)
    assert tree.tokens[:, 0].tolist() == anchors.tolist()
    for row in range(3):
        found = paths(tree, row, tokens[row])
        assert len(found) == len(set(found)) == nodes
        assert set(found) == brute_force(log_probs[row], nodes=nodes)
        values = [value(path, log_probs[row]) for path in found]
        assert values == sorted(values, reverse=True), "nodes were not popped in the order of their value"


@pytest.mark.parametrize("conditioned", [False, True])
def test_one_candidate_per_depth_is_a_chain(conditioned: bool) -> None:
    tokens, log_probs = candidates(2, 4, 1, seed=3, conditioned=conditioned)
    anchors = torch.tensor([1, 2])
    tree, chain = best_first(anchors, tokens, log_probs, nodes=4), TokenTree.chain(anchors, tokens[:, :, 0])
    assert torch.equal(tree.tokens, chain.tokens)
    assert torch.equal(tree.parents, chain.parents)
    assert bool(tree.valid.all())


def test_a_row_does_not_depend_on_its_batch() -> None:
    tokens, log_probs = candidates(4, 3, 3, seed=5, conditioned=True)
    anchors = torch.arange(4)
    together = best_first(anchors, tokens, log_probs, nodes=10)
    for row in range(4):
        one = slice(row, row + 1)
        alone = best_first(anchors[one], tokens[one], log_probs[one], nodes=10)
        assert torch.equal(alone.tokens, together.tokens[one])
        assert torch.equal(alone.parents, together.parents[one])


def test_impossible_candidates_are_left_out_and_the_row_is_padded_with_invalid_nodes() -> None:
    tokens, log_probs = candidates(2, 2, 3, seed=6, conditioned=False)
    log_probs[1, :, 1:] = -torch.inf  # row 1 has one path of two nodes
    tree = best_first(torch.tensor([0, 0]), tokens, log_probs, nodes=6)
    assert tree.valid.sum(dim=1).tolist() == [7, 3]
    assert paths(tree, 1, tokens[1]) == [(0,), (0, 0)]
    assert set(paths(tree, 0, tokens[0])) == brute_force(log_probs[0], nodes=6)


def test_equal_scores_and_rounding_above_one_keep_parents_in_front() -> None:
    """Certain candidates give children the score of their parents, or a little more where a probability was rounded up."""
    tokens = torch.arange(12).view(1, 4, 3)
    log_probs = torch.tensor([1e-7, -1.0, -1.0]).expand(1, 4, 3)
    tree = best_first(torch.tensor([50]), tokens, log_probs, nodes=9)
    assert paths(tree, 0, tokens[0])[:4] == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert bool((tree.depths[0] > 0)[1:].all())


def test_lazy_expansion_is_never_worth_less_than_keeping_all_children() -> None:
    """The published rule pops the best node and keeps all its children; its expected acceptance is lower."""
    tokens, log_probs = candidates(1, 4, 4, seed=8, conditioned=False)
    lazy = {*paths(best_first(torch.tensor([0]), tokens, log_probs, nodes=20), 0, tokens[0])}
    greedy: set[Path] = set()
    frontier: set[Path] = {()}
    while len(greedy) < 20:
        best = max((path for path in frontier if len(path) < 4), key=lambda path: value(path, log_probs[0]))
        frontier.remove(best)
        children = {(*best, rank) for rank in range(4)}
        frontier |= children
        greedy |= children
    worth = [sum(float(torch.tensor(value(path, log_probs[0])).exp()) for path in found) for found in (lazy, greedy)]
    assert len(lazy) == len(greedy) == 20
    assert worth[0] > worth[1]
