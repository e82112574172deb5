"""Ctrl-C and memory that runs out, wherever they come: nobody's text changes, no request is lost, the engine goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from draftsmith.infer.cache import KVCache
from draftsmith.infer.decode import Engine
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.request import Request
from draftsmith.infer.target import Target

from . import drafting
from .test_prefixes import alone, random_ids


def once(function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The function, whose first call ends with the error when its work is done."""
    errors = [error]

    def failing(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if errors:
            raise errors.pop()
        return found

    return failing


def go_on(engine: Engine) -> dict[str, list[int]]:
    """Step by step, through every interrupt; what is told of piece by piece is the whole text."""
    told: dict[str, list[int]] = {}
    ended: dict[str, list[int]] = {}
    for _ in range(2000):
        try:
            for progress in engine.step():
                output = progress.output
                told.setdefault(output.id, []).extend(output.tokens[len(output.tokens) - progress.new_tokens :])
                if progress.is_last:
                    assert output.id not in ended, "reported twice"
                    ended[output.id] = output.checked().tokens
        except KeyboardInterrupt:
            continue
        if not (engine._rows or engine._queue or engine._joining or engine._news):
            break
    assert told == ended
    assert not engine._ids
    return ended


def until_nothing_is_left(engine: Engine, step: Callable[[], object]) -> None:
    while engine._rows or engine._queue:
        step()


@pytest.mark.parametrize("place", ["take", "leave", "read", "cancel"])
def test_an_interrupt_where_rows_move_or_prompts_are_read(
    target: Target, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then requests come that begin like what lies in the rows, or lay there."""
    first, second = (random_ids(40, seed=seed, vocab=target.vocab_size) for seed in (1, 2))
    requests = {"short": Request("short", first, 3), "long": Request("long", second, 30)}
    engine = Engine(target, rows=3)
    if place == "take":
        requests = dict(reversed(requests.items()))
    for request in requests.values():
        engine.add(request)
    engine.step()
    found: dict[str, list[int]] = {}
    if place in ("take", "read"):
        while "short" not in found:
            found |= {each.output.id: each.output.tokens for each in engine.step() if each.is_last}
        requests["extra"] = Request("extra", second[:30] + first[:5], 4)
        engine.add(requests["extra"])
    failing = once((engine.drafter if place == "take" else engine.cache).move, KeyboardInterrupt())
    if place == "read":
        monkeypatch.setattr(target, "prefill", once(target.prefill, KeyboardInterrupt()))
        monkeypatch.setattr(Target, "verify", once(Target.verify, KeyboardInterrupt()))
    else:
        monkeypatch.setattr(engine.drafter if place == "take" else engine.cache, "move", failing)
    with pytest.raises(KeyboardInterrupt):
        until_nothing_is_left(engine, (lambda: engine.cancel("short")) if place == "cancel" else engine.step)
    monkeypatch.undo()
    for request in (Request("again", [*first, 9], 12), Request("more", [*second, 9], 12)):
        requests[request.id] = request
        engine.add(request)
    for output in engine.run():
        found[output.id] = output.tokens
        assert output.finish == ("cancelled" if (place, output.id) == ("cancel", "short") else "length")
    expected = alone(target, list(requests.values()))
    if place == "cancel":
        expected["short"] = expected["short"][:1]
    assert found == expected


def test_an_interrupt_while_a_draft_model_drafts(target: Target, draft: Target) -> None:
    """In every third of its forwards, the first ones of a draft and later ones."""
    calls = iter(range(10**6))

    def interrupt(*args: object) -> None:
        if next(calls) % 3 == 2 and len(engine._rows):
            raise KeyboardInterrupt

    requests = [Request("0", random_ids(20, seed=1, vocab=target.vocab_size), 12)]
    engine = Engine(target, drafter=DraftModel(draft, target, length=4, min_confidence=0), rows=1)
    engine.add(requests[0])
    hook = draft.model.base_model.register_forward_hook(interrupt)
    for _ in range(8):
        with suppress(KeyboardInterrupt):
            engine.step()
    hook.remove()
    assert {output.id: output.tokens for output in engine.run()} == alone(target, requests)


@pytest.mark.parametrize("name", ["none", *drafting.NAMES])
@pytest.mark.parametrize("seed", range(3))
def test_interrupts_anywhere(
    target: Target, draft: Target, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after anything that moves tensors, many times in one run of requests that join, share and leave."""
    rng = random.Random(f"{name} {seed}")
    shared = random_ids(24, seed=seed, vocab=target.vocab_size)
    requests = [
        Request(
            str(n),
            shared[: rng.choice((3, 20, 24))] + random_ids(rng.randint(1, 9), seed=n, vocab=target.vocab_size),
            9,
        )
        for n in range(9)
    ]
    expected = alone(target, requests)
    drafter: Drafter = NoDraft() if name == "none" else drafting.build(name, target, draft)

    def haunted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if rng.random() < 0.02:
                raise KeyboardInterrupt
            found = function(*args, **options)
            if rng.random() < 0.02:
                raise KeyboardInterrupt
            return found

        return call

    for owner, method in (
        (KVCache, "move"),
        (KVCache, "commit"),
        (KVCache, "update"),
        (Target, "verify"),
        (Target, "_forward"),
    ):
        monkeypatch.setattr(owner, method, haunted(getattr(owner, method)))
    for method in ("move", "observe", "draft"):
        monkeypatch.setattr(drafter, method, haunted(getattr(drafter, method)))
    engine = Engine(target, drafter=drafter, rows=3)
    for request in requests:
        engine.add(request)
    assert go_on(engine) == expected


def test_memory_that_runs_out_while_starting_over_is_asked_for_again(target: Target) -> None:
    class Hungry(NoDraft):
        is_full = False

        def start(self, *, rows: int, capacity: int) -> None:
            self.complain()

        def draft(self, *args: Any) -> Any:
            if self.is_full:
                raise torch.OutOfMemoryError("no memory for drafts")
            return super().draft(*args)

        def complain(self) -> None:
            if self.is_full:
                self.is_full = False
                raise torch.OutOfMemoryError("no memory for buffers")

    drafter = Hungry()
    engine = Engine(target, drafter=drafter, rows=2)
    requests = [Request(str(n), random_ids(17 + n, seed=n, vocab=target.vocab_size), 8) for n in range(2)]
    for request in requests:
        engine.add(request)
    engine.step()
    drafter.is_full = True
    with pytest.raises(torch.OutOfMemoryError, match="buffers"):
        engine.step()
    outputs = {output.id: output for output in engine.run()}
    assert outputs["1"].finish == "error"
    assert outputs["0"].tokens == alone(target, requests)["0"]


def test_memory_that_runs_out_behind_an_answer_does_not_take_it_back(target: Target) -> None:
    requests = [
        Request(str(n), random_ids(39 + n, seed=n, vocab=target.vocab_size), limit) for n, limit in ((1, 3), (0, 8))
    ]
    engine = Engine(target, rows=3)
    for request in requests:
        engine.add(request)
    engine.step()
    engine.cache.move = once(engine.cache.move, torch.OutOfMemoryError("no memory"))  # type: ignore[method-assign]
    assert {output.id: output.checked().tokens for output in engine.run()} == alone(target, requests)
