"""Grown trees against a plain retelling of EAGLE-2's rules, and what must hold where scores tie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.infer.dynamic_tree import DynamicGrowth, DynamicShape, StaticGrowth
from draftsmith.infer.tree import TokenTree, Topology

VOCAB = 7
Path = tuple[int, ...]
Table = Callable[[Path], Tensor]
"""A drafter whose proposals depend on the whole path: the log-probabilities (V,) after it."""


def random_table(seed: int, *, sharpness: float = 1.0) -> Table:
    def row(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        return (torch.randn(VOCAB, generator=generator) * sharpness).log_softmax(-1)

    return row


def grow(growth: DynamicGrowth | StaticGrowth, tables: list[Table]) -> TokenTree:
    """Drive a growth with one table per row, walking paths by `origin` alone."""
    paths: list[list[Path]] = [[()] for _ in tables]
    run: list[list[Path]] = [[] for _ in tables]
    while True:
        rows = torch.stack([torch.stack([table(path) for path in level]) for table, level in zip(tables, paths)])
        best = rows.topk(min(growth.width, VOCAB), dim=-1)
        frontier = growth.add(best.indices, best.values)
        if frontier is None:
            return growth.finish()
        paths = [
            [(*level[origin], token) for origin, token in zip(origins, tokens)]
            for level, origins, tokens in zip(paths, frontier.origin.tolist(), frontier.tokens.tolist())
        ]
        for row, level in enumerate(paths):
            run[row] += level
            for node, path in enumerate(level):
                above = [path[: len(other)] == other for other in run[row]]
                assert frontier.ancestors[row, node].tolist() == above


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths[1:]


def retold(table: Table, shape: DynamicShape) -> set[Path]:
    """EAGLE-2 over dicts: expand the best `width` of each level, keep the best `nodes` of all."""
    pool: dict[Path, float] = {}
    level = {(): 0.0}
    for _ in range(shape.depth):
        found = {}
        for path, score in level.items():
            best = table(path).topk(min(shape.width, VOCAB))
            found |= {
                (*path, int(token)): score + float(value) for token, value in zip(best.indices, best.values.double())
            }
        pool |= found
        level = dict(sorted(found.items(), key=lambda item: -item[1])[: shape.width])
    return set(sorted(pool, key=lambda path: -pool[path])[: shape.nodes])


@pytest.mark.parametrize(
    "shape",
    [
        DynamicShape(12, 3, 4),
        DynamicShape(5, 4, 3),
        DynamicShape(100, 2, 3),
        DynamicShape(6, 9, 2),
        DynamicShape(3, 1, 3),
    ],
)
def test_dynamic_tree_is_eagle_2s(shape: DynamicShape) -> None:
    tables = [random_table(seed, sharpness=2.0) for seed in range(8)]
    tree = grow(DynamicGrowth(shape, torch.full((8,), 99)), tables)
    assert tree.tokens[:, 0].tolist() == [99] * 8
    assert bool(tree.valid.all())
    for row, table in enumerate(tables):
        assert set(paths_of(tree, row)) == retold(table, shape)


def test_rows_grow_independently() -> None:
    shape, tables = DynamicShape(10, 3, 3), [random_table(seed) for seed in range(4)]
    together = grow(DynamicGrowth(shape, torch.zeros(4, dtype=torch.int64)), tables)
    for row, table in enumerate(tables):
        alone = grow(DynamicGrowth(shape, torch.zeros(1, dtype=torch.int64)), [table])
        assert paths_of(alone, 0) == paths_of(together, row)


@pytest.mark.parametrize("lift", [0.0, 1e-6])
def test_ties_keep_every_parent_and_prefer_the_shallower_node(lift: float) -> None:
    """A certain child ties with its parent; rounding may even put its log-probability above 0."""

    def certain(path: Path) -> Tensor:
        row = torch.full((VOCAB,), -30.0)
        row[0] = lift
        row[1] = -1.0
        return row

    tree = grow(DynamicGrowth(DynamicShape(4, 2, 6), torch.zeros(1, dtype=torch.int64)), [certain])
    assert paths_of(tree, 0) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]


def test_a_child_kept_without_its_parent_is_caught() -> None:
    growth = DynamicGrowth(DynamicShape(1, 1, 2), torch.zeros(1, dtype=torch.int64))
    growth.add(torch.tensor([[[1]]]), torch.tensor([[[-1.0]]]))
    growth.add(torch.tensor([[[2]]]), torch.tensor([[[-1.0]]]))
    growth._pool[1][1].fill_(0.0)  # a score that rose along its path
    with pytest.raises(RuntimeError, match="without its parent"):
        growth.finish()


def test_static_tree_takes_each_parents_own_candidates() -> None:
    topology = Topology(((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 2, 0), (2, 1, 1)))
    tables = [random_table(seed) for seed in range(3)]
    tree = grow(StaticGrowth(topology, torch.arange(3)), tables)
    for row, table in enumerate(tables):
        expected: dict[Path, Path] = {(): ()}  # rank path -> token path
        for ranks in topology.paths:
            above = expected[ranks[:-1]]
            expected[ranks] = (*above, int(table(above).topk(3).indices[ranks[-1]]))
        assert paths_of(tree, row) == [expected[ranks] for ranks in topology.paths]


def test_static_growth_fills_like_the_topology_where_candidates_ignore_the_path() -> None:
    topology = Topology(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    steps = torch.tensor([[[3, 5], [2, 6], [1, 4]]])  # (B, K, R)
    growth, frontier, depth = StaticGrowth(topology, torch.tensor([9])), None, 0
    while depth == 0 or frontier is not None:
        count = 1 if frontier is None else frontier.tokens.shape[1]
        candidates = steps[:, depth : depth + 1].expand(1, count, 2)
        frontier, depth = growth.add(candidates, torch.zeros_like(candidates)), depth + 1
    tree, filled = growth.finish(), topology.fill(torch.tensor([9]), steps)
    assert torch.equal(tree.tokens, filled.tokens)
    assert torch.equal(tree.parents, filled.parents)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DynamicShape(nodes=4, width=0, depth=2)


def test_what_is_no_number_is_worth_nothing() -> None:
    """A head that overflowed: its row drafts something, and the other rows do not notice."""

    def broken(path: Path) -> Tensor:
        return torch.full((VOCAB,), torch.nan) if path else random_table(1)(path)

    shape = DynamicShape(nodes=6, width=2, depth=3)
    anchors = torch.tensor([1, 1])
    alone = grow(DynamicGrowth(shape, anchors[:1]), [random_table(0)])
    together = grow(DynamicGrowth(shape, anchors), [random_table(0), broken])
    assert torch.equal(together.tokens[:1], alone.tokens)
    assert torch.equal(together.parents[:1], alone.parents)
