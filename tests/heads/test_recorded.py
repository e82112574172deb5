"""A trained language model drafts with recorded forwards where the target's are recorded (tests/infer/test_recorded.py)."""

from __future__ import annotations

import pytest

from draftsmith.infer.recorded import RecordedTarget
from draftsmith.infer.target import Target

from ..infer.tracing import Trace
from . import laws


@pytest.mark.parametrize("tree", [None, ((0,), (1,), (0, 0), (0, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("method", ["draft_model", "pard"])
def test_its_own_forwards_are_recorded_too(
    method: str, tree: tuple[tuple[int, ...], ...] | None, tiny_target: Target
) -> None:
    ids = laws.prompts(5, seed=9, vocab_size=tiny_target.vocab_size)
    plain = laws.decode(tiny_target, None, ids)
    played = []
    for is_recorded in (False, True):
        trace = Trace()
        target = RecordedTarget(tiny_target, trace)
        drafter = laws.build(method, target if is_recorded else tiny_target, tree=tree)
        outputs = laws.decode(target, drafter, ids, rows=2)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert target.fault is None
        played.append(trace.played)
    assert played[1] > 1.5 * played[0], "few of the drafter's own forwards were played back"
    assert isinstance(drafter.reading_view, RecordedTarget)
    assert drafter.reading_view.fault is None
