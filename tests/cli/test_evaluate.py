"""`draftsmith evaluate` and `bench`: the table and the document a user gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli

INTEGERS = ("prompts", "identical", "rounds", "drafted", "accepted", "emitted")
FIGURES = ("tau", "tokens_per_s_plain", "tokens_per_s", "speedup", "ms_draft", "ms_verify", "ms_host")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": n, "category": "ab"[n % 2], "turns": [f"count to {n}", "and a second turn that is not asked"]}
        for n in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_document_holds_totals_and_categories_and_texts_are_identical(
    cli: Cli, tiny_target_dir: Path, drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "evaluation.json"
    settings = ("--target", tiny_target_dir, "--drafter", drafter_dir, "--prompts", questions, "--dtype", "float32")
    ran = cli("evaluate", *settings, "--max-new-tokens", 12, "--json", out)
    assert ran.exit_code == 0, ran.stderr
    document = json.loads(out.read_text())
    assert set(document["categories"]) == {"a", "b"}
    for part in (document["totals"], *document["categories"].values()):
        assert all(isinstance(part[name], int) for name in INTEGERS)
        assert all(isinstance(part[name], float) for name in FIGURES)
        assert part["identical"] == part["prompts"]
    assert document["totals"]["prompts"] == 6
    assert document["settings"]["drafter"] == str(drafter_dir)
    assert document["settings"]["prompts"] == str(questions)
    assert {"definitions", "versions", "machine"} <= set(document)
    assert "6/6" in ran.stdout
    assert f"{document['totals']['tau']:.2f}" in ran.stdout
    assert not list(out.parent.glob(".*")), "a temporary file was left behind"


def test_a_limit_spreads_over_the_file(
    cli: Cli, tiny_target_dir: Path, drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation.json"
    settings = ("--target", tiny_target_dir, "--drafter", drafter_dir, "--prompts", questions, "--limit", 3)
    assert cli("evaluate", *settings, "--max-new-tokens", 4, "--json", out).exit_code == 0
    assert [answer["id"] for answer in json.loads(out.read_text())["answers"]] == ["0", "2", "4"]


def test_a_lossy_verifier_is_named_so_and_nothing_is_called_identical(
    cli: Cli, tiny_target_dir: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation.json"
    settings = ("--target", tiny_target_dir, "--drafter", "prompt-lookup", "--prompts", questions, "--json", out)
    ran = cli("evaluate", *settings, "--max-new-tokens", 6, "--verifier", "typical", "--min-p", 0.1)
    assert ran.exit_code == 0, ran.stderr
    assert "verifier typical: LOSSY" in ran.stdout
    assert "6/6" not in ran.stdout
    document = json.loads(out.read_text())
    assert document["totals"]["identical"] is None
    assert document["settings"]["promise"] == "lossy"
    assert document["settings"]["sampling"]["min_p"] == 0.1


def test_a_verifier_that_keeps_the_distribution_is_compared_where_text_is_greedy(
    cli: Cli, tiny_target_dir: Path, questions: Path
) -> None:
    draft = f"draft:{tiny_target_dir}"
    settings = ("--target", tiny_target_dir, "--drafter", draft, "--prompts", questions, "--dtype", "float32")
    greedy = cli("evaluate", *settings, "--max-new-tokens", 6, "--verifier", "traversal")
    assert "6/6" in greedy.stdout, greedy.stderr
    sampled = cli("evaluate", *settings, "--max-new-tokens", 6, "--verifier", "traversal", "--temperature", 1)
    assert "another text than plain decoding's" in " ".join(sampled.stdout.split())
    assert "6/6" not in sampled.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--drafter", "none"), "--drafter must name one"),
        (("--drafter", "none", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_input_ends_in_one_line(
    cli: Cli, tiny_target_dir: Path, questions: Path, arguments: tuple[str, ...], named: str
) -> None:
    given = arguments if "--prompts" in arguments else (*arguments, "--prompts", questions)
    ran = cli("evaluate", "--target", tiny_target_dir, *given)
    assert ran.exit_code == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.output
