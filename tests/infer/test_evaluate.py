"""The evaluation document and its arithmetic."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor

from draftsmith.infer.clock import Clock
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.evaluate import EvalPrompt, _Pool, _Side, evaluate
from draftsmith.infer.request import Stats
from draftsmith.infer.sampling import Sampling
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree

COUNTS = {"prompts", "identical", "rounds", "drafted", "accepted", "emitted"}
FIGURES = {"tau", "tokens_per_s_plain", "tokens_per_s", "speedup", "ms_draft", "ms_verify", "ms_host"}


class Oracle(NoDraft):
    """Drafts the target's own greedy text, with one wrong token in every third chain."""

    def __init__(self, texts: dict[int, list[int]], length: int = 3) -> None:
        self.texts, self.length, self.calls = texts, length, 0

    def draft(self, state: None, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        self.calls += 1
        rows = []
        for length, anchor in zip(lengths.tolist(), anchors.tolist()):
            text = next(text for text in self.texts.values() if len(text) > length and text[length] == anchor)
            rows.append((text[length + 1 :] + [0] * self.length)[: self.length])
        draft = torch.tensor(rows)
        if self.calls % 3 == 0:
            draft[:, 1] = (draft[:, 1] + 1) % 300
        return TokenTree.chain(anchors, draft)


@pytest.fixture(scope="module")
def prompts(tiny_target: Target) -> list[EvalPrompt]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 300, (5 + index,), generator=generator).tolist() for index in range(4)]
    return [EvalPrompt(str(index), "ab"[index % 2], tokens) for index, tokens in enumerate(ids)]


def greedy(target: Target, prompt: EvalPrompt, new_tokens: int) -> list[int]:
    engine = Engine(target, rows=1)
    engine.add(Request("x", prompt.tokens, new_tokens))
    return next(engine.run()).tokens


def test_document_holds_what_its_schema_says(tiny_target: Target, prompts: list[EvalPrompt]) -> None:
    texts = {index: [*p.tokens, *greedy(tiny_target, p, 60)] for index, p in enumerate(prompts)}
    document = evaluate(tiny_target, Oracle(texts), prompts, max_new_tokens=24, progress=False)
    document = json.loads(json.dumps(document))
    assert set(document) >= {"totals", "categories", "definitions", "settings", "versions", "machine", "answers"}
    for part in (document["totals"], *document["categories"].values()):
        assert all(isinstance(part[key], int) for key in COUNTS)
        assert all(isinstance(part[key], float) for key in FIGURES)
        assert part["tau"] == part["emitted"] / part["rounds"]
        assert part["identical"] == part["prompts"]
        assert 0 < part["accepted"] < part["drafted"]
        assert part["emitted"] <= part["rounds"] + part["accepted"]
        assert all(0 <= share <= 1 for share in part["acceptance"])
    for key in COUNTS:
        assert document["totals"][key] == sum(part[key] for part in document["categories"].values())
    assert COUNTS | FIGURES | {"acceptance"} <= set(document["definitions"]) | {
        "tokens_per_s_plain",
        "ms_verify",
        "ms_host",
    }
    assert len(document["answers"]) == len(prompts)


def test_rows_change_no_answer(tiny_target: Target, prompts: list[EvalPrompt]) -> None:
    texts = {index: [*p.tokens, *greedy(tiny_target, p, 60)] for index, p in enumerate(prompts)}
    one = evaluate(tiny_target, Oracle(texts), prompts, max_new_tokens=16, progress=False)
    two = evaluate(tiny_target, Oracle(texts), prompts, max_new_tokens=16, rows=2, progress=False)
    assert {a["id"]: a["tokens"] for a in one["answers"]} == {a["id"]: a["tokens"] for a in two["answers"]}


def test_acceptance_is_conditional_and_a_text_that_ends_inside_a_draft_is_no_rejection() -> None:
    stats = Stats()
    stats.count_round(drafted=3, offered=3, accepted=3, emitted=4)
    stats.count_round(drafted=3, offered=3, accepted=1, emitted=2)
    stats.count_round(drafted=3, offered=1, accepted=1, emitted=1)  # EOS was the first draft token
    assert stats.acceptance == [3 / 3, 1 / 2, 1 / 1]
    assert stats.tau == 7 / 3


def test_nothing_to_evaluate_is_an_error(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(tiny_target, NoDraft(), [], max_new_tokens=4)


def test_rates_are_all_tokens_over_all_seconds() -> None:
    """Of a slow short answer and a quick long one, the mean of rates would be 52.5 tokens/s."""
    pool = _Pool()
    for tokens, seconds in ((10, 2.0), (100, 1.0)):
        other = _Pool()
        other.plain.add(_Side(tokens, 2 * seconds, tokens, {}))
        other.drafted.add(_Side(tokens, seconds, 5, {"draft": 0.1, "verify": 0.7, "host": 0.2}))
        pool.add(other)
    found = pool.report()
    rates = [found[name] for name in ("tokens_per_s_plain", "tokens_per_s", "speedup")]
    assert rates == pytest.approx([110 / 6, 110 / 3, 2.0])
    assert [found[f"ms_{phase}"] for phase in ("draft", "verify", "host")] == pytest.approx([20, 140, 40])


def test_each_phase_gets_its_own_time_and_what_is_inside_another_counts_once() -> None:
    clock = Clock(torch.device("cpu"))
    with clock.time("host"):
        time.sleep(0.02)
        with clock.time("draft"):
            time.sleep(0.05)
    assert 0.05 <= clock.seconds["draft"] < 0.5
    assert 0.02 <= clock.seconds["host"] < clock.seconds["draft"] + 0.4
    assert clock.total() == pytest.approx(sum(clock.seconds.values()))
    assert clock.seconds["host"] + clock.seconds["draft"] < 1.0
