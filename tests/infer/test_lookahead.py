"""Lookahead: the shape of its window, the n-grams it collects, and the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.infer.drafter import Observation
from draftsmith.infer.lookahead import Lookahead, Pool, Row
from draftsmith.infer.sampling import Sampling
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree
from draftsmith.infer.verify import follow

from . import drafting


def observe(drafter: Lookahead, state: list[Row | None], text: list[int], *, logits: Tensor | None = None) -> None:
    tokens, anchor = torch.tensor([text[:-1]]), torch.tensor([text[-1]])
    count = torch.tensor([len(text) - 1])
    seen = Observation(slice(0, 1), tokens, count, torch.tensor([0]), torch.zeros(1), None, anchor, logits)
    drafter.observe(state, seen)


def draft(drafter: Lookahead, state: list[Row | None], anchor: int) -> TokenTree:
    return drafter.draft(state, torch.tensor([anchor]), torch.tensor([1]), Sampling([]))


@pytest.mark.parametrize(("window", "ngram"), [(5, 4), (1, 3), (3, 3), (7, 6)])
def test_the_window_has_the_papers_mask_and_positions(window: int, ngram: int) -> None:
    """Item j of level l stands at l + j and sees the anchor, items 1..j of the base, and item j of levels 1..l."""
    drafter = Lookahead(window=window, ngram=ngram, guesses=2)
    state = drafter.start(rows=1, capacity=64)
    observe(drafter, state, [10, 11, 12, 13, 10, 11, 14, 10])
    tree = draft(drafter, state, 10)
    size = (window - 1) + window * (ngram - 2)
    first = tree.num_nodes - size
    base = [0, *range(first, first + window - 1)]
    assert not tree.valid[0, first:].any(), "a window node could be accepted"
    for level in range(1, ngram - 1):
        for item in range(window):
            column = [first + window - 1 + (depth - 1) * window + item for depth in range(1, level + 1)]
            seen = tree.ancestors[0, column[-1]].nonzero()[:, 0].tolist()
            assert seen == [*base[: item + 1], *column]
            assert tree.depths[0, column[-1]] == level + item
    for item, node in enumerate(base):
        assert tree.depths[0, node] == item


def test_window_tokens_are_never_accepted_even_where_they_are_right() -> None:
    drafter = Lookahead(window=3, ngram=3, guesses=2)
    state = drafter.start(rows=1, capacity=64)
    observe(drafter, state, [5, 6])
    tree = draft(drafter, state, 6)
    assert tree.tokens[0, 1].item() in (5, 6)
    verdict = follow(tree, tree.tokens[:, 1:2].expand_as(tree.tokens))
    assert verdict.count.tolist() == [1]


def test_the_window_moves_as_in_the_worked_example() -> None:
    row = Row([1, 2, 3], window=3, ngram=4, guesses=5)
    row.levels, row.rounds = [[21, 22], [30, 31, 32], [40, 41, 42]], 2
    row.advance(20, [50, 51, 52])
    assert row.levels == [[31, 32], [40, 41, 42], [50, 51, 52]]
    assert row.pool.tree(20) == ([30, 40, 50], [0, 1, 2])
    assert row.pool.tree(21) == ([31, 41, 51], [0, 1, 2])
    assert row.pool.tree(22) == ([32, 42, 52], [0, 1, 2])


def test_random_tokens_of_the_start_never_reach_the_pool() -> None:
    row = Row([1, 1], window=2, ngram=5, guesses=5)
    for number in range(3):  # N - 2 rounds push the random tokens out of levels 1..
        row.advance(7, [100 + number, 100 + number])
        assert row.pool.tree(7) == ([], [])
    row.advance(7, [103, 103])
    assert row.pool.tree(7) == ([100, 101, 102, 103], [0, 1, 2, 3])


def test_the_text_is_pooled_across_the_edges_of_rounds() -> None:
    row = Row([1, 2, 3], window=1, ngram=3, guesses=4)
    row.extend([4])
    row.extend([5, 6])
    assert [row.pool.tree(token)[0] for token in range(1, 6)] == [[2, 3], [3, 4], [4, 5], [5, 6], []]


def test_the_pool_keeps_the_newest_runs_and_merges_their_prefixes() -> None:
    pool = Pool(size=2)
    for run in ((1, 2), (3, 4), (1, 5), (3, 4)):
        pool.add(9, run)
    assert pool.tree(9) == ([3, 4, 1, 5], [0, 1, 0, 3])
    pool.add(9, (3, 6))
    assert pool.tree(9) == ([3, 6, 4], [0, 1, 1])
    assert pool.tree(8) == ([], [])


class Watched(Lookahead):
    """Keeps its states where a test can see them."""

    def start(self, *, rows: int, capacity: int) -> list[Row | None]:
        self.state = super().start(rows=rows, capacity=capacity)
        return self.state


def test_pooled_ngrams_are_what_the_target_writes(build_target: Callable[..., Target]) -> None:
    """A target that looks at the current token only: all pooled runs must be pieces of its text.

    The step from the anchor to level 1 is a guess (its column followed another token), so it is not compared.
    """
    target = drafting.repeating(build_target(num_hidden_layers=2), attention=0.0)
    drafter = Watched(window=4, ngram=4, guesses=3)
    (output,) = drafting.decode(target, drafter, [[7, 8]], new_tokens=24)
    assert output.stats.accepted > 0
    row = drafter.state[0]
    assert row is not None
    tokens = torch.arange(target.vocab_size)[:, None]
    hidden = target.read_packed(tokens, torch.zeros_like(tokens), torch.ones_like(tokens)).hidden
    following = target.logits(hidden)[:, 0].argmax(dim=-1).tolist()
    runs = [row.pool.tree(token) for token in range(target.vocab_size)]
    pairs = [(run[parent - 1], token) for run, parents in runs for token, parent in zip(run, parents) if parent]
    assert len(pairs) > 40
    assert all(following[before] == token for before, token in pairs)


def test_impossible_settings_are_refused() -> None:
    for bad in ({"window": 0}, {"ngram": 2}, {"guesses": 0}):
        with pytest.raises(ValueError, match="window >= 1, ngram >= 3 and guesses >= 1"):
            Lookahead(**bad)
