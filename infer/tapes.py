"""Forwards without Python: what a model computes recorded once per shape, then played back.

If everything in a computation has a fixed shape and a fixed place in memory, its tensor operations can be recorded and
played back alone: as a CUDA graph (recorded.py), or compiled (compiled.py). What changes from one time to the next is
copied into tensors that stay; keys and values stay where their cache has them. So recordings belong to the buffers of a
cache, and a cache that is not used any more hands both to the next one of as many rows.

Weights may change in place. A model whose weights were replaced, or have another precision, is recorded anew.

A shape is recorded when it has been seen a few times in one cache. What cannot be recorded, because what it launches depends
on what it computes (some mixtures of experts) or waits for the device, runs as ever, and the reason is told. Of one
recorder, one computation at a time: threads would read each other's results.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn

from .cache import KVCache
from .clock import set_aside

IDLE = 2
"""Unused sets of buffers that are kept for each number of rows."""

Tensors = tuple[Tensor, ...]
Weights = tuple[tuple[int, torch.dtype, torch.device, int], ...]
"""Which tensors they are, and where."""


class Recorder(Protocol):
    """Records what a function computes; the function reads and writes tensors that stay where they are."""

    seen: int
    """Times that a shape runs as ever before it is recorded: recording takes as long as several of them."""
    most: int
    """Recordings per cache; later shapes run as ever."""
    takes: str
    """How long one takes, in words."""

    def span(self, needed: int) -> int:
        """How many slots to read where `needed` are; every number that it returns is a recording of its own."""
        ...

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """What computes it all again, into tensors of its own. Raises RuntimeError if it cannot be recorded."""
        ...


@dataclass(frozen=True)
class _Recording:
    inputs: Tensors
    """Where what it reads is to be put."""
    play: Callable[[], Tensors]

    def __call__(self, inputs: Tensors) -> Tensors:
        for place, given in zip(self.inputs, inputs):
            place.copy_(given)
        return self.play()


@dataclass(eq=False)
class _Tape:
    """The buffers of a cache, and the recordings that read and write them."""

    rows: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None
    """The first of the buffers that the recordings know; another one has taken its place once they have grown."""
    recordings: dict[Hashable, _Recording] = field(default_factory=dict)
    seen: Counter[Hashable] = field(default_factory=Counter)
    weights: Weights = ()
    is_given_up: bool = False
    """Its buffers are not to be used again."""

    @property
    def is_whole(self) -> bool:
        """False if memory ran out while the buffers grew."""
        sizes = {buffer.shape[1] for buffer in (*self.keys, *self.values)}
        return len(sizes) < 2 and len(self.keys) == len(self.values)

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


_TAPES: WeakSet[Tapes] = WeakSet()


class Tapes:
    """All that is recorded of one model.

    say: told what is about to be recorded, which may take a while.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        *,
        name: str,
        device: torch.device,
        say: Callable[[str], None] | None,
    ) -> None:
        self.recorder, self.name, self.device, self.say = recorder, name, device, say
        self._model = ref(model)  # which may own this
        self.fault: str | None = None
        """Why nothing is recorded any more."""
        self._used: WeakKeyDictionary[KVCache, _Tape] = WeakKeyDictionary()
        self._idle: dict[int, list[_Tape]] = {}  # by rows
        _TAPES.add(self)

    def __contains__(self, cache: KVCache) -> bool:
        return cache in self._used

    def new_cache(self, *, rows: int, capacity: int) -> KVCache:
        idle, weights = self._idle.setdefault(rows, []), self._weights()
        idle[:] = [tape for tape in idle if tape.weights == weights]
        tape = idle.pop() if idle else _Tape(rows, weights=weights)
        cache = tape.new_cache(capacity)
        self._used[cache] = tape
        finalize(cache, _lay_down, tape, idle)
        return cache

    def give_up(self, cache: KVCache) -> None:
        """This cache's buffers are not kept."""
        if tape := self._used.get(cache):
            tape.is_given_up = True

    def give_up_idle(self) -> None:
        """Nor are those of unused ones."""
        for idle in self._idle.values():
            idle.clear()

    def play(
        self, cache: KVCache, shape: Hashable, what: str, function: Callable[..., Tensors], *inputs: Tensor
    ) -> Tensors | None:
        """What `function(*inputs)` computes and writes into `cache`; None if its shape is not recorded (yet).

        shape: equal for what is recorded once, whatever the inputs hold; what: the same in words.
        """
        tape = self._used[cache]
        tape.forget_the_outgrown()
        if shape not in tape.recordings:
            tape.seen[shape] += 1
            if tape.seen[shape] <= self.recorder.seen or len(tape.recordings) == self.recorder.most or self.fault:
                return None
            if self.say is not None:
                self.say(f"recording {what}, {self.recorder.takes}")
            try:
                tape.recordings[shape] = self._record(function, inputs)
            except RuntimeError as error:  # of memory too: what is not recorded needs less of it
                self.fault = str(error).strip().partition("\n")[0]
                warnings.warn(f"{self.name}: forwards run as ever, they cannot be recorded: {self.fault}", stacklevel=3)
                return None
        return tape.recordings[shape](inputs)

    def num_recordings(self, cache: KVCache) -> int:
        """How many shapes can be played back into this cache as it is."""
        tape = self._used[cache]
        tape.forget_the_outgrown()
        return len(tape.recordings)

    def _weights(self) -> Weights:
        """Equal as long as recordings read the same memory as the model."""
        model = self._model()
        assert model is not None, f"{self.name} is gone"
        return weights_of(model)

    def _record(self, function: Callable[..., Tensors], inputs: Tensors) -> _Recording:
        with torch.inference_mode(False):  # the places are written to inside of it and outside
            places = tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in inputs)
        for place, given in zip(places, inputs):
            place.copy_(given)  # recording may run the function, which then is this time's
        with set_aside(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return _Recording(places, self.recorder(lambda: function(*places)))


def give_up_idle() -> None:
    """Keep no buffers that are not in use, of whatever model: memory has run out."""
    for tapes in _TAPES:
        tapes.give_up_idle()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def weights_of(model: nn.Module) -> Weights:
    """Equal as long as a model's weights lie where they are."""
    return tuple(
        (id(each), each.dtype, each.device, _address(each)) for each in (*model.parameters(), *model.buffers())
    )


def _address(weight: Tensor) -> int:
    """0 for tensors without storage of their own, which nobody changes."""
    return weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0


def _lay_down(tape: _Tape, idle: list[_Tape]) -> None:
    if tape.is_whole and not tape.is_given_up and len(idle) < IDLE:
        idle.append(tape)
