"""A drafter's own cache against lists of keys and values kept by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads.own_cache import OwnCache
from draftsmith.infer.drafter import Observation

HEADS, KV, WIDTH = 4, 2, 8
OWNER = nn.Identity()


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """query (HEADS, d) over lists of (KV, d) -> (HEADS, d)."""
    k, v = (torch.stack(x).repeat_interleave(HEADS // KV, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,shd->hs", query, k) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


class ByHand:
    """What each row truly holds."""

    def __init__(self, rows: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(rows)]
        self.values: list[list[Tensor]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        return [len(keys) for keys in self.keys]


def observe(cache: OwnCache, truth: ByHand, rows: slice, counts: list[int], *, last: bool) -> None:
    batch, width = len(counts), max(counts)
    start, count, tokens = torch.tensor(truth.lengths[rows]), torch.tensor(counts), torch.zeros(batch, width).long()
    query = torch.randn(batch, 1 if last else width, HEADS, WIDTH)
    key, value = torch.randn(batch, width, KV, WIDTH), torch.randn(batch, width, KV, WIDTH)

    def answer(*states: Tensor) -> tuple[Tensor, ...]:
        memory = cache.observe(OWNER, rows.start, start, count, width, last=last)
        return (memory.attend(0, *(each.flatten(0, 1) for each in states)),)

    seen = Observation(rows, tokens, count, start, hidden=key, features=None, anchor=tokens[:, 0])
    out = cache.take(seen, answer, query, key, value)[0].view_as(query)
    for b, real in enumerate(counts):
        for column in range(real):
            truth.keys[rows.start + b].append(key[b, column])
            truth.values[rows.start + b].append(value[b, column])
            if not last or column == real - 1:
                expected = attend(
                    query[b, 0 if last else column], truth.keys[rows.start + b], truth.values[rows.start + b]
                )
                torch.testing.assert_close(out[b, 0 if last else column], expected)


def draft(cache: OwnCache, truth: ByHand, batch: int) -> None:
    """Two levels: nodes 0 and 1, then node 2 below node 1 and node 3 below node 0."""
    key, value = torch.randn(batch, 4, KV, WIDTH), torch.randn(batch, 4, KV, WIDTH)
    lengths = torch.tensor(truth.lengths[:batch])
    levels = [(slice(0, 2), [[0], [1]]), (slice(2, 4), [[1, 2], [0, 3]])]
    for nodes, seen in levels:
        ancestors = torch.zeros(batch, 2, nodes.stop, dtype=torch.bool)
        for node, above in enumerate(seen):
            ancestors[:, node, above] = True
        query = torch.randn(batch, 2, HEADS, WIDTH)
        memory = cache.grow(OWNER, lengths, ancestors)
        out = memory.attend(0, query.flatten(0, 1), key[:, nodes].flatten(0, 1), value[:, nodes].flatten(0, 1))
        for b in range(batch):
            for node, above in enumerate(seen):
                keys = truth.keys[b] + [key[b, other] for other in above]
                values = truth.values[b] + [value[b, other] for other in above]
                torch.testing.assert_close(out.view_as(query)[b, node], attend(query[b, node], keys, values))


@pytest.mark.parametrize("last", [True, False])
def test_rows_of_different_lengths_see_their_own_past_and_their_own_draft(last: bool) -> None:
    cache, truth = OwnCache(rows=4, capacity=4, tapes=None), ByHand(4)
    for row, prompt in enumerate([5, 2, 9]):  # one longer than the capacity
        observe(cache, truth, slice(row, row + 1), [prompt], last=last)
    for counts in ([1, 4, 2], [3, 1, 1], [1, 1, 70]):
        draft(cache, truth, 3)
        observe(cache, truth, slice(0, 3), counts, last=last)
    draft(cache, truth, 3)


def test_the_last_row_takes_the_place_of_one_that_left() -> None:
    cache, truth = OwnCache(rows=3, capacity=16, tapes=None), ByHand(3)
    for row, prompt in enumerate([5, 2, 9]):
        observe(cache, truth, slice(row, row + 1), [prompt], last=True)
    draft(cache, truth, 3)
    cache.move(2, 0)
    truth.keys[0], truth.values[0] = list(truth.keys[2]), list(truth.values[2])
    draft(cache, truth, 2)
    observe(cache, truth, slice(0, 2), [3, 1], last=True)
    truth.keys[2], truth.values[2] = [], []
    observe(cache, truth, slice(2, 3), [4], last=True)  # a new request in the place that became free
    draft(cache, truth, 3)
