"""A scheduled drafter in the loop: the text does not change, and the target reads what was chosen and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.infer import rejection
from draftsmith.infer.candidates import DraftTree
from draftsmith.infer.cost import uneven_seconds
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter, Observation
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.schedule import Scheduled, early_stop
from draftsmith.infer.target import Reading, Target
from draftsmith.infer.tree import TokenTree

from . import drafting

DEPTH = 4


@pytest.fixture(scope="module")
def draft(build_target: Callable[..., Target], tiny_target: Target) -> Target:
    return drafting.perturbed(tiny_target, build_target(), noise=0.06)


class Watched(Scheduled):
    """Remembers how many tokens of each row were verified."""

    lengths: list[list[int]]

    def draft(self, state: object, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        tree = super().draft(state, anchors, lengths, sampling)  # type: ignore[arg-type]
        self.lengths.append((tree.valid.sum(dim=1) - 1).tolist())
        return tree


def watched(drafter: Drafter, *, rows: int, rule: str = "early-stop") -> Watched:
    """With steps that one more token in every row makes an eighth longer."""
    scheduled = Watched(drafter, seconds={1: 1.0, rows: 1.0, 9 * rows: 2.0}, rule=rule)
    scheduled.lengths = []
    return scheduled


@pytest.mark.parametrize("rule", ["early-stop", "budget"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("settings", [SamplingParams(), SamplingParams(0.9, top_k=40)])
def test_text_equals_plain_decoding(
    tiny_target: Target, draft: Target, rule: str, rows: int, settings: SamplingParams
) -> None:
    ids = drafting.prompts(9, seed=4, vocab_size=tiny_target.vocab_size)[: 4 + rows]
    scheduled = watched(DraftModel(draft, tiny_target, length=DEPTH, min_confidence=0), rows=rows, rule=rule)
    plain = drafting.decode(tiny_target, None, ids, sampling=settings)
    drafted = drafting.decode(tiny_target, scheduled, ids, sampling=settings, rows=rows)
    assert drafting.texts(drafted) == drafting.texts(plain)
    seen = {length for lengths in scheduled.lengths for length in lengths}
    assert len(seen) >= 3, f"only drafts of {seen} tokens were verified"
    assert rows == 1 or any(len(set(lengths)) > 1 for lengths in scheduled.lengths), "all rows were cut alike"
    assert sum(output.stats.drafted for output in drafted) < DEPTH * sum(output.stats.rounds for output in drafted)


@pytest.mark.parametrize("verifier", [rejection.token_level, rejection.block])
def test_drawn_drafts_are_judged_by_rejection_as_far_as_they_are_verified(
    tiny_target: Target, draft: Target, verifier: rejection.Judge
) -> None:
    """Where draft and target agree nothing is rejected, so every verified token is in the text."""
    twin = Target(tiny_target.model, tiny_target.tokenizer)
    scheduled = watched(DraftModel(twin, tiny_target, length=DEPTH, min_confidence=0, is_drawn=True), rows=3)
    ids = drafting.prompts(6, seed=4, vocab_size=tiny_target.vocab_size)
    outputs = drafting.decode(
        tiny_target, scheduled, ids, sampling=SamplingParams(0.5), rows=3, verifier=verifier, new_tokens=24
    )
    assert len({length for lengths in scheduled.lengths for length in lengths}) >= 3
    whole = [output for output in outputs if output.finish == "length"]
    # The limit can end a text inside its last draft.
    assert all(output.stats.drafted - output.stats.accepted <= DEPTH for output in whole)
    assert whole


def test_the_target_reads_the_chosen_tokens_and_no_others(tiny_target: Target, draft: Target) -> None:
    read: list[int] = []
    layer = tiny_target.model.base_model.get_submodule("layers.0.mlp")
    scheduled = watched(DraftModel(draft, tiny_target, length=DEPTH, min_confidence=0), rows=4)
    engine = Engine(tiny_target, drafter=scheduled, rows=4)
    for number, ids in enumerate(drafting.prompts(4, seed=4, vocab_size=tiny_target.vocab_size)):
        engine.add(Request(str(number), ids, 20))
    engine.step()
    hook = layer.register_forward_hook(lambda module, args, output: read.append(output.shape[:2].numel()))
    try:
        while engine._rows:
            engine.step()
    finally:
        hook.remove()
    assert read == [len(lengths) + sum(lengths) for lengths in scheduled.lengths]


def test_text_of_a_request_does_not_depend_on_the_batch(tiny_target: Target, draft: Target) -> None:
    ids = drafting.prompts(7, seed=6, vocab_size=tiny_target.vocab_size)
    settings = SamplingParams(0.8)
    texts = [
        drafting.texts(
            drafting.decode(
                tiny_target, watched(DraftModel(draft, tiny_target), rows=rows), ids, sampling=settings, rows=rows
            )
        )
        for rows in (1, 6)
    ]
    assert texts[0] == texts[1]


def test_what_uneven_rows_cost_is_measured(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Target.verify

    def slow(self: Target, tree: TokenTree, *args: Any, **options: Any) -> Reading:
        time.sleep(0.02 if tree.read is not None else 0.0)
        return read(self, tree, *args, **options)

    monkeypatch.setattr(Target, "verify", slow)
    assert 0.015 < uneven_seconds(tiny_target, rows=4, context=8, repeats=5) < 0.2
    assert 0.015 < uneven_seconds(tiny_target, rows=7, context=8, repeats=5) < 0.2
    assert uneven_seconds(tiny_target, rows=3) == 0, "a quarter of three rows is none"


def test_a_drafter_without_confidence_is_refused(tiny_target: Target, draft: Target) -> None:
    drafter = DraftTree(draft, tiny_target, shape=drafting.SHAPE)
    with pytest.raises(ValueError, match="does not say how sure it is"):
        drafting.decode(tiny_target, watched(drafter, rows=1), [[5, 6, 5, 6, 5, 6]])


def test_the_best_rule_is_not_for_drawn_drafts(tiny_target: Target, draft: Target) -> None:
    """It looks at what the drawn tokens make the next ones look like."""
    drawn = watched(DraftModel(draft, tiny_target, length=DEPTH, min_confidence=0, is_drawn=True), rows=1, rule="best")
    with pytest.raises(ValueError, match="drawn ones take early-stop or budget"):
        drafting.decode(tiny_target, drawn, [[5, 6, 7]], verifier=rejection.token_level)


@pytest.mark.parametrize("rows", [1, 4])
def test_prompt_lookup_is_cut_to_what_pays(tiny_target: Target, rows: int) -> None:
    """Its text is plain decoding's. A random target copies nothing, which is soon noticed; one that runs in a loop is
    followed to the end of every draft."""
    ids = drafting.prompts(6, seed=8, vocab_size=tiny_target.vocab_size)
    lookup = watched(PromptLookup(stop_ids=tiny_target.eos_ids), rows=rows, rule="best")
    settings = SamplingParams(1.5)
    plain = drafting.decode(tiny_target, None, ids, sampling=settings)
    for output, expected in zip(drafting.decode(tiny_target, lookup, ids, sampling=settings, rows=rows), plain):
        assert output.tokens == expected.tokens
    late = lookup.lengths[len(lookup.lengths) // 2 :]
    assert sum(map(sum, late)) < 0.2 * sum(map(len, late)), "it goes on verifying what is never right"
    loop = watched(PromptLookup(), rows=1, rule="best")
    state = loop.start(rows=1, capacity=256)
    text, one, zero = torch.tensor([[7, 8, 9] * 20]), torch.tensor([59]), torch.tensor([0])
    loop.observe(state, Observation(slice(0, 1), text[:, :-1], one, zero, torch.zeros(1), None, text[:, -1]))
    tree = loop.draft(state, torch.tensor([9]), torch.tensor([59]), Sampling([SamplingParams()]))
    assert tree.tokens[0].tolist() == [9, 7, 8, 9, 7, 8, 9, 7, 8], "beyond eight tokens its steps are dearer"


def test_the_step_times_of_this_machine_are_measured(tiny_target: Target, draft: Target) -> None:
    drafter = DraftModel(draft, tiny_target, length=3, min_confidence=0)
    scheduled = Scheduled.measure(drafter, tiny_target, rows=4, rule="budget")
    assert sorted(scheduled.seconds) == [1, 2, 4, 8, 16]
    taken = [scheduled.seconds[count] for count in sorted(scheduled.seconds)]
    assert taken == sorted(taken)
    assert taken[0] > 1e-3, "drafting and the host are part of a step"
    with pytest.raises(ValueError, match="one of early-stop, budget, best, got 'late'"):
        Scheduled(drafter, seconds={1: 1.0}, rule="late")


# The law, with coins and noise -------------------------------------------------------------------------------------


def _verify(tree: TokenTree, lengths: Tensor) -> TokenTree:
    """The harness goes through all nodes, so what is not verified stays in the tree as invalid."""
    return replace(tree, valid=tree.valid & (torch.arange(tree.num_nodes) <= lengths[:, None]))


def _scheduled(tree: TokenTree) -> TokenTree:
    """By the likeliest token's probability, which no drawn token decides."""
    assert tree.probs is not None
    survival = tree.probs[:, 1:].amax(dim=-1).double().cumprod(dim=1)
    seconds = 1 + torch.arange(survival.numel() + 1, dtype=torch.float64) * 0.35 / len(survival)
    return _verify(tree, early_stop(survival, seconds))


def _picked(tree: TokenTree) -> TokenTree:
    """Drops drawn tokens because they look unlikely: the bias that confidence must not have."""
    assert tree.probs is not None
    likely = tree.probs[:, 1:].gather(2, tree.tokens[:, 1:, None])[..., 0] > 0.4
    return _verify(tree, likely.cumprod(dim=1).sum(dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("verify", [rejection.token_level, rejection.block])
def test_scheduled_chains_have_the_targets_law(verify: rejection.Judge) -> None:
    from .test_sampled_rounds import CHAIN, FALSE_ALARM, run

    lengths = torch.zeros(len(CHAIN), dtype=torch.int64)

    def schedule(tree: TokenTree) -> TokenTree:
        short = _scheduled(tree)
        lengths.add_((short.valid.sum(dim=1) - 1).bincount(minlength=len(CHAIN)))
        return short

    assert run(verify, CHAIN, spoil=schedule) > FALSE_ALARM
    assert int(lengths.min()) > 1000, f"hardly any choice was made: {lengths.tolist()}"
    assert run(verify, CHAIN, spoil=_picked) < FALSE_ALARM
