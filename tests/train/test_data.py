"""Laws of the data order and the counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.distill.features import teacher_batch
from draftsmith.distill.packing import pack
from draftsmith.distill.tokens import Sample
from draftsmith.heads import METHODS
from draftsmith.infer.target import Target
from draftsmith.train.data import Stream, fingerprint, prepare_rows

from ..heads.laws import SMALL, HardCrossEntropy


@given(num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_row_comes_once_per_epoch(num_rows: int, rows_per_step: int, seed: int) -> None:
    stream = Stream(num_rows, rows_per_step, seed)
    places = [row for step in range(3 * num_rows) for row in stream.batch(step)]
    for epoch in range(3):
        assert sorted(places[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_order_is_a_function_of_seed_and_step_alone() -> None:
    stream = Stream(30, 7, 3)
    forward = [stream.batch(step) for step in range(20)]
    assert [Stream(30, 7, 3).batch(step) for step in reversed(range(20))] == forward[::-1]
    assert [Stream(30, 7, 4).batch(step) for step in range(20)] != forward
    epochs = [row for batch in forward for row in batch]
    assert epochs[:30] != epochs[30:60], "each epoch has its own order"


def samples(count: int = 6) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        length = int(torch.randint(6, 30, (), generator=generator))
        tokens = torch.randint(3, 300, (length,), generator=generator).tolist()
        found.append(Sample(f"s{number}", tokens, [i >= length // 3 for i in range(length)]))
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_counts_are_those_of_the_head_and_kept_features_those_of_the_target(method: str, tiny_target: Target) -> None:
    """What the loop divides by, known before any forward, is what the head then sums over."""
    config, drafter_class = METHODS[method]
    drafter = drafter_class(config.model_validate({"method": method} | SMALL[method]), tiny_target)
    packed = pack(samples(), length=48)
    online = prepare_rows(packed, drafter, features="online", what="test")
    memory = prepare_rows(packed, drafter, features="memory", what="test")
    indices = list(range(len(packed)))

    for rows in (online, memory, memory):  # the second time from what was kept
        out = drafter(rows.teach(indices), HardCrossEntropy())
        assert out.counts.tolist() == rows.counts.sum(dim=0).tolist()
    fresh, kept = teacher_batch(tiny_target, packed, taps=drafter.taps), memory.teach(indices)
    torch.testing.assert_close(kept.hidden, fresh.hidden)
    assert torch.equal(kept.tokens, fresh.tokens)


def test_rows_are_named_with_their_documents(tiny_target: Target) -> None:
    config, drafter_class = METHODS["medusa"]
    rows = prepare_rows(
        pack(samples(3), length=80), drafter_class(config(), tiny_target), features="online", what="test"
    )
    assert all(sample.id in rows.name(range(len(rows.rows))) for sample in samples(3))
    assert rows.num_tokens(range(len(rows.rows))) == sum(len(sample.tokens) for sample in samples(3))


def test_nothing_to_propose_is_an_error_with_the_reason(tiny_target: Target) -> None:
    config, drafter_class = METHODS["medusa"]
    drafter = drafter_class(config(), tiny_target)
    lonely = [Sample("a", [5, 6, 7, 8], [False, True, False, True])]
    with pytest.raises(ValueError, match=r"2 supervised tokens, but none that a draft could propose"):
        prepare_rows(pack(lonely, length=16), drafter, features="online", what="training data")
    with pytest.raises(ValueError, match="there are no rows"):
        prepare_rows([], drafter, features="online", what="training data")


def test_fingerprint_changes_with_tokens_and_masks() -> None:
    base = samples(2)
    flipped = [base[0], Sample(base[1].id, base[1].tokens, [not flag for flag in base[1].supervised])]
    prints = {fingerprint(pack(group, length=64)) for group in (base, flipped, samples(3))}
    assert len(prints) == 3
    assert fingerprint(pack(samples(2), length=64)) in prints
