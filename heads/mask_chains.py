"""Packed text followed by chains of mask tokens, so that one forward of a language model drafts several tokens per row.

Row t, whose anchor is token t+1, has a chain of masks at the positions behind its anchor. Mask k stands where token
t+1+k would, sees the document up to the anchor and the chain's masks up to itself, and scores token t+2+k. Step 0 needs
no mask: it is scored at the anchor. Worked example, "a b c d e", row t = 1, three steps:

    entry        a  b  c  |  mask 1  mask 2
    position     0  1  2  |  3       4           mask 1 sees a b c and itself; mask 2 sees a b c, mask 1 and itself
    scores       .  .  d  |  e       f

Chains of other rows see nothing of this one, and text never sees a mask.

Letters: B packed rows, T positions, K draft steps, M mask tokens of a packed row, N = T + M entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..infer.cache import Plan
from .base import TeacherBatch


@dataclass(frozen=True)
class MaskChains:
    """What the model reads, and where each step of each row is scored."""

    tokens: Tensor
    """(B, N) int64."""
    positions: Tensor
    """(B, N) int64."""
    plan: Plan
    """Who sees whom."""
    scored: Tensor
    """(K, B, T) int64: the entry that scores step k of row t; any entry where the step is left out."""

    @classmethod
    def lay_out(cls, teacher: TeacherBatch, kept: Tensor, *, mask_token: int) -> MaskChains:
        """kept: (K, B, T) bool, the steps of every row that are scored."""
        length, steps = teacher.tokens.shape[1], torch.arange(1, len(kept), device=kept.device)
        needed = (kept.flip(0).cumsum(dim=0).flip(0) > 0)[1:].transpose(
            0, 1
        )  # (B, K-1, T): masks up to the last step kept
        places = needed.flatten(1).cumsum(dim=1).view_as(needed) - 1 + length
        width = int(places.max()) + 1 if bool(needed.any()) else length
        row, step, t = needed.nonzero(as_tuple=True)
        at = places[row, step, t]
        index = torch.arange(length, device=kept.device).expand_as(teacher.tokens)
        tokens = _widened(teacher.tokens, width, mask_token)
        segments, positions = _widened(teacher.segments, width, 0), _widened(teacher.positions, width, 0)
        limits, chains = _widened(index, width, -1), _widened(torch.full_like(index, -1), width, -1)
        segments[row, at] = teacher.segments[row, t]
        positions[row, at] = teacher.positions[row, t] + 1 + steps[step]
        limits[row, at] = chains[row, at] = t + 1
        anchors = (index + 1).clamp(max=length - 1)[:, None]  # (B, 1, T)
        scored = torch.cat([anchors, torch.where(needed, places, 0)], dim=1).transpose(0, 1)
        return cls(tokens, positions, _Seen(segments, positions, limits, chains, length), scored)


class _Seen(Plan):
    """An entry sees its document's text up to `limits`, its chain's masks up to its own position, and itself."""

    def __init__(self, segments: Tensor, positions: Tensor, limits: Tensor, chains: Tensor, length: int) -> None:
        """All (B, N) int64; the first `length` entries are text, padding has segment 0, text has chain -1."""
        super().__init__()
        self.segments, self.positions, self.limits, self.chains, self.length = (
            segments,
            positions,
            limits,
            chains,
            length,
        )

    def visible(self, window: int) -> Tensor:
        count, device = self.segments.shape[1], self.segments.device
        distance = self.positions[:, :, None] - self.positions[:, None, :]
        text = torch.arange(self.length, device=device) <= self.limits[:, :, None]  # (B, N, T)
        masks = self.chains[:, :, None] == self.chains[:, None, self.length :]  # (B, N, M)
        masks &= distance[:, :, self.length :] >= 0
        seen = torch.cat([text, masks], dim=2)
        seen &= (self.segments[:, :, None] == self.segments[:, None, :]) & (self.segments > 0)[:, :, None]
        if window:
            seen &= distance < window
        return seen | torch.eye(count, dtype=torch.bool, device=device)


def _widened(values: Tensor, width: int, filler: int) -> Tensor:
    """(B, T) -> (B, width), a copy."""
    wide = values.new_full((len(values), width), filler)
    wide[:, : values.shape[1]] = values
    return wide
