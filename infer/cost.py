"""The cost curve of this machine: seconds of one target forward by how much it verifies, and of one draft."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import torch

from .clock import now
from .drafter import Drafter, Observation
from .sampling import Sampling, SamplingParams
from .target import Target
from .tree import TokenTree

SIZES = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 49, 64)
"""Matrix units work in tiles of 16 rows, so the seventeenth node costs as much as the eight after it: both sides of such
steps are measured, and between them the curve is nearly straight."""


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
    # Positions end, and half of them are an encoder-decoder's source.
    context = max(2, min(context, target.max_length // 2 - max(sizes) - 1))
    cache = target.new_cache(rows=rows, capacity=context + max(sizes))
    target.read_blank(cache, rows=rows, length=context)
    lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            tokens = torch.zeros(rows, size, dtype=torch.int64, device=device)
            tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
            _wait(device)
            began = now()
            target.logits(target.verify(tree, lengths, cache, longest=context).hidden).argmax(dim=-1)
            _wait(device)
            if turn:  # the first turn warms up
                samples[size].append(now() - began)
    fastest = [min(samples[size]) for size in sorted(sizes)]
    return dict(zip(sorted(sizes), itertools.accumulate(fastest, max)))


def token_seconds(target: Target, *, rows: int, depth: int) -> dict[int, float]:
    """Seconds of a target forward by the number of tokens in it: of one row and of `rows`, with up to `depth` draft tokens
    in each. More tokens never cost less."""
    sizes = (*(size for size in SIZES if size <= depth), depth + 1)
    found = verify_seconds(target, sizes=sizes)
    if rows > 1:
        found |= {rows * size: taken for size, taken in verify_seconds(target, sizes=sizes, rows=rows).items()}
    counts = sorted(found)
    return dict(zip(counts, itertools.accumulate((found[count] for count in counts), max)))


@torch.inference_mode()
def uneven_seconds(target: Target, *, rows: int, context: int = 256, repeats: int = 9) -> float:
    """Seconds that a forward over `rows` rows takes longer where they differ in length, each token counted alike: a quarter of
    the rows reads four drafted tokens instead of every row one. 0 for fewer than four rows."""
    rows -= rows % 4  # so that both ways read as many
    if not rows:
        return 0.0
    device, context = target.device, max(2, min(context, target.max_length // 2 - 6))
    cache = target.new_cache(rows=rows, capacity=context + 5)
    target.read_blank(cache, rows=rows, length=context)
    lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
    tokens = torch.zeros(rows, 5, dtype=torch.int64, device=device)
    wide = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
    drafted = torch.where(torch.arange(rows, device=device) < rows // 4, 4, 0)
    read = torch.arange(5, device=device) <= drafted[:, None]
    trees = replace(wide, valid=read, read=read), TokenTree.chain(tokens[:, 0], tokens[:, 1:2])
    longer = []
    for turn in range(repeats + 1):
        taken = []
        for tree in trees:
            _wait(device)
            began = now()
            target.verify(tree, lengths, cache, longest=context)
            _wait(device)
            taken.append(now() - began)
        if turn:
            longer.append(taken[0] - taken[1])
    return max(0.0, statistics.median(longer))


@torch.inference_mode()
def draft_seconds(drafter: Drafter, target: Target, *, rows: int, repeats: int = 8) -> tuple[TokenTree, float]:
    """What the drafter makes of `rows` rows that have read one token, and the seconds that takes at its fastest."""
    anchors = torch.zeros(rows, dtype=torch.int64, device=target.device)
    sampling = Sampling([SamplingParams()] * rows, target.device)
    hidden = torch.zeros(rows, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    features = hidden.repeat(1, 1, len(drafter.taps)) if drafter.taps else None
    one = torch.ones_like(anchors)
    prompt = Observation(slice(0, rows), anchors[:, None], one, anchors, hidden, features, anchors)
    taken, state = list[float](), None
    while True:
        del state  # its buffers, and what was recorded of them, are the next one's
        state = drafter.start(rows=rows, capacity=256)  # anew: a draft model would go on from what it drafted last
        drafter.observe(state, prompt)
        began = now()
        tree = drafter.draft(state, anchors, one, sampling)
        tree.tokens.tolist()  # waits for the device
        taken.append(now() - began)
        if len(taken) == repeats:
            return tree, min(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
