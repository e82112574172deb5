"""`--quantize` on the command line: the quantised target's own texts, and its evaluation beside the whole target's."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from draftsmith.cli.memory import beside, memory_table

from .conftest import Cli


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "category": "a", "turns": [f"count to {n}"]} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_an_evaluation_shows_both_targets_and_passes_the_audit(
    cli: Cli, tiny_target_dir: Path, questions: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    out = tmp_path / "evaluation.json"
    settings = ("--target", tiny_target_dir, "--drafter", "prompt-lookup", "--prompts", questions, "--quantize", "int8")
    ran = cli("evaluate", *settings, "--max-new-tokens", 12, "--dtype", "float32", "--json", out)
    assert ran.exit_code == 0, ran.output
    document = json.loads(out.read_text())
    assert document["totals"]["identical"] == 3
    whole = document["unquantized"]
    assert document["settings"]["fingerprint"]["quantization"] == "int8"
    assert document["memory"]["target_weights"] < whole["memory"]["target_weights"]
    assert whole["totals"]["prompts"] == 3
    assert f"{whole['same_texts']} of 3 texts are those of the target as it was" in ran.stdout
    assert "weights MB" in ran.stdout
    ran = cli("audit", "--run", out)
    assert ran.exit_code == 0, ran.output
    assert "3 exact, 0 near-ties, 0 wrong" in ran.stdout
    assert "int8, float32" in ran.stdout


def test_generate_and_respond_quantise_target_and_drafter(
    cli: Cli, tiny_target_dir: Path, drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    """Every method's drafter in 8 bits; the text is that of the quantised target."""
    pytest.importorskip("torchao")
    settings = ("generate", "the cat", "--target", tiny_target_dir, "--max-new-tokens", 16, "--quantize", "int8")
    plain = cli(*settings)
    drafted = cli(*settings, "--drafter", drafter_dir, "--quantize-drafter", "int8", "--json", tmp_path / "a.json")
    assert plain.exit_code == drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert cli("audit", "--run", tmp_path / "a.json").exit_code == 0
    out = tmp_path / "responses.jsonl"
    asked = ("--target", tiny_target_dir, "--prompts", questions, "--out", out, "--max-new-tokens", 8)
    assert cli("respond", *asked, "--quantize", "int8").exit_code == 0
    assert cli("audit", "--text", out).exit_code == 0
    again = cli("respond", *asked)
    assert again.exit_code == 2
    assert "target quantization: None here, 'int8' there" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--quantize", "int2"), "quantize must be one of int8, int4, got 'int2'"),
        (("--quantize-drafter", "int8"), "drafter 'none' has no weights to quantise"),
    ],
)
def test_bad_kinds_end_in_one_line(cli: Cli, tiny_target_dir: Path, arguments: tuple[str, ...], named: str) -> None:
    ran = cli("generate", "hi", "--target", tiny_target_dir, *arguments)
    assert ran.exit_code == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.output


def test_four_bits_of_a_trained_drafter_are_refused(cli: Cli, tiny_target_dir: Path, drafter_dir: Path) -> None:
    ran = cli("generate", "hi", "--target", tiny_target_dir, "--drafter", drafter_dir, "--quantize-drafter", "int4")
    assert ran.exit_code == 2
    assert "a trained drafter can be quantised to int8, got 'int4'" in ran.stderr


def test_the_table_shows_both_and_leaves_out_what_is_not_measured() -> None:
    from rich.console import Console

    totals = {"prompts": 2, "tau": 2.5, "tokens_per_s_plain": 10.0, "tokens_per_s": 20.0}
    quantized = {
        "totals": totals,
        "memory": {"target_weights": 1_500_000, "cache": 100_000, "peak": None},
        "answers": [{"id": "a", "tokens": [1, 2]}, {"id": "b", "tokens": [3]}],
        "settings": {"dtype": "bfloat16", "fingerprint": {"quantization": "int8"}},
    }
    whole = quantized | {
        "totals": totals | {"tau": 2.75},
        "memory": {"target_weights": 3_000_000, "cache": 100_000, "peak": 4_000_000},
        "answers": [{"id": "b", "tokens": [4]}, {"id": "a", "tokens": [1, 2]}],
    }
    quantized["unquantized"] = beside(quantized, whole)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(memory_table(quantized))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["1", "of", "2", "texts", "are", "those", "of", "the", "target", "as", "it", "was"]
    assert lines[2] == ["int8", "1.5", "0.1", "2.50", "10.0", "20.0"]
    assert lines[3] == ["bfloat16", "3.0", "0.1", "4.0", "2.75", "10.0", "20.0"]
