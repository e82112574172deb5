"""Where the target's forwards are recorded, what trained drafters compute is too (tests/infer/test_recorded.py), and they draft
what they would have drafted."""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.heads import METHODS, TrainedDrafter
from draftsmith.infer.compiled import Compiled
from draftsmith.infer.drafter import Observation
from draftsmith.infer.recorded import CudaGraphs, RecordedTarget
from draftsmith.infer.sampling import Sampling
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree, Topology

from ..infer.tracing import Trace
from . import laws

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "medusa of the target's head": ("medusa", {"own_lm_head": False}),
    "hydra without a prefix": ("hydra", {"prefix_layer": False}),
    "eagle3 chain of two layers": ("eagle3", {"tree": None, "num_layers": 2}),
    "eagle3 dynamic": ("eagle3", {"tree": None, "dynamic_tree": {"nodes": 6, "width": 2, "depth": 3}}),
    "dflash without markov": ("dflash", {"markov_head_type": "none"}),
    "dflash chain": ("dflash", {"best_first": None}),
    "dflash tree": ("dflash", {"best_first": None, "tree": ((0,), (1,), (0, 0), (1, 0), (1, 1)), "is_causal": True}),
}


class Kept:
    """A drafter whose drafts are kept."""

    def __init__(self, inner: TrainedDrafter) -> None:
        self.inner, self.taps, self.depth = inner, inner.taps, inner.depth
        self.trees: list[TokenTree] = []

    def start(self, *, rows: int, capacity: int) -> Any:
        return self.inner.start(rows=rows, capacity=capacity)

    def move(self, state: Any, source: int, target: int) -> None:
        self.inner.move(state, source, target)

    def observe(self, state: Any, seen: Observation) -> None:
        self.inner.observe(state, seen)

    def draft(self, state: Any, anchors: torch.Tensor, lengths: torch.Tensor, sampling: Sampling) -> TokenTree:
        tree = self.inner.draft(state, anchors, lengths, sampling)
        self.trees.append(tree)
        return tree


def build(name: str, target: Target) -> TrainedDrafter:
    method, changes = DRAFTERS[name]
    drafter = laws.build(method, target, **changes).to(target.device)
    laws.disturb(drafter)
    return drafter.eval()


def drafts(drafter: TrainedDrafter, ids: list[list[int]], target: Target, expected: list[list[int]]) -> list[TokenTree]:
    """Every draft while it writes what is `expected`."""
    kept = Kept(drafter)
    outputs = laws.decode(target, kept, ids, rows=3, new_tokens=max(map(len, expected)))
    assert [output.tokens for output in outputs] == expected
    return kept.trees


@pytest.mark.parametrize("name", DRAFTERS)
def test_they_draft_what_they_would_have_drafted(name: str, tiny_target: Target) -> None:
    """Six requests over three rows: they join, advance and leave at different times; and then once more with the buffers that
    the first engine left."""
    ids = laws.prompts(6, seed=9, vocab_size=tiny_target.vocab_size)
    plain = [output.tokens for output in laws.decode(tiny_target, None, ids)]
    before = drafts(build(name, tiny_target), ids, tiny_target, plain)
    trace = Trace(step=32, most=12)
    drafter = build(name, RecordedTarget(tiny_target, trace))
    with warnings.catch_warnings(action="error"):  # as where something could not be recorded
        assert_alike(before, drafts(drafter, ids, tiny_target, plain))
        played = trace.played
        assert played > len(before) / 2, "little was played back"
        gc.collect()
        assert_alike(before, drafts(drafter, ids, tiny_target, plain))
    assert trace.played - played > played, "recordings did not pass on to the second engine"


def assert_alike(before: list[TokenTree], after: list[TokenTree]) -> None:
    assert len(before) == len(after)
    for one, other in zip(before, after):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        assert torch.equal(one.valid, other.valid)
        assert (one.confidence is None) == (other.confidence is None)
        if one.confidence is not None and other.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence, rtol=1e-4, atol=1e-5)


def test_another_tree_is_another_recording(tiny_target: Target) -> None:
    ids = laws.prompts(3, seed=9, vocab_size=tiny_target.vocab_size)
    plain = [output.tokens for output in laws.decode(tiny_target, None, ids)]
    trace = Trace()
    eager, drafter = build("eagle3", tiny_target), build("eagle3", RecordedTarget(tiny_target, trace))
    for topology in (Topology.chain(2), Topology(((0,), (1,))), Topology(())):
        eager.use_tree(topology)
        drafter.use_tree(topology)
        recorded = trace.recorded
        assert_alike(drafts(eager, ids, tiny_target, plain), drafts(drafter, ids, tiny_target, plain))
        assert (trace.recorded > recorded) == bool(topology.paths)


@pytest.mark.parametrize("tree", [None, ((0,), (1,), (0, 0), (0, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("method", ["draft_model", "pard"])
def test_a_language_model_is_recorded_as_a_target_is(
    method: str, tree: tuple[tuple[int, ...], ...] | None, tiny_target: Target
) -> None:
    ids = laws.prompts(5, seed=9, vocab_size=tiny_target.vocab_size)
    plain = laws.decode(tiny_target, None, ids)
    played = []
    for is_recorded in (False, True):
        trace = Trace()
        target = RecordedTarget(tiny_target, trace)
        drafter = laws.build(method, target if is_recorded else tiny_target, tree=tree)
        outputs = laws.decode(target, drafter, ids, rows=2)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert target.tapes.fault is None
        played.append(trace.played)
    assert played[1] > 1.5 * played[0], "few of the drafter's own forwards were played back"
    assert isinstance(drafter.reading_view, RecordedTarget)
    assert drafter.reading_view.tapes.fault is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="compiling takes a C++ compiler")
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_compiled_heads_draft_what_they_would_have_drafted(name: str, tiny_target: Target) -> None:
    ids = laws.prompts(2, seed=9, vocab_size=tiny_target.vocab_size)
    plain = [output.tokens for output in laws.decode(tiny_target, None, ids, new_tokens=120)]
    before = drafts(build(name, tiny_target), ids, tiny_target, plain)
    said: list[str] = []
    drafter = build(name, RecordedTarget(tiny_target, Compiled(), say=said.append))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*forwards run as ever")
        assert_alike(before, drafts(drafter, ids, tiny_target, plain))
    assert any(line.startswith("recording drafts") for line in said), said


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_cuda_graphs_draft_what_heads_would_have_drafted(name: str, build_target: Callable[..., Target]) -> None:
    target = build_target(num_hidden_layers=4)
    torch.nn.Module.to(target.model, "cuda")
    ids = laws.prompts(6, seed=9, vocab_size=target.vocab_size)
    plain = [output.tokens for output in laws.decode(target, None, ids)]
    before = drafts(build(name, target), ids, target, plain)
    recorded = RecordedTarget(target, CudaGraphs())
    drafter = build(name, recorded)
    assert_alike(before, drafts(drafter, ids, recorded, plain))
    assert drafter.tapes is not None
    assert drafter.tapes.fault is recorded.tapes.fault is None
