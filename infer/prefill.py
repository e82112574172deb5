"""What the target has read, as the drafter sees it: prompts that were read together one by one, and the rows of a round.

Letters: R prompts, T their tokens in all; B rows, A kept nodes, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .drafter import Observation
from .target import Reading
from .tree import TokenTree
from .verify import Verdict


def observations(
    prompts: Sequence[Tensor], reading: Reading, anchors: Tensor, held: Sequence[int], *, first_row: int
) -> Iterator[Observation]:
    """Of each prompt, 1-D int64, what was read of it beyond the first `held` tokens; `reading` holds all of them side by
    side, (1, T, ...), and anchors (R,) int64 the tokens that follow them."""
    start = 0
    for index, prompt in enumerate(prompts):
        part = slice(start, start + len(prompt))
        start += len(prompt)
        yield Observation(
            rows=slice(first_row + index, first_row + index + 1),
            tokens=prompt.to(anchors.device)[None],
            count=torch.tensor([len(prompt)], device=anchors.device),
            start=torch.zeros_like(anchors[:1]),
            hidden=reading.hidden[:, part],
            features=None if reading.features is None else reading.features[:, part],
            anchor=anchors[index : index + 1],
            known=held[index],
        )


def accepted(
    tree: TokenTree, reading: Reading, logits: Tensor, verdict: Verdict, path: Tensor, *, start: Tensor, ends: list[int]
) -> Observation:
    """Of a round, what was read at the nodes that are kept, `path` (B, A); logits (B, N, V); start (B,): tokens read before,
    ends: after."""
    rows = torch.arange(len(path), device=path.device)[:, None]
    return Observation(
        rows=slice(0, len(path)),
        tokens=tree.tokens.gather(1, path),
        count=verdict.count,
        start=start,
        hidden=reading.hidden[rows, path],
        features=None if reading.features is None else reading.features[rows, path],
        anchor=verdict.bonus,
        logits=logits,
        ends=ends,
    )
