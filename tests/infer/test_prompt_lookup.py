"""Prompt lookup: the index against a search of the whole text, and what is made of a match."""

from __future__ import annotations

import random
import time

import pytest
import torch

from draftsmith.infer import prompt_lookup
from draftsmith.infer.drafter import Observation
from draftsmith.infer.prompt_lookup import PromptLookup, Record, SuffixIndex
from draftsmith.infer.sampling import Sampling


def search(text: list[int]) -> tuple[int, int]:
    """Longest match of the text's end with an earlier place, most recent first, by looking everywhere."""
    best, longest = 0, 0
    for place in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(place, prompt_lookup.MAX_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    return best, longest


def indexed(text: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(text)
    return index


def observation(text: list[int], *, start: int = 0) -> Observation:
    """The target has read all of `text` but its last token, the anchor."""
    tokens, anchor = torch.tensor([text[:-1]]), torch.tensor([text[-1]])
    logits = None if start == 0 else torch.zeros(1, 1, 1)
    count = torch.tensor([len(text) - 1])
    return Observation(slice(0, 1), tokens, count, torch.tensor([start]), torch.zeros(1), None, anchor, logits)


def proposal(drafter: PromptLookup, text: list[int]) -> list[int]:
    state = drafter.start(rows=1, capacity=64)
    drafter.observe(state, observation(text))
    tree = drafter.draft(state, torch.tensor(text[-1:]), torch.tensor([len(text) - 1]), Sampling([]))
    return tree.tokens[0, 1:].tolist()


@pytest.mark.parametrize("letters", [1, 2, 3, 8, 40])
def test_the_match_is_the_longest_and_of_those_the_most_recent(letters: int) -> None:
    draw = random.Random(letters)
    for _ in range(40):
        text: list[int] = []
        index = SuffixIndex()
        while len(text) < 100:
            piece = [draw.randrange(letters) for _ in range(draw.randrange(1, 5))]
            text += piece
            index.extend(piece)
            assert index.find() == search(text)


def test_the_worked_example() -> None:
    assert indexed([*b"abcxbcdbc"]).find() == (6, 2)
    assert indexed([]).find() == indexed([5]).find() == (0, 0)


def test_a_long_repetition_is_found_however_far_back() -> None:
    draw = random.Random(0)
    passage = [draw.randrange(50) for _ in range(60)]
    text = passage + [draw.randrange(50) for _ in range(3000)] + passage[:40]
    assert indexed(text).find() == (40, prompt_lookup.MAX_MATCH)


def test_the_draft_is_what_followed() -> None:
    assert proposal(PromptLookup(length=3), [1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5, 6]


def test_a_loop_is_proposed_whole() -> None:
    assert proposal(PromptLookup(length=7), [9, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_after_a_stop_token_or_for_too_short_a_match() -> None:
    assert proposal(PromptLookup(length=6, stop_ids=(5,)), [1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5]
    assert proposal(PromptLookup(length=6, min_match=3), [1, 2, 3, 4, 5, 6, 7, 2, 3]) == []
    assert proposal(PromptLookup(length=6), [1, 2, 3]) == []


def test_rows_of_a_batch_draft_by_their_own_text() -> None:
    drafter = PromptLookup(length=2)
    state = drafter.start(rows=3, capacity=64)
    for row, text in enumerate(([1, 2, 3, 1], [4, 5, 6], [7, 8, 7])):
        seen = observation(text)
        seen = Observation(slice(row, row + 1), *list(vars(seen).values())[1:])
        drafter.observe(state, seen)
    tree = drafter.draft(state, torch.tensor([1, 6, 7]), torch.tensor([3, 2, 2]), Sampling([]))
    assert tree.tokens[:, 1:].tolist() == [[2, 3], [0, 0], [8, 7]]
    assert tree.valid.tolist() == [[True, True, True], [True, False, False], [True, True, True]]
    drafter.move(state, 2, 0)
    tree = drafter.draft(state, torch.tensor([7, 6]), torch.tensor([2, 2]), Sampling([]))
    assert tree.tokens[0, 1:].tolist() == [8, 7]


def test_a_round_costs_the_same_after_a_long_text() -> None:
    """Many places to look at, all of them alike: the walk is bounded. 2 ms would be 5 % of a round."""
    draw = random.Random(0)
    index = indexed([draw.randrange(2) for _ in range(400_000)])
    took = []
    for _ in range(20):
        began = time.perf_counter()
        index.extend([draw.randrange(2) for _ in range(4)])
        index.continuation(index.find()[0], 10)
        took.append(time.perf_counter() - began)
    assert min(took) < 2e-3


def test_a_record_counts_by_the_length_of_the_match() -> None:
    record = Record()
    before = record.confidence(2, 4)
    assert before == pytest.approx([2 / 5, 3 / 6, 4 / 7, 5 / 8])
    for _ in range(400):
        record.note(2, [1, 2, 3, 4], [1, 2, 9, 4])
    after = record.confidence(2, 4)
    assert after[:3] == pytest.approx([1, 1, 0], abs=0.02)
    assert after[3] == before[3], "what comes after a wrong token tells nothing"


def test_confidences_follow_what_became_of_drafts_whoever_cut_them() -> None:
    drafter = PromptLookup(length=3)
    state = drafter.start(rows=1, capacity=64)
    text = [1, 2, 3, 4, 1, 2]
    drafter.observe(state, observation(text))
    tree = drafter.draft(state, torch.tensor([2]), torch.tensor([5]), Sampling([]))
    assert tree.confidence is not None
    assert tree.tokens[0].tolist() == [2, 3, 4, 1]
    first = tree.confidence[0, 1:].tolist()
    drafter.observe(state, observation([2, 3], start=5))  # nothing was verified, and the target wrote "3"
    assert state.record.confidence(2, 1)[0] > first[0]
    assert state.record.confidence(3, 1)[0] == pytest.approx(first[1]), "the token after it was not put to the test"


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got length 0"):
        PromptLookup(length=0)
    with pytest.raises(ValueError, match=r"min_match must lie in 1\.\.32"):
        PromptLookup(min_match=0)
