"""Packing loses nothing, mixes nothing, wastes little and always does the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from draftsmith.distill.packing import Row, pack, packing_efficiency
from draftsmith.distill.tokens import Sample, load_samples
from draftsmith.infer.pretrained import model_folder

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def sample(id: str, length: int) -> Sample:
    rng = random.Random(id)
    return Sample(id, [rng.randrange(1, 300) for _ in range(length)], [rng.random() < 0.5 for _ in range(length)])


def documents(rows: list[Row]) -> list[Sample]:
    found = []
    for row in rows:
        for number, id in enumerate(row.ids, start=1):
            at = row.segments == number
            assert row.positions[at].tolist() == list(range(int(at.sum()))), "positions restart in each document"
            found.append(Sample(id, row.tokens[at].tolist(), row.supervised[at].tolist()))
    return sorted(found, key=lambda document: document.id)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60), st.integers(32, 48))
def test_every_token_is_in_exactly_one_row_once(lengths: list[int], length: int) -> None:
    samples = [sample(f"s{i:03d}", size) for i, size in enumerate(lengths)]
    rows = pack(samples, length=length)
    assert documents(rows) == samples
    for row in rows:
        assert [len(t) for t in (row.tokens, row.segments, row.positions, row.supervised)] == [length] * 4
        used = int((row.segments > 0).sum())
        assert not row.segments[used:].any(), "padding only at the end"
        assert not row.supervised[used:].any()
        assert set(row.segments[:used].diff().tolist()) <= {0, 1}, "documents are contiguous and in order"
    assert packing_efficiency(rows) == pytest.approx(sum(lengths) / (len(rows) * length))


def test_rows_depend_on_the_samples_not_on_their_order() -> None:
    samples = [sample(f"s{i:03d}", 1 + i * 7 % 50) for i in range(200)]
    shuffled = samples.copy()
    random.Random(0).shuffle(shuffled)
    assert [row.ids for row in pack(samples, length=64)] == [row.ids for row in pack(shuffled, length=64)]


def test_a_worked_example() -> None:
    (row,) = pack([Sample("a", [7, 8, 9], [False, True, True]), Sample("b", [5, 6], [False, True])], length=6)
    assert row.tokens.tolist() == [7, 8, 9, 5, 6, 0]
    assert row.segments.tolist() == [1, 1, 1, 2, 2, 0]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert row.supervised.tolist() == [False, True, True, False, True, False]
    assert row.ids == ("a", "b")


def test_a_sample_longer_than_a_row_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 'long' has 9 tokens, rows hold 8"):
        pack([sample("long", 9), sample("short", 2)], length=8)
    assert pack([], length=8) == []
    assert packing_efficiency([]) == 0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not beside the repository")
@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "alpaca_zh_demo.json", "glaive_toolcall_en_demo.json"])
@pytest.mark.parametrize("length", [1024, 2048])
def test_real_data_fills_its_rows(name: str, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))
    samples = load_samples(SHARED / "train" / name, tokenizer, max_length=length)
    rows = pack(samples, length=length)
    assert packing_efficiency(rows) >= 0.95
    assert sum(int((row.segments > 0).sum()) for row in rows) == sum(len(sample.tokens) for sample in samples)
