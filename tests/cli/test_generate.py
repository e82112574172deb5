"""`draftsmith generate`: one seed, one text, whatever drafts it; bad input ends in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.heads import METHODS
from draftsmith.infer.target import Target

from .conftest import Cli

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
COUNTS = re.compile(r"rounds (\d+)  drafted (\d+)  accepted (\d+)  emitted (\d+)  tau (\d+\.\d\d)  (\d+\.\d) tokens/s")


SAMPLINGS = [
    ("--temperature", 0.8, "--seed", 1),
    ("--temperature", 1, "--top-k", 20),
    ("--temperature", 1, "--min-p", 0.05, "--repetition-penalty", 1.2),
    ("--presence-penalty", 0.5, "--frequency-penalty", 0.2),
]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_text_is_the_same_with_and_without_a_drafter(
    cli: Cli, tiny_target_dir: Path, drafter_dir: Path, is_sampled: bool
) -> None:
    """Of the settings each method gets one (all with all: tests/heads/test_laws.py)."""
    sampling = SAMPLINGS[sorted(METHODS).index(drafter_dir.name) % len(SAMPLINGS)] if is_sampled else ()
    settings = ("--target", tiny_target_dir, "--max-new-tokens", 40, *sampling)
    plain = cli("generate", "the cat", *settings, "--drafter", "none")
    drafted = cli("generate", "the cat", *settings, "--drafter", drafter_dir)
    assert plain.exit_code == drafted.exit_code == 0, drafted.output
    assert plain.stdout.strip()
    assert drafted.stdout == plain.stdout


@pytest.mark.parametrize("drafter", ["prompt-lookup", "lookahead", "draft:TARGET", "draft:TARGET+prompt-lookup"])
def test_drafters_without_training_change_no_text_either(cli: Cli, tiny_target_dir: Path, drafter: str) -> None:
    settings = ("generate", "the cat the cat", "--target", tiny_target_dir, "--max-new-tokens", 24)
    drafted = cli(*settings, "--drafter", drafter.replace("TARGET", str(tiny_target_dir)))
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == cli(*settings).stdout


def test_another_seed_gives_another_text(cli: Cli, tiny_target_dir: Path) -> None:
    settings = ("--target", tiny_target_dir, "--max-new-tokens", 20, "--temperature", 1)
    one = cli("generate", "the cat", *settings, "--seed", 1)
    two = cli("generate", "the cat", *settings, "--seed", 2)
    assert one.stdout != two.stdout


@pytest.mark.parametrize(
    "setting",
    [
        ("--min-p", 0.9),
        ("--repetition-penalty", 3),
        ("--presence-penalty", 2),
        ("--frequency-penalty", -2),
        ("--stop", "e"),
    ],
)
def test_every_setting_changes_the_text(cli: Cli, tiny_target_dir: Path, setting: tuple[object, ...]) -> None:
    settings = ("generate", "the cat", "--target", tiny_target_dir, "--max-new-tokens", 60, "--temperature", 1)
    assert cli(*settings, *setting).stdout != cli(*settings).stdout


def test_a_stop_string_ends_the_answer_on_the_screen(cli: Cli, tiny_target_dir: Path, drafter_dir: Path) -> None:
    settings = ("generate", "the cat", "--target", tiny_target_dir, "--drafter", drafter_dir, "--max-new-tokens", 40)
    text = cli(*settings).stdout.removesuffix("\n")
    letters = [text[at : at + 2] for at in range(3, len(text) - 1) if text[at : at + 2].isascii()]
    ended = cli(*settings, "--stop", "never written", "--stop", letters[-1])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout == text[: text.index(letters[-1])] + "\n"


VERIFIERS = ["token-level", "block", "recursive", "traversal", "typical"]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verifiers_say_what_they_promise(cli: Cli, tiny_target_dir: Path, verifier: str) -> None:
    settings = ("generate", "the cat", "--target", tiny_target_dir, "--max-new-tokens", 20)
    judged = (*settings, "--drafter", f"draft:{tiny_target_dir}", "--verifier", verifier)
    ran = cli(*judged)
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout == cli(*settings).stdout, "greedy text is the same"
    assert ("LOSSY" in ran.stderr) == (verifier == "typical")
    ran = cli(*judged, "--temperature", 1, "--tree", "chain")
    assert ran.exit_code == 0, ran.stderr
    said = "LOSSY" if verifier == "typical" else "another text than plain decoding's"
    assert f"verifier {verifier}: " in ran.stderr
    assert said in ran.stderr
    assert "accepted 0" not in ran.stderr, "a draft model that is the target was never accepted"


@pytest.mark.parametrize("verifier", VERIFIERS[:-1])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "lookahead", "FOLDER"])
def test_verifiers_that_judge_probabilities_refuse_drafters_without(
    cli: Cli, tiny_target_dir: Path, tmp_path: Path, verifier: str, drafter: str
) -> None:
    name = drafter.replace("FOLDER", str(tmp_path))
    ran = cli("generate", "hi", "--target", tiny_target_dir, "--drafter", name, "--verifier", verifier)
    assert ran.exit_code == 2
    assert "--verifier sample-match" in ran.stderr
    assert "--drafter draft:MODEL" in ran.stderr
    assert ran.stdout == ""


def test_lossy_is_said_where_it_can_be_chosen(cli: Cli) -> None:
    for verb in ("generate", "evaluate"):
        shown = " ".join(cli(verb, "--help").stdout.split())
        assert "typical(LOSSY)" in shown
        assert "typical: LOSSY" in shown


def test_the_last_line_counts_in_integers_that_add_up(cli: Cli, tiny_target_dir: Path, drafter_dir: Path) -> None:
    ran = cli("generate", "the cat", "--target", tiny_target_dir, "--drafter", drafter_dir, "--max-new-tokens", 30)
    found = COUNTS.fullmatch(ran.stderr.splitlines()[-1])
    assert found, ran.stderr
    rounds, drafted, accepted, emitted = map(int, found.groups()[:4])
    assert emitted == 29, "the first of 30 tokens comes from the prefill"
    assert 0 <= accepted <= drafted
    assert rounds + accepted in (emitted, emitted + 1), "each round adds a bonus token, unless the limit cut it"
    assert found[5] == f"{emitted / rounds:.2f}"


def test_accepted_tokens_are_green_and_only_on_a_terminal(
    cli: Cli, build_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied, nearly linear target repeats its token; a drafter that copies its head agrees, so drafts are accepted."""
    from draftsmith.heads import METHODS, Binding

    dull = build_target(initializer_range=1e-2, tie_word_embeddings=True)
    dull.model.save_pretrained(tmp_path / "target")
    dull.tokenizer.save_pretrained(tmp_path / "target")
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n", "assistant"))  # a letter to repeat, no line end
    config, method = METHODS["medusa"]
    method(config(), dull).save(tmp_path / "drafter", binding=Binding(target=dull.fingerprint(), template_hash=""))
    command = ("generate", "hi", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter")
    ran = cli(*command, "--max-new-tokens", 12)
    assert "accepted 0" not in ran.stderr
    assert "\x1b" not in ran.stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = cli(*command, "--max-new-tokens", 12)
    assert "\x1b[32m" in coloured.stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.stdout) == ran.stdout


def test_a_drafter_of_another_target_is_refused_with_what_differs(
    cli: Cli, build_target: Callable[..., Target], tmp_path: Path, drafter_dir: Path
) -> None:
    other = build_target(seed=1, num_hidden_layers=2)
    other.model.save_pretrained(tmp_path)
    other.tokenizer.save_pretrained(tmp_path)
    ran = cli("generate", "hi", "--target", tmp_path, "--drafter", drafter_dir)
    assert ran.exit_code == 2
    assert "num_layers" in ran.stderr
    assert "Traceback" not in ran.output


def test_damaged_weights_are_named(cli: Cli, tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "drafter"
    shutil.copytree(drafter_dir, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = cli("generate", "hi", "--target", tiny_target_dir, "--drafter", broken)
    assert ran.exit_code == 2
    assert str(weights) in ran.stderr


def test_an_unknown_method_is_named_with_the_known_ones(
    cli: Cli, tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "drafter"
    shutil.copytree(drafter_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    config["draftsmith"]["head"]["method"] = "clairvoyance"
    (broken / "config.json").write_text(json.dumps(config))
    ran = cli("generate", "hi", "--target", tiny_target_dir, "--drafter", broken)
    assert ran.exit_code == 2
    assert "'clairvoyance'" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("hi", "--drafter", "nowhere"), "nowhere"),
        (("hi", "--drafter", "nowhere+prompt-lookup"), "there is no drafter 'nowhere'"),
        (("hi", "--drafter", "lookahead+prompt-lookup", "--quantize-drafter", "int8"), "no weights to quantise"),
        (("hi", "--drafter", "none+prompt-lookup"), "copies on copies or on nothing"),
        (("hi", "--drafter", "draft:x+prompt-lookup", "--verifier", "block"), "no probabilities to judge it by"),
        (("hi", "--tree", "oak"), "--tree must be fit, chain, saved or a number of nodes, got 'oak'"),
        (("hi", "--dtype", "int8"), "float32, bfloat16, float16"),
        (("hi", "--temperature", "-1"), "temperature must be 0"),
        (("hi", "--top-p", "0"), "top_p must lie in (0, 1]"),
        (("hi", "--min-p", "2"), "min_p must lie in [0, 1]"),
        (("hi", "--repetition-penalty", "0"), "repetition_penalty must be above 0"),
        (("hi", "--presence-penalty", "3"), "presence_penalty must lie in [-2, 2]"),
        (("hi", "--stop", ""), "stop must be a list of non-empty strings"),
        (("hi", "--verifier", "best"), "no verifier 'best'; expected sample-match"),
        (("hi", "--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        pytest.param(("hi", "--forwards", "graphs"), "graphs are CUDA graphs", marks=no_card),
        (("hi", "--forwards", "fast"), "--forwards must be eager, compiled or graphs, got 'fast'"),
        (("",), "the prompt is empty"),
        (("the cat " * 300,), "exceed the target's context of 512"),
    ],
)
def test_bad_input_ends_in_one_line(cli: Cli, tiny_target_dir: Path, arguments: tuple[str, ...], named: str) -> None:
    ran = cli("generate", *arguments, "--target", tiny_target_dir)
    assert ran.exit_code == 2, ran.output
    assert named in ran.stderr
    assert "Traceback" not in ran.output
    assert ran.stdout == ""


def test_a_target_that_does_not_exist_is_an_error_that_says_what_can_be_named(cli: Cli) -> None:
    ran = cli("generate", "hi", "--target", "./nowhere")
    assert ran.exit_code == 2
    assert "./nowhere" in ran.stderr
    assert "smollm2-135m" in ran.stderr


@pytest.mark.slow
def test_the_embedded_target_writes_the_same_text_with_drafts_from_the_prompt(cli: Cli) -> None:
    settings = ("generate", "Repeat after me: a b c a b c a b c", "--max-new-tokens", 24)
    plain = cli(*settings)
    drafted = cli(*settings, "--drafter", "prompt-lookup")
    assert plain.exit_code == drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    assert "accepted 0" not in drafted.stderr
