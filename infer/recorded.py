"""Verification without Python: the target's forwards recorded once per shape, then played back (tapes.py).

What one forward costs a host (modules, checks, some dozens of launches per layer) is often more than what its arithmetic
costs a GPU, and a good part of what it costs a CPU. What changes from round to round is copied into place:

- the trees' tokens and parents, and the rows' lengths; masks, positions and cache slots follow from these on the device;
- slots read: as many as the recorder's `span` says, masked beyond the text;
- all nodes are read, also those a drafter left out (`TokenTree.read`), whose hidden states are then no zeros: how many there
  are would have to be known here.

Letters: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .cache import Decode, KVCache
from .tapes import Recorder, Tapes, Tensors
from .target import Reading, Target
from .tree import TokenTree

NODES = 256
"""Wider trees, such as pieces of a prompt, are work enough by themselves."""


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory."""

    seen, most, takes = 4, 256, "in a moment"

    def __init__(self) -> None:
        self._pool: Any = None
        self._alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._stream: torch.cuda.Stream | None = None

    def span(self, needed: int) -> int:
        """Multiples of 256."""
        return -(-needed // 256) * 256

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        now = torch.cuda.current_stream()
        aside = self._stream = self._stream or torch.cuda.Stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside), Outside() as outside:
            function()  # libraries allocate what they need at their first call, which no recording may hold
        with torch.cuda.stream(aside):
            refuse_to_wait(function)
        now.wait_stream(aside)
        if not self._alive:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=aside):
                found = function()
        finally:
            torch.cuda.set_stream(now)  # a capture that fails leaves its own
        self._alive.add(graph)

        kept = outside.tensors

        def play() -> Tensors:
            assert kept  # a graph knows addresses, and holds nothing of what lies there
            graph.replay()
            return tuple(each.clone() for each in found)

        return play


class Outside(TorchDispatchMode):
    """Collects the tensors that are read or written by what runs inside, but were not made there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._found: dict[int, Tensor] = {}

    @property
    def tensors(self) -> Tensors:
        return tuple(self._found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and id(each) not in self._made:
                self._found[id(each)] = each
        result = func(*args, **(kwargs or {}))
        # What is found is held, so that nothing made later can be taken for it.
        self._made.update(id(each) for each in tree_leaves(result) if id(each) not in self._found)
        return result


def refuse_to_wait(function: Callable[[], Tensors]) -> None:
    """Raise RuntimeError if the function waits for the device, before a capture fails on it with less to say."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode(before)


class RecordedTarget(Target):
    """A target whose verification forwards are played back; otherwise the same, its fingerprint too.

    say: told what is about to be recorded, which may take a while. Raises ValueError for other kinds of targets (an
    encoder-decoder, one that is split over processes), and for CUDA graphs without CUDA.
    """

    def __init__(self, target: Target, recorder: Recorder, *, say: Callable[[str], None] | None = None) -> None:
        if type(target) is not Target:
            raise ValueError(
                f"forwards of {target.name!r} cannot be recorded: it is a {type(target).__name__}, not a plain Target. Run them "
                "eagerly."
            )
        if isinstance(recorder, CudaGraphs) and target.device.type != "cuda":
            raise ValueError(
                f"graphs are CUDA graphs, and {target.name!r} is on {target.device}. Compile its forwards instead, or use a CUDA device."
            )
        super().__init__(target.model, target._tokenizer, name=target.name, quantization=target.quantization)
        self.recorder, self.say = recorder, say
        self.tapes = Tapes(recorder, target.model, name=target.name, device=target.device, say=say)

    def new_cache(self, *, rows: int, capacity: int) -> KVCache:
        return self.tapes.new_cache(rows=rows, capacity=capacity)

    def give_up(self, cache: KVCache) -> None:
        self.tapes.give_up(cache)

    @torch.no_grad()
    def verify(
        self,
        tree: TokenTree,
        lengths: Tensor,
        cache: KVCache,
        *,
        longest: int,
        first_row: int = 0,
        skip: int = 0,
        taps: tuple[int, ...] = (),
    ) -> Reading:
        rows, nodes = tree.tokens.shape
        if cache in self.tapes and not (first_row or skip or nodes > NODES):  # another target's cache has no tape
            span = self.recorder.span(longest + nodes)
            cache.reserve(span)

            def forward(tokens: Tensor, parents: Tensor, lengths: Tensor) -> Tensors:
                tree = TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
                read = super(RecordedTarget, self).verify
                reading = read(tree, lengths, cache, longest=span - nodes, taps=taps)
                return (reading.hidden,) if reading.features is None else (reading.hidden, reading.features)

            what = f"forwards of {rows} x {nodes} nodes over up to {span} tokens"
            inputs = tree.tokens, tree.parents, lengths
            if found := self.tapes.play(cache, (rows, nodes, span, taps), what, forward, *inputs):
                return Reading(found[0], found[1] if taps else None)
        return super().verify(tree, lengths, cache, longest=longest, first_row=first_row, skip=skip, taps=taps)

    def _aim(self, tree: TokenTree, lengths: Tensor, cache: KVCache, **given: int) -> Decode:
        plan = super()._aim(tree, lengths, cache, **given)
        if self.device.type == "cpu":
            plan.bound()  # the span of a recording is what rows may grow to
        return plan


def recorded_like(model: Target, target: Target) -> Target:
    """`model`, recorded if `target` is, and by the same recorder: a draft model beside the target it drafts for."""
    return RecordedTarget(model, target.recorder, say=target.say) if isinstance(target, RecordedTarget) else model


def tapes_like(target: Target, model: nn.Module, *, name: str) -> Tapes | None:
    """Tapes for what `model` computes beside the target, by the same recorder; None if its forwards are not recorded."""
    if not isinstance(target, RecordedTarget):
        return None
    return Tapes(target.recorder, model, name=name, device=target.device, say=target.say)
