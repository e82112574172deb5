"""The draft model: what it reads, what it proposes, where it stops, and which models it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.infer import draft_model
from draftsmith.infer.candidates import DraftBeams, DraftTree
from draftsmith.infer.draft_model import DraftModel, DraftReader, DraftState
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Reading, Target
from draftsmith.infer.tree import TokenTree

from . import drafting

SAMPLED = SamplingParams(0.8, top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def target(build_target: Callable[..., Target]) -> Target:
    return drafting.repeating(build_target(num_hidden_layers=2, eos_token_id=[]), attention=0.3)


@pytest.fixture(scope="module")
def draft(target: Target, build_target: Callable[..., Target]) -> Target:
    return drafting.perturbed(target, build_target(num_hidden_layers=2, eos_token_id=[]))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return drafting.prompts(6, seed=8, vocab_size=target.vocab_size)


@dataclass
class Round:
    text: list[int]
    tree: TokenTree
    sampling: Sampling


def watch(drafter: DraftReader, target: Target, prompt: list[int], sampling: SamplingParams) -> list[Round]:
    """Decode one prompt and keep every round: the text up to the anchor and the tree that was drafted."""
    rounds: list[Round] = []
    draft, text = drafter.draft, list(prompt)

    def record(state: DraftState, anchors: Tensor, lengths: Tensor, settings: Sampling) -> TokenTree:
        tree = draft(state, anchors, lengths, settings)
        rounds.append(Round([int(lengths[0])], tree, settings))
        return tree

    drafter.draft = record  # type: ignore[attr-defined]
    (output,) = drafting.decode(target, drafter, [prompt], sampling=[sampling])
    text += output.tokens
    for done in rounds:
        done.text = text[: done.text[0] + 1]
    return rounds


def fresh_logits(model: Target, ids: list[int]) -> Tensor:
    """(V,): the draft model's logits after `ids`, read anew without a cache."""
    tokens = torch.tensor([ids])
    reading = model.read_packed(tokens, torch.arange(len(ids))[None], torch.ones_like(tokens))
    return model.logits(reading.hidden)[0, -1]


@pytest.mark.parametrize("settings", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_every_proposal_is_the_models_own_choice_for_the_text_so_far(
    target: Target, draft: Target, prompts: list[list[int]], settings: SamplingParams
) -> None:
    """The cache after accepted, rejected and half-accepted drafts, against reading the text anew."""
    drafter = DraftModel(draft, target, length=3, min_confidence=0)
    rounds = watch(drafter, target, prompts[0], settings)
    counts = {len(after.text) - len(before.text) for before, after in pairwise(rounds)}
    assert counts >= {1, 4}, f"rounds that accept all and rounds that accept nothing are both needed, got {counts}"
    for done in rounds:
        ids = list(done.text)
        for token in done.tree.tokens[0, 1:].tolist():
            logits = fresh_logits(draft, ids)[None, None]
            assert done.sampling.choose(logits, torch.tensor([[len(ids)]])).item() == token
            ids.append(token)


@pytest.mark.parametrize("settings", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_that_is_the_target_is_always_right(
    target: Target, prompts: list[list[int]], settings: SamplingParams
) -> None:
    drafter = DraftModel(target, target, length=4, min_confidence=0)
    for output in drafting.decode(target, drafter, prompts, new_tokens=41, sampling=settings):
        assert output.stats.acceptance == [1.0] * 4
        assert (output.stats.rounds, output.stats.emitted) == (8, 40)


@pytest.mark.parametrize("settings", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_that_writes_garbage_changes_nothing(
    target: Target, build_target: Callable[..., Target], prompts: list[list[int]], settings: SamplingParams
) -> None:
    plain = drafting.decode(target, None, prompts, sampling=settings)
    unused = min(set(range(target.vocab_size)) - {token for output in plain for token in output.tokens})
    garbage = build_target(num_hidden_layers=2)
    with torch.no_grad():
        garbage.model.model.norm.weight.zero_()
        garbage.head.bias = torch.nn.Parameter(
            torch.zeros(target.vocab_size).index_fill_(0, torch.tensor([unused]), 1e4)
        )
    outputs = drafting.decode(target, DraftModel(garbage, target), prompts, sampling=settings)
    assert drafting.texts(outputs) == drafting.texts(plain)
    assert all(output.stats.tau == 1.0 and output.stats.drafted > 0 for output in outputs)


def test_a_chain_ends_after_the_token_at_which_confidence_falls(
    target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    """The last token of an early end has the low product; no token before it has."""
    threshold = 0.3
    lengths = set()
    for done in watch(
        DraftModel(draft, target, length=5, min_confidence=threshold), target, prompts[1], SamplingParams()
    ):
        product, tokens = 1.0, done.tree.tokens[0, 1:].tolist()
        assert done.tree.valid.all()
        lengths.add(len(tokens))
        for step, token in enumerate(tokens):
            assert product >= threshold
            product *= float(fresh_logits(draft, done.text + tokens[:step]).softmax(-1)[token])
        assert len(tokens) == 5 or product < threshold
    assert len(lengths) > 1


def test_nothing_is_drafted_after_an_eos(
    target: Target, draft: Target, build_target: Callable[..., Target], prompts: list[list[int]]
) -> None:
    def make(owner: Target) -> DraftModel:
        return DraftModel(draft, owner, length=4, min_confidence=0)

    before = watch(make(target), target, prompts[0], SamplingParams())[0].tree
    ending = build_target(num_hidden_layers=2, eos_token_id=int(before.tokens[0, 2]))
    ending.model.load_state_dict(target.model.state_dict())
    after = watch(make(ending), ending, prompts[0], SamplingParams())[0].tree
    assert after.valid[0].tolist() == [True, True, True, False, False]


def test_what_was_drafted_and_accepted_is_not_read_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right: per round the last drafted token and the anchor, then all but the last proposal."""
    read: list[int] = []
    verify = target.verify

    def count(tree: TokenTree, *args: Any, **options: Any) -> Reading:
        read.append(tree.num_nodes)
        return verify(tree, *args, **options)

    drafter = DraftModel(target, target, length=3, min_confidence=0)
    monkeypatch.setattr(target, "verify", count)
    (output,) = drafting.decode(target, drafter, [[5, 6]], new_tokens=13)
    assert output.stats.rounds == 3
    assert read == [
        1,
        1,
        1,
        4,
        2,
        1,
        1,
        4,
        2,
        1,
        1,
        4,
    ]  # in rounds; the prompt was prefilled. Each 4 is the target's own


def test_rows_end_their_chains_separately(target: Target, draft: Target, prompts: list[list[int]]) -> None:
    drafter = DraftModel(draft, target, length=5)
    alone = drafting.decode(target, drafter, prompts, rows=1)
    crowd = drafting.decode(target, drafter, prompts, rows=6)
    assert [output.stats.drafted for output in crowd] == [output.stats.drafted for output in alone]


def test_drawn_tokens_come_with_the_row_they_were_drawn_from(
    target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    drafter = DraftModel(draft, target, length=3, min_confidence=0, is_drawn=True)
    for done in watch(drafter, target, prompts[2], SAMPLED)[:8]:
        assert done.tree.probs is not None
        for node in range(1, done.tree.num_nodes):
            ids = done.text + done.tree.tokens[0, 1:node].tolist()
            expected = done.sampling.log_probs(fresh_logits(draft, ids)[None, None]).exp()[0, 0]
            torch.testing.assert_close(done.tree.probs[0, node], expected, atol=1e-4, rtol=1e-3)
            assert done.tree.probs[0, node, done.tree.tokens[0, node]] > 0


def test_rounds_without_a_draft_are_caught_up(target: Target, draft: Target, prompts: list[list[int]]) -> None:
    """Load may switch drafting off for some rounds; the model then reads what it missed."""
    drafter = DraftModel(draft, target, length=3, min_confidence=0)
    calls = 0
    propose = drafter.draft

    def sometimes(state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        nonlocal calls
        calls += 1
        return propose(state, anchors, lengths, sampling) if calls % 4 == 0 else TokenTree.root(anchors)

    drafter.draft = sometimes  # type: ignore[method-assign]
    rounds = watch(drafter, target, prompts[3], SamplingParams())
    for done in rounds:
        ids = list(done.text)
        for token in done.tree.tokens[0, 1:].tolist():
            assert fresh_logits(draft, ids).argmax().item() == token
            ids.append(token)
    assert sum(done.tree.num_nodes > 1 for done in rounds) > 3


def test_text_that_another_drafter_proposed_is_read_anew(
    target: Target, draft: Target, prompts: list[list[int]]
) -> None:
    """Accepted tokens that differ from the model's own draft must not be taken for read."""
    drafter, right = DraftModel(draft, target, length=3, min_confidence=0), DraftModel(target, target, length=3)
    states: list[object] = []
    seen_draft, seen_observe = drafter.draft, drafter.observe

    def overruled(state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        mine = seen_draft(state, anchors, lengths, sampling)
        theirs = right.draft(states[0], anchors, lengths, sampling)  # type: ignore[arg-type]
        rounds.append((int(lengths[0]), mine))
        return theirs

    def both(state: DraftState, seen: object) -> None:
        if not states:
            states.append(right.start(rows=4, capacity=256))
        seen_observe(state, seen)  # type: ignore[arg-type]
        right.observe(states[0], seen)  # type: ignore[arg-type]

    rounds: list[tuple[int, TokenTree]] = []
    drafter.draft, drafter.observe = overruled, both  # type: ignore[method-assign]
    (output,) = drafting.decode(target, drafter, [prompts[0]])
    text = prompts[0] + output.tokens
    wrong = 0
    for length, tree in rounds:
        ids = text[: length + 1]
        for token in tree.tokens[0, 1:].tolist():
            assert fresh_logits(draft, ids).argmax().item() == token
            ids.append(token)
        wrong += ids[: len(text)] != text[: len(ids)]
    assert wrong > 3, "the model agreed with the other drafter: nothing was tested"


def test_long_prompts_are_read_in_pieces(target: Target, draft: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = drafting.prompts(1, seed=1, vocab_size=300, longest=3)[0] * 40
    whole = drafting.decode(target, DraftModel(draft, target), [prompt])
    monkeypatch.setattr(draft_model, "PREFILL_TOKENS", 16)
    pieces = drafting.decode(target, DraftModel(draft, target), [prompt])
    assert vars(pieces[0].stats) == vars(whole[0].stats)
    assert whole[0].stats.accepted > 0


def test_a_draft_model_with_a_shorter_context_stops_at_its_end(
    target: Target, build_target: Callable[..., Target], prompts: list[list[int]]
) -> None:
    """The rows that outgrow it fall silent; a prompt beyond it and the other rows of the batch are not disturbed."""
    short = drafting.perturbed(target, build_target(num_hidden_layers=2, max_position_embeddings=40))
    asked = [*prompts[:3], [5] * 60]
    plain = drafting.decode(target, None, asked, new_tokens=45)
    drafters = [
        DraftModel(short, target, length=4),
        DraftBeams(short, target),
        DraftTree(short, target, shape=drafting.SHAPE),
    ]
    for drafter in drafters:
        outputs = drafting.decode(target, drafter, asked, new_tokens=45, rows=4)
        alone = drafting.decode(target, drafter, asked, new_tokens=45, rows=1)
        assert drafting.texts(outputs) == drafting.texts(plain)
        assert [vars(output.stats) for output in outputs] == [vars(output.stats) for output in alone]
        assert outputs[-1].stats.drafted == 0
        assert all(output.stats.drafted > 0 for output in outputs[:-1])
        for ids, output in zip(asked, outputs):
            first = 40 - len(ids)
            assert not any(output.from_draft[max(0, first) :]), "a token beyond the context was drafted"


def test_impossible_settings_are_refused(target: Target, draft: Target) -> None:
    with pytest.raises(ValueError, match="at least 1 token deep"):
        DraftModel(draft, target, length=0)
    with pytest.raises(ValueError, match="fit the context of tiny, 512 tokens; got 600"):
        DraftModel(draft, target, length=600)
    with pytest.raises(ValueError, match=r"min_confidence must lie in \[0, 1\)"):
        DraftModel(draft, target, min_confidence=1.0)
    with pytest.raises(ValueError, match="built without a tokenizer"):
        DraftModel(Target(copy.deepcopy(draft.model), None), target)
    assert NoDraft().taps == DraftModel(draft, target).taps == ()
