"""Answers are the target's own to the token, each conversation once, whatever interrupts the run."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.distill.prompts import Conversation
from draftsmith.distill.respond import respond
from draftsmith.distill.responses import Response, read_responses
from draftsmith.distill.talks import RespondReport, conversation_seed
from draftsmith.distill.template import ChatTemplate
from draftsmith.distill.tokens import load_samples
from draftsmith.infer.cache import KVCache
from draftsmith.infer.decode import Engine
from draftsmith.infer.request import Request
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Reading, Target
from draftsmith.infer.tree import TokenTree

from .nursery import Nursery

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.9, top_k=20, seed=5)


def talk(id: str, *turns: str, split: str = "train") -> Conversation:
    messages = tuple({"role": "user", "content": turn} for turn in turns)
    return Conversation(id, "writing", messages, "held-out" if split == "held-out" else "train")


TALKS = [talk(f"t{i:02d}", *[f"say {'the cat ' * (i % 5)}{i}.{turn}" for turn in range(1 + i % 3)]) for i in range(20)]


@pytest.fixture(scope="module")
def ending_target(build_target: Callable[..., Target]) -> Target:
    """A target some of whose answers end before the limit: a tenth of its vocabulary are EOS ids."""
    return build_target(eos_token_id=[2, *range(200, 230)])


def run(target: Target, talks: list[Conversation], out: Path, sampling: SamplingParams = GREEDY) -> RespondReport:
    return respond(target, talks, out, sampling=sampling, max_new_tokens=12, rows=4, progress=False)


def by_id(path: Path) -> dict[str, Response]:
    return {response.id: response for response in read_responses(path)}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_every_answer_is_what_the_target_decodes_alone_from_the_rendered_history(
    tmp_path: Path, ending_target: Target, sampling: SamplingParams
) -> None:
    report = run(ending_target, TALKS, tmp_path / "r.jsonl", sampling)
    assert report.answered == len(TALKS)
    template = ChatTemplate(ending_target.tokenizer, ending_target.eos_ids)
    tokens = 0
    for response in read_responses(tmp_path / "r.jsonl"):
        spans = [(part.token_ids, span) for part in response.sequences for span in part.supervised]
        turns = [index for index, message in enumerate(response.messages) if message["role"] == "assistant"]
        assert len(spans) == len(turns) == len(response.messages) / 2
        for (ids, (start, end)), turn in zip(spans, turns):
            prompt = template.prompt(response.messages[:turn])
            assert ids[:start] == prompt
            params = SamplingParams(0.9, 20, 1.0, conversation_seed(5, response.id)) if sampling == WARM else GREEDY
            engine = Engine(ending_target, rows=1)
            engine.add(Request("alone", prompt, 12, params))
            (alone,) = engine.run()
            assert ids[start:end] == alone.tokens
            assert response.messages[turn]["content"] == ending_target.tokenizer.decode(
                alone.tokens, skip_special_tokens=True
            )
            tokens += end - start
    assert tokens == report.tokens


def test_training_reads_the_ids_that_decoding_wrote(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, TALKS, tmp_path / "r.jsonl", WARM)
    samples = load_samples(tmp_path / "r.jsonl", tiny_target, max_length=512)
    written = [
        part.token_ids for _, response in sorted(by_id(tmp_path / "r.jsonl").items()) for part in response.sequences
    ]
    assert [sample.tokens for sample in samples] == written


def test_answers_that_came_with_the_data_are_replaced(tmp_path: Path, tiny_target: Target) -> None:
    came_with = Conversation(
        "a",
        "general",
        (
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "somebody else's answer"},
            {"role": "user", "content": "two"},
        ),
        "train",
    )
    run(tiny_target, [came_with], tmp_path / "r.jsonl")
    (response,) = read_responses(tmp_path / "r.jsonl")
    assert [message["role"] for message in response.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "somebody else" not in response.model_dump_json()


def test_cut_answers_are_marked(tmp_path: Path, ending_target: Target) -> None:
    report = run(ending_target, TALKS, tmp_path / "r.jsonl", WARM)
    responses = read_responses(tmp_path / "r.jsonl")
    for response in responses:
        ends = [part.token_ids[end - 1] for part in response.sequences for _, end in part.supervised]
        assert response.truncated == any(token not in ending_target.eos_ids for token in ends)
    assert report.truncated == sum(response.truncated for response in responses)
    assert 0 < report.truncated < len(responses), "both kinds occur"


def test_a_conversation_that_outgrows_the_context_keeps_its_finished_turns(tmp_path: Path, tiny_target: Target) -> None:
    long = talk("long", "hi", "the cat " * 300, "never asked")
    report = run(tiny_target, [long, *TALKS], tmp_path / "r.jsonl")
    response = by_id(tmp_path / "r.jsonl")["long"]
    assert [message["role"] for message in response.messages] == ["user", "assistant"]
    assert response.truncated
    assert report.answered == len(TALKS) + 1


def test_a_prompt_longer_than_the_context_is_named(tmp_path: Path, tiny_target: Target) -> None:
    huge = talk("huge", "the cat " * 600)
    with pytest.raises(ValueError, match=r"the first is 'huge': its prompt of \d+ tokens leaves no room .* of 512"):
        run(tiny_target, [*TALKS, huge], tmp_path / "r.jsonl")
    report = respond(
        tiny_target,
        [*TALKS, huge],
        tmp_path / "r.jsonl",
        sampling=GREEDY,
        max_new_tokens=4,
        progress=False,
        max_bad_share=0.1,
    )
    assert (report.answered, report.rejected) == (len(TALKS), 1)
    assert json.loads((tmp_path / "r.rejects.jsonl").read_text())["id"] == "huge"


def test_plain_text_and_repeated_ids_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="plain text holds no question"):
        run(tiny_target, [Conversation("a", "text", (), "train", text="once")], tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="'t00' occurs 2 times"):
        run(tiny_target, [*TALKS, TALKS[0]], tmp_path / "r.jsonl")


def test_a_finished_run_is_resumed_to_nothing(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, TALKS, tmp_path / "r.jsonl")
    before = (tmp_path / "r.jsonl").read_bytes()
    report = run(tiny_target, TALKS, tmp_path / "r.jsonl")
    assert (report.answered, report.resumed) == (0, len(TALKS))
    assert (tmp_path / "r.jsonl").read_bytes() == before


def test_a_run_cut_at_any_place_and_resumed_equals_an_uninterrupted_one(tmp_path: Path, tiny_target: Target) -> None:
    out = tmp_path / "r.jsonl"
    run(tiny_target, TALKS[:9], out, WARM)
    whole, expected = out.read_bytes(), by_id(out)
    for length in random.Random(0).sample(range(len(whole)), 8):
        out.write_bytes(whole[:length])
        report = run(tiny_target, TALKS[:9], out, WARM)
        assert report.answered + report.resumed == 9
        assert by_id(out) == expected


def test_an_answer_that_memory_cut_short_is_not_kept(tmp_path: Path, tiny_target: Target) -> None:
    """The run ends with the reason; with more memory the same command goes on, and nothing is different."""

    class Small(Target):
        def verify(self, tree: TokenTree, lengths: Tensor, cache: KVCache, **options: Any) -> Reading:
            if int(lengths.max()) > 60:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().verify(tree, lengths, cache, **options)

    out, whole = tmp_path / "r.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(ValueError, match=r"memory ran out .* Use fewer rows"):
        run(Small(tiny_target.model, tiny_target.tokenizer, name="tiny"), TALKS, out)
    assert len(by_id(out)) < len(TALKS)
    run(tiny_target, TALKS, out)
    run(tiny_target, TALKS, whole)
    assert by_id(out) == by_id(whole)


def test_resuming_under_other_settings_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, TALKS[:2], tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"sampling temperature: 0\.9 here, 0\.0 there"):
        run(tiny_target, TALKS, tmp_path / "r.jsonl", WARM)


RESPOND = """
from pathlib import Path
from draftsmith.distill.prompts import load_conversations
from draftsmith.distill.respond import respond
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

target = Target.load(sys.argv[1])
conversations = load_conversations(None, split="held-out")[:60]

def work(out):
    sampling = SamplingParams(temperature=0.9, seed=3)
    respond(target, conversations, Path(out), sampling=sampling, max_new_tokens=40, rows=8, progress=False, max_bad_share=1.0)
"""


@pytest.mark.slow
def test_killed_at_random_instants_nothing_is_lost_or_doubled(tmp_path: Path, tiny_target_dir: Path) -> None:
    nursery = Nursery(RESPOND, tiny_target_dir)
    assert nursery.run(tmp_path / "first.jsonl") == 0
    began = time.perf_counter()
    assert nursery.run(tmp_path / "whole.jsonl") == 0
    length = time.perf_counter() - began
    whole = by_id(tmp_path / "whole.jsonl")
    rng, statuses = random.Random(0), []
    for number in range(20):  # five runs, each killed three times and then left to end
        out = tmp_path / f"killed{number // 4}.jsonl"
        statuses.append(nursery.run(out, kill_after=None if number % 4 == 3 else rng.uniform(0, length / 2)))
        if number % 4 == 3:
            assert statuses[-1] == 0
            assert by_id(out) == whole
    nursery.close()
    assert statuses.count(-signal.SIGKILL) >= 10, "most kills hit a run that was under way"
