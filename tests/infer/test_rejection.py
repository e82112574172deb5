"""The rejection verifiers on tensors: equal to the exact reference coin for coin, and right in law on the whole loop.

`test_exact.py` proves the rules. Here the tensor judges are driven with the reference's own coins on hundreds of random
worlds in one ragged batch (other trees, other lengths, padding, zeros, exhausted rows in every row), and then draft,
coins and verifier run together for several rounds, compared with the target's product law by a chi-square test that
raises a false alarm once in a million.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from draftsmith.infer import noise, rejection
from draftsmith.infer.propose import draw_children
from draftsmith.infer.rejection import Judge
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.tree import TokenTree
from draftsmith.infer.verify import Verifier, sample_match
from tests.infer import exact, rules
from tests.infer.exact import MISSING, VOCAB, Draft, Tokens, World

CHAIN_JUDGES: dict[str, tuple[Judge, exact.Rule]] = {
    "token_level": (rejection.judge_token_level, rules.token_level),
    "block": (rejection.judge_block, rules.block),
}
TREE_JUDGES: dict[str, tuple[Judge, exact.Rule]] = {
    "recursive": (rejection.judge_recursive, rules.recursive),
    "traversal": (rejection.judge_traversal, rules.traversal),
}
VERIFIERS: dict[str, Verifier] = {
    "token_level": rejection.token_level,
    "block": rejection.block,
    "recursive": rejection.recursive,
    "traversal": rejection.traversal,
}
CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 0, 1, 1, 2, 4]
SHAPES = {name: CHAIN if name in CHAIN_JUDGES else TREE for name in VERIFIERS}
LENGTHS = torch.arange(200) * 7 % 50


class Drawn:
    """A source of randomness for drawing drafts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def pick(self, weights: exact.Row) -> int:
        return self.rng.choices(range(len(weights)), [float(weight) for weight in weights])[0]

    def flip(self, node: int, chance: Fraction) -> bool:
        raise AssertionError(f"drawing a draft flips no coins, node {node} wants {chance}")


def random_shape(rng: random.Random, nodes: int) -> Tokens:
    """Parents of a tree of depth at most 3 with at most 3 children per node, in any order that the contract allows."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        parent = rng.randrange(len(parents))
        if depths[parent] < 3 and parents.count(parent) < VOCAB:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tuple(parents)


def hide(rng: random.Random, draft: Draft) -> Draft:
    """The draft without some node and what hangs from it: padding may stand anywhere, also before real siblings."""
    gone = {rng.randrange(1, len(draft.tokens))} if len(draft.tokens) > 1 else set()
    for node, parent in enumerate(draft.parents):
        if parent in gone:
            gone.add(node)
    return Draft(tuple(MISSING if node in gone else token for node, token in enumerate(draft.tokens)), draft.parents)


def to_tree(drafts: list[Draft], worlds: list[World]) -> tuple[TokenTree, Tensor]:
    """The drafts as one batch and p (B, N, V) at their nodes. Nodes that were not drafted hold plausible garbage."""
    garbage = [0.2, 0.5, 0.3]
    tokens, valid, q, p = [], [], [], []
    for draft, world in zip(drafts, worlds):
        real = [token != MISSING for token in draft.tokens]
        tokens.append([max(token, 0) for token in draft.tokens])
        # a node below a missing one may call itself valid: it still cannot be reached
        valid.append([ok or not real[parent] for ok, parent in zip(real, draft.parents)])
        p.append([floats(world.p[draft.context(node)]) if real[node] else garbage for node in range(len(real))])
        q.append(
            [garbage]
            + [
                floats(world.q[draft.context(parent)]) if real[node] else garbage
                for node, parent in enumerate(draft.parents)
                if node
            ]
        )
    parents = torch.tensor([draft.parents for draft in drafts])
    return TokenTree(torch.tensor(tokens), parents, torch.tensor(valid), torch.tensor(q)), torch.tensor(p)


def floats(row: exact.Row) -> list[float]:
    return [float(value) for value in row]


def compare(judge: Judge, rule: exact.Rule, drafts: list[Draft], worlds: list[World], uniforms: Tensor) -> list[int]:
    """Judge and reference with the same uniforms (B, N + 1) float64; returns the numbers of kept draft tokens."""
    tree, p = to_tree(drafts, worlds)
    last, weights = judge(tree, p, uniforms[:, :-1])
    bonus = rejection.draw(weights, uniforms[:, -1])
    kept = []
    for row, (draft, world) in enumerate(zip(drafts, worlds)):
        *coins, final = (Fraction(value) for value in uniforms[row].tolist())
        source = exact.Supplied(coins, final)
        expected = rule(draft, world, source)
        assert (*draft.context(int(last[row])), int(bonus[row])) == expected, f"row {row}: {draft}"
        law = weights[row] / weights[row].sum()
        torch.testing.assert_close(law, torch.tensor(floats(source.drawn_from)), atol=1e-5, rtol=0)
        kept.append(len(expected) - 1)
    return kept


@pytest.mark.parametrize("name", [*CHAIN_JUDGES, *TREE_JUDGES])
def test_judges_equal_the_reference_on_ragged_chains(name: str) -> None:
    judge, rule = (CHAIN_JUDGES | TREE_JUDGES)[name]
    worlds = [exact.random_world(seed, 4) for seed in range(300)]
    drafts = [
        exact.draw_tree(world, Drawn(seed), exact.chain_shape(3), stop_after=((), (0,), (1, 2))[seed % 3])
        for seed, world in enumerate(worlds)
    ]
    kept = compare(judge, rule, drafts, worlds, torch.rand(300, 5, dtype=torch.float64))
    assert set(kept) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", TREE_JUDGES)
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_judges_equal_the_reference_on_ragged_trees(name: str, nodes: int) -> None:
    rng = random.Random(nodes)
    worlds = [exact.random_world(seed, 4) for seed in range(300)]
    shapes = [random_shape(rng, nodes) for _ in worlds]
    drafts = [exact.draw_tree(world, Drawn(seed), shapes[seed]) for seed, world in enumerate(worlds)]
    drafts[::3] = [hide(rng, draft) for draft in drafts[::3]]
    kept = compare(*TREE_JUDGES[name], drafts, worlds, torch.rand(300, nodes + 1, dtype=torch.float64))
    assert set(kept) == set(range(min(nodes, 4)))


@pytest.mark.parametrize("name", [*CHAIN_JUDGES, *TREE_JUDGES])
def test_judges_equal_the_reference_on_a_grid_of_coins(name: str) -> None:
    """Every combination of coins from low to high, on one draft: all branches of the rule are taken."""
    judge, rule = (CHAIN_JUDGES | TREE_JUDGES)[name]
    shape = exact.chain_shape(2) if name in CHAIN_JUDGES else (-1, 0, 0, 1)
    world = exact.random_world(3, 4)
    draft = exact.draw_tree(world, Drawn(1), shape)
    grid = torch.linspace(0.03, 0.97, 5, dtype=torch.float64)
    uniforms = torch.cartesian_prod(torch.zeros(1, dtype=torch.float64), *[grid] * len(shape))
    kept = compare(judge, rule, [draft] * len(uniforms), [world] * len(uniforms), uniforms)
    assert len(set(kept)) > 1


# Properties of the verifiers -------------------------------------------------------------------------------------


def settings(batch: int, *, temperature: float = 1.0) -> Sampling:
    return Sampling([SamplingParams(temperature=temperature, seed=row) for row in range(batch)])


def sampled_tree(logits_q: Tensor, parents: list[int], *, sampling: Sampling) -> TokenTree:
    """A tree of random siblings, all rows the same shape, drawn from softmax(logits_q (B, V)) whatever the context."""
    batch, vocab = logits_q.shape
    tokens = torch.zeros(batch, len(parents), dtype=torch.int64)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    log_q = sampling.log_probs(logits_q[:, None])[:, 0]
    for parent in set(parents[1:]):
        children = [node for node, above in enumerate(parents) if above == parent]
        nodes = torch.full((batch, 1), parent)
        drawn, ok = draw_children(log_q[:, None], nodes, lengths=LENGTHS[:batch], seeds=sampling.seeds, k=len(children))
        tokens[:, children], valid[:, children] = drawn[:, 0], ok[:, 0]
    probs = log_q.exp()[:, None].expand(batch, len(parents), vocab)
    return TokenTree(tokens, torch.tensor(parents).expand(batch, -1), valid, probs)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_draft_drawn_from_the_target_is_kept_whole(name: str) -> None:
    sampling = settings(64, temperature=0.8)
    logits = torch.randn(64, 500) * 3
    tree = sampled_tree(logits, SHAPES[name], sampling=sampling)
    verdict = VERIFIERS[name](tree, logits[:, None].expand(-1, tree.num_nodes, -1), LENGTHS[:64], sampling)
    assert verdict.count.tolist() == [tree.depths.max() + 1] * 64


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_draft_the_target_cannot_write_costs_nothing_but_the_draft(name: str) -> None:
    sampling = settings(64)
    mine, theirs = torch.randn(64, 40), torch.randn(64, 40)
    mine[:, 20:], theirs[:, :20] = -torch.inf, -torch.inf
    tree = sampled_tree(theirs, SHAPES[name], sampling=sampling)
    verdict = VERIFIERS[name](tree, mine[:, None].expand(-1, tree.num_nodes, -1), LENGTHS[:64], sampling)
    assert verdict.count.tolist() == [1] * 64
    assert int(verdict.bonus.max()) < 20


@pytest.mark.parametrize("name", VERIFIERS)
def test_greedy_rows_keep_the_path_of_argmaxes(name: str) -> None:
    """Rows of temperature 0 and 1 in one batch; the greedy ones do what sample-match does."""
    mixed = Sampling([SamplingParams(temperature=float(row % 2), seed=row) for row in range(200)])
    tree = sampled_tree(torch.randn(200, 3), SHAPES[name], sampling=settings(200))
    logits = torch.randn(200, tree.num_nodes, 3)
    verdict = VERIFIERS[name](tree, logits, LENGTHS, mixed)
    expected = sample_match(tree, logits, LENGTHS, mixed)
    greedy = slice(0, None, 2)
    assert torch.equal(verdict.count[greedy], expected.count[greedy])
    assert torch.equal(verdict.path[greedy], expected.path[greedy])
    assert torch.equal(verdict.bonus[greedy], expected.bonus[greedy])
    counts = expected.count[greedy]
    assert int(counts.max()) == int(tree.depths.max()) + 1
    assert len(counts.unique()) > 2


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    sampling = settings(20)
    tree = sampled_tree(torch.randn(20, 6), SHAPES[name], sampling=sampling)
    logits = torch.randn(20, tree.num_nodes, 6)
    together = VERIFIERS[name](tree, logits, LENGTHS[:20], sampling)
    assert tree.probs is not None
    for row in range(20):
        one = slice(row, row + 1)
        alone = TokenTree(tree.tokens[one], tree.parents[one], tree.valid[one], tree.probs[one])
        verdict = VERIFIERS[name](alone, logits[one], LENGTHS[one], Sampling(sampling.params[one]))
        assert torch.equal(verdict.path[0], together.path[row])
        assert (verdict.count[0], verdict.bonus[0]) == (together.count[row], together.bonus[row])


@pytest.mark.gpu
@pytest.mark.parametrize("name", VERIFIERS)
def test_verdicts_on_cuda_equal_those_on_cpu(name: str) -> None:
    tree = sampled_tree(torch.randn(200, 6), SHAPES[name], sampling=settings(200))
    logits = torch.randn(200, tree.num_nodes, 6)
    expected = VERIFIERS[name](tree, logits, LENGTHS, settings(200))
    assert tree.probs is not None
    there = TokenTree(tree.tokens.cuda(), tree.parents.cuda(), tree.valid.cuda(), tree.probs.cuda())
    verdict = VERIFIERS[name](there, logits.cuda(), LENGTHS.cuda(), Sampling(settings(200).params, "cuda"))
    assert torch.equal(verdict.path.cpu(), expected.path)
    assert torch.equal(verdict.bonus.cpu(), expected.bonus)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_draft_of_nothing_is_plain_sampling_in_bounds(name: str) -> None:
    logits = torch.randn(200, 1, 5).masked_fill(torch.arange(5) == 2, -torch.inf)
    verdict = VERIFIERS[name](TokenTree.root(torch.zeros(200, dtype=torch.int64)), logits, LENGTHS, settings(200))
    assert verdict.count.tolist() == [1] * 200
    assert set(verdict.bonus.tolist()) == {0, 1, 3, 4}


@pytest.mark.parametrize("name", VERIFIERS)
def test_drafts_without_their_rows_are_refused(name: str) -> None:
    tree = TokenTree.chain(torch.zeros(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"TokenTree\.probs.*sample_match"):
        VERIFIERS[name](tree, torch.randn(2, 4, 5), LENGTHS[:2], settings(2))


@pytest.mark.parametrize("name", CHAIN_JUDGES)
def test_chain_verifiers_refuse_branches(name: str) -> None:
    tree = sampled_tree(torch.randn(2, 5), [-1, 0, 0], sampling=settings(2))
    with pytest.raises(ValueError, match="branches"):
        VERIFIERS[name](tree, torch.randn(2, 3, 5), LENGTHS[:2], settings(2))


def test_rare_tokens_keep_their_chance_in_the_final_draw() -> None:
    """A float32 running sum over a large vocabulary would lose a tail of 1e-9 per token; float64 keeps it."""
    weights = torch.full((1, 50_000), 1e-9)
    weights[0, 0] = 1.0
    edge = 1 / (1 + 49_999e-9)
    tokens = [
        int(rejection.draw(weights, torch.tensor([u], dtype=torch.float64))) for u in (edge - 1e-7, edge + 1.5e-9)
    ]
    assert tokens == [0, 2]


def test_the_final_draw_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.0, 3.0, 0.0, 1.0, 0.0]])
    below_one = 1 - 2.0**-53
    for value in (2.0**-53, 0.5, 0.75 - 1e-12, 0.75 + 1e-12, below_one):
        token = int(rejection.draw(weights, torch.tensor([value], dtype=torch.float64)))
        assert token == (2 if value < 0.75 else 4)


def test_streams_of_randomness_are_distinct() -> None:
    streams = [noise.STREAM_TARGET, noise.STREAM_DRAFT, noise.STREAM_COIN, noise.STREAM_BONUS]
    assert len(set(streams)) == 4
