"""Answers through a server are the target's answers, each conversation once, whatever goes wrong on the way."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.prompts import Conversation
from draftsmith.distill.remote import respond_through
from draftsmith.distill.respond import respond
from draftsmith.distill.responses import read_responses
from draftsmith.distill.served import ServedTarget
from draftsmith.distill.server import Server
from draftsmith.distill.talks import RespondReport
from draftsmith.distill.tokens import load_samples
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

from .chat_server import FAULTS, Answer, Body, ChatServer, Decoder, Words, completion
from .nursery import Nursery
from .test_respond import TALKS, by_id, talk

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def served(tiny_tokenizer: PreTrainedTokenizerFast) -> ServedTarget:
    return ServedTarget("tiny", tiny_tokenizer, (2,), 300, 512)


def run(
    server: ChatServer | str,
    target: ServedTarget,
    talks: list[Conversation],
    out: Path,
    *,
    sampling: SamplingParams = GREEDY,
    share: float = 0.01,
    **changes: Any,
) -> RespondReport:
    settings: dict[str, Any] = {"attempts": 20, "first_delay_s": 0.001, "timeout_s": 2.0, "concurrency": 8} | changes
    url = server if isinstance(server, str) else server.url
    return respond_through(
        Server(url, "tiny", **settings),
        target,
        talks,
        out,
        sampling=sampling,
        max_new_tokens=12,
        progress=False,
        max_bad_share=share,
    )


def test_a_server_that_fails_stalls_and_drops_gives_the_answers_of_the_engine_here(
    tmp_path: Path, tiny_target: Target, served: ServedTarget
) -> None:
    respond(tiny_target, TALKS, tmp_path / "here.jsonl", sampling=GREEDY, max_new_tokens=12, rows=4, progress=False)
    here = by_id(tmp_path / "here.jsonl")
    with ChatServer(Decoder(tiny_target), faults=FAULTS, seed=3, stall=1.2) as server:
        run(server, served, TALKS, tmp_path / "text.jsonl", timeout_s=60)
        server.share, count = 0.4, len(server.bodies)
        report = run(server, served, TALKS, tmp_path / "ids.jsonl", body={"return_token_ids": True}, timeout_s=1.0)
        assert (report.answered, report.failed, report.rejected) == (len(TALKS), 0, 0)
        assert len(server.bodies) - count > 1.3 * count, "much was asked again"
    assert by_id(tmp_path / "ids.jsonl") == here, "with the ids of the server, to the token"
    differs = 0
    for id, found in by_id(tmp_path / "text.jsonl").items():
        assert (found.messages, found.truncated) == (here[id].messages, here[id].truncated)
        lengths = [
            [end - start for part in response.sequences for start, end in part.supervised]
            for response in (found, here[id])
        ]
        assert (found.spelling == "differs") == (lengths[0] != lengths[1]), "the counts tell"
        differs += found.spelling == "differs"
    assert differs, "random text is often not spelled as the tokenizer would spell it"


def test_training_reads_the_file_as_any_other(
    tmp_path: Path, tiny_target: Target, served: ServedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatServer(Words(served.tokenizer)) as server:
        run(server, served, TALKS, tmp_path / "r.jsonl")
    samples = load_samples(tmp_path / "r.jsonl", tiny_target, max_length=512)
    written = [part.token_ids for _, found in sorted(by_id(tmp_path / "r.jsonl").items()) for part in found.sequences]
    assert [sample.tokens for sample in samples] == written
    assert "was answered through a server, by what it calls tiny" in capsys.readouterr().err
    for found in read_responses(tmp_path / "r.jsonl"):
        assert found.spelling == "counted"
        ends = [part.token_ids[end - 1] for part in found.sequences for _, end in part.supervised]
        assert ends == [2] * len(ends), "every answer has its end"


def test_another_template_on_the_server_and_a_silent_one_are_noticed(
    tmp_path: Path, served: ServedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    words = Words(served.tokenizer)

    def with_a_system_prompt(body: Body) -> Answer:
        status, content = words(body)
        content["usage"]["prompt_tokens"] += 9
        return status, content

    with ChatServer(with_a_system_prompt) as server:
        run(server, served, TALKS, tmp_path / "other.jsonl")
        assert {found.spelling for found in read_responses(tmp_path / "other.jsonl")} == {"differs"}
        assert "20 of 20 conversations have ids that are not the target's own" in capsys.readouterr().err
        server.speak = lambda body: completion("yes")
        run(server, served, TALKS, tmp_path / "silent.jsonl")
    assert {found.spelling for found in read_responses(tmp_path / "silent.jsonl")} == {"unknown"}
    assert "could not be compared" in capsys.readouterr().err


def test_cut_answers_are_marked_and_have_no_end(tmp_path: Path, served: ServedTarget) -> None:
    with ChatServer(lambda body: completion("one two", finish="length")) as server:
        report = run(server, served, TALKS[:4], tmp_path / "r.jsonl")
    assert report.truncated == 4
    for found in read_responses(tmp_path / "r.jsonl"):
        assert found.truncated
        assert all(part.token_ids[end - 1] != 2 for part in found.sequences for _, end in part.supervised)


def test_every_turn_is_asked_with_the_answers_before_it(tmp_path: Path, served: ServedTarget) -> None:
    with ChatServer(lambda body: completion(f"answer {len(body['messages'])}")) as server:
        run(server, served, [talk("a", "one", "two", "three")], tmp_path / "r.jsonl", concurrency=1)
        asked = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert asked == [["one"], ["one", "answer 1", "two"], ["one", "answer 1", "two", "answer 3", "three"]]


def poisoned(body: Body) -> Answer:
    if "poison" in body["messages"][-1]["content"]:
        return 400, {"error": {"message": "I will not say this"}}
    return completion("fine", usage=(1, 1))


def test_a_prompt_without_an_answer_is_listed_shown_and_asked_again(
    tmp_path: Path, served: ServedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [*TALKS, talk("bad", "say", "poison"), talk("worse", "poison")]
    out, listing = tmp_path / "r.jsonl", tmp_path / "r.failures.jsonl"
    with ChatServer(poisoned) as server:
        report = run(server, served, talks, out, share=0.2)
        assert (report.answered, report.failed) == (len(TALKS), 2)
        assert len(server.bodies) == sum(len(talk.messages) for talk in TALKS) + 3, "it is final: asked once"
        failures = {line["id"]: line["reason"] for line in map(json.loads, listing.read_text().splitlines())}
        assert failures.keys() == {"bad", "worse"}
        assert "I will not say this" in failures["bad"]
        said = capsys.readouterr().err
        assert "2 of 22 conversations got no answer" in said
        assert str(listing) in said
        assert by_id(out).keys() == {talk.id for talk in TALKS}

        with pytest.raises(ValueError, match=r"2 of 22 conversations got no answer.*'bad'.*Every other answer is kept"):
            run(server, served, talks, out)
        server.speak = lambda body: completion("healed")
        report = run(server, served, talks, out)
    assert (report.answered, report.resumed, report.failed) == (2, len(TALKS), 0)
    assert not listing.exists(), "an old list would be a false one"


def test_a_server_that_went_away_stops_the_run_and_keeps_what_it_had_answered(
    tmp_path: Path, served: ServedTarget
) -> None:
    words, out = Words(served.tokenizer), tmp_path / "r.jsonl"
    answers = [0]

    def ends(body: Body) -> Answer:
        answers[0] += 1
        return words(body) if answers[0] <= 10 else (503, {})

    with ChatServer(ends) as server, pytest.raises(ValueError, match=r"none of the last 3 prompts.*goes on from there"):
        run(server, served, TALKS, out, attempts=2, concurrency=1)
    kept = by_id(out)
    assert 0 < len(kept) < len(TALKS)
    with ChatServer(words) as server:
        report = run(server, served, TALKS, out)
        assert (report.resumed, report.answered) == (len(kept), len(TALKS) - len(kept))
        run(server, served, TALKS, tmp_path / "whole.jsonl")
    assert by_id(out) == by_id(tmp_path / "whole.jsonl")


def test_prompts_given_up_here_and_there_do_not_stop_the_run(tmp_path: Path, served: ServedTarget) -> None:
    words = Words(served.tokenizer)
    talks = [talk(f"{'sick' if i % 2 else 'well'}{i}", f"{'sick' if i % 2 else 'well'} {i}") for i in range(12)]
    with ChatServer(lambda body: (503, {}) if "sick" in body["messages"][-1]["content"] else words(body)) as server:
        report = run(server, served, talks, tmp_path / "r.jsonl", attempts=2, concurrency=1, share=1.0)
    assert (report.answered, report.failed) == (6, 6)


def test_as_many_requests_are_under_way_as_allowed_and_no_more(tmp_path: Path, served: ServedTarget) -> None:
    words = Words(served.tokenizer)

    def slowly(body: Body) -> Answer:
        time.sleep(0.02)
        return words(body)

    with ChatServer(slowly) as server:
        run(server, served, TALKS, tmp_path / "r.jsonl", concurrency=5)
        assert server.most_at_once == 5


def test_a_conversation_that_outgrows_the_server_s_context_keeps_its_finished_turns(
    tmp_path: Path, served: ServedTarget
) -> None:
    def narrow(body: Body) -> Answer:
        if len(body["messages"]) > 2:
            return 400, {"error": {"message": "maximum context length is 10", "code": "context_length_exceeded"}}
        return completion("short")

    with ChatServer(narrow) as server:
        report = run(server, served, [talk("a", "one", "two")], tmp_path / "r.jsonl")
    (found,) = read_responses(tmp_path / "r.jsonl")
    assert [message["content"] for message in found.messages] == ["one", "short"]
    assert found.truncated
    assert report.truncated == 1


def test_what_does_not_fit_the_target_s_context_is_never_sent(tmp_path: Path, served: ServedTarget) -> None:
    with ChatServer(Words(served.tokenizer)) as server:
        talks = [*TALKS, talk("huge", "the cat " * 600)]
        with pytest.raises(ValueError, match=r"the first is 'huge': its prompt of \d+ tokens leaves no room .* of 512"):
            run(server, served, talks, tmp_path / "r.jsonl")
        assert run(server, served, talks, tmp_path / "r.jsonl", share=0.1).rejected == 1
        assert all(len(body["messages"][-1]["content"]) < 1000 for body in server.bodies)
    assert len(read_responses(tmp_path / "r.jsonl")) == len(TALKS)


def test_sampling_reaches_the_server_with_a_seed_per_conversation(tmp_path: Path, served: ServedTarget) -> None:
    warm = SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=5)
    with ChatServer(Words(served.tokenizer)) as server:
        run(server, served, TALKS, tmp_path / "r.jsonl", sampling=warm)
        seeds = {(body["messages"][0]["content"], body["seed"]) for body in server.bodies}
        assert len({seed for _, seed in seeds}) == len(seeds) == len(TALKS)
        assert all((body["temperature"], body["top_k"], body["top_p"]) == (0.9, 20, 0.8) for body in server.bodies)
        server.bodies.clear()
        run(server, served, TALKS[:3], tmp_path / "greedy.jsonl")
        assert all(body["temperature"] == 0 and "seed" not in body for body in server.bodies)


def test_a_file_is_continued_only_for_the_same_model_and_request(tmp_path: Path, served: ServedTarget) -> None:
    with ChatServer(Words(served.tokenizer)) as server:
        run(server, served, TALKS[:2], tmp_path / "r.jsonl")
        with pytest.raises(ValueError, match=r"request top_k: 3 here, None there"):
            run(server, served, TALKS, tmp_path / "r.jsonl", body={"top_k": 3})
    other = Server("http://127.0.0.1:9", "another")
    with pytest.raises(ValueError, match="target served as: 'another' here, 'tiny' there"):
        respond_through(other, served, TALKS, tmp_path / "r.jsonl", sampling=GREEDY, max_new_tokens=12)


MANY = [talk(f"m{i:02d}", *[f"say {i}.{turn}" for turn in range(1 + i % 3)]) for i in range(40)]

ASK = """
from pathlib import Path
from draftsmith.distill.served import ServedTarget
from tests.distill.test_remote import MANY, run

target = ServedTarget.load(sys.argv[1])

def work(line):
    url, out = line.split()
    run(url, target, MANY, Path(out), timeout_s=1.0, concurrency=4)
"""


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_killed_at_random_instants_nothing_is_lost_or_doubled(
    tmp_path: Path, served: ServedTarget, tiny_target_dir: Path
) -> None:
    words, nursery = Words(served.tokenizer), Nursery(ASK, tiny_target_dir)

    def slowly(body: Body) -> Answer:
        time.sleep(0.02)
        return words(body)

    with ChatServer(slowly, faults=FAULTS, share=0.25, seed=9, stall=1.3) as server:
        assert nursery.run(f"{server.url} {tmp_path / 'whole.jsonl'}") == 0
        whole, draw, out = by_id(tmp_path / "whole.jsonl"), random.Random(0), tmp_path / "killed.jsonl"
        assert len(whole) == len(MANY)
        for _ in range(5):
            goal = lines(out) + draw.randint(0, 3)
            killed = nursery.kill_when(
                f"{server.url} {out}",
                lambda: lines(out) >= goal,  # noqa: B023 (called at once)
                pause=draw.uniform(0, 0.03),
            )
            assert killed == -signal.SIGKILL
        assert nursery.run(f"{server.url} {out}") == 0
        assert by_id(out) == whole
    nursery.close()
