"""Best-first trees against brute force, and the choice of size."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.infer.cost import SIZES
from draftsmith.infer.tree import Topology
from draftsmith.infer.tree_search import choose_tree, expected_tau, grow, interpolate, rank_accuracy, round_starts


def random_table(seed: int) -> list[list[float]]:
    table = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).sort(dim=1, descending=True).values
    return (table / table.sum(dim=1, keepdim=True) * 0.9).tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1, 3, 5])
def test_grown_tree_is_the_best_of_all_trees_of_its_size(seed: int, size: int) -> None:
    table = random_table(seed)
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    best = 0.0
    for chosen in itertools.combinations(paths, size):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            best = max(best, expected_tau(Topology(chosen), table))
    grown = Topology(tuple(path for path, _ in grow(table, num_nodes=size)))
    assert expected_tau(grown, table) == pytest.approx(best, abs=1e-12)


def test_a_table_that_is_not_sorted_still_gives_a_closed_tree() -> None:
    grown = grow([[0.1, 0.4, 0.2], [0.3, 0.5, 0.0]], num_nodes=9)
    Topology(tuple(path for path, _ in grown))  # raises if a prefix is missing
    values = [value for _, value in grown]
    assert values == sorted(values, reverse=True)


def test_rank_accuracy_is_conditional_on_earlier_candidates() -> None:
    ranks = torch.tensor([[0, 1], [0, 0], [1, 0], [5, 0], [-1, 0], [0, -1]])
    table = rank_accuracy(ranks, width=2)
    assert table[0] == pytest.approx([3 / 5, 1 / 5])
    assert table[1] == pytest.approx([2 / 3, 1 / 3])  # the row of rank 5 and those that do not count are out


def test_tree_size_follows_the_cost_curve() -> None:
    table = random_table(1)
    free, tau_free = choose_tree(table, seconds={1: 1.0, 8: 1.0})
    dear, tau_dear = choose_tree(table, seconds={1: 1.0, 8: 8.0})
    assert len(free.paths) == 7
    assert tau_free > tau_dear >= 1.0
    assert len(dear.paths) == 0, "verification that costs its own token each can never pay"


def test_of_trees_that_timing_cannot_tell_apart_the_largest_is_taken() -> None:
    """tau is 1.4 at 2 nodes and 1.6 at 3, rates 1.4 and then 1.6 / 1.16 = 1.38, 1 % less, or 1.6 / 1.2 = 1.33, 5 % less."""
    close, _ = choose_tree([[0.4, 0.2]], seconds={1: 1.0, 2: 1.0, 3: 1.16})
    apart, _ = choose_tree([[0.4, 0.2]], seconds={1: 1.0, 2: 1.0, 3: 1.2})
    assert (close.paths, apart.paths) == (((0,), (1,)), ((0,),))


def test_a_tree_stops_before_the_node_that_opens_another_tile() -> None:
    table = [[0.5, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01]] * 3
    topology, _ = choose_tree(table, seconds={1: 1.0, 16: 1.05, 17: 1.35, 24: 1.4})
    assert len(topology.paths) == 15, "the root is the sixteenth"
    assert all(size in SIZES and size + 1 in SIZES for size in range(16, 64, 16)), "steps are measured on both sides"


def test_overhead_can_make_plain_decoding_win() -> None:
    topology, tau = choose_tree([[0.2]], seconds={1: 1.0, 4: 1.0}, overhead=0.5)
    assert (topology.paths, tau) == ((), 1.0)


def test_interpolation_is_linear_between_measured_sizes() -> None:
    curve = {1: 1.0, 5: 3.0}
    assert [interpolate(curve, size) for size in (1, 2, 5, 10)] == [1.0, 1.5, 3.0, 6.0]


def test_orphan_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="contain each path's prefix"):
        Topology(((0,), (1, 0)))


def test_rounds_begin_where_the_one_before_ended() -> None:
    """Two answers in a row; a round keeps its leading right tokens and one more."""
    right, wrong, out = [0, 0], [3, 0], [-1, -1]
    ranks = torch.tensor([[out, right, right, wrong, wrong, wrong, [0, 5], wrong, out, out, wrong, wrong, [0, -1]]])
    assert round_starts(ranks)[0].nonzero()[:, 0].tolist() == [1, 4, 5, 6, 10, 11, 12]
