"""A drafter's own keys and values in decoding, for rows of different lengths.

Slots 0..length-1 of a row hold what came from the target's true features; draft nodes are written behind them and are
overwritten by the next observation, so nothing of a rejected token survives.

Letters: B rows of one forward, A new tokens per row, M draft nodes kept so far, S slots read, H key-value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..infer.attention import attend
from ..infer.cache import KVCache, Plan


class OwnCache:
    """Keys and values of up to `rows` rows, and how many true tokens each holds, known to the host."""

    def __init__(self, *, rows: int, capacity: int) -> None:
        self.kv = KVCache(rows=rows, capacity=capacity)
        self.lengths = [1] * rows  # drafting starts behind at least one token

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self.kv.move(source, target, length=self.lengths[source])
        self.lengths[target] = self.lengths[source]

    def observe(self, owner: nn.Module, rows: slice, start: Tensor, count: Tensor, width: int, *, last: bool) -> Recall:
        """Room for `width` true tokens in each of `rows`, from slot `start` (B,), `count` (B,) of them real.

        Returns the memory of a forward in which all A tokens ask, or with `last` only each row's last real one.
        """
        self.lengths[rows] = (start + count).tolist()
        span = max(self.lengths[rows])
        self.kv.reserve(span + width)  # columns beyond `count` are written too, and never read
        columns = torch.arange(width, device=start.device)
        ends = (start + count)[:, None] if last else start[:, None] + columns + 1
        return Recall(owner, self.kv, rows.start, start[:, None] + columns, _Seen(ends, span))

    def grow(self, owner: nn.Module, lengths: Tensor, ancestors: Tensor) -> Recall:
        """The memory of a forward over draft nodes of rows 0..B-1.

        lengths: (B,) int64, true tokens; ancestors: (B, n, M) bool, the new nodes are the last n of M.
        """
        batch, count, total = ancestors.shape
        span = max(self.lengths[:batch]) + total
        self.kv.reserve(span)
        slots = lengths[:, None] + torch.arange(total - count, total, device=lengths.device)
        return Recall(owner, self.kv, 0, slots, _Seen(lengths[:, None].expand(-1, count), span, ancestors))


class Recall:
    """The memory of one forward: writes the new keys and values to their slots, then attends to what is visible."""

    def __init__(self, owner: nn.Module, cache: KVCache, first: int, slots: Tensor, plan: _Seen) -> None:
        """slots: (B, A) int64, within each row; rows first..first+B-1 are meant."""
        self.owner, self.cache, self.plan, self.batch = owner, cache, plan, len(slots)
        rows = torch.arange(first, first + len(slots), device=slots.device)
        cache.write_at((rows[:, None] * cache.capacity + slots).flatten(), read=(first, len(slots), plan.span))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (B*n, Hq, d), key and value (B*A, H, d), row by row -> (B*n, Hq, d)."""
        keys, values = self.cache.update(self._by_row(key), self._by_row(value), layer)
        out, _ = attend(self.owner, self._by_row(query), keys, values, None, plan=self.plan)
        return out.flatten(0, 1)

    def _by_row(self, x: Tensor) -> Tensor:
        """(B*n, heads, d) -> (B, heads, n, d)."""
        return x.view(self.batch, len(x) // self.batch, *x.shape[1:]).transpose(1, 2)


class _Seen(Plan):
    """A query sees the slots below its end, and of the slots from there on those that `own` marks."""

    def __init__(self, ends: Tensor, span: int, own: Tensor | None = None) -> None:
        """ends: (B, n) int64; own: (B, n, M) bool, for slots end..end+M-1; `span` slots are read."""
        super().__init__()
        self.ends, self.span, self.own = ends, span, own

    def visible(self, window: int) -> Tensor:
        assert window == 0, "drafter layers attend fully"
        seen = torch.arange(self.span, device=self.ends.device) < self.ends[:, :, None]  # (B, n, S)
        if self.own is None:
            return seen
        where = self.ends[:, :, None] + torch.arange(self.own.shape[2], device=seen.device)
        return seen.scatter(2, where, self.own)
