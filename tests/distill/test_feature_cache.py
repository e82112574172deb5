"""What is read from disk is what the target computes, in any order, and never a byte that was not written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill.feature_build import build
from draftsmith.distill.feature_cache import FeatureCache
from draftsmith.distill.features import precompute
from draftsmith.distill.packing import Row, pack
from draftsmith.distill.tokens import Sample
from draftsmith.infer.target import Target

TAPS = (0, 2)


def packed(count: int = 30, *, length: int = 32, seed: int = 1) -> list[Row]:
    draw = random.Random(seed)
    samples = []
    for number in range(count):
        size = draw.randint(3, length - 3)
        samples.append(Sample(f"doc{number}", [draw.randint(3, 299) for _ in range(size)], [True] * size))
    return pack(samples, length=length)


def cache(folder: Path, target: Target, rows: list[Row], **changes: Any) -> FeatureCache:
    """A cache of about three rows per shard."""
    settings: dict[str, Any] = {"taps": TAPS, "compression": "exact", "shard_bytes": 3 * 32 * 48 * 3 * 4}
    return FeatureCache(folder, target, rows, **settings | changes)


def built(folder: Path, target: Target, rows: list[Row], **changes: Any) -> FeatureCache:
    made = cache(folder, target, rows, **changes)
    build(made)
    return cache(folder, target, rows, **changes)  # as another process would open it


@pytest.fixture
def rows() -> list[Row]:
    return packed()


@pytest.mark.parametrize("taps", [TAPS, ()], ids=["taps", "none"])
def test_exact_rows_in_any_order_are_those_kept_in_memory_to_the_bit(
    tmp_path: Path, tiny_target: Target, rows: list[Row], taps: tuple[int, ...]
) -> None:
    stored = built(tmp_path, tiny_target, rows, taps=taps, shard_bytes=20_000)
    kept = precompute(tiny_target, rows, taps=taps)
    order = random.Random(0).sample(range(len(rows)), len(rows))
    assert stored.num_shards > 3
    read = stored.batch(order)
    for name in ("tokens", "segments", "positions", "supervised"):
        assert torch.equal(getattr(read, name), getattr(kept, name)[order])
    real = kept.segments[order] > 0
    assert not bool(real.all()), "there is padding"
    assert torch.equal(read.hidden[real], kept.hidden[order][real])
    assert not bool(read.hidden[~real].any())
    if taps:
        assert read.features is not None
        assert kept.features is not None
        assert torch.equal(read.features[real], kept.features[order][real])
    else:
        assert read.features is None
    assert torch.equal(read.logits(read.hidden[real]), tiny_target.logits(kept.hidden[order][real]))


@pytest.mark.parametrize(("compression", "most"), [("bf16", 0.004), ("int8", 0.012), ("int6", 0.05)])
def test_compressed_rows_are_close_and_in_the_target_s_precision(
    tmp_path: Path, tiny_target: Target, rows: list[Row], compression: str, most: float
) -> None:
    stored = built(tmp_path, tiny_target, rows, compression=compression)
    kept = precompute(tiny_target, rows, taps=TAPS)
    read = stored.batch(range(len(rows)))
    real = kept.segments > 0
    for found, wanted in ((read.hidden, kept.hidden), (read.features, kept.features)):
        assert found is not None
        assert wanted is not None
        assert found.dtype == tiny_target.dtype
        error = (found[real] - wanted[real]).norm() / wanted[real].norm()
        assert 0 < float(error) < most


def test_a_row_s_bytes_do_not_depend_on_the_rows_before_it(
    tmp_path: Path, tiny_target: Target, rows: list[Row]
) -> None:
    one = built(tmp_path / "one", tiny_target, rows, shard_bytes=1)
    assert one.num_shards == len(rows), "at least one row per shard"
    all_rows = built(tmp_path / "all", tiny_target, rows, shard_bytes=2**30)
    assert all_rows.num_shards == 1
    for index in range(len(rows)):
        assert torch.equal(one.batch([index]).hidden, all_rows.batch([index]).hidden)


def test_sizes_are_known_before_the_first_byte(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    for compression in ("exact", "int8"):
        made = cache(tmp_path / compression, tiny_target, rows, compression=compression)
        expected = sum(map(made.size, range(made.num_shards)))
        report = build(made)
        assert report.bytes <= expected <= report.bytes + 1024 * made.num_shards


def test_shards_may_be_read_by_whom_any_new_file_may(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    stored = built(tmp_path, tiny_target, rows)
    (tmp_path / "any").touch()
    assert stored.path(0).stat().st_mode == (tmp_path / "any").stat().st_mode


def flip(path: Path, places: list[int]) -> None:
    """Change bytes of a file; the map of the reader shows it at once."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("when", ["before it is opened", "while it is mapped"])
def test_a_byte_changed_anywhere_is_noticed_and_the_shard_written_anew(
    tmp_path: Path, tiny_target: Target, rows: list[Row], when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = built(tmp_path, tiny_target, rows, compression="int8")
    everything = range(len(rows))
    wanted, whole = stored.batch(everything), stored.path(1).read_bytes()
    draw, changed = random.Random(5), 0
    for place in [0, 9, *(draw.randrange(len(whole)) for _ in range(30))]:
        reader = cache(tmp_path, tiny_target, rows, compression="int8")
        if when == "while it is mapped":
            reader.batch(everything)
        flip(stored.path(1), [place])
        read = reader.batch(everything)
        assert torch.equal(read.hidden, wanted.hidden)
        assert torch.equal(read.features, wanted.features)  # type: ignore[arg-type]
        changed += "the target reads its rows again" in capsys.readouterr().err
        if stored.path(1).read_bytes() != whole:
            flip(stored.path(1), [place])  # a byte of the header's padding, or of a map that was read already
        assert stored.path(1).read_bytes() == whole, "it is written anew, to the byte"
    assert changed >= 25


def test_numbers_that_a_changed_header_would_read_otherwise_are_noticed(
    tmp_path: Path, tiny_target: Target, rows: list[Row]
) -> None:
    stored = built(tmp_path, tiny_target, rows, compression="int8")
    wanted, path = stored.batch([4]), stored.path(0)
    whole = path.read_bytes()
    assert 4 in stored.indices(0)
    assert whole.count(b'"I8"') == 2
    path.write_bytes(whole.replace(b'"I8"', b'"U8"'))
    assert torch.equal(cache(tmp_path, tiny_target, rows, compression="int8").batch([4]).hidden, wanted.hidden)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "of another cache"])
def test_a_shard_that_is_no_shard_is_written_anew_while_it_is_read(
    tmp_path: Path, tiny_target: Target, rows: list[Row], damage: str
) -> None:
    stored = built(tmp_path, tiny_target, rows)
    wanted, path = stored.batch([4]), stored.path(1)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "of another cache":
        other = built(tmp_path / "other", tiny_target, rows, taps=(1, 3))
        path.write_bytes(other.path(1).read_bytes())
    else:
        path.write_bytes(whole[: 0 if damage == "empty" else -1])
    assert torch.equal(cache(tmp_path, tiny_target, rows).batch([4]).hidden, wanted.hidden)
    assert path.read_bytes() == whole


def test_a_cache_replaced_while_it_is_read_is_an_error_not_other_data(
    tmp_path: Path, tiny_target: Target, rows: list[Row]
) -> None:
    reader = built(tmp_path, tiny_target, rows)
    build(cache(tmp_path, tiny_target, packed(seed=2)), replace=True)
    with pytest.raises(ValueError, match="removed or replaced by another cache while it was read"):
        reader.batch([0])


def test_a_target_that_computes_nan_stops_the_build_with_the_documents_named(
    tmp_path: Path, build_target: Callable[..., Target], rows: list[Row]
) -> None:
    broken = build_target(seed=4)
    with torch.no_grad():
        broken.embedding.weight[int(rows[0].tokens[0])] = torch.nan
    with pytest.raises(ValueError, match=f"not finite .* first in row 0, which holds {rows[0].ids[0]}"):
        build(cache(tmp_path, broken, rows))
