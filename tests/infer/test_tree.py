"""Token trees: everything that follows from the parents, checked against climbing them one by one."""

from __future__ import annotations

import random

import pytest
import torch

from draftsmith.infer.tree import TokenTree, Topology


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    return [-1] + [rng.randrange(node) for node in range(1, nodes)]


def climb(parents: list[int], node: int) -> set[int]:
    """The node and its ancestors."""
    return {node} if node == 0 else {node} | climb(parents, parents[node])


def build(parents: list[list[int]]) -> TokenTree:
    above = torch.tensor(parents)
    return TokenTree(torch.zeros_like(above), above, torch.ones_like(above, dtype=torch.bool))


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9, 33])
def test_ancestors_and_depths_are_those_of_climbing_the_parents(nodes: int) -> None:
    rng = random.Random(nodes)
    parents = [random_parents(rng, nodes) for _ in range(20)] + [list(range(-1, nodes - 1))]
    tree = build(parents)
    for row, above in enumerate(parents):
        for node in range(nodes):
            path = climb(above, node)
            assert set(tree.ancestors[row, node].nonzero().flatten().tolist()) == path
            assert int(tree.depths[row, node]) == len(path) - 1


def test_the_worked_example_of_the_module() -> None:
    tree = build([[-1, 0, 0, 1]])
    assert tree.depths.tolist() == [[0, 1, 1, 2]]
    assert tree.ancestors[0, 3].tolist() == [True, True, False, True]


def test_a_chain_is_a_tree_without_branches() -> None:
    anchors, draft = torch.tensor([7, 8]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    valid, probs = torch.tensor([[True, True, False], [True, False, False]]), torch.rand(2, 3, 9)
    tree = TokenTree.chain(anchors, draft, valid=valid, probs=probs)
    assert tree.num_nodes == 4
    assert tree.tokens.tolist() == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.valid.tolist() == [[True, True, True, False], [True, True, False, False]]
    assert tree.probs is not None
    assert torch.equal(tree.probs[:, 1:], probs)
    assert not bool(tree.probs[:, 0].any())


def test_a_root_alone_is_a_draft_of_nothing() -> None:
    tree = TokenTree.root(torch.tensor([7, 8, 9]))
    assert tree.tokens.tolist() == [[7], [8], [9]]
    assert tree.parents.tolist() == [[-1]] * 3
    assert tree.valid.tolist() == [[True]] * 3
    assert tree.ancestors.tolist() == [[[True]]] * 3
    assert tree.depths.tolist() == [[0]] * 3


def test_tensors_of_different_shapes_do_not_make_a_tree() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="parents"):
        TokenTree(tokens, tokens[:, :2], tokens > 0)
    with pytest.raises(AssertionError, match="valid"):
        TokenTree(tokens, tokens, tokens[:1] > 0)
    with pytest.raises(AssertionError, match=r"\(B, N\)"):
        TokenTree(tokens[0], tokens[0], tokens[0] > 0)


def test_topology_fills_every_path_with_its_candidates() -> None:
    rng = random.Random(0)
    paths = {()}
    while len(paths) < 30:
        paths.add((*rng.choice(sorted(path for path in paths if len(path) < 4)), rng.randrange(5)))
    wanted = sorted(paths - {()}, key=lambda path: rng.random())  # in any order
    topology = Topology(tuple(wanted))
    anchors, candidates = torch.tensor([100, 200]), torch.arange(2 * 4 * 5).view(2, 4, 5)
    tree = topology.fill(anchors, candidates)
    assert tree.tokens[:, 0].tolist() == [100, 200]
    for row in range(2):
        found = set()
        for node in range(1, tree.num_nodes):
            chain = sorted(climb(tree.parents[row].tolist(), node))[1:]
            found.add(tuple(int(tree.tokens[row, k]) for k in chain))
        assert found == {tuple(int(candidates[row, step, rank]) for step, rank in enumerate(path)) for path in wanted}
    assert bool(tree.valid.all())
    assert (topology.depth, topology.width) == (max(map(len, wanted)), 1 + max(map(max, wanted)))


def test_a_chain_topology_takes_the_best_candidate_of_each_step() -> None:
    topology = Topology.chain(3)
    assert (topology.depth, topology.width) == (3, 1)
    tree = topology.fill(torch.tensor([9]), torch.tensor([[[1], [2], [3]]]))
    chain = TokenTree.chain(torch.tensor([9]), torch.tensor([[1, 2, 3]]))
    assert torch.equal(tree.tokens, chain.tokens)
    assert torch.equal(tree.parents, chain.parents)


def test_an_empty_topology_is_the_root_alone() -> None:
    topology = Topology(())
    assert (topology.depth, topology.width) == (0, 0)
    assert topology.fill(torch.tensor([4]), torch.zeros(1, 0, 0, dtype=torch.int64)).tokens.tolist() == [[4]]


@pytest.mark.parametrize("paths", [((0,), (1, 0)), ((0,), (0,)), ((),)])
def test_a_topology_with_orphans_or_repeats_is_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="contain each path's prefix"):
        Topology(paths)


def test_a_topology_first_used_in_inference_serves_training_too() -> None:
    topology, anchors = Topology(((0,), (1,), (0, 2))), torch.tensor([5])
    with torch.inference_mode():
        topology.fill(anchors, torch.zeros(1, 2, 3, dtype=torch.int64))
    scores = torch.zeros(1, 2, 3, requires_grad=True)
    confidence = topology.fill(anchors, torch.zeros(1, 2, 3, dtype=torch.int64), scores).confidence
    assert confidence is not None
    confidence.sum().backward()
    assert scores.grad is not None
