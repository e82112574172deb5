"""What recordings of trained drafters hold, when they end, and how few there are (tests/heads/test_recorded.py: that they are
right)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor

from draftsmith.heads import METHODS, TrainedDrafter
from draftsmith.heads.own_cache import OwnCache
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import Observation
from draftsmith.infer.dynamic_tree import _compiled
from draftsmith.infer.recorded import Outside, RecordedTarget
from draftsmith.infer.tapes import Tapes, Tensors
from draftsmith.infer.target import Target

from ..infer.tracing import Trace
from . import laws
from .test_recorded import assert_alike, build, drafts

TREE = ((0,), (0, 0))


class Holding(Trace):
    """Notes what a CUDA graph would have to hold."""

    def __init__(self) -> None:
        super().__init__(most=50)
        self.outside: list[Tensor] = []

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        seen = []
        for _ in range(2):
            with Outside() as outside:
                function()
            seen.append({id(tensor) for tensor in outside.tensors})
        assert seen[0] == seen[1], "something that was made inside is taken for something outside"
        self.outside += outside.tensors
        return super().__call__(function)


def test_all_that_a_graph_reads_is_held(tiny_target: Target) -> None:
    """Also what lies in caches of the library, which forget."""
    holding = Holding()
    target = RecordedTarget(tiny_target, holding)
    config, module = METHODS["medusa"]
    kept = torch.arange(100) * 3
    made = config.model_validate({"num_heads": 2, "own_lm_head": False, "draft_vocab_size": 100, "tree": TREE})
    medusa, eagle3 = module(made, target, token_map=kept), laws.build("eagle3", target, tree=TREE)
    ids = laws.prompts(3, seed=9, vocab_size=tiny_target.vocab_size)
    for drafter in (medusa, eagle3):
        laws.decode(target, drafter.eval(), ids, rows=3)
    held = {id(tensor) for tensor in holding.outside}
    assert target._selection._kept is not None
    assert id(target._selection._kept[0]) in held
    assert {id(level.origin) for level in _compiled(TREE, "cpu")} <= held
    assert id(target.embedding.get_parameter("weight")) in held
    assert {id(weight) for weight in eagle3.parameters() if weight.ndim > 1} <= held


def adapt(drafter: TrainedDrafter) -> None:
    """Other weights, in other places."""
    generator = torch.Generator().manual_seed(3)
    state = {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator) if weight.is_floating_point() else weight
        for name, weight in drafter.state_dict().items()
    }
    drafter.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [adapt, lambda drafter: drafter.to(torch.float64)], ids=["replaced", "precision"])
def test_other_weights_are_other_recordings(change: Callable[[TrainedDrafter], object], tiny_target: Target) -> None:
    ids = laws.prompts(3, seed=9, vocab_size=tiny_target.vocab_size)
    plain = [output.tokens for output in laws.decode(tiny_target, None, ids)]
    trace = Trace(most=50)
    eager, drafter = build("eagle3", tiny_target), build("eagle3", RecordedTarget(tiny_target, trace))
    before = drafts(drafter, ids, tiny_target, plain)
    gc.collect()
    change(eager)
    change(drafter)
    after, played = drafts(eager, ids, tiny_target, plain), trace.played
    assert_alike(after, drafts(drafter, ids, tiny_target, plain))
    assert trace.played > played
    same = all(torch.equal(one.tokens, other.tokens) for one, other in zip(before, after))
    assert same == (change is not adapt), "other weights draft other tokens, other precisions hardly ever"


def test_where_memory_runs_out_the_drafters_buffers_go_too(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the round that failed, and those that an earlier engine left."""
    target = RecordedTarget(tiny_target, Trace(most=50))
    drafter = build("eagle3", target)
    ids = laws.prompts(3, seed=9, vocab_size=tiny_target.vocab_size)
    expected = [output.tokens for output in laws.decode(tiny_target, None, ids)]
    laws.decode(target, drafter, ids, rows=2)
    gc.collect()
    assert isinstance(drafter.tapes, Tapes)
    buffers = [tape.keys[0] for tapes in (target.tapes, drafter.tapes) for tape in tapes._idle[2]]
    assert len(buffers) == 2
    engine = Engine(target, drafter=drafter, rows=3)
    for index, prompt in enumerate(ids):
        engine.add(Request(str(index), prompt, 40))
    for _ in range(4):
        engine.step()
    gone = [ref(buffer) for buffer in (*buffers, engine.cache.keys[0], engine.state.cache.kv.keys[0])]
    del buffers

    def fail(*args: object, **options: object) -> None:
        monkeypatch.undo()
        torch.empty(1 << 60)  # the allocator's own error

    monkeypatch.setattr(target, "verify", fail)
    (failed,) = engine.step()
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    texts = {output.id: output.tokens for output in engine.run()}
    assert len(texts) == 2
    assert all(texts[id] == expected[int(id)] for id in texts)
    assert failed.output.id not in texts


def test_observations_of_all_widths_are_one_recording(tiny_target: Target) -> None:
    """How many tokens were accepted changes from round to round."""
    said: list[str] = []
    trace = Trace(most=50)
    tapes = Tapes(trace, tiny_target.model, name="a drafter", device=tiny_target.device, say=said.append)
    cache, zero = OwnCache(rows=1, capacity=64, tapes=tapes), torch.zeros(1, dtype=torch.int64)
    for index, width in enumerate((3, 1, 2, 1, 3, 2, 1, 3, 2)):
        tokens = torch.arange(1, width + 1)[None] * (index + 1)
        count = torch.tensor([width])
        seen = Observation(slice(0, 1), tokens, count, zero, tokens[..., None].float(), None, zero, logits=zero)
        (total,) = cache.take(seen, lambda tokens, count: (tokens.sum(dim=1) + count,), tokens, count)
        assert int(total) == int(tokens.sum()) + width
    assert said == ["recording observations of 1 rows over up to 128 tokens, at once"]
    assert trace.played == 9 - trace.seen


def test_an_interrupt_while_a_drafter_observes_loses_nothing(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is done again, on a host that knows no more than the device."""
    drafter = build("eagle3", tiny_target)
    ids = laws.prompts(3, seed=9, vocab_size=tiny_target.vocab_size)
    expected = [output.tokens for output in laws.decode(tiny_target, None, ids)]
    engine, observe, calls = Engine(tiny_target, drafter=drafter, rows=3), drafter.observe, list[Observation]()
    for index, prompt in enumerate(ids):
        engine.add(Request(str(index), prompt, len(expected[index])))

    def interrupted(state: object, seen: Observation) -> None:
        calls.append(seen)
        if len(calls) % 3 == 0 and not seen.is_prompt:
            raise KeyboardInterrupt
        observe(state, seen)

    monkeypatch.setattr(drafter, "observe", interrupted)
    texts: dict[str, list[int]] = {}
    interrupts = 0
    while engine._rows or engine._queue:
        try:
            texts |= {each.output.id: each.output.tokens for each in engine.step() if each.is_last}
        except KeyboardInterrupt:
            interrupts += 1
        assert [row.length for row in engine._rows] == engine._lengths.tolist()
    assert interrupts > 3
    assert [texts[str(index)] for index in range(3)] == expected
