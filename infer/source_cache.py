"""The cache and the attention of an encoder-decoder target: the source in the first slots of a row, the answer after it.

A decoder layer attends twice, to the answer so far (self-attention) and to the encoded source (cross-attention), with
heads of one shape. So one buffer serves both: slots 0..S-1 of a row hold the keys and values of its S source tokens,
slot S + t those of decoder position t. The loop sees one text, source and answer, whose lengths, trees and commits are
those of a causal target; only what a layer may see differs.

T5's self-attention adds a bias by distance, which the model computes for one range of positions. Ours is looked up in a
table by the distance between two nodes' own positions, made once with the model's public `compute_bias`.

Letters: B rows, H heads, N new tokens per row, M nodes of the tree, S slots, L source tokens, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .cache import Decode, KVCache

NAME = "draftsmith-seq2seq"


class SourceCache(KVCache, Cache):
    """A KV cache whose rows begin with their source. Where it ends is known to host and device."""

    def __init__(self, *, rows: int, capacity: int, device: torch.device) -> None:
        Cache.__init__(self, layers=[])  # transformers pairs two of its own
        KVCache.__init__(self, rows=rows, capacity=capacity)
        self.sources = [0] * rows
        self.origins = torch.zeros(rows, dtype=torch.int64, device=device)
        """(rows,): slot of decoder position 0, which is the number of source tokens."""

    def begin(self, first_row: int, sources: Sequence[int]) -> None:
        """Rows from `first_row` on start anew with sources of these lengths."""
        rows = slice(first_row, first_row + len(sources))
        self.sources[rows] = sources
        self.origins[rows] = torch.tensor(sources, device=self.origins.device)

    def move(self, source: int, target: int, *, length: int) -> None:
        super().move(source, target, length=length)
        self.sources[target] = self.sources[source]
        self.origins[target] = self.origins[source]

    def source_slots(self, first_row: int, count: int) -> tuple[Tensor, Tensor]:
        """Where `count` right-padded sources go: their real tokens' indices in (B*L), and the flat slots of those."""
        lengths, longest = self.origins[first_row : first_row + count], max(self.sources[first_row : first_row + count])
        columns = torch.arange(longest, device=lengths.device)
        real = (columns < lengths[:, None]).flatten().nonzero()[:, 0]
        rows = torch.arange(first_row, first_row + count, device=lengths.device)
        return real, (rows[:, None] * self.capacity + columns).flatten()[real]

    def source_states(self, layer: int, first_row: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, L, d) of the sources of `count` rows, as views."""
        longest = max(self.sources[first_row : first_row + count])
        rows = slice(first_row, first_row + count)
        heads, width = self.keys[layer].shape[0], self.keys[layer].shape[-1]
        shape = heads, self.rows, self.capacity, width
        keys, values = (
            b.view(shape)[:, rows, :longest].transpose(0, 1) for b in (self.keys[layer], self.values[layer])
        )
        return keys, values


@dataclass(frozen=True)
class _Layer:
    """What a model reads of a cross-attention layer that has been written."""

    keys: Tensor
    values: Tensor


class Sources(Cache):
    """The cross-attention side of a SourceCache for one forward over `count` rows from `first_row`.

    A model writes it in the first forward of a row, when the encoded source is at hand, and reads it in all others.
    """

    def __init__(self, cache: SourceCache, *, first_row: int, count: int, is_new: bool) -> None:
        super().__init__(layers=[])
        self._cache, self._is_new = cache, is_new
        if is_new:
            self._real, self._slots = cache.source_slots(first_row, count)
        else:
            states = (cache.source_states(layer, first_row, count) for layer in range(len(cache.keys)))
            self.layers: list[Any] = [_Layer(keys, values) for keys, values in states]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep (B, H, L, d) keys and values of right-padded sources; attention reads them as they came."""
        for buffers, states in ((self._cache.keys, key_states), (self._cache.values, value_states)):
            flat = states.transpose(0, 1).flatten(1, 2)  # (H, B*L, d)
            buffers[layer_idx].index_copy_(1, self._slots, flat[:, self._real])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """More than 0 where the sources are written, by which a model knows."""
        return 0 if self._is_new else 1


class EncoderPlan:
    """The encoder's forward over right-padded sources of `lengths` (B,): every token sees its source, both ways."""

    def __init__(self, lengths: Tensor, longest: int) -> None:
        self._seen = (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None, None]  # (B, 1, 1, L)
        self._bias: Tensor | None = None
        self._mask: Tensor | None = None

    def sight(
        self, module: nn.Module, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and additive mask for a layer. `bias` (1, H, L, L) is the model's own: its positions are right."""
        if self._mask is None or bias is not self._bias:
            mask = _additive(self._seen, key.dtype)
            self._bias, self._mask = bias, mask if bias is None else mask + bias
        return key, value, self._mask


class DecoderPlan:
    """The decoder's forward over nodes of a tree.

    decode: as for a causal target, slots and lengths counting the source. origins: (B,) int64, source tokens of each
    row, between `shortest` and `longest`. tables: per layer the bias by distance (H, D), or None.
    """

    def __init__(
        self, decode: Decode, origins: Tensor, *, shortest: int, longest: int, tables: Sequence[Tensor | None]
    ) -> None:
        self._decode, self._origins, self._tables, self._first = decode, origins, tables, shortest
        self._source = (torch.arange(longest, device=origins.device) < origins[:, None])[:, None, None]  # (B, 1, 1, L)
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def sight(
        self, module: nn.Module, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and additive mask for a layer; `bias` is the model's own, whose positions are not ours."""
        if not module.is_causal:  # cross-attention
            return key, value, self._mask(-1, key.dtype)
        layer = module.layer_idx
        assert isinstance(layer, int), "a decoder layer without its number cannot be cached"
        shared = layer if self._tables[layer] is not None else 0
        return key[:, :, self._first :], value[:, :, self._first :], self._mask(shared, key.dtype)

    def _mask(self, layer: int, dtype: torch.dtype) -> Tensor:
        if (layer, dtype) not in self._masks:
            self._masks[layer, dtype] = _additive(self._source, dtype) if layer < 0 else self._own(layer, dtype)
        return self._masks[layer, dtype]

    def _own(self, layer: int, dtype: torch.dtype) -> Tensor:
        """(B, H or 1, N, S - first): the row's answer so far and a node's ancestors, with the bias by distance."""
        slots = torch.arange(self._decode.span, device=self._origins.device)
        seen = self._decode.visible(0) & (slots >= self._origins[:, None])[:, None]
        mask = _additive(seen[:, None, :, self._first :], dtype)
        table = self._tables[layer]
        if table is None:
            return mask
        distance = self._distances(slots)[:, :, self._first :].clamp(min=0, max=table.shape[1] - 1)
        return mask + table.to(dtype)[:, distance].transpose(0, 1)

    def _distances(self, slots: Tensor) -> Tensor:
        """(B, N, S): decoder positions between each new token and each slot, nodes standing where their depth says."""
        lengths, depths = self._decode.lengths[:, None], self._decode.depths
        positions = slots.expand(len(lengths), -1).clone()  # of the tokens in the slots, counting the source
        nodes = lengths + torch.arange(depths.shape[1], device=slots.device)
        positions.scatter_(1, nodes, lengths + depths)
        count = self._decode.ancestors.shape[1]
        return (lengths + depths[:, -count:])[:, :, None] - positions[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: EncoderPlan | DecoderPlan,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query (B, H, N, d), key and value (B, H, S, d) -> (B, N, H, d). `attention_mask` is ignored: `plan` decides."""
    key, value, mask = plan.sight(module, key, value, position_bias)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2), None


def register() -> None:
    """Make `attend` known to transformers under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
