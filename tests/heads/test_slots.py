"""Laws of the trees made of one block: a width of one is the chain, and every rank is a rank given the node's own path."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from draftsmith.heads.markov import Kind, MarkovHead
from draftsmith.heads.slots import Slots
from draftsmith.heads.vocabulary import DraftVocabulary
from draftsmith.infer.parallel_tree import best_first
from draftsmith.infer.tree import TokenTree, Topology

BATCH, DEPTH, WIDTH, VOCAB, RANK = 3, 3, 6, 12, 4
KINDS: list[Kind | None] = [None, "vanilla", "gated", "rnn"]


def build(kind: Kind | None, *, drafted: Tensor | None = None) -> Slots:
    generator = torch.Generator().manual_seed(5)
    size = VOCAB if drafted is None else len(drafted)
    torch.manual_seed(6)
    head = None if kind is None else MarkovHead(kind, rank=RANK, width=WIDTH, vocab_size=VOCAB, drafted=size)
    if head is not None:
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            torch.nn.init.normal_(weight)
    hidden = torch.randn(BATCH, DEPTH, WIDTH, generator=generator)
    base = torch.randn(BATCH, DEPTH, size, generator=generator)
    vocabulary = DraftVocabulary(None if drafted is None else size, VOCAB, drafted)
    return Slots(torch.randint(VOCAB, (BATCH,), generator=generator), hidden, base, vocabulary, head)


def log_probs(slots: Slots, row: int, path: list[int]) -> Tensor:
    """(W,): the slot's distribution after the target ids `path`, from the teacher-forced form of the head."""
    step = len(path)
    logits = slots.base[row, step]
    if slots.markov is not None:
        previous = torch.tensor([[int(slots.anchors[row])], *[[token] for token in path]])
        codes = slots.markov.codes(slots.hidden[row, : step + 1, None], previous)
        logits = logits + slots.markov.markov_w2(codes[-1, 0])
    return logits.log_softmax(dim=-1)


def path_of(tree: TokenTree, row: int, node: int) -> list[int]:
    found: list[int] = []
    while node:
        found.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_static_tree_has_its_rank_below_its_own_path(kind: Kind | None) -> None:
    slots = build(kind, drafted=torch.tensor([0, 2, 3, 5, 7, 8, 11]))
    topology = Topology(((0,), (1,), (0, 0), (0, 2), (1, 0), (1, 1), (0, 2, 0), (1, 1, 3)))
    with torch.no_grad():
        tree = slots.static_tree(topology)
        for row in range(BATCH):
            for node, ranks in enumerate(topology.paths, start=1):
                *above, token = path_of(tree, row, node)
                order = slots.vocabulary.to_target(log_probs(slots, row, above).argsort(descending=True))
                assert int(order[ranks[-1]]) == token


@pytest.mark.parametrize("kind", KINDS)
def test_one_candidate_makes_the_best_first_tree_the_chain(kind: Kind | None) -> None:
    slots = build(kind)
    with torch.no_grad():
        chain = slots.static_tree(Topology.chain(DEPTH))
        tree = best_first(slots.anchors, *slots.candidates(1), nodes=DEPTH)
        wide = best_first(slots.anchors, *slots.candidates(4), nodes=60)
    assert torch.equal(tree.tokens, chain.tokens)
    assert torch.equal(tree.parents, chain.parents)
    for row in range(BATCH):
        path = chain.tokens[row, 1:].tolist()
        assert path in [path_of(wide, row, node) for node in range(wide.num_nodes)], "a wide tree holds the chain"


@pytest.mark.parametrize("kind", [None, "vanilla", "gated"])
def test_with_all_tokens_as_candidates_the_tree_holds_the_most_likely_paths(kind: Kind | None) -> None:
    """With the whole vocabulary in the pool nothing is estimated."""
    slots, nodes = build(kind), 25
    with torch.no_grad():
        tree = best_first(slots.anchors, *slots.candidates(VOCAB), nodes=nodes)
        for row in range(BATCH):
            values: dict[tuple[int, ...], float] = {(): 0.0}
            for depth in range(DEPTH):
                for above in product(range(VOCAB), repeat=depth):
                    scores = log_probs(slots, row, list(above)).tolist()
                    values |= {(*above, token): values[above] + score for token, score in enumerate(scores)}
            del values[()]
            best = sorted(values, key=lambda path: -values[path])[:nodes]
            assert {tuple(path_of(tree, row, node)) for node in range(1, nodes + 1)} == set(best)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_scores_below_the_chain_are_exact_and_below_others_no_more_than_certain(kind: Kind) -> None:
    slots = build(kind)
    assert slots.markov is not None
    with torch.no_grad():
        tokens, table = slots.conditioned(slots.markov, 4)
        for row in range(BATCH):
            for step in range(DEPTH):
                path = tokens[row, :step, 0].tolist()
                truth = log_probs(slots, row, path)[tokens[row, step]]
                torch.testing.assert_close(table[row, step, 0], truth)
    assert bool((table.exp().sum(dim=-1) <= 1 + 1e-5).all())
