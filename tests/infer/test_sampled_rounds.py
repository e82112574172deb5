"""Draft, coins and verifier together, several rounds: the emitted text has the target's law.

Worlds of three tokens with zeros, 20,000 rows with seeds 0, 1, 2, ...: each row drafts from q, is verified against p,
moves on by what was kept, and so on until four tokens are out. Their counts are compared with the product law of p by
a chi-square test that raises a false alarm with probability 1e-6. Deliberate faults, and the lossy rule, must fail it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from draftsmith.infer import noise, propose, rejection
from draftsmith.infer.penalties import TokenCounts, penalise
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.tree import TokenTree
from draftsmith.infer.typical import typical_lossy
from draftsmith.infer.verify import Verifier, sample_match

from .one_token import next_law

pytestmark = pytest.mark.slow

VOCAB, OUTPUT, ROWS = 3, 4, 20_000
FALSE_ALARM = 1e-6
CONTEXTS = VOCAB**8  # contexts are numbered like a heap: below context c stand 3c + 1, 3c + 2, 3c + 3
PLAIN = SamplingParams(temperature=1.0)
PENALISED = SamplingParams(
    temperature=0.8, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.6
)
PROMPT = [1]
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 1, 1, 2, 3)


def random_rows(seed: int) -> Tensor:
    """(CONTEXTS, V) float32 log-probabilities, about one in eight of them -inf."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(CONTEXTS, VOCAB, generator=generator) ** 2
    weights[torch.rand(CONTEXTS, VOCAB, generator=generator) < 0.125] = 0
    weights[:, seed % VOCAB] += 0.02  # no row is empty
    return torch.log(weights / weights.sum(dim=-1, keepdim=True))


def draw(
    q: Tensor, contexts: Tensor, shape: tuple[int, ...], *, lengths: Tensor, seeds: Tensor
) -> tuple[TokenTree, Tensor]:
    """A tree of `shape` (parents) below every row's context (B,), and the context (B, N) at each node."""
    at = contexts[:, None].repeat(1, len(shape)) % CONTEXTS
    tokens, valid = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    probs = torch.zeros(*at.shape, VOCAB)
    for parent in sorted(set(shape[1:])):
        children = [node for node, above in enumerate(shape) if above == parent]
        log_q = q[at[:, parent]]
        nodes = torch.full_like(at[:, :1], parent)
        drawn, ok = propose.draw_children(log_q[:, None], nodes, lengths=lengths, seeds=seeds, k=len(children))
        tokens[:, children], valid[:, children] = drawn[:, 0], ok[:, 0]
        probs[:, children] = log_q.exp()[:, None]
        at[:, children] = (at[:, parent, None] * VOCAB + 1 + drawn[:, 0]) % CONTEXTS
    return TokenTree(tokens, torch.tensor(shape).expand_as(at), valid, probs), at


def decode(
    verify: Verifier,
    p: Tensor,
    q: Tensor,
    shape: tuple[int, ...],
    *,
    params: SamplingParams,
    spoil: Callable[[TokenTree], TokenTree],
) -> Tensor:
    """(ROWS, OUTPUT) tokens. Drafts know nothing of the penalties."""
    sampling = Sampling([replace(params, seed=row) for row in range(ROWS)])
    texts = [TokenCounts(PROMPT) for _ in range(ROWS)]
    contexts = torch.zeros(ROWS, dtype=torch.int64)
    emitted = torch.zeros(ROWS, OUTPUT + len(shape), dtype=torch.int64)
    count, rows = torch.zeros_like(contexts), torch.arange(ROWS)
    while int(count.min()) < OUTPUT:
        before = count
        tree, at = draw(q, contexts, shape, lengths=count + 5, seeds=sampling.seeds)
        tree = spoil(tree)
        verdict = verify(tree, penalise(p[at], tree, sampling, texts), count + 5, sampling)
        for step in range(1, len(shape) + 1):
            kept = step < verdict.count
            node = verdict.path[:, min(step, len(shape) - 1)]
            token = torch.where(kept, tree.tokens[rows, node], verdict.bonus)
            moves = (step <= verdict.count) & (count < OUTPUT)
            emitted[rows[moves], count[moves]] = token[moves]
            contexts = torch.where(moves, contexts * VOCAB + 1 + token, contexts)
            count = count + moves
        for row, (first, last) in enumerate(zip(before.tolist(), count.tolist())):
            for token in emitted[row, first:last].tolist() if params.has_penalties else ():
                texts[row].add(token)
    return emitted[:, :OUTPUT]


def product_law(p: Tensor, params: SamplingParams) -> Tensor:
    """(VOCAB ** OUTPUT,) float64: the law of all outputs, token by token from the definitions."""
    chances = []
    for output in itertools.product(range(VOCAB), repeat=OUTPUT):
        chance, context = 1.0, 0
        for step, token in enumerate(output):
            chance *= next_law(p[context].double().tolist(), PROMPT, output[:step], params)[token]
            context = context * VOCAB + 1 + token
        chances.append(chance)
    return torch.tensor(chances, dtype=torch.float64)


def p_value(tokens: Tensor, law: Tensor) -> float:
    """Chi-square of the counts of all outputs against their law; 0 if an impossible output occurs."""
    cell = (tokens * VOCAB ** torch.arange(OUTPUT - 1, -1, -1)).sum(dim=1)
    seen, expected = torch.bincount(cell, minlength=len(law)).double(), law * len(tokens)
    if bool(seen[law == 0].any()):
        return 0.0
    large = expected >= 5
    seen = torch.cat([seen[large], seen[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]]).clamp(min=1e-9)
    return float(chi2.sf(float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1))


def run(
    verify: Verifier,
    shape: tuple[int, ...],
    *,
    params: SamplingParams = PLAIN,
    spoil: Callable[[TokenTree], TokenTree] = lambda tree: tree,
) -> float:
    p, q = random_rows(1), random_rows(2)
    return p_value(decode(verify, p, q, shape, params=params, spoil=spoil), product_law(p, params))


@pytest.mark.parametrize("verify", [sample_match, rejection.token_level, rejection.block])
def test_sampled_chains_have_the_targets_law(verify: Verifier) -> None:
    assert run(verify, CHAIN) > FALSE_ALARM


@pytest.mark.parametrize("verify", [sample_match, rejection.recursive, rejection.traversal])
def test_sampled_trees_have_the_targets_law(verify: Verifier) -> None:
    assert run(verify, TREE) > FALSE_ALARM


@pytest.mark.parametrize(
    ("verify", "shape"), [(sample_match, TREE), (rejection.block, CHAIN), (rejection.traversal, TREE)]
)
def test_penalties_and_min_p_are_part_of_the_law(verify: Verifier, shape: tuple[int, ...]) -> None:
    assert run(verify, shape, params=PENALISED) > FALSE_ALARM


def test_penalties_for_the_text_before_the_draft_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = penalise

    def blind(logits: Tensor, tree: TokenTree, sampling: Sampling, texts: list[TokenCounts]) -> Tensor:
        """Every node is penalised as if it were the root."""
        lone = TokenTree.root(tree.tokens[:, 0])
        nodes = [real(logits[:, [node]], lone, sampling, texts) for node in range(tree.num_nodes)]
        return torch.cat(nodes, dim=1)

    monkeypatch.setitem(decode.__globals__, "penalise", blind)
    assert run(sample_match, CHAIN, params=PENALISED) < FALSE_ALARM


def test_typical_acceptance_does_not_have_the_targets_law() -> None:
    assert run(typical_lossy, CHAIN) < FALSE_ALARM


@pytest.mark.parametrize("verify", [rejection.token_level, rejection.block, rejection.traversal])
def test_coins_taken_from_the_drafts_stream_are_noticed(verify: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "STREAM_COIN", noise.STREAM_DRAFT)
    monkeypatch.setattr(propose, "MAX_NODES", 1)  # so that the coin of node 1 is noise of the first draw
    assert run(verify, CHAIN) < FALSE_ALARM


@pytest.mark.parametrize("verify", [rejection.token_level, rejection.block, rejection.recursive, rejection.traversal])
def test_rows_other_than_the_drawn_ones_are_noticed(verify: Verifier) -> None:
    def flatten(tree: TokenTree) -> TokenTree:
        """The verifier is told a warmer q than the tokens were drawn from."""
        assert tree.probs is not None
        warmer = tree.probs**0.7
        return replace(tree, probs=warmer / warmer.sum(dim=-1, keepdim=True).clamp(min=1e-9))

    assert run(verify, CHAIN, spoil=flatten) < FALSE_ALARM


def test_one_noise_for_all_nodes_of_a_depth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position-keyed draft noise, right for sample-match, correlates the branches that traversal plays off."""
    draw_children = propose.draw_children

    def by_depth(log_q: Tensor, nodes: Tensor, *, lengths: Tensor, seeds: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return draw_children(log_q, torch.zeros_like(nodes), lengths=lengths, seeds=seeds, k=k)

    monkeypatch.setattr(propose, "draw_children", by_depth)
    assert run(rejection.traversal, (-1, 0, 0, 1, 2)) < FALSE_ALARM
