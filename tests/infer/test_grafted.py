"""Copies grafted onto a tree: the union of both, cut where it does not pay. The laws of drafters are in test_drafters.py."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.drafters import make_drafter
from draftsmith.infer.grafted import Grafted, best_graft, follow, graft
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree

from . import drafting

FLAT = {1: 1.0, 512: 1.0}
"""Verifying costs nothing."""
STEEP = {1: 1.0, 16: 2.0, 128: 16.0}
"""Every token costs."""


def random_tree(draw: random.Random, nodes: int, letters: int) -> TokenTree:
    """A tree whose siblings differ, some of its nodes padding."""
    tokens, parents, valid, taken = [0], [-1], [True], set()
    while len(tokens) < nodes:
        parent, token = draw.randrange(len(tokens)), draw.randrange(letters)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            valid.append(valid[parent] and draw.random() < 0.8)
    return TokenTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([valid]))


def said(tree: TokenTree, row: int = 0) -> set[tuple[int, ...]]:
    """Every text from the root that some valid node ends."""
    texts: set[tuple[int, ...]] = set()
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node]:
            path, at = [], node
            while at > 0:
                path.append(int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            texts.add(tuple(reversed(path)))
    return texts


def rows_of(trees: list[TokenTree]) -> TokenTree:
    """Single-row trees of equal size as one batch."""
    columns = zip(*((tree.tokens, tree.parents, tree.valid) for tree in trees))
    return TokenTree(*(torch.cat(column) for column in columns))


@pytest.mark.parametrize("seed", range(20))
def test_a_graft_says_what_either_says_and_nothing_twice(seed: int) -> None:
    draw = random.Random(seed)
    tree = rows_of([random_tree(draw, 9, 3) for _ in range(4)])
    draft = torch.tensor([[draw.randrange(3) for _ in range(5)] for _ in range(4)])
    lengths = torch.tensor([draw.randrange(6) for _ in range(4)])
    chain = TokenTree.chain(tree.tokens[:, 0], draft, valid=torch.arange(5) < lengths[:, None])
    both = graft(tree, chain)
    for row in range(4):
        assert said(both, row) == said(tree, row) | said(chain, row)
        assert int(both.valid[row].sum()) == 1 + len(said(both, row)), "two nodes say the same"
    assert torch.equal(both.tokens[:, :9], tree.tokens)
    assert torch.equal(both.valid[:, :9], tree.valid)
    assert bool((both.parents[:, 1:] < torch.arange(1, both.num_nodes)).all()), "parents stand before children"
    assert both.read is None or bool((both.read | ~both.valid).all()), "every valid node is read"
    most = max(len(said(both, row) - said(tree, row)) for row in range(4))
    assert both.num_nodes == 9 + most, "no column that no row needs"


def test_follow_by_hand() -> None:
    """The tree of tree.py: cat and dog below the, sat below cat."""
    tree = TokenTree(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]), torch.ones(1, 4, dtype=torch.bool))
    assert follow(tree, torch.tensor([[1, 3, 5]])).tolist() == [[1, 3, -1]]
    assert follow(tree, torch.tensor([[2, 3, 5]])).tolist() == [[2, -1, -1]]
    assert follow(tree, torch.tensor([[3, 1, 3]])).tolist() == [[-1, -1, -1]], "what failed once does not begin anew"


def test_a_drawn_tree_takes_no_graft() -> None:
    draft = torch.tensor([[1, 2]])
    drawn = TokenTree.chain(torch.tensor([0]), draft, probs=torch.full((1, 2, 4), 0.25))
    with pytest.raises(ValueError, match="drawn"):
        graft(drawn, TokenTree.chain(torch.tensor([0]), draft))


@pytest.mark.parametrize("seed", range(10))
def test_the_best_graft_is_the_best_of_all_prefixes(seed: int) -> None:
    """By trying every length of every row's copy: none is expected to emit more per second."""
    generator = torch.Generator().manual_seed(seed)
    copied = torch.rand(2, 3, generator=generator, dtype=torch.float64).sqrt().cumprod(dim=1)
    seconds = 1 + 0.3 * torch.arange(7, dtype=torch.float64)
    rate, count = best_graft(copied, copied.new_zeros(0), seconds)
    found = {}
    for lengths in itertools.product(range(4), repeat=2):
        emitted = 2 + sum(float(copied[row, :length].sum()) for row, length in enumerate(lengths))
        found[lengths] = emitted / float(seconds[sum(lengths)])
    assert rate == pytest.approx(max(found.values()))
    assert sum(max(found, key=found.__getitem__)) == count


def test_what_the_tree_holds_anyway_is_worth_nothing_twice() -> None:
    copied = torch.tensor([[0.9, 0.8, 0.1]], dtype=torch.float64)
    held = torch.tensor([0.9, 0.5, 0.2, 0.1], dtype=torch.float64)
    free = torch.ones(4, dtype=torch.float64)
    assert best_graft(copied, held, free) == (pytest.approx(1 + 0.9 + 0.8 + 0.2 + 0.1), 2)
    dear = torch.tensor([1.0, 1.2, 1.4, 1.6], dtype=torch.float64)
    assert best_graft(copied, held, dear) == (pytest.approx(2.7), 0), "0.3 tokens for 0.4 of the time"


class Parrot:
    """A drafter that always proposes the same chain, and counts how often it is asked."""

    taps: tuple[int, ...] = ()

    def __init__(self, draft: list[int]) -> None:
        self.chain, self.asked = draft, 0
        self.depth = len(draft)

    def start(self, *, rows: int, capacity: int) -> None:
        return None

    def move(self, state: None, source: int, target: int) -> None:
        pass

    def observe(self, state: None, seen: object) -> None:
        pass

    def draft(self, state: None, anchors: torch.Tensor, lengths: torch.Tensor, sampling: Sampling) -> TokenTree:
        self.asked += 1
        return TokenTree.chain(anchors, torch.tensor([self.chain]).expand(len(anchors), -1))


def rounds(target: Target, drafter: Drafter, prompts: list[list[int]], *, rows: int = 1) -> int:
    return sum(output.stats.rounds for output in drafting.decode(target, drafter, prompts, rows=rows, new_tokens=90))


@pytest.mark.parametrize("sampling", [None, SamplingParams(0.6)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seconds", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("name", ["lookahead", "draft beams", "draft model"])
def test_the_text_is_that_of_plain_decoding_whatever_is_left_out(
    name: str, seconds: dict[int, float], sampling: SamplingParams | None, target: Target, draft: Target
) -> None:
    """Rounds with the tree alone, the copy alone, both and neither, in rows that begin and end at different times."""
    prompts = drafting.prompts(9, seed=23, vocab_size=target.vocab_size)
    grafted = Grafted(
        drafting.build(name, target, draft), PromptLookup(length=6), seconds=seconds, drafting=0.2, nodes=8
    )
    found, plain = (
        drafting.decode(target, drafter, prompts, rows=3, new_tokens=[60, 5, 90] * 3, sampling=sampling)
        for drafter in (grafted, None)
    )
    assert drafting.texts(found) == drafting.texts(plain)
    assert sum(output.stats.accepted for output in found) > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_both_take_no_more_rounds_than_either(target: Target, prompts: list[list[int]], rows: int) -> None:
    """On the repeating target, whose text soon runs in loops."""
    copies = PromptLookup(length=6, stop_ids=target.eos_ids)
    lookahead = drafting.FREE["lookahead"](target)
    alone = [rounds(target, drafter, prompts, rows=rows) for drafter in (lookahead, copies)]
    assert rounds(target, Grafted(lookahead, copies), prompts, rows=rows) < min(alone)


def test_a_drafter_that_is_never_right_is_asked_on_trial_only(target: Target, prompts: list[list[int]]) -> None:
    wrong = Parrot([1, 1, 1])
    grafted = Grafted(wrong, PromptLookup(length=6), seconds={1: 1.0, 4: 3.0, 64: 30.0}, drafting=1.0, nodes=4)
    total = rounds(target, grafted, prompts[:2])
    assert 8 <= wrong.asked < 0.6 * total


def test_where_nothing_costs_it_is_always_asked(target: Target, prompts: list[list[int]]) -> None:
    helpful = Parrot([5, 6])
    grafted = Grafted(helpful, PromptLookup(length=6), seconds=FLAT)
    total = rounds(target, grafted, prompts[:1])
    assert helpful.asked >= min(8, total)


def test_grafted_on_nothing_it_is_the_copier(target: Target, prompts: list[list[int]]) -> None:
    copies = PromptLookup(length=6, stop_ids=target.eos_ids)
    assert rounds(target, Grafted(NoDraft(), copies), prompts) == rounds(target, copies, prompts)


def test_measured_on_a_target(target: Target, prompts: list[list[int]]) -> None:
    lookahead = drafting.FREE["lookahead"](target)
    grafted = Grafted.measure(lookahead, PromptLookup(length=6), target, rows=2)
    assert grafted.depth == 6
    assert grafted.drafting > 0
    assert grafted.seconds is not None
    assert max(grafted.seconds) >= 2 * (grafted.nodes + 6)
    outputs = drafting.decode(target, grafted, prompts, rows=2)
    assert drafting.texts(outputs) == drafting.texts(drafting.decode(target, None, prompts))


@pytest.mark.parametrize("name", ["none+prompt-lookup", "prompt-lookup+prompt-lookup", "+prompt-lookup"])
def test_copies_on_copies_are_refused(name: str, target: Target) -> None:
    with pytest.raises(ValueError, match="copies on copies or on nothing"):
        make_drafter(name, target)


def test_by_name(target: Target) -> None:
    assert isinstance(make_drafter("lookahead+prompt-lookup", target), Grafted)
    with pytest.raises(ValueError, match="no probabilities"):
        make_drafter("draft:somewhere+prompt-lookup", target, draws="chain")
