"""A cache is built once, by whoever comes, in any number of pieces, and never taken for another one."""

from __future__ import annotations

import random
import re
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.feature_build import BuildReport, build
from draftsmith.distill.feature_manifest import Manifest, hash_rows
from draftsmith.distill.packing import Row
from draftsmith.infer.target import Target

from ..conftest import tiny_model
from .nursery import Nursery, kill
from .test_feature_cache import cache, flip, packed


@pytest.fixture
def rows() -> list[Row]:
    return packed()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_complete_cache_is_found_complete_and_left_alone(
    tmp_path: Path, tiny_target: Target, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    first = build(cache(tmp_path, tiny_target, rows))
    before = contents(tmp_path)
    assert (first.written, first.damaged) == (first.num_shards, 0)
    assert first.bytes == sum(len(data) for name, data in before.items() if name.startswith("shard"))
    assert build(cache(tmp_path, tiny_target, rows), check=True) == BuildReport(0, 0, first.num_shards, first.bytes)
    assert contents(tmp_path) == before
    assert "0.0 MiB to write" in capsys.readouterr().err.splitlines()[-1]


def test_size_bytes_per_token_and_free_disk_are_printed_first(
    tmp_path: Path, tiny_target: Target, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    report = build(cache(tmp_path, tiny_target, rows, compression="int6"))
    tokens = sum(int((row.segments > 0).sum()) for row in rows)
    said = capsys.readouterr().err
    assert "features: 114 bytes per token (int6; bf16 has 288, 2.53 times as many)" in said
    assert f"x {tokens:,} tokens = 0.1 MiB in {report.num_shards} shards" in said
    assert 0.045 < report.bytes / 2**20 < 0.15
    assert re.search(r"to write, [\d,.]+ GiB free", said)


def test_progress_goes_row_by_row(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    stored, told = cache(tmp_path, tiny_target, rows), []
    stored.write(0, told=lambda: told.append(stored.path(0).exists()))
    assert told == [False] * len(stored.indices(0)), "a bar that moves shard by shard stands still for minutes"
    assert stored.is_whole(0)


@pytest.mark.parametrize("lost", ["shards", "the index", "the index and shards", "the manifest"])
def test_what_is_missing_is_written_and_nothing_else(
    tmp_path: Path, tiny_target: Target, rows: list[Row], lost: str
) -> None:
    first = build(cache(tmp_path, tiny_target, rows))
    before, missing = contents(tmp_path), 0
    if lost.endswith("shards"):
        for number in (0, 3):
            cache(tmp_path, tiny_target, rows).path(number).unlink()
        missing = 2
    if "index" in lost:
        (tmp_path / "index.json").unlink()
    if "manifest" in lost:
        (tmp_path / "manifest.json").unlink()
    assert build(cache(tmp_path, tiny_target, rows)).written == missing
    assert contents(tmp_path) == before
    assert first.num_shards > 4


def test_a_changed_byte_is_found_by_a_check_and_written_anew(
    tmp_path: Path, tiny_target: Target, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    build(cache(tmp_path, tiny_target, rows))
    before = contents(tmp_path)
    for number, place in ((1, 1500), (4, 2000)):
        flip(cache(tmp_path, tiny_target, rows).path(number), [place])
    report = build(cache(tmp_path, tiny_target, rows), check=True)
    assert (report.damaged, report.written) == (2, 2)
    assert "shard-00001.safetensors is damaged and is written anew" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_cache_of_anything_else_is_refused_with_what_differs(
    tmp_path: Path, tiny_target: Target, rows: list[Row], build_target: Callable[..., Target]
) -> None:
    build(cache(tmp_path, tiny_target, rows))
    before = contents(tmp_path)
    other = {
        r"taps: \[0, 2\] there, \[1\] here": cache(tmp_path, tiny_target, rows, taps=(1,)),
        "compression: exact there, int8 here": cache(tmp_path, tiny_target, rows, compression="int8"),
        "rows hash: .* there, .* here": cache(tmp_path, tiny_target, packed(seed=3)),
        "target weights: .* there": cache(tmp_path, build_target(seed=5), rows),
        "num rows: .* num tokens": cache(tmp_path, tiny_target, rows[:-1]),
    }
    for message, wanted in other.items():
        with pytest.raises(ValueError, match=f"holds features made of something else: .*{message}") as caught:
            build(wanted)
        assert "--replace" in str(caught.value)
        assert contents(tmp_path) == before


def test_a_single_other_token_or_document_border_makes_other_rows_and_another_mask_does_not(rows: list[Row]) -> None:
    first = rows[0]
    token, border, mask = first.tokens.clone(), first.segments.clone(), ~first.supervised
    token[3] += 1
    border[border > 1] -= 1
    others = (replace(first, tokens=token), replace(first, segments=border))
    assert len({hash_rows([row, *rows[1:]]) for row in (first, *others)}) == 3
    assert hash_rows([replace(first, supervised=mask), *rows[1:]]) == hash_rows(rows), "what is learned is not stored"


def test_another_template_and_another_precision_are_refused(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> None:
    build(cache(tmp_path, tiny_target, rows))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    tokenizer.chat_template = f"{tiny_tokenizer.chat_template}{{# another #}}"
    retold = Target(tiny_model(eos_token_id=2), tokenizer)
    with pytest.raises(ValueError, match=r"else: template hash: .* there, .* here"):
        build(cache(tmp_path, retold, rows))
    halved = Target(tiny_model(eos_token_id=2).bfloat16(), tiny_tokenizer)
    with pytest.raises(ValueError, match="else: dtype: float32 there, bfloat16 here"):
        build(cache(tmp_path, halved, rows))


def test_where_a_target_lies_and_how_large_shards_should_be_does_not_matter(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, tiny_target: Target, rows: list[Row]
) -> None:
    build(cache(tmp_path, tiny_target, rows))
    moved = Target(tiny_model(eos_token_id=2), tiny_tokenizer, name="elsewhere")
    smaller = cache(tmp_path, moved, rows, shard_bytes=1)
    assert build(smaller).written == 0
    assert smaller.num_shards == cache(tmp_path, tiny_target, rows).num_shards


def test_replacing_leaves_nothing_of_the_other_cache(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    build(cache(tmp_path / "a", tiny_target, packed(60, seed=3)))
    (tmp_path / "a" / ".writing-shard-00009.safetensors").write_text("what a kill left")
    build(cache(tmp_path / "a", tiny_target, rows), replace=True)
    build(cache(tmp_path / "b", tiny_target, rows))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    (tmp_path / "a" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged .*--replace"):
        build(cache(tmp_path / "a", tiny_target, rows))
    assert build(cache(tmp_path / "a", tiny_target, rows), replace=True).written > 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_disk_too_small_is_refused_before_the_first_shard(
    tmp_path: Path, tiny_target: Target, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = cache(tmp_path, tiny_target, rows)
    need = sum(map(wanted.size, range(wanted.num_shards)))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 0, need - 1))
    with pytest.raises(ValueError, match=r"needs .* more and .* has .* free.*int6 .* or features: online"):
        build(wanted)
    assert not list(tmp_path.glob("*shard*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 0, need))
    build(wanted)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 0, 0))
    assert build(cache(tmp_path, tiny_target, rows)).written == 0, "a complete cache needs no room"


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """The system itself refuses to write beyond `size`, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_write_is_said_and_leaves_no_half_shard(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    wanted = cache(tmp_path, tiny_target, rows)
    with (
        file_limit(4096),
        pytest.raises(ValueError, match=r"shard-00000.safetensors could not be written \(\d+ MiB free\)"),
    ):
        build(wanted)
    assert not list(tmp_path.glob("*shard*"))
    assert build(wanted).written == wanted.num_shards


BUILD = """
from pathlib import Path
from draftsmith.distill.feature_build import build
from draftsmith.infer.target import Target
from tests.distill.test_feature_cache import cache, packed

target, rows = Target.load(sys.argv[1]), packed(250)

def work(line):
    folder, log = line.split()
    report = build(cache(Path(folder), target, rows, compression="int8", shard_bytes=9000))
    Path(log).write_text(str(report.written))
"""


@pytest.mark.slow
def test_builders_share_the_work_and_a_kill_at_any_instant_loses_nothing(tmp_path: Path, tiny_target_dir: Path) -> None:
    nursery = Nursery(BUILD, tiny_target_dir)
    log = tmp_path / "log"
    assert nursery.run(f"{tmp_path / 'whole'} {log}") == 0
    whole = contents(tmp_path / "whole")
    num_shards = int(log.read_text())
    assert num_shards > 50

    pair = [nursery.start(f"{tmp_path / 'pair'} {tmp_path / f'log{number}'}") for number in range(2)]
    assert [nursery.wait(child) for child in pair] == [0, 0]
    written = [int((tmp_path / f"log{number}").read_text()) for number in range(2)]
    assert sum(written) == num_shards, "no shard is written twice"
    assert min(written) > num_shards / 5
    assert contents(tmp_path / "pair") == whole

    draw, folder = random.Random(0), tmp_path / "killed"
    for _ in range(5):
        goal = len(list(folder.glob("shard-*"))) + draw.randint(1, 8)
        other = nursery.start(f"{folder} {log}")
        killed = nursery.kill_when(
            f"{folder} {log}",
            lambda: len(list(folder.glob("shard-*"))) >= goal,  # noqa: B023 (called at once)
            pause=draw.uniform(0, 0.01),
        )
        kill(other)
        assert [killed, nursery.wait(other)] == [-signal.SIGKILL] * 2
    other = nursery.start(f"{folder} {log}")
    nursery.kill_when(f"{folder} {log}", lambda: True, pause=0.02)
    assert nursery.wait(other) == 0, "it takes over what the killed one was writing"
    assert contents(tmp_path / "killed") == whole
    nursery.close()


def test_the_manifest_says_what_made_the_cache(tmp_path: Path, tiny_target: Target, rows: list[Row]) -> None:
    build(cache(tmp_path, tiny_target, rows))
    found = Manifest.read(tmp_path)
    assert found is not None
    assert found.target == tiny_target.fingerprint()
    assert (found.taps, found.template_hash, found.num_rows) == ((0, 2), tiny_target.template_hash, len(rows))
    assert Manifest.read(tmp_path / "nowhere") is None
