"""`draftsmith audit`: what evaluate, generate and respond write passes; planted errors end in exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.infer.audit import choices
from draftsmith.infer.target import Target

from .conftest import Cli

SETTINGS = ("--dtype", "float32", "--max-new-tokens", 16)
SAMPLED = ("--temperature", 0.9, "--top-k", 30, "--seed", 4)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "category": "a", "turns": [f"count to {n}"]} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluation(cli: Cli, target: Path, questions: Path, *more: object) -> Path:
    out = questions.with_name("evaluation.json")
    settings = ("--target", target, "--drafter", "prompt-lookup", "--prompts", questions, *SETTINGS)
    ran = cli("evaluate", *settings, "--json", out, *more)
    assert ran.exit_code == 0, ran.stderr
    return out


@pytest.mark.parametrize("sampling", [(), SAMPLED])
def test_an_evaluation_passes_and_a_planted_token_does_not(
    cli: Cli, tiny_target_dir: Path, questions: Path, sampling: tuple[object, ...]
) -> None:
    path = evaluation(cli, tiny_target_dir, questions, *sampling)
    found = questions.with_name("audit.json")
    ran = cli("audit", "--run", path, "--json", found)
    assert ran.exit_code == 0, ran.output
    assert f"3 outputs: 3 exact, 0 near-ties, 0 wrong ({tiny_target_dir}, float32)" in ran.stdout
    assert json.loads(found.read_text())["totals"] == {"exact": 3, "near-tie": 0, "wrong": 0}

    document = json.loads(path.read_text())
    document["answers"][1]["tokens"][5] ^= 1
    path.write_text(json.dumps(document))
    ran = cli("audit", "--run", path, "--json", found)
    assert ran.exit_code == 1
    assert "2 exact, 0 near-ties, 1 wrong" in ran.stdout
    bad = json.loads(found.read_text())["outputs"][1]
    assert (bad["id"], bad["verdict"], bad["position"]) == ("1", "wrong", 5)
    assert bad["choice"] == bad["emitted"] ^ 1


def test_truncated_and_swapped_answers_are_wrong(cli: Cli, tiny_target_dir: Path, questions: Path) -> None:
    path = evaluation(cli, tiny_target_dir, questions)
    document = json.loads(path.read_text())
    one, two, three = document["answers"]
    one["tokens"], two["tokens"] = two["tokens"], one["tokens"]
    three["tokens"] = three["tokens"][:9]
    path.write_text(json.dumps(document))
    ran = cli("audit", "--run", path)
    assert ran.exit_code == 1
    assert "0 exact, 0 near-ties, 3 wrong" in ran.stdout
    assert "(ends)" in ran.stdout


@pytest.mark.parametrize("sampling", [(), SAMPLED])
def test_what_generate_wrote_passes(
    cli: Cli, tiny_target_dir: Path, tmp_path: Path, sampling: tuple[object, ...]
) -> None:
    out = tmp_path / "answer.json"
    asked = ("the cat", "--target", tiny_target_dir, "--max-new-tokens", 12, "--drafter", "prompt-lookup", *sampling)
    assert cli("generate", *asked, "--json", out).exit_code == 0
    ran = cli("audit", "--run", out)
    assert ran.exit_code == 0, ran.output
    assert "1 outputs: 1 exact" in ran.stdout


def test_a_response_file_passes_answer_by_answer(cli: Cli, tiny_target_dir: Path, tmp_path: Path) -> None:
    """Two turns of one conversation, sampled with the conversation's own seed."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "responses.jsonl"
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "and"},
    ]
    prompts.write_text(json.dumps({"id": "a", "messages": talk}) + "\n")
    asked = ("--target", tiny_target_dir, "--prompts", prompts, "--out", out, *SETTINGS, *SAMPLED)
    assert cli("respond", *asked).exit_code == 0
    ran = cli("audit", "--text", out)
    assert ran.exit_code == 0, ran.output
    assert "2 outputs: 2 exact" in ran.stdout
    assert "a turn 2" in ran.stdout


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_greedy_answers_of_a_server_are_replayed_and_sampled_ones_are_not(
    cli: Cli, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path, temperature: float
) -> None:
    from draftsmith.distill.responses import Manifest, Response, TokenSequence

    ids, out = [5, 9, 7], tmp_path / "served.jsonl"
    while len(ids) < 9:
        ids.append(choices(tiny_target, ids[:3], [*ids[3:], 0])[-1])
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": 0}
    Manifest(
        target={"name": str(tiny_target_dir), "served as": "tiny", "weights": None, "vocab_size": 300},
        dtype="served",
        template_hash="",
        sampling=sampling,
        max_new_tokens=6,
    ).write(out)
    sequence = TokenSequence(token_ids=ids, supervised=[(3, 9)])
    talk = Response(id="a", category="x", split="train", messages=[], truncated=True, sequences=[sequence])
    out.write_text(talk.model_dump_json() + "\n")
    ran = cli("audit", "--text", out)
    if temperature:
        assert ran.exit_code == 2
        assert "were sampled by a server, with noise of its own" in ran.stderr
    else:
        assert ran.exit_code == 0, ran.output
        assert f"1 outputs: 1 exact, 0 near-ties, 0 wrong ({tiny_target_dir}, float32)" in ran.stdout


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lines_of_text_and_of_tokens(cli: Cli, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path) -> None:
    """What was asked and what came out, each in every way it can be said; the texts are a token the target writes."""
    from draftsmith.cli.prompts import encode

    ids = encode(tiny_target, "hi")
    tokens: list[int] = []
    for _ in range(6):
        tokens.append(choices(tiny_target, ids, [*tokens, 0])[-1])
    text, message = tiny_target.tokenizer.decode(tokens[:1]), {"role": "user", "content": "hi"}
    file = write(
        tmp_path / "outputs.jsonl",
        {"id": "ids", "prompt_tokens": ids, "tokens": tokens, "finish": "length", "max_new_tokens": 6},
        {"prompt": "hi", "tokens": tokens},
        {"prompt": "hi", "response": text},
        {"messages": [message], "response": text},
        {"messages": [message, {"role": "assistant", "content": text}]},
    )
    ran = cli("audit", "--text", file, "--target", tiny_target_dir)
    assert ran.exit_code == 0, ran.output
    assert "5 outputs: 5 exact" in ran.stdout
    assert "of 4 nothing says why they end where they do" in ran.stdout
    ran = cli("audit", "--text", write(file, {"prompt": "hi", "response": text + "!"}), "--target", tiny_target_dir)
    assert ran.exit_code == 1, ran.output


def test_another_target_than_the_one_that_wrote_them_is_mentioned(
    cli: Cli, tiny_target_dir: Path, questions: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, other = evaluation(cli, tiny_target_dir, questions), tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    model.lm_head.weight.data += 0.5 * model.lm_head.weight.data.roll(1, 0)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_target_dir).save_pretrained(other)
    ran = cli("audit", "--run", path, "--target", other)
    assert ran.exit_code == 1
    assert f"written by a target with other weights ({tiny_target_dir}), not by {other}" in ran.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("not json", ":1: Expecting value"),
        ("[1, 2]", ":1: expected a JSON object, got list"),
        ('{"response": "x"}', "it does not say what was asked (prompt, messages or prompt_tokens); it has response."),
        ('{"prompt": "x"}', "it does not say what came out"),
        ('{"prompt": "x", "response": "y", "seed": 3}', 'seed must stand in "sampling"'),
        ('{"prompt": "x", "tokens": ["a"]}', "lists of token ids"),
        ('{"prompt": "x", "response": "y", "sampling": {"heat": 1}}', "heat"),
        ('{"prompt": "x", "tokens": [99999]}', "output '1': token id 99999 is none of the target's 300"),
        ("", "is empty; expected one output per line"),
    ],
)
def test_a_bad_line_is_named(cli: Cli, tiny_target_dir: Path, tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "outputs.jsonl"
    file.write_text(line + "\n")
    ran = cli("audit", "--text", file, "--target", tiny_target_dir)
    assert ran.exit_code == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.output


def test_bad_calls_end_in_one_line(cli: Cli, tmp_path: Path) -> None:
    none, both = cli("audit"), cli("audit", "--run", tmp_path / "a", "--text", tmp_path / "b")
    assert none.exit_code == both.exit_code == 2
    assert "name one file of outputs" in none.stderr
    assert "name one file of outputs" in both.stderr
    missing = cli("audit", "--run", tmp_path / "nowhere.json")
    assert missing.exit_code == 2
    assert "nowhere.json" in missing.stderr
    strange = tmp_path / "strange.json"
    strange.write_text("{}")
    ran = cli("audit", "--run", strange)
    assert ran.exit_code == 2
    assert "holds no outputs to audit (KeyError: 'settings')" in ran.stderr
