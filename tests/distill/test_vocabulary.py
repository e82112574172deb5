"""The draft vocabulary holds what the target writes most, always its EOS, and says what it misses."""

from __future__ import annotations

import pytest

from draftsmith.distill.tokens import Sample
from draftsmith.distill.vocabulary import choose_vocabulary, coverage

#                      context: 9 9 9   answer: 5 5 5 7 7 4 2
SAMPLES = [Sample("a", [9, 9, 9, 5, 5, 5, 7, 7, 4, 2], [False] * 3 + [True] * 7)]


def test_most_frequent_supervised_tokens_in_ascending_order() -> None:
    assert choose_vocabulary(SAMPLES, 2, always=(), vocab_size=10).tolist() == [5, 7]
    assert choose_vocabulary(SAMPLES, 4, always=(), vocab_size=10).tolist() == [2, 4, 5, 7], "context does not count"


def test_eos_ids_are_kept_however_rare() -> None:
    assert choose_vocabulary(SAMPLES, 3, always=(2, 8), vocab_size=10).tolist() == [2, 5, 8]


def test_places_left_over_go_to_the_lowest_ids() -> None:
    assert choose_vocabulary(SAMPLES, 6, always=(), vocab_size=10).tolist() == [0, 1, 2, 4, 5, 7]
    assert choose_vocabulary(SAMPLES, 10, always=(2,), vocab_size=10).tolist() == list(range(10))


def test_coverage_is_the_share_of_supervised_tokens_inside() -> None:
    chosen = choose_vocabulary(SAMPLES, 2, always=(), vocab_size=10)
    assert coverage(SAMPLES, chosen) == pytest.approx(5 / 7)
    assert coverage(SAMPLES, choose_vocabulary(SAMPLES, 10, always=(), vocab_size=10)) == 1


@pytest.mark.parametrize("size", [0, 1, 11])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"must lie between 2 .* and 10 .*, got {size}"):
        choose_vocabulary(SAMPLES, size, always=(2, 3), vocab_size=10)
