"""Where the tokens of an encoder-decoder model's decoder stand: its position embedding, or its bias by distance.

Letters: B rows, N tokens per row, H heads, D distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Placed:
    """Hands our positions (B, N) to a decoder's position embedding for one forward; its own are one range for all rows."""

    def __init__(self, module: nn.Module | None, positions: Tensor) -> None:
        self._module, self._positions = module, positions
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        if self._module is not None:
            before = self._module.register_forward_pre_hook(self._give, with_kwargs=True)
            self._handles = [before, self._module.register_forward_hook(self._shape)]

    def _give(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "position_ids" not in kwargs:
            raise TypeError(f"{type(module).__name__} takes no position_ids")
        return args, kwargs | {"position_ids": self._positions.flatten()}

    def _shape(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.reshape(*self._positions.shape, -1)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def bias_tables(layers: nn.ModuleList) -> list[Tensor | None]:
    """Per decoder layer the bias of its self-attention by distance, (H, D) with the last entry for all that is farther, or
    None; T5 has one in its first layer, which all share."""
    tables: list[Tensor | None] = []
    for layer in layers:
        biased = [module for module in layer.modules() if "relative_attention_bias" in dict(module.named_children())]
        assert len(biased) <= 1, "two attentions with a position bias in one decoder layer"
        if not biased:
            tables.append(None)
            continue
        attention: Any = biased[0]
        farthest = attention.relative_attention_max_distance
        with torch.no_grad():
            bias: Tensor = attention.compute_bias(
                1, farthest + 1, past_seen_tokens=farthest
            )  # (1, H, 1, D), nearest last
        tables.append(bias[0, :, 0].flip(-1))
    return tables
