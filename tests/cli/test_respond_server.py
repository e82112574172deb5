"""`draftsmith respond --server`: a target behind a server, asked over a real connection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..distill.chat_server import ChatServer, Words, completion
from .conftest import Cli
from .test_respond import answers, prompts  # noqa: F401 (a fixture)


@pytest.fixture
def server(tiny_tokenizer: object) -> ChatServer:
    return ChatServer(Words(tiny_tokenizer))  # type: ignore[arg-type]


def test_a_server_answers_and_the_same_command_goes_on(
    cli: Cli,
    server: ChatServer,
    tiny_target_dir: Path,
    prompts: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "open sesame")
    out = tmp_path / "out.jsonl"
    with server:
        words = ["respond", "--server", server.url, "--model", "m", "--target", tiny_target_dir, "--prompts", prompts]
        words += ["--out", out, "--api-key-env", "MY_KEY", "--concurrency", 2, "--body", '{"top_k": 5}']
        ran = cli(*words, "--limit", 2)
        assert ran.exit_code == 0, ran.output
        ran = cli(*words)
        assert ran.exit_code == 0, ran.output
    assert "answered 4 (0 truncated), kept 2 from before, refused 0, failed 0" in ran.stdout
    assert len(answers(out)) == 6
    assert {body["top_k"] for body in server.bodies} == {5}
    assert set(server.keys) == {"Bearer open sesame"}
    assert "open sesame" not in ran.output + (tmp_path / "out.manifest.json").read_text()


def test_without_a_target_the_model_s_name_is_where_its_tokenizer_is(
    cli: Cli,
    server: ChatServer,
    tiny_target_dir: Path,
    prompts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    with server:
        ran = cli(
            "respond",
            "--server",
            server.url,
            "--model",
            tiny_target_dir,
            "--prompts",
            prompts,
            "--out",
            tmp_path / "o.jsonl",
        )
    assert ran.exit_code == 0, ran.output
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert {row["spelling"] for row in rows} == {"counted"}


def test_prompts_without_an_answer_end_in_one_line_and_a_list(
    cli: Cli,
    server: ChatServer,
    tiny_target_dir: Path,
    prompts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.jsonl"
    server.speak = lambda body: (
        (400, {"error": "no"}) if body["messages"][-1]["content"].endswith("3") else completion("yes")
    )
    with server:
        words = ["respond", "--server", server.url, "--model", tiny_target_dir, "--prompts", prompts, "--out", out]
        ran = cli(*words)
    assert ran.exit_code == 2
    assert "1 of 6 conversations got no answer, the first: 'p3': status 400" in ran.stderr
    assert "Traceback" not in ran.output
    assert len(answers(out)) == 5
    assert json.loads((tmp_path / "out.failures.jsonl").read_text())["id"] == "p3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--server", "http://h"], "--server needs --model"),
        (["--server", "host:8000", "--model", "m"], "must look like http://localhost:8000/v1"),
        (["--server", "http://h", "--model", "m", "--rows", "4"], "--rows means nothing with --server"),
        (["--server", "http://h", "--model", "m", "--drafter", "none"], "--drafter means nothing with --server"),
        (["--concurrency", "4"], "--concurrency means nothing without --server"),
        (["--api-key-env", "X"], "--api-key-env means nothing without --server"),
        (["--server", "http://h", "--model", "m", "--api-key-env", "NO_SUCH"], "NO_SUCH, which is not set"),
        (["--server", "http://h", "--model", "m", "--body", "{"], "--body is not JSON"),
        (["--server", "http://h", "--model", "m", "--body", "3"], "--body must be a JSON object"),
    ],
)
def test_options_that_do_not_go_together_are_refused(cli: Cli, tmp_path: Path, words: list[str], message: str) -> None:
    ran = cli("respond", "--out", tmp_path / "out.jsonl", *words)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert not (tmp_path / "out.jsonl").exists()
