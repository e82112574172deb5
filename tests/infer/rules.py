"""The verification rules in exact arithmetic, as the papers state them; `exact.py` says how they are run.

Each takes a drafted tree, a world and a source of randomness, and returns the tokens that the round emits.
"""

from __future__ import annotations

from fractions import Fraction

from tests.infer.exact import Draft, Row, Source, Tokens, World, normalised, proposal


def excess(p: Row, q: Row, rate: Fraction = Fraction(1)) -> Row:
    """(rate * p - q)_+"""
    return tuple(max(rate * a - b, Fraction(0)) for a, b in zip(p, q))


def sample_match(draft: Draft, world: World, source: Source) -> Tokens:
    """One draw of the target per node; descend while it is a child."""
    node = 0
    while True:
        token = source.pick(world.p[draft.context(node)])
        match = [child for child in draft.children(node) if draft.tokens[child] == token]
        if not match:
            return (*draft.context(node), token)
        node = match[0]


def token_level(draft: Draft, world: World, source: Source) -> Tokens:
    kept: Tokens = ()
    for node, token, context in draft.chain():
        p, q = world.p[context], world.q[context]
        if not source.flip(node, min(Fraction(1), p[token] / q[token])):
            return (*kept, source.pick(excess(p, q)))
        kept = (*context, token)
    return (*kept, source.pick(world.p[kept]))


def block(draft: Draft, world: World, source: Source) -> Tokens:
    steps = list(draft.chain())
    rates, kept = [Fraction(1)], 0
    for index, (node, token, context) in enumerate(steps, start=1):
        rate = min(Fraction(1), rates[-1] * world.p[context][token] / world.q[context][token])
        rates.append(rate)
        chance = rate
        if index < len(steps):
            after = (*context, token)
            chance = next_rate(sum(excess(world.p[after], world.q[after], rate)), rate)
        if source.flip(node, chance):
            kept = index  # the largest index counts: no break
    context = tuple(token for _, token, _ in steps[:kept])
    if kept == len(steps):
        return (*context, source.pick(world.p[context]))
    return (*context, source.pick(excess(world.p[context], world.q[context], rates[kept])))


def next_rate(total: Fraction | int, rate: Fraction) -> Fraction:
    """S / (S + 1 - r), 1 where it is 0/0."""
    return Fraction(total) / (total + 1 - rate) if total + 1 - rate else Fraction(1)


def recursive(draft: Draft, world: World, source: Source) -> Tokens:
    node, p = 0, world.p[()]
    while True:
        for child in draft.children(node):
            q = normalised(proposal(draft, child, world))
            token = draft.tokens[child]
            if source.flip(child, min(Fraction(1), p[token] / q[token])):
                node, p = child, world.p[draft.context(child)]
                break
            p = normalised(excess(p, q))
        else:
            return (*draft.context(node), source.pick(p))


def traversal(draft: Draft, world: World, source: Source) -> Tokens:
    def visit(node: int, rate: Fraction) -> tuple[Tokens | None, Row, Fraction]:
        """The output if something below `node` is kept; else the node's law and rate after the deletions."""
        p = world.p[draft.context(node)]
        for child in draft.children(node):
            q = normalised(proposal(draft, child, world))
            token = draft.tokens[child]
            output, law_below, rate_below = visit(child, min(Fraction(1), rate * p[token] / q[token]))
            if output is not None:
                return output, p, rate
            if source.flip(child, rate_below):
                return (*draft.context(child), source.pick(law_below)), p, rate
            rest = excess(p, q, rate)
            rate = next_rate(sum(rest), rate)
            p = normalised(rest) if any(rest) else p
        return None, p, rate

    output, law_left, _ = visit(0, Fraction(1))
    return output if output is not None else (source.pick(law_left),)
