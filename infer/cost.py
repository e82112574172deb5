"""The cost curve of this machine: seconds of one target forward by the number of tree nodes it verifies."""

from __future__ import annotations

import itertools
import time

import torch

from .target import Target
from .tree import TokenTree

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@torch.inference_mode()
def verify_seconds(
    target: Target, *, sizes: tuple[int, ...] = SIZES, rows: int = 1, context: int = 256, repeats: int = 7
) -> dict[int, float]:
    """Seconds of a verification forward (head included) per tree size, for `rows` rows of `context` read tokens.

    Sizes are measured in turn, round after round, so that a drift of the machine touches all alike; of each the fastest
    counts, since other work on the machine only ever adds, and more nodes never cost less. Takes about
    `repeats * len(sizes)` forwards (4 seconds for the embedded target).
    """
    device = target.device
    cache = target.new_cache(rows=rows, capacity=context + max(sizes))
    target.read_blank(cache, rows=rows, length=context)
    lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            tokens = torch.zeros(rows, size, dtype=torch.int64, device=device)
            tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
            _wait(device)
            began = time.perf_counter()
            target.logits(target.verify(tree, lengths, cache, longest=context).hidden).argmax(dim=-1)
            _wait(device)
            if turn:  # the first turn warms up
                samples[size].append(time.perf_counter() - began)
    fastest = [min(samples[size]) for size in sorted(sizes)]
    return dict(zip(sorted(sizes), itertools.accumulate(fastest, max)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
