"""Known ways to get verification wrong, each told from the target's law by enumeration.

Every mutant is a rule or a way of drafting that some published implementation shipped or nearly shipped. The proofs of
`test_exact.py` are worth something only if the same method rejects all of these, including the token-level residual in
block verification, whose error no sampling test would see.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Protocol

import pytest

from tests.infer import exact, rules
from tests.infer.exact import MISSING, ROOT, VOCAB, Draft, Program, Source, Tokens, World, error, program

SEEDS = range(8)
CHAIN = exact.chain_shape(3)
TREE = (-1, 0, 0, 1, 2)


class FaultyRule(Protocol):
    def __call__(self, draft: Draft, world: World, source: Source, *, fault: str) -> Tokens: ...


def block_mutant(draft: Draft, world: World, source: Source, *, fault: str) -> Tokens:
    """`rules.block` with one fault."""
    steps = list(draft.chain())
    rates, kept = [Fraction(1)], 0
    for index, (node, token, context) in enumerate(steps, start=1):
        rate = rates[-1] * world.p[context][token] / world.q[context][token]
        if fault != "clip only at the end":
            rate = min(Fraction(1), rate)
        rates.append(rate)
        rate = chance = min(Fraction(1), rate)
        if index < len(steps) and fault != "h is r":
            after = (*context, token)
            chance = rules.next_rate(sum(rules.excess(world.p[after], world.q[after], rate)), rate)
        if source.flip(node, chance):
            kept = index
        elif fault == "break at first failure":
            break
    context = tuple(token for _, token, _ in steps[:kept])
    if kept == len(steps):
        return (*context, source.pick(world.p[context]))
    rate = Fraction(1) if fault == "token-level residual" else min(Fraction(1), rates[kept])
    return (*context, pick_or(source, rules.excess(world.p[context], world.q[context], rate), world.p[context]))


def recursive_mutant(draft: Draft, world: World, source: Source, *, fault: str) -> Tokens:
    """`rules.recursive` with one fault; it draws its two children itself."""
    first = source.pick(world.q[()])
    if fault == "duplicates skipped":  # drawn with replacement, a repeated token skipped, q not renormalised
        second = source.pick(world.q[()])
        children = [first] if second == first else [first, second]
    else:
        weights = tuple(Fraction(0) if token == first else weight for token, weight in enumerate(world.q[()]))
        children = [first, source.pick(weights)] if any(weights) else [first]
    p, q = world.p[()], world.q[()]
    for rank, token in enumerate(children):
        if source.flip(rank, min(Fraction(1), p[token] / q[token])):
            return (token, source.pick(world.p[(token,)]))
        if fault != "p not updated":
            rest = rules.excess(p, q)
            p = exact.normalised(rest) if any(rest) else p
        q = tuple(Fraction(0) if other == token else weight for other, weight in enumerate(q))
        if fault == "p not updated" and any(q):
            q = exact.normalised(q)
    return (pick_or(source, p, world.p[()]),)


def traversal_mutant(draft: Draft, world: World, source: Source, *, fault: str) -> Tokens:
    """`rules.traversal` with one fault."""

    def visit(node: int, rate: Fraction) -> tuple[Tokens | None, exact.Row, Fraction]:
        p = world.p[draft.context(node)]
        for child in draft.children(node):
            q = exact.normalised(exact.proposal(draft, child, world))
            token = draft.tokens[child]
            output, law_below, rate_below = visit(child, min(Fraction(1), rate * p[token] / q[token]))
            if output is not None:
                return output, p, rate
            if source.flip(child, rate_below):
                return (*draft.context(child), source.pick(law_below)), p, rate
            rest = rules.excess(p, q, rate)
            p = exact.normalised(rest) if any(rest) and fault != "p not updated" else p
            rate = rules.next_rate(sum(rest), rate) if fault != "r not updated" else rate
        return None, p, rate

    output, law_left, _ = visit(0, Fraction(1))
    return output if output is not None else (source.pick(law_left),)


def pick_or(source: Source, weights: exact.Row, otherwise: exact.Row) -> int:
    """A faulty rule may be left with nothing to draw from; it then draws from `otherwise`."""
    return source.pick(weights if any(weights) else otherwise)


def argmax(row: exact.Row) -> int:
    return row.index(max(row))


def greedy_draft_with_softmax_q(world: World, source: Source) -> Tokens:
    """The drafted token is q's argmax, but the ratio uses q as if it had been drawn."""
    token = argmax(world.q[()])
    return rules.token_level(Draft((ROOT, token), (-1, 0)), world, source)


def a_draw_per_row_of_the_tree(world: World, source: Source) -> Tokens:
    """Each root-to-leaf row draws the target for itself, so a shared node has many chances; the longest row wins."""
    first = argmax(world.q[()])
    best: Tokens = ()
    for second in range(2):
        row = (first, second)
        length = 0
        for token, drafted in ((source.pick(world.p[row[:k]]), row[k]) for k in range(2)):
            if token != drafted:
                break
            length += 1
        best = max(best, row[:length], key=len)
    return (*best, source.pick(world.p[best]))


def unlikely_drafts_dropped(world: World, source: Source) -> Tokens:
    """A drawn token that q finds unlikely is thrown away, together with what would have followed."""
    draft = exact.draw_tree(world, source, exact.chain_shape(1))
    token = draft.tokens[1]
    if world.q[()][token] < Fraction(2, 5):
        draft = Draft((ROOT, MISSING), draft.parents)
    return rules.token_level(draft, world, source)


def beams_judged_as_samples(world: World, source: Source) -> Tokens:
    """ReDrafter's sampler: the two best beams, each judged by p/q with coins of its own; the longest wins."""
    chances = {(a, b): world.q[()][a] * world.q[(a,)][b] for a in range(VOCAB) for b in range(VOCAB)}
    beams = sorted(chances, key=lambda beam: (-chances[beam], beam))[:2]
    best: Tokens = ()
    for beam in (beam for beam in beams if chances[beam]):
        length = 0
        while length < 2:
            p, q = world.p[beam[:length]][beam[length]], world.q[beam[:length]][beam[length]]
            if not source.flip(0, min(Fraction(1), p / q)):
                break
            length += 1
        best = max(best, beam[:length], key=len)
    if len(best) == 2:
        return (*best, source.pick(world.p[best]))
    return (*best, pick_or(source, rules.excess(world.p[best], world.q[best]), world.p[best]))


MUTANTS: dict[str, Program] = {
    "block: break at the first failure": program(partial(block_mutant, fault="break at first failure"), CHAIN),
    "block: h is r": program(partial(block_mutant, fault="h is r"), CHAIN),
    "block: r clipped only at the end": program(partial(block_mutant, fault="clip only at the end"), CHAIN),
    "block: token-level residual": program(partial(block_mutant, fault="token-level residual"), CHAIN),
    "recursive: q not renormalised": program(partial(recursive_mutant, fault="q not renormalised"), (-1,)),
    "recursive: p not updated": program(partial(recursive_mutant, fault="p not updated"), (-1,)),
    "recursive: duplicates skipped": program(partial(recursive_mutant, fault="duplicates skipped"), (-1,)),
    "traversal: p not updated": program(partial(traversal_mutant, fault="p not updated"), TREE),
    "traversal: r not updated": program(partial(traversal_mutant, fault="r not updated"), TREE),
    "draft: argmax with softmax q": greedy_draft_with_softmax_q,
    "tree: a draw per row": a_draw_per_row_of_the_tree,
    "draft: unlikely samples dropped": unlikely_drafts_dropped,
    "draft: beams judged as samples": beams_judged_as_samples,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_told_from_the_target(mutant: str) -> None:
    length = 4 if mutant.startswith("block") else 3
    assert max(error(MUTANTS[mutant], exact.random_world(seed, length)) for seed in SEEDS) > 0


def test_enumeration_sees_a_fault_too_small_for_sampling() -> None:
    """The token-level residual in block verification errs by well under a percent in many worlds: exact, not zero."""
    mutant = program(partial(block_mutant, fault="token-level residual"), exact.chain_shape(2))
    errors = [error(mutant, exact.random_world(seed, 3)) for seed in SEEDS]
    assert any(0 < value <= Fraction(8, 1000) for value in errors)


@pytest.mark.parametrize(("rule", "shape"), [(block_mutant, CHAIN), (traversal_mutant, TREE)])
def test_mutants_without_their_fault_are_exact(rule: FaultyRule, shape: Tokens) -> None:
    """The mutants differ from the rules by their fault alone."""
    for seed in range(4):
        world = exact.random_world(seed, 4 if rule is block_mutant else 3)
        assert error(program(partial(rule, fault="none"), shape), world) == 0
