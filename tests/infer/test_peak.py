"""What decoding holds at most: weights, cache, and what one forward computes; nothing is copied from round to round."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.infer.decode import PREFILL_TOKENS, Engine
from draftsmith.infer.memory import num_bytes
from draftsmith.infer.request import Request
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree

from . import drafting


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are still alive: `now`, and at most at any time, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or size == 0:
            return
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@torch.inference_mode()
def forward_bytes(target: Target, *, rows: int, nodes: int, length: int) -> int:
    """What one verification of so many rows and nodes computes beside weights and cache, or one prefill if that is more."""
    cache = target.new_cache(rows=rows, capacity=length + nodes)
    target.read_blank(cache, rows=rows, length=length)
    tokens = torch.zeros(rows, nodes, dtype=torch.int64)
    with Held() as round_:
        tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
        reading = target.verify(tree, torch.full((rows,), length), cache, longest=length)
        target.logits(reading.hidden).argmax(dim=-1)
    fresh = target.new_cache(rows=rows, capacity=length + nodes)
    target.read_blank(fresh, rows=rows, length=1)  # its buffers are there
    with Held() as prefill:
        prompts = [torch.zeros(min(length, PREFILL_TOKENS // rows), dtype=torch.int64)] * rows
        target.read_prompts(prompts, fresh, first_row=0, budget=PREFILL_TOKENS)
    return max(round_.peak, prefill.peak)


@pytest.mark.parametrize("name", drafting.FREE)
def test_peak_is_that_of_weights_cache_and_one_forward(name: str, build_target: Callable[..., Target]) -> None:
    """Within a tenth, over 160 rounds at least; a copy of the cache per step, or a round that is kept, would exceed it."""
    target = drafting.repeating(build_target(num_hidden_layers=3, max_position_embeddings=2048))
    prompts = drafting.prompts(4, seed=2, vocab_size=target.vocab_size, longest=100)
    drafter = drafting.FREE[name](target)
    with Held() as held:
        engine = Engine(target, drafter=drafter, rows=len(prompts))
        for index, prompt in enumerate(prompts):
            engine.add(Request(str(index), prompt, 400))
        for _ in engine.run():
            pass
        cache = engine.cache.num_bytes()
    assert engine.steps > 160, "too few rounds to show what piles up"
    allowed = cache + forward_bytes(target, rows=len(prompts), nodes=_nodes(name), length=engine.cache.capacity)
    weights = num_bytes(target.model)
    assert held.peak < 1.1 * allowed, f"{held.peak:,} held, {allowed:,} explained"
    assert weights + held.peak <= 1.1 * (weights + allowed)


def test_it_would_see_a_copy_of_the_cache(build_target: Callable[..., Target]) -> None:
    target = build_target(num_hidden_layers=3)
    cache = target.new_cache(rows=2, capacity=200)
    target.read_blank(cache, rows=2, length=100)
    with Held() as held, torch.inference_mode():
        copies = [buffer.clone() for buffer in (*cache.keys, *cache.values)]
        size = held.now
        del copies
    assert (size, held.now, held.peak) == (cache.num_bytes(), 0, cache.num_bytes())


def _nodes(name: str) -> int:
    lookahead = 1 + 3 * 3 + 3 + 4 * 2
    return {"prompt-lookup": 7, "lookahead": lookahead, "lookahead and copies": lookahead + 6}[name]
