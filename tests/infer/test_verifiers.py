"""Verifiers by name, on the whole loop: each keeps what it promises, and refuses drafts that it cannot judge."""

from __future__ import annotations

import pytest

from draftsmith.infer import VERIFIERS
from draftsmith.infer.candidates import DraftTree
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.drafters import DRAWN_TREE
from draftsmith.infer.evaluate import EvalPrompt, evaluate
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.verifiers import verifier_named

from . import drafting

WARM = SamplingParams(temperature=0.5)


def drafter_for(name: str, draft: Target, target: Target) -> Drafter:
    shape = verifier_named(name).draws
    if shape == "tree":
        return DraftTree(draft, target, shape=DRAWN_TREE)
    return DraftModel(draft, target, length=4, is_drawn=shape == "chain")


@pytest.mark.parametrize("name", VERIFIERS)
def test_greedy_text_is_plain_decodings_and_so_is_sampled_text_that_is_promised_to_be(
    name: str, target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    rule = VERIFIERS[name]
    greedy = [SamplingParams(repetition_penalty=1.1) if index % 2 else SamplingParams() for index in range(6)]
    for sampling, is_same in ((greedy, True), (WARM, rule.promise == "same text")):
        plain = drafting.decode(target, None, prompts, sampling=sampling)
        outputs = drafting.decode(
            target, drafter_for(name, draft, target), prompts, sampling=sampling, verifier=rule.verify
        )
        assert (drafting.texts(outputs) == drafting.texts(plain)) == is_same
        assert sum(output.stats.accepted for output in outputs) > 20


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_request_writes_the_same_alone_and_in_a_crowd(
    name: str, target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(temperature=0.5, min_p=0.05, presence_penalty=0.3)
    texts = [
        drafting.texts(
            drafting.decode(
                target,
                drafter_for(name, draft, target),
                prompts,
                rows=rows,
                sampling=sampling,
                new_tokens=[4, 20, 9, 14, 1, 12],
                verifier=VERIFIERS[name].verify,
            )
        )
        for rows in (1, 3)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", [name for name, rule in VERIFIERS.items() if rule.draws])
def test_drafters_that_give_no_probabilities_are_refused_with_what_to_use(
    name: str, target: Target, prompts: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="sample_match verifier: it is exact for every drafter"):
        drafting.decode(target, PromptLookup(), [prompts[0] * 3], sampling=WARM, verifier=VERIFIERS[name].verify)


def test_what_is_promised_of_a_text() -> None:
    keeps = {name: (rule.keeps_text(0.0), rule.keeps_text(1.0)) for name, rule in VERIFIERS.items()}
    exact = dict.fromkeys(("token-level", "block", "recursive", "traversal"), (True, False))
    assert keeps == {"sample-match": (True, True), **exact, "typical": (False, False)}
    assert "LOSSY" in VERIFIERS["typical"].meaning


@pytest.mark.parametrize(("name", "temperature"), [("block", 0.5), ("typical", 0.0), ("typical", 0.5)])
def test_texts_that_are_not_promised_to_be_identical_are_never_called_so(
    name: str, temperature: float, target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    document = evaluate(
        target,
        drafter_for(name, draft, target),
        [EvalPrompt(str(index), "all", ids) for index, ids in enumerate(prompts)],
        max_new_tokens=8,
        sampling=SamplingParams(temperature=temperature),
        verifier=name,
        progress=False,
    )
    for part in (document["totals"], document["categories"]["all"]):
        assert (part["identical"], part["near_ties"]) == (None, None)
    assert all((answer["identical"], answer["audit"]) == (None, None) for answer in document["answers"])
    assert (document["settings"]["verifier"], document["settings"]["promise"]) == (name, VERIFIERS[name].promise)


def test_rejection_keeps_more_of_a_drawn_draft_than_matching_does(
    target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    """What it is for: the same drawn draft, longer accepted."""
    sampling, accepted = SamplingParams(temperature=1.0), {}
    for name in ("sample-match", "token-level", "block"):
        drafter = DraftModel(draft, target, length=4, min_confidence=0, is_drawn=True)
        outputs = drafting.decode(target, drafter, prompts * 2, sampling=sampling, verifier=VERIFIERS[name].verify)
        rounds = sum(output.stats.rounds for output in outputs)
        accepted[name] = sum(output.stats.accepted for output in outputs) / rounds
    assert accepted["sample-match"] < accepted["token-level"]
    assert accepted["sample-match"] < accepted["block"]
