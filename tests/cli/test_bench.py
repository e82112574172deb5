"""`draftsmith bench`: both sides do the same work, and the numbers are what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli.side_by_side import BATCHES, Bench, Case
from draftsmith.cli.stock import Answers
from draftsmith.infer.precision import has_bf16
from draftsmith.infer.target import Target

from .conftest import Cli


@pytest.fixture(scope="module")
def folder(build_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with room for the shipped prompts; it ends its answers now and then."""
    roomy = build_target(max_position_embeddings=8192, eos_token_id=[5, 77, 130])
    path: Path = tmp_path_factory.mktemp("target")
    roomy.model.save_pretrained(path)
    roomy.tokenizer.save_pretrained(path)
    return path


def test_both_sides_write_the_same_texts_in_every_case(folder: Path) -> None:
    """In float32, so the case in bfloat16 is left out."""
    target = Target.load(str(folder))
    bench = Bench(target, str(folder), drafter="prompt-lookup", draft=None, rows=3, max_new_tokens=12)
    compared = 0
    for case in bench.cases(singles=2, prompts=5):
        if "bfloat16" in case.name:
            continue
        for group in case.groups[:2]:
            ours, peer = case.ours(group), case.peer(group)
            assert ours.texts == peer.texts, case.name
            compared += len(ours.texts)
    assert compared > 2 * len(BATCHES)


def test_a_ratio_is_the_median_of_the_groups_ratios() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str, rates: list[float]) -> Callable[[list[list[int]]], Answers]:
        def answer(group: list[list[int]]) -> Answers:
            asked.append((name, group[0][0]))
            return Answers([[1] * 12], 12 / rates[group[0][0]])

        return answer

    groups = [[[number]] for number in range(5)]
    case = Case("one", groups, side("ours", [2, 4, 6, 8, 10]), side("peer", [2, 2, 2, 2, 1]))
    row = case.measure(False)
    assert (row.ours, row.peer, row.ratio, row.n) == pytest.approx((6, 2, 3, 5))
    assert row.low < row.ratio < row.high
    assert [name for name, number in asked if number == 0] == ["ours", "peer"]
    assert [name for name, number in asked if number == 1] == ["peer", "ours"], "the first side takes turns"


def test_the_table_and_the_json_agree(cli: Cli, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    settings = ("--singles", 2, "--prompts", 4, "--rows", 2, "--max-new-tokens", 6, "--dtype", "float32")
    ran = cli("bench", "--target", folder, *settings, "--only", "one at a time", "--json", out)
    assert ran.exit_code == 0, ran.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 4 + has_bf16(), "bfloat16 is measured where it is not emulated"
    for row in rows:
        assert set(row) == {"name", "ours", "peer", "ratio", "low", "high", "n", "unit"}
        assert row["n"] == 2
        assert row["low"] <= row["ratio"] <= row["high"]
        assert f"{row['ratio']:.2f}x" in ran.stdout


def test_a_case_that_is_not_there_is_refused_with_those_that_are(cli: Cli, folder: Path) -> None:
    ran = cli("bench", "--target", folder, "--only", "one at a tyme", "--dtype", "float32")
    assert ran.exit_code == 2
    assert "prompt lookup, one at a time" in ran.stderr
