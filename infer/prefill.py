"""Prompts that were read together, as the drafter sees them: one by one.

Letters: R prompts, T their tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .drafter import Observation
from .target import Reading


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
