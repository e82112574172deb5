"""A reduced draft vocabulary: which target tokens a drafter can propose, and how ids are translated.

Letters: V target vocabulary, W draft vocabulary, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Target ids of the draft vocabulary, ascending; the identity (nothing stored) when the size is None."""

    token_map: Tensor | None

    def __init__(self, size: int | None, target_size: int, token_map: Tensor | None) -> None:
        """token_map: (W,) int64 ascending target ids; None with a size leaves it to be loaded from a checkpoint."""
        super().__init__()
        self.target_size = target_size
        self.size = target_size if size is None else size
        if size is None and token_map is not None:
            raise ValueError("a token map was given but draft_vocab_size is not set; set it to the map's length.")
        if size is not None and size > target_size:
            raise ValueError(
                f"draft_vocab_size {size} exceeds the target's vocabulary of {target_size}; lower it or leave it out."
            )
        if size is not None and token_map is not None:
            self.check(token_map)
        if size is not None and token_map is None:
            token_map = torch.arange(size)
        self.register_buffer("token_map", token_map)

    def check(self, token_map: Tensor) -> None:
        """Raise ValueError unless the map is ascending, without repeats and within the target's vocabulary."""
        good = token_map.shape == (self.size,) and bool((token_map.diff() > 0).all())
        if not good or not 0 <= int(token_map[0]) <= int(token_map[-1]) < self.target_size:
            raise ValueError(
                f"the token map must hold {self.size} ascending distinct ids below {self.target_size}; got shape "
                f"{tuple(token_map.shape)}, ids {int(token_map.min())}..{int(token_map.max())}."
            )

    def select(self, rows: Tensor) -> Tensor:
        """Rows (V, ...) of the draft vocabulary only: (W, ...)."""
        return rows if self.token_map is None else rows[self.token_map.to(rows.device)]

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids to target ids, any shape, int64."""
        return ids if self.token_map is None else self.token_map[ids]

    def labels(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids (R,) to draft ids (R,) int64 and whether they are in the draft vocabulary (R,) bool; 0 where not."""
        if self.token_map is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        index = torch.searchsorted(self.token_map, tokens).clamp(max=self.size - 1)
        known = self.token_map[index] == tokens
        return torch.where(known, index, 0), known

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Rank of each target token in the draft's list: logits (R, W), tokens (R,) -> (R,) int64; W if not in it.

        Ties are broken as `topk` may break them: a tied token counts as ranked behind those with a lower id.
        """
        labels, known = self.labels(tokens)
        own = logits.gather(-1, labels[:, None])
        ids = torch.arange(logits.shape[-1], device=logits.device)
        better = (logits > own) | ((logits == own) & (ids < labels[:, None]))
        return torch.where(known, better.sum(dim=-1), self.size)
