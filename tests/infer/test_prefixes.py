"""What rows have in common is read once, and nobody's text changes by it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from draftsmith.cli.stock import our_texts
from draftsmith.infer import decode
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.prefixes import SHORTEST
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

from ..heads import laws
from . import architectures, drafting

HOT = SamplingParams(temperature=0.8, top_k=30, repetition_penalty=1.1, seed=4)


def random_ids(count: int, *, seed: int, vocab: int) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(target: Target, requests: list[Request]) -> dict[str, list[int]]:
    """Each in an engine of its own, so that there is nobody to share with."""
    found = {}
    for request in requests:
        engine = Engine(target, rows=1)
        engine.add(request)
        (output,) = engine.run()
        found[request.id] = output.tokens
    return found


def together(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return {output.id: output.checked().tokens for output in engine.run()}


def tokens_read(target: Target, run: Callable[[], object]) -> int:
    """How many tokens the model was given."""
    counts: list[int] = []
    hook = target.model.base_model.register_forward_pre_hook(
        lambda module, args, given: counts.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    return sum(counts)


@pytest.mark.parametrize("kind", architectures.ARCHITECTURES)
def test_every_architecture_writes_what_it_would_have_read_everything_for(kind: str) -> None:
    """Prompts of three families, longer than any sliding window, some of which begin in the middle of others; rows join, leave and
    are taken by others."""
    target = Target(architectures.build(kind), None)
    rng = random.Random(kind)
    families = [random_ids(30, seed=seed, vocab=architectures.VOCAB) for seed in range(3)]
    requests = []
    for number in range(24):
        family = rng.choice(families)[: rng.choice((18, 24, 30))]
        prompt = family + random_ids(rng.randint(1, 12), seed=100 + number, vocab=architectures.VOCAB)
        requests.append(Request(str(number), prompt, rng.randint(1, 14)))
    engine = Engine(target, rows=4)
    assert together(engine, requests) == alone(target, requests)
    assert engine._prefixes.reused > 100


@pytest.fixture(params=["none", *drafting.NAMES])
def drafter(request: pytest.FixtureRequest, target: Target, draft: Target) -> Drafter:
    return NoDraft() if request.param == "none" else drafting.build(request.param, target, draft)


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT])
def test_drafters_are_told_the_whole_prompt(drafter: Drafter, sampling: SamplingParams, target: Target) -> None:
    shared = random_ids(20, seed=1, vocab=target.vocab_size)
    requests = [
        Request(str(n), shared + random_ids(3 + n, seed=n, vocab=target.vocab_size), 24, sampling) for n in range(6)
    ]
    engine = Engine(target, drafter=drafter, rows=4)
    assert together(engine, requests) == alone(target, requests)
    assert engine._prefixes.reused == 5 * 19


def test_answers_to_one_prompt_read_it_once(target: Target) -> None:
    prompt = random_ids(40, seed=1, vocab=target.vocab_size)
    requests = [Request(str(n), prompt, 1, SamplingParams(1.0, seed=n)) for n in range(5)]
    engine = Engine(target, rows=8)
    padded = 64  # packed prompts are filled up
    assert tokens_read(target, lambda: together(engine, requests)) == padded + 4
    assert engine._prefixes.reused == 4 * 39


def test_the_next_turn_reads_what_is_new(target: Target) -> None:
    """In the same row, where everything lies already; also what the target wrote itself."""
    engine = Engine(target, rows=1)
    prompt, replies = random_ids(18, seed=1, vocab=target.vocab_size), list[list[int]]()
    for turn in range(3):
        request = Request(str(turn), prompt, 12)
        before = engine._prefixes.reused
        replies.append(together(engine, [request])[str(turn)])
        assert replies[-1] == alone(target, [request])[str(turn)]
        read = len(prompt) - (engine._prefixes.reused - before)
        assert read == (18 if turn == 0 else 2 + 5), "the last token written was not read, the one before is read again"
        prompt = prompt + replies[-1] + random_ids(5, seed=turn, vocab=target.vocab_size)


def test_who_grows_longer_than_the_other_still_goes_on_in_the_row_that_holds_it(target: Target) -> None:
    engine = Engine(target, rows=2)
    turns = [
        Request("a", random_ids(60, seed=1, vocab=target.vocab_size), 5),
        Request("b", random_ids(50, seed=2, vocab=target.vocab_size), 5),
    ]
    replies = together(engine, turns)
    turns = [
        Request(turn.id, [*turn.prompt, *replies[turn.id], *random_ids(new, seed=new, vocab=target.vocab_size)], 5)
        for turn, new in zip(turns, (3, 30))
    ]
    assert together(engine, turns) == alone(target, turns)
    assert engine._prefixes.reused == 60 + 50 + 2 * (5 - 1 - 1)


def test_one_with_much_to_read_does_not_fill_up_many_with_little(target: Target) -> None:
    """They are read side by side, as wide as the widest."""
    engine, counts = Engine(target, rows=16), list[int]()
    shared = random_ids(40, seed=1, vocab=target.vocab_size)
    together(engine, [Request("first", shared, 2)])
    rests = [400, *[2] * 12]
    requests = [
        Request(str(n), shared + random_ids(rest, seed=n, vocab=target.vocab_size), 1) for n, rest in enumerate(rests)
    ]
    counts.append(tokens_read(target, lambda: together(engine, requests)))
    assert counts[0] <= sum(rests) + len(rests) + 64


def test_little_in_common_is_not_worth_it(target: Target) -> None:
    shared = random_ids(SHORTEST - 1, seed=1, vocab=target.vocab_size)
    requests = [Request(str(n), [*shared, 3 + n, 7], 4) for n in range(4)]
    engine = Engine(target, rows=4)
    assert together(engine, requests) == alone(target, requests)
    assert engine._prefixes.reused == 0


def test_a_measurement_begins_with_nothing(target: Target) -> None:
    """The same prompts once more take the same reading."""
    shared = random_ids(20, seed=1, vocab=target.vocab_size)
    requests = [Request(str(n), shared + random_ids(4, seed=n, vocab=target.vocab_size), 4) for n in range(3)]
    engine, counts = Engine(target, rows=3), list[int]()
    for _ in range(2):
        counts.append(tokens_read(target, lambda: our_texts(engine, [r.prompt for r in requests], max_new_tokens=4)))
    assert counts[0] == counts[1]
    assert engine._prefixes.reused == 2 * 2 * 19


def test_a_long_rest_is_read_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 16)
    shared = random_ids(24, seed=1, vocab=target.vocab_size)
    requests = [Request(str(n), shared + random_ids(37, seed=n, vocab=target.vocab_size), 6) for n in range(3)]
    engine = Engine(target, rows=2)
    texts = together(engine, requests)
    assert engine._prefixes.reused == 2 * 23
    monkeypatch.undo()
    assert texts == alone(target, requests)


def test_a_drafter_proposes_what_it_would_have(drafter: Drafter, target: Target) -> None:
    """What it kept of a beginning, in its own cache too, is as good as new (the trained ones: tests/heads/test_laws.py)."""
    shared = random_ids(20, seed=1, vocab=target.vocab_size)
    prompts = [shared + random_ids(3 + n, seed=n, vocab=target.vocab_size) for n in range(6)]
    found = []
    for shares in (True, False):
        engine = Engine(target, drafter=drafter, rows=4)
        engine._prefixes.shares = shares
        outputs = laws.answers(engine, prompts, new_tokens=24)
        found.append([(output.tokens, vars(output.stats)) for output in outputs])
        assert (engine._prefixes.reused > 0) == shares
    assert found[0] == found[1]


def test_what_an_interrupt_left_half_read_is_not_reused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, rows=1)
    first, second = (random_ids(30, seed=seed, vocab=target.vocab_size) for seed in (1, 2))
    together(engine, [Request("first", first, 4)])
    read = target.read_prompts

    def interrupted(*args: object, **options: object) -> None:
        read(*args, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "read_prompts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together(engine, [Request("second", second, 4)])
    monkeypatch.undo()
    again = Request("again", [*first, 9], 12)
    assert together(engine, [again]) == alone(target, [Request("second", second, 4), again])
