"""What a user asks becomes token ids; and encoder-decoder targets on the command line, where that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.cli.prompts import encode
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.target import Target

from ..infer.encoder_decoders import build
from .conftest import Cli

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "so"}]


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny encoder-decoder target on disk with its tokenizer, as a user would name it."""
    saved = tmp_path_factory.mktemp("seq2seq") / request.param
    build(request.param, vocab_size=300).save_pretrained(saved)
    tiny_tokenizer.save_pretrained(saved)
    return saved


def test_text_messages_and_ids_are_prompts(tiny_target: Target) -> None:
    one = encode(tiny_target, "hi")
    assert encode(tiny_target, TALK[:1]) == one == tiny_target.encode(TALK[:1])
    assert encode(tiny_target, TALK)[: len(one)] == one
    assert encode(tiny_target, one) == one
    with pytest.raises(ValueError, match="not both"):
        encode(tiny_target, [3, TALK[0]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(tiny_target, "  ")


def test_an_encoder_reads_the_text_as_it_is(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = Seq2SeqTarget(build("bart", vocab_size=300), tiny_tokenizer)
    assert encode(target, "the cat") == [*tiny_tokenizer("the cat")["input_ids"], 2, 0]


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--seed", 2)])
def test_generate_writes_the_same_text_with_any_drafter(cli: Cli, folder: Path, sampling: tuple[object, ...]) -> None:
    settings = ("generate", "the cat sat on the mat", "--target", folder, "--max-new-tokens", 14, *sampling)
    plain = cli(*settings)
    assert plain.exit_code == 0, plain.output
    assert plain.stdout.strip()
    for drafter in ("prompt-lookup", "lookahead", f"draft:{folder}"):
        drafted = cli(*settings, "--drafter", drafter)
        assert drafted.exit_code == 0, drafted.output
        assert drafted.stdout == plain.stdout
    assert "accepted 0" not in drafted.stderr


def test_generated_and_evaluated_answers_pass_the_audit(cli: Cli, folder: Path, tmp_path: Path) -> None:
    answer, document = tmp_path / "answer.json", tmp_path / "evaluation.json"
    assert cli("generate", "the cat", "--target", folder, "--max-new-tokens", 9, "--json", answer).exit_code == 0
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "category": "a", "turns": [f"the cat and {n} dogs"]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("--target", folder, "--drafter", "prompt-lookup", "--prompts", questions, "--dtype", "float32")
    ran = cli("evaluate", *settings, "--max-new-tokens", 12, "--rows", 2, "--json", document)
    assert ran.exit_code == 0, ran.output
    assert json.loads(document.read_text())["totals"]["identical"] == 3
    for file, count in ((answer, 1), (document, 3)):
        ran = cli("audit", "--run", file)
        assert ran.exit_code == 0, ran.output
        assert f"{count} outputs: {count} exact" in ran.stdout


def test_what_needs_a_causal_target_says_so(cli: Cli, folder: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    ran = cli("generate", "hi", "--target", folder, "--drafter", f"draft:{tiny_target_dir}")
    assert ran.exit_code == 2
    assert "is an encoder-decoder model, draft model" in ran.stderr
    asked = cli("generate", "the cat " * 40, "--target", folder, "--max-new-tokens", 9)
    assert asked.exit_code == (2 if folder.name == "bart" else 0)
    assert "Traceback" not in asked.output
