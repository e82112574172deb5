"""Losslessness proved by enumeration: every lossless rule has the target's product law, as an equality of fractions.

Also how much the rules emit, as exact numbers. `test_mutants.py` holds the other half of the proof: that this method
tells faulty rules from right ones.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest

from tests.infer import exact, rules
from tests.infer.exact import Tokens, World, error, program

SEEDS = range(8)
TREE_SEEDS = range(4)  # trees branch wide; half of these worlds have zeros, like half of the others
CHAINS = {f"chain of {length}": exact.chain_shape(length) for length in (0, 1, 2, 3)}
TREES = {
    "three children": (-1, 0, 0, 0),
    "two by two": (-1, 0, 0, 1, 1, 2),
    "depth first order": (-1, 0, 1, 1, 0, 4),
    "deep first branch": (-1, 0, 0, 1, 1, 3),
    "deep second branch": (-1, 0, 0, 2, 3),
}
RULES: dict[str, exact.Rule] = {
    "sample_match": rules.sample_match,
    "token_level": rules.token_level,
    "block": rules.block,
    "recursive": rules.recursive,
    "traversal": rules.traversal,
}
ON_TREES = ["sample_match", "recursive", "traversal"]


def depth(shape: Tokens) -> int:
    depths = [0]
    for parent in shape[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


@cache
def world_for(shape: Tokens, seed: int) -> World:
    return exact.random_world(seed, depth(shape) + 1)


@cache
def emitted(rule: str, shape: Tokens, seed: int) -> exact.Law:
    return exact.law(program(RULES[rule], shape), world_for(shape, seed))


def gains(better: str, worse: str, shape: Tokens, seeds: range) -> list[Fraction]:
    """How many more tokens per round one rule emits than another, on average, in each world."""
    return [
        exact.mean_emitted(emitted(better, shape, seed)) - exact.mean_emitted(emitted(worse, shape, seed))
        for seed in seeds
    ]


# Lossless rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", CHAINS)
def test_every_rule_has_the_targets_law_on_chains(rule: str, shape: str) -> None:
    for seed in SEEDS:
        world = world_for(CHAINS[shape], seed)
        law = world.complete(emitted(rule, CHAINS[shape], seed))
        assert exact.total_variation(law, world.target_law()) == 0


@pytest.mark.parametrize("rule", ON_TREES)
@pytest.mark.parametrize("shape", TREES)
def test_tree_rules_have_the_targets_law(rule: str, shape: str) -> None:
    for seed in TREE_SEEDS:
        world = world_for(TREES[shape], seed)
        law = world.complete(emitted(rule, TREES[shape], seed))
        assert exact.total_variation(law, world.target_law()) == 0


@pytest.mark.parametrize("rule", RULES)
def test_stopping_after_a_drawn_token_keeps_the_law(rule: str) -> None:
    candidate = program(RULES[rule], exact.chain_shape(3), stop_after=(1,))
    for seed in SEEDS:
        assert error(candidate, world_for(exact.chain_shape(3), seed)) == 0


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_siblings_may_come_from_different_drafters(rule: str) -> None:
    shape = TREES["deep second branch"]
    for seed in SEEDS:
        world = world_for(shape, seed)
        pair = World(world.p, world.q, world.length, second=exact.random_world(100 + seed, world.length).q)
        assert error(program(RULES[rule], shape), pair) == 0


# Efficiency ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_emits_at_least_as_much_as_token_level(length: int) -> None:
    gained = gains("block", "token_level", exact.chain_shape(length), SEEDS)
    assert min(gained) >= 0
    assert (max(gained) > 0) == (length > 1)


@pytest.mark.parametrize("shape", TREES)
def test_traversal_emits_at_least_as_much_as_recursive_rejection(shape: str) -> None:
    gained = gains("traversal", "recursive", TREES[shape], TREE_SEEDS)
    assert min(gained) >= 0
    assert (max(gained) > 0) == (depth(TREES[shape]) > 1)


def test_traversal_on_a_chain_is_block_verification() -> None:
    chain = exact.chain_shape(3)
    for seed in SEEDS:
        assert exact.total_variation(emitted("traversal", chain, seed), emitted("block", chain, seed)) == 0


def test_block_accepts_what_its_paper_says_on_two_letters() -> None:
    p, q = (Fraction(1, 3), Fraction(2, 3), Fraction(0)), (Fraction(2, 3), Fraction(1, 3), Fraction(0))
    contexts = exact.random_world(0, 3).p
    world = World(dict.fromkeys(contexts, p), dict.fromkeys(contexts, q), 3)
    laws = [exact.law(program(rule, exact.chain_shape(2)), world) for rule in (rules.block, rules.token_level)]
    assert [exact.mean_emitted(law) - 1 for law in laws] == [Fraction(11, 9), Fraction(10, 9)]
