"""Verification without Python: the target's forwards recorded once per shape, then played back.

What one forward costs a host (modules, checks, some dozens of launches per layer) is often more than what its arithmetic
costs a GPU, and a good part of what it costs a CPU. If everything in a forward has a fixed shape and a fixed place in
memory, the tensor operations can be recorded and played back alone: as a CUDA graph, or compiled (compiled.py). So what
changes from round to round is copied into tensors that stay:

- the trees' tokens and parents, and the rows' lengths; masks, positions and cache slots follow from these on the device;
- slots read: as many as the recorder's `span` says, masked beyond the text;
- all nodes are read, also those a drafter left out (`TokenTree.read`), whose hidden states are then no zeros: how many there
  are would have to be known here.

A shape is recorded when it has been seen a few times in one cache. Forwards that cannot be recorded, because what they
launch depends on what they compute (some mixtures of experts) or waits for the device, run as ever, and the reason is told.
A cache that is not used any more hands its buffers, and with them its recordings, to the next one of as many rows. Of one
recorder, one forward at a time: threads would read each other's results.

Letters: B rows, N nodes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor

from .cache import KVCache
from .clock import set_aside
from .target import Reading, Target
from .tree import TokenTree

NODES = 256
"""Wider trees, such as pieces of a prompt, are work enough by themselves."""
IDLE = 2
"""Unused sets of buffers that are kept for each number of rows."""

Shape = tuple[int, int, int, tuple[int, ...]]
"""Rows, nodes, slots read, taps."""


class Recorder(Protocol):
    """Records what a function computes; the function reads and writes tensors that stay where they are."""

    seen: int
    """Forwards of a shape that run as ever before it is recorded: recording takes as long as several of them."""
    most: int
    """Recordings per cache; later shapes run as ever."""
    takes: str
    """How long one takes, in words."""

    def span(self, needed: int) -> int:
        """How many slots to read where `needed` are; every number that it returns is a recording of its own."""
        ...

    def __call__(self, function: Callable[[], Reading]) -> Callable[[], Reading]:
        """What computes it all again, into tensors of its own. Raises RuntimeError if it cannot be recorded."""
        ...


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

    def __call__(self, function: Callable[[], Reading]) -> Callable[[], Reading]:
        now = torch.cuda.current_stream()
        aside = self._stream = self._stream or torch.cuda.Stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            function()  # libraries allocate what they need at their first call, which no recording may hold
            refuse_to_wait(function)
        now.wait_stream(aside)
        if not self._alive:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=aside):
                reading = function()
        finally:
            torch.cuda.set_stream(now)  # a capture that fails leaves its own
        self._alive.add(graph)

        def play() -> Reading:
            graph.replay()
            return Reading(reading.hidden.clone(), None if reading.features is None else reading.features.clone())

        return play


def refuse_to_wait(function: Callable[[], Reading]) -> None:
    """Raise RuntimeError if the function waits for the device, before a capture fails on it with less to say."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True)
class _Places:
    """What a recorded forward reads from."""

    tokens: Tensor
    """(B, N) int64."""
    parents: Tensor
    """(B, N) int64."""
    lengths: Tensor
    """(B,) int64."""

    @classmethod
    @torch.inference_mode(False)  # they are written to inside of it and outside
    def make(cls, rows: int, count: int, device: torch.device) -> _Places:
        tokens = torch.zeros(rows, count, dtype=torch.int64, device=device)
        return cls(tokens, torch.arange(-1, count - 1, device=device).repeat(rows, 1), tokens[:, 0].clone())

    def fill(self, tree: TokenTree, lengths: Tensor) -> None:
        self.tokens.copy_(tree.tokens)
        self.parents.copy_(tree.parents)
        self.lengths.copy_(lengths)

    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents, torch.ones_like(self.tokens, dtype=torch.bool))


@dataclass(eq=False)
class _Tape:
    """The buffers of a cache, and the recordings that read and write them."""

    rows: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None
    """The first of the buffers that the recordings know; another one has taken its place once they have grown."""
    recordings: dict[Shape, tuple[_Places, Callable[[], Reading]]] = field(default_factory=dict)
    seen: Counter[Shape] = field(default_factory=Counter)
    is_given_up: bool = False
    """Its buffers are not to be used again."""

    @property
    def is_whole(self) -> bool:
        """False if memory ran out while the buffers grew."""
        sizes = {buffer.shape[1] for buffer in (*self.keys, *self.values)}
        return len(sizes) == 1 and len(self.keys) == len(self.values)

    def new_cache(self, capacity: int) -> KVCache:
        there = self.keys[0].shape[1] // self.rows if self.keys else 0
        cache = KVCache(rows=self.rows, capacity=there or capacity)
        cache.keys, cache.values = self.keys, self.values
        for buffer in (*self.keys, *self.values):
            buffer.zero_()  # what is masked counts for nothing only if it is a number
        cache.reserve(capacity)
        return cache

    def forget_the_outgrown(self) -> None:
        now = self.keys[0] if self.keys else None
        if now is not self.first:
            self.first = now
            self.recordings.clear()
            self.seen.clear()


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
        self.fault: str | None = None
        """Why nothing is recorded any more."""
        self._tapes: WeakKeyDictionary[KVCache, _Tape] = WeakKeyDictionary()
        self._idle: dict[int, list[_Tape]] = {}  # by rows

    def new_cache(self, *, rows: int, capacity: int) -> KVCache:
        idle = self._idle.setdefault(rows, [])
        try:
            tape = idle.pop()
        except IndexError:
            tape = _Tape(rows)
        cache = tape.new_cache(capacity)
        self._tapes[cache] = tape
        finalize(cache, _lay_down, tape, idle)
        return cache

    def give_up(self, cache: KVCache) -> None:
        """Neither this cache's buffers nor those of unused ones are kept."""
        if tape := self._tapes.get(cache):
            tape.is_given_up = True
        for idle in self._idle.values():
            idle.clear()

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
        tape = self._tapes.get(cache)  # another target's cache has none
        if tape is not None and not (first_row or skip or tree.num_nodes > NODES):
            span = self.recorder.span(longest + tree.num_nodes)
            cache.reserve(span)
            shape = (len(lengths), tree.num_nodes, span, taps)
            if recording := self._recording(shape, tree, lengths, cache, tape):
                places, play = recording
                places.fill(tree, lengths)
                return play()
        return super().verify(tree, lengths, cache, longest=longest, first_row=first_row, skip=skip, taps=taps)

    def num_recordings(self, cache: KVCache) -> int:
        """How many shapes can be played back into this cache as it is."""
        tape = self._tapes[cache]
        tape.forget_the_outgrown()
        return len(tape.recordings)

    def _recording(
        self, shape: Shape, tree: TokenTree, lengths: Tensor, cache: KVCache, tape: _Tape
    ) -> tuple[_Places, Callable[[], Reading]] | None:
        """What to fill in and how to play it; None if the shape is not recorded (yet)."""
        tape.forget_the_outgrown()
        if shape in tape.recordings:
            return tape.recordings[shape]
        tape.seen[shape] += 1
        if tape.seen[shape] <= self.recorder.seen or len(tape.recordings) == self.recorder.most or self.fault:
            return None
        rows, nodes, span, taps = shape
        places = _Places.make(rows, nodes, lengths.device)
        places.fill(tree, lengths)  # recording may run the forward, which then is this one

        def forward() -> Reading:
            longest = span - nodes
            return super(RecordedTarget, self).verify(places.tree(), places.lengths, cache, longest=longest, taps=taps)

        if self.say is not None:
            self.say(f"recording forwards of {rows} x {nodes} nodes over up to {span} tokens, {self.recorder.takes}")
        try:
            with set_aside(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                tape.recordings[shape] = places, self.recorder(forward)
        except RuntimeError as error:  # of memory too: what is not recorded needs less of it
            self.fault = str(error).strip().partition("\n")[0]
            warnings.warn(f"{self.name}: forwards run as ever, they cannot be recorded: {self.fault}", stacklevel=2)
        return tape.recordings.get(shape)


def _lay_down(tape: _Tape, idle: list[_Tape]) -> None:
    if tape.is_whole and not tape.is_given_up and len(idle) < IDLE:
        idle.append(tape)


def recorded_like(model: Target, target: Target) -> Target:
    """`model`, recorded if `target` is, and by the same recorder: a draft model beside the target it drafts for."""
    return RecordedTarget(model, target.recorder, say=target.say) if isinstance(target, RecordedTarget) else model
