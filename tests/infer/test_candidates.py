"""Trees of candidates from a draft model: what is in them, in which order, and the law of what they emit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from draftsmith.infer import rejection
from draftsmith.infer.cache import KVCache
from draftsmith.infer.candidates import DraftBeams, DraftTree
from draftsmith.infer.draft_model import DraftModel, DraftReader, DraftState
from draftsmith.infer.drafter import Observation
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree, Topology
from draftsmith.infer.verify import Verifier, sample_match

from . import architectures, drafting

TEXTS = [[5, 9, 200, 33, 17], [40, 7]]
SAMPLED = SamplingParams(0.8, top_k=30, seed=3)
DEEP = Topology((*Topology.chain(11).paths, (1,), (0, 1)))


@pytest.fixture(scope="module")
def target(build_target: Callable[..., Target]) -> Target:
    return build_target(num_hidden_layers=2, eos_token_id=[])


@pytest.fixture(scope="module")
def draft(build_target: Callable[..., Target]) -> Target:
    return build_target(num_hidden_layers=2, eos_token_id=[], seed=2)


def first_tree(drafter: DraftReader, settings: Sampling) -> TokenTree:
    """The tree after TEXTS, the last token of each being the anchor."""
    state = drafter.start(rows=3, capacity=8)
    for row, text in enumerate(TEXTS):
        tokens, count = torch.tensor([text[:-1]]), torch.tensor([len(text) - 1])
        rows, start = slice(row, row + 1), torch.tensor([0])
        drafter.observe(state, Observation(rows, tokens, count, start, torch.zeros(1), None, torch.tensor([text[-1]])))
    anchors, lengths = torch.tensor([text[-1] for text in TEXTS]), torch.tensor([len(text) - 1 for text in TEXTS])
    return drafter.draft(state, anchors, lengths, settings)


def paths(tree: TokenTree, row: int) -> list[list[int]]:
    """Drafted tokens from the root down to each node."""
    found: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        found.append([*found[int(tree.parents[row, node])], int(tree.tokens[row, node])])
    return found


def log_row(model: Target, ids: list[int]) -> Tensor:
    """(V,): the draft model's log-probabilities after `ids`, read anew."""
    tokens = torch.tensor([ids])
    hidden = model.read_packed(tokens, torch.arange(len(ids))[None], torch.ones_like(tokens)).hidden
    return model.logits(hidden)[0, -1].log_softmax(dim=-1)


def test_beams_are_the_likeliest_continuations(target: Target, draft: Target) -> None:
    """Against a beam search that reads every hypothesis anew: the same tokens, best first within each level."""
    beams, length = 3, 3
    nodes = beams + beams * beams * (length - 1)  # all that is scored
    tree = first_tree(
        DraftBeams(draft, target, beams=beams, length=length, nodes=nodes), Sampling([SamplingParams()] * 2)
    )
    for row, text in enumerate(TEXTS):
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        expected: set[tuple[int, ...]] = set()
        for _ in range(length):
            scored: dict[tuple[int, ...], float] = {}
            for path, score in frontier.items():
                best = log_row(draft, [*text, *path]).topk(beams)
                scored |= {(*path, t): score + v for t, v in zip(best.indices.tolist(), best.values.tolist())}
            expected |= set(scored)
            frontier = dict(sorted(scored.items(), key=lambda item: -item[1])[:beams])
        assert {tuple(path) for path in paths(tree, row)[1:]} == expected
        assert len(expected) == nodes


@pytest.mark.parametrize("kind", list(architectures.ARCHITECTURES))
def test_a_tree_read_level_by_level_is_the_tree_read_at_once(kind: str) -> None:
    """Rows of different lengths; the past and the tree itself are longer than any sliding window."""
    model = Target(architectures.build(kind), None)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, architectures.VOCAB, (count,), generator=draw) for count in (14, 5)]
    lengths = torch.tensor([14, 5])
    candidates = torch.randint(3, architectures.VOCAB, (2, DEEP.depth, DEEP.width), generator=draw)
    tree = DEEP.fill(torch.tensor([7, 8]), candidates)
    hidden = []
    for edges in ([0, 14], [0, 1, 3, 6, 11, 14]):
        cache = KVCache(rows=2, capacity=64)
        model.prefill(prompts, cache, first_row=0)
        parts = []
        for skip, end in pairwise(edges):
            part = TokenTree(tree.tokens[:, :end], tree.parents[:, :end], tree.valid[:, :end])
            parts.append(model.verify(part, lengths, cache, longest=14, skip=skip).hidden)
        hidden.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-4, rtol=1e-4)


def test_a_smaller_tree_keeps_the_likeliest_nodes(target: Target, draft: Target) -> None:
    settings = Sampling([SamplingParams()] * 2)
    whole, small = (first_tree(DraftBeams(draft, target, beams=3, length=3, nodes=n), settings) for n in (21, 6))
    for row, text in enumerate(TEXTS):
        worth = {
            tuple(path): sum(float(log_row(draft, text + path[:at])[path[at]]) for at in range(len(path)))
            for path in paths(whole, row)[1:]
        }
        best = sorted(worth, key=lambda path: -worth[path])[:6]
        assert {tuple(path) for path in paths(small, row)[1:]} == set(best)


def test_the_best_child_of_a_sampled_beam_is_the_coupled_proposal(target: Target, draft: Target) -> None:
    settings = Sampling([SAMPLED, replace(SAMPLED, seed=4)])
    tree = first_tree(DraftBeams(draft, target, beams=2, length=2, nodes=6), settings)
    chain = first_tree(DraftModel(draft, target, length=1), settings)
    for row in range(2):
        assert chain.tokens[row, 1] in tree.tokens[row, tree.parents[row] == 0]


def test_siblings_of_a_drawn_tree_differ_and_carry_their_parents_row(target: Target, draft: Target) -> None:
    settings = Sampling([SAMPLED, replace(SAMPLED, temperature=1.5, seed=5)])
    tree = first_tree(DraftTree(draft, target, shape=drafting.SHAPE), settings)
    assert tree.parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 2, 4]
    assert tree.probs is not None
    for row, text in enumerate(TEXTS):
        path = paths(tree, row)
        for node in range(1, tree.num_nodes):
            above = int(tree.parents[row, node])
            logits = log_row(draft, text + path[above])[None, None].expand(2, 1, -1)
            torch.testing.assert_close(
                tree.probs[row, node], settings.log_probs(logits).exp()[row, 0], atol=1e-5, rtol=1e-3
            )
            siblings = tree.tokens[row, tree.parents[row] == above].tolist()
            assert len(set(siblings)) == len(siblings)
        assert tree.valid.all()


def test_a_row_that_runs_out_of_tokens_drafts_no_more(target: Target, draft: Target) -> None:
    """top_k 2 has two tokens for three siblings; a greedy row has one."""
    settings = Sampling([SamplingParams(1.0, top_k=2), SamplingParams()])
    tree = first_tree(DraftTree(draft, target, shape=drafting.SHAPE), settings)
    assert tree.valid[:, :4].tolist() == [[True, True, True, False], [True, True, False, False]]
    greedy = [int(log_row(draft, TEXTS[1]).argmax())]
    greedy.append(int(log_row(draft, TEXTS[1] + greedy).argmax()))
    assert tree.tokens[1, [1, 4]].tolist() == greedy


def test_nothing_is_drafted_below_an_eos(target: Target, draft: Target, build_target: Callable[..., Target]) -> None:
    settings = Sampling([SamplingParams(1.0, top_k=3, seed=2)] * 2)
    before = first_tree(DraftTree(draft, target, shape=drafting.SHAPE), settings)
    ending = build_target(num_hidden_layers=2, eos_token_id=[int(before.tokens[0, 1])])
    after = first_tree(DraftTree(draft, ending, shape=drafting.SHAPE), settings)
    assert before.valid[0].all()
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after.valid[0].tolist() == [True, True, True, True, False, False, True, False]
    beams = first_tree(DraftBeams(draft, ending, beams=3, length=3, nodes=8), settings)
    ended = [node for node, token in enumerate(beams.tokens[0].tolist()) if token in ending.eos_ids]
    assert ended
    assert not any(int(parent) in ended for parent in beams.parents[0])


def test_branches_of_one_depth_are_drawn_independently(target: Target, build_target: Callable[..., Target]) -> None:
    """Traversal verification relies on it. With one and the same row everywhere, shared noise would draw the same tokens."""
    flat = build_target(num_hidden_layers=2)
    torch.nn.init.zeros_(flat.head.weight)
    settings = Sampling([SamplingParams(1.0), SamplingParams(1.0, seed=1)])
    tree = first_tree(DraftTree(flat, target, shape=Topology(((0,), (1,), (0, 0), (1, 0)))), settings)
    assert (tree.tokens[:, 3] != tree.tokens[:, 4]).all()
    assert tree.tokens[0].tolist() != tree.tokens[1].tolist()


def test_a_shape_with_gaps_among_siblings_is_refused(target: Target, draft: Target) -> None:
    with pytest.raises(ValueError, match=r"path \(0, 2\) needs its elder \(0, 1\)"):
        DraftTree(draft, target, shape=Topology(((0,), (0, 0), (0, 2))))
    with pytest.raises(ValueError, match=r"beams must lie in 1\.\.300"):
        DraftBeams(draft, target, beams=301)


VOCAB, OUTPUT, REQUESTS = 4, 4, 3000
FALSE_ALARM = 1e-6
LAW = SamplingParams(0.9)


def p_value(target: Target, drafter: DraftReader, verifier: Verifier) -> float:
    """Chi-square of the texts of 3000 seeds against the product law of the target's own rows."""
    torch.set_num_threads(1)  # the models are too small to share out
    prompt = [1]
    outputs = drafting.decode(
        target, drafter, [prompt] * REQUESTS, new_tokens=OUTPUT, rows=150, sampling=LAW, verifier=verifier
    )
    assert sum(output.stats.accepted for output in outputs) > REQUESTS
    words = list(product(range(VOCAB), repeat=OUTPUT))
    tokens = torch.tensor([[*prompt, *word] for word in words])
    reading = target.read_packed(tokens, torch.arange(OUTPUT + 1).expand_as(tokens), torch.ones_like(tokens))
    rows = (target.logits(reading.hidden).double() / LAW.temperature).log_softmax(dim=-1)
    law = rows[:, :-1].gather(2, tokens[:, 1:, None]).sum(dim=(1, 2)).exp()
    cells = {word: cell for cell, word in enumerate(words)}
    seen = torch.bincount(
        torch.tensor([cells[tuple(output.tokens)] for output in outputs]), minlength=len(words)
    ).double()
    expected = law * REQUESTS
    large = expected >= 5
    seen = torch.cat([seen[large], seen[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    return float(chi2.sf(float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1))


@pytest.fixture(scope="module")
def small_pair(build_target: Callable[..., Target]) -> tuple[Target, Target]:
    """A target of four tokens and a draft model that differs from it."""
    options = {"vocab_size": VOCAB, "num_hidden_layers": 1, "eos_token_id": [], "pad_token_id": 0}
    target = build_target(**options, initializer_range=0.15)
    return target, drafting.perturbed(target, build_target(**options), noise=0.1)


TREE = Topology(((0,), (1,), (0, 0), (0, 1), (1, 0)))
DRAWN: dict[str, tuple[Callable[[Target, Target], DraftReader], Verifier]] = {
    "token_level": (lambda d, t: DraftModel(d, t, length=3, is_drawn=True), rejection.token_level),
    "block": (lambda d, t: DraftModel(d, t, length=3, is_drawn=True), rejection.block),
    "recursive": (lambda d, t: DraftTree(d, t, shape=TREE), rejection.recursive),
    "traversal": (lambda d, t: DraftTree(d, t, shape=TREE), rejection.traversal),
    "sample_match of a coupled chain": (lambda d, t: DraftModel(d, t, length=3), sample_match),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(DRAWN))
def test_drawn_drafts_have_the_targets_law(small_pair: tuple[Target, Target], rule: str) -> None:
    target, draft = small_pair
    make, verifier = DRAWN[rule]
    assert p_value(target, make(draft, target), verifier) > FALSE_ALARM


class Misreported(DraftModel):
    """Tells the verifier a warmer row than the tokens were drawn from."""

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        tree = super().draft(state, anchors, lengths, sampling)
        assert tree.probs is not None
        warmer = tree.probs**0.3
        return replace(tree, probs=warmer / warmer.sum(dim=-1, keepdim=True).clamp(min=1e-9))


@pytest.mark.slow
def test_the_law_test_notices_a_wrong_row(small_pair: tuple[Target, Target]) -> None:
    target, draft = small_pair
    wrong = Misreported(draft, target, length=3, is_drawn=True)
    assert p_value(target, wrong, rejection.token_level) < FALSE_ALARM
