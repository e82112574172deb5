"""The next teacher batch is under way while one is worked on, and is the batch that the source gives anyway."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from draftsmith.distill.ahead import Ahead
from draftsmith.distill.features import Online
from draftsmith.heads import TeacherBatch
from draftsmith.infer.target import Target

from .test_features import packed

CPU = torch.device("cpu")


@pytest.fixture
def source(tiny_target: Target) -> Online:
    return Online(tiny_target, packed(), (0, 2))


class Watched:
    """A source that tells when a reading begins, and fails on row 2."""

    def __init__(self, source: Online) -> None:
        self.source, self.begun, self.asked = source, {row: threading.Event() for row in range(3)}, 0

    def batch(self, indices: Sequence[int]) -> TeacherBatch:
        self.asked += 1
        self.begun[indices[0]].set()
        if indices[0] == 2:
            raise ValueError("row 2 is at fault")
        return self.source.batch(indices)


def test_next_rows_are_read_meanwhile_and_equal_those_of_the_source(source: Online) -> None:
    watched = Watched(source)
    ahead = Ahead(watched, CPU)
    for row, then in ((1, [0]), (0, [1]), (1, None)):
        found = ahead.batch([row], then)
        if then:
            assert watched.begun[then[0]].wait(30)  # nobody has asked for it yet
        wanted = source.batch([row])
        assert torch.equal(found.hidden, wanted.hidden)
        assert found.features is not None
        assert wanted.features is not None
        assert torch.equal(found.features, wanted.features)
        assert torch.equal(found.tokens, wanted.tokens)
    assert watched.asked == 3


def test_other_rows_than_announced_are_read_when_they_are_asked_for(source: Online) -> None:
    ahead = Ahead(Watched(source), CPU)
    ahead.batch([0], [2])  # fails, and nobody asks for it
    assert torch.equal(ahead.batch([1], None).hidden, source.batch([1]).hidden)


def test_a_fault_is_raised_where_its_rows_are_asked_for(source: Online) -> None:
    ahead = Ahead(Watched(source), CPU)
    ahead.batch([0], [2])
    with pytest.raises(ValueError, match="row 2 is at fault"):
        ahead.batch([2], None)


def test_where_both_at_once_do_not_fit_rows_are_read_when_they_are_asked_for(source: Online) -> None:
    class Narrow(Watched):
        def batch(self, indices: Sequence[int]) -> TeacherBatch:
            found = super().batch(indices)
            if threading.current_thread() is not threading.main_thread():
                raise torch.OutOfMemoryError("the step holds the memory")
            return found

    narrow = Narrow(source)
    ahead = Ahead(narrow, CPU)
    for row, then in ((0, [1]), (1, [0]), (0, [1])):
        assert torch.equal(ahead.batch([row], then).hidden, source.batch([row]).hidden)
    assert narrow.asked == 4, "it went on reading what does not fit"
