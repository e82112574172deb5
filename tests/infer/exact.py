"""Exact laws of draft-and-verify programs: every random choice is enumerated with `fractions.Fraction`.

A *program* is ordinary sequential code that asks `Choices` for its coins and draws and returns the emitted tokens.
`law` runs it once for every outcome of its choices and adds up exact probabilities; `Supplied` runs the same code once
with given uniforms. So one text of each rule (`rules.py`) serves the proof and the comparison with the tensor
implementation.

A *world* is a pair of tables, target p and draft q, from contexts (tuples of tokens) to probability rows.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Protocol

VOCAB = 3
Tokens = tuple[int, ...]
Row = tuple[Fraction, ...]
Law = dict[Tokens, Fraction]


class Source(Protocol):
    """Where a rule gets its randomness."""

    def flip(self, node: int, chance: Fraction) -> bool:
        """A coin that belongs to a tree node, True with probability `chance`."""
        ...

    def pick(self, weights: Row) -> int:
        """An index drawn in proportion to `weights`, which need not be normalised."""
        ...


class Choices:
    """One run of a program, following a script of choices and the first possible branch beyond its end."""

    def __init__(self, script: Tokens) -> None:
        self.script, self.taken = script, list[int]()
        self.weight = Fraction(1)
        self.untaken: list[Tokens] = []

    def pick(self, weights: Row) -> int:
        total = sum(weights)
        assert total > 0, "a branch of probability 0 was entered"
        possible = [index for index, weight in enumerate(weights) if weight]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice, *others = possible
            self.untaken += [(*self.taken, other) for other in others]
        self.taken.append(choice)
        self.weight *= weights[choice] / total
        return choice

    def flip(self, node: int, chance: Fraction) -> bool:
        assert 0 <= chance <= 1, f"coin of node {node} has chance {chance}"
        return self.pick((1 - chance, chance)) == 1


@dataclass
class Supplied:
    """Given uniforms: a coin per node, and one for the draw that ends the round."""

    coins: Sequence[Fraction]
    final: Fraction
    drawn_from: Row = ()

    def flip(self, node: int, chance: Fraction) -> bool:
        return self.coins[node] < chance

    def pick(self, weights: Row) -> int:
        self.drawn_from = tuple(weight / sum(weights) for weight in weights)
        upto = Fraction(0)
        for index, weight in enumerate(self.drawn_from):
            upto += weight
            if self.final < upto:
                return index
        raise AssertionError("uniforms lie below 1")


@dataclass(frozen=True)
class World:
    p: Mapping[Tokens, Row]
    q: Mapping[Tokens, Row]
    length: int
    """Tokens per complete output: the longest context that has a row in p, plus 1."""
    second: Mapping[Tokens, Row] | None = None
    """The rows of a second drafter, which draws every other sibling; None: there is one drafter."""

    def drawn_from(self, context: Tokens, rank: int) -> Row:
        """The row that sibling number `rank` below `context` is drawn from, before earlier siblings are removed."""
        return self.q[context] if self.second is None or rank % 2 == 0 else self.second[context]

    def target_law(self) -> Law:
        """The product law of p over complete outputs."""
        return self.complete({(): Fraction(1)})

    def complete(self, emitted: Law) -> Law:
        """Every emitted prefix continued by p to `length` tokens."""
        whole: Law = defaultdict(Fraction)
        for prefix, weight in emitted.items():
            for tail in product(range(VOCAB), repeat=self.length - len(prefix)):
                chance, tokens = weight, prefix
                for token in tail:
                    chance *= self.p[tokens][token]
                    tokens = (*tokens, token)
                whole[tokens] += chance
        return {tokens: chance for tokens, chance in whole.items() if chance}


Program = Callable[[World, Source], Tokens]


def random_world(seed: int, length: int) -> World:
    """Rows of small random fractions; a quarter of them zeros if `seed` is even; some contexts have q = p."""
    rng = random.Random(seed)
    zeros = [0, 0] if seed % 2 == 0 else []

    def row() -> Row:
        while True:
            weights = [rng.choice([*zeros, 1, 1, 2, 3, 5, 8]) for _ in range(VOCAB)]
            if any(weights):
                return tuple(Fraction(weight, sum(weights)) for weight in weights)

    contexts = [context for size in range(length) for context in product(range(VOCAB), repeat=size)]
    p = {context: row() for context in contexts}
    q = {context: p[context] if rng.random() < 0.1 else row() for context in contexts}
    return World(p, q, length)


def law(program: Program, world: World) -> Law:
    """The law of the emitted tokens: a run for every outcome of the program's choices."""
    emitted: Law = defaultdict(Fraction)
    scripts: list[Tokens] = [()]
    while scripts:
        choices = Choices(scripts.pop())
        tokens = program(world, choices)
        emitted[tokens] += choices.weight
        scripts += choices.untaken
    assert sum(emitted.values()) == 1, "the branches do not add up"
    return emitted


def total_variation(a: Law, b: Law) -> Fraction:
    keys = a.keys() | b.keys()
    return sum((abs(a.get(key, Fraction(0)) - b.get(key, Fraction(0))) for key in keys), Fraction(0)) / 2


def error(candidate: Program, world: World) -> Fraction:
    """Total variation between the candidate's law, continued by p, and the target's."""
    return total_variation(world.complete(law(candidate, world)), world.target_law())


def mean_emitted(emitted: Law) -> Fraction:
    return sum((len(tokens) * weight for tokens, weight in emitted.items()), Fraction(0))


ROOT, MISSING = -2, -1

# Drafts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A drafted tree: per node its token (or MISSING) and parent; node 0 is the root, a token of the past."""

    tokens: Tokens
    parents: Tokens

    def context(self, node: int) -> Tokens:
        """The drafted tokens from the root down to `node`."""
        return () if node == 0 else (*self.context(self.parents[node]), self.tokens[node])

    def children(self, node: int) -> list[int]:
        """Drafted children in the order of drawing."""
        below = [child for child, parent in enumerate(self.parents) if parent == node]
        return [child for child in below if self.tokens[child] != MISSING]

    def chain(self) -> Iterator[tuple[int, int, Tokens]]:
        """(node, token, context before it) along a chain."""
        node = 0
        while below := self.children(node):
            (child,) = below
            yield child, self.tokens[child], self.context(node)
            node = child


Rule = Callable[[Draft, World, Source], Tokens]


def chain_shape(length: int) -> Tokens:
    return tuple(range(-1, length))


def draw_tree(world: World, source: Source, shape: Tokens, *, stop_after: Tokens = ()) -> Draft:
    """Draw the nodes of `shape` (parents) from q, siblings without replacement; a row that runs out gives no more.

    Nothing is drafted below a token of `stop_after`: the length may depend on what was drawn above.
    """
    tokens: Tokens = (ROOT,)
    for node in range(1, len(shape)):
        parent = shape[node]
        token = MISSING
        if tokens[parent] != MISSING and tokens[parent] not in stop_after:
            weights = proposal(Draft((*tokens, MISSING), shape[: node + 1]), node, world)
            token = source.pick(weights) if any(weights) else MISSING
        tokens = (*tokens, token)
    return Draft(tokens, shape)


def proposal(draft: Draft, node: int, world: World) -> Row:
    """The row that `node` is drawn from: its drafter's, with earlier siblings' tokens set to 0; not normalised."""
    parent = draft.parents[node]
    rank = draft.parents[:node].count(parent)
    gone = {draft.tokens[child] for child in draft.children(parent) if child < node}
    row = world.drawn_from(draft.context(parent), rank)
    return tuple(Fraction(0) if token in gone else weight for token, weight in enumerate(row))


def program(rule: Rule, shape: Tokens, *, stop_after: Tokens = ()) -> Program:
    """Draw a tree of `shape`, then judge it."""
    return lambda world, source: rule(draw_tree(world, source, shape, stop_after=stop_after), world, source)


def normalised(weights: Row) -> Row:
    return tuple(weight / sum(weights) for weight in weights)
