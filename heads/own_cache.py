"""A drafter's own keys and values in decoding, for rows of different lengths, and its computations played back.

Slots 0..length-1 of a row hold what came from the target's true features; draft nodes are written behind them and are
overwritten by the next observation, so nothing of a rejected token survives.

A head gives `draft` and `take` what it computes in a round as a function of tensors. Where the target's forwards are
recorded (infer/tapes.py), the function is too, once for every shape: it must launch the same operations whatever the tensors
hold, never wait for the device, and read no other tensors than its inputs, weights and this cache.

Letters: B rows of one forward, A new tokens per row, M draft nodes kept so far, S slots read, H key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from ..infer.attention import attend
from ..infer.cache import KVCache, Plan
from ..infer.drafter import Observation
from ..infer.tapes import Tapes, Tensors
from ..infer.tree import TokenTree


class OwnCache:
    """Keys and values of up to `rows` rows, none in heads without attention, and how many true tokens each row has."""

    def __init__(self, *, rows: int, capacity: int, tapes: Tapes | None) -> None:
        """tapes: the drafter's, if its computations are to be recorded."""
        self.kv = (KVCache if tapes is None else tapes.new_cache)(rows=rows, capacity=capacity)
        self.tapes = tapes
        self.lengths = [1] * rows  # on the host; drafting starts behind at least one token
        self._span = 0  # slots that are read while a function is recorded
        self._widest = 0  # columns of an observation so far

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self.kv.move(source, target, length=self.lengths[source])
        self.lengths[target] = self.lengths[source]

    def draft(self, kind: Hashable, room: int | None, function: Callable[..., TokenTree], *inputs: Tensor) -> TokenTree:
        """The tree `function(*inputs)`, which knows no `probs` and has every node `read`; else as `run`."""

        def tensors(*inputs: Tensor) -> Tensors:
            tree = function(*inputs)
            found = tree.tokens, tree.parents, tree.valid
            return found if tree.confidence is None else (*found, tree.confidence)

        tokens, parents, valid, *rest = self.run("drafts", kind, room, tensors, *inputs)
        return TokenTree(tokens, parents, valid, confidence=rest[0] if rest else None)

    def take(self, seen: Observation, function: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """Note how many tokens the rows have now and make room for them; then as `run`, but prompts, which come in all
        lengths, are not recorded.

        Inputs of more than one dimension have a column per token; where they are recorded they are padded to the widest of
        their kind, since a recording has one width.
        """
        width = seen.tokens.shape[1]
        self.lengths[seen.rows] = seen.ends or (seen.start + seen.count).tolist()
        needed = max(self.lengths[seen.rows]) + width
        if self.tapes is None:
            self.kv.reserve(needed)
            return function(*inputs)
        self.kv.reserve(self.tapes.recorder.span(needed))  # growing twice would lose what was recorded twice
        if seen.is_prompt:
            return function(*inputs)
        self._widest = max(self._widest, width)
        padded = (_widened(each, self._widest) if each.ndim > 1 else each for each in inputs)
        return self.run("observations", None, self._widest, function, *padded)

    def run(
        self, what: str, kind: Hashable, room: int | None, function: Callable[..., Tensors], *inputs: Tensor
    ) -> Tensors:
        """`function(*inputs)`, played back where that is recorded.

        what: it is, in a word, and of which `kind`: equal ones launch the same operations on inputs of the same shapes.
        room: how many slots it writes behind the true tokens of rows 0..B-1, B being the length of its first input; None if
        it reads no keys.
        """
        if self.tapes is None:
            return function(*inputs)
        batch, span = len(inputs[0]), 0
        if room is not None:
            span = self.tapes.recorder.span(max(self.lengths[:batch]) + room)
            self.kv.reserve(span)

        def recorded(*inputs: Tensor) -> Tensors:
            self._span = span
            try:
                return function(*inputs)
            finally:
                self._span = 0

        shape = (what, kind, span, tuple(each.shape for each in inputs))
        words = f"{what} of {batch} rows" + (f" over up to {span} tokens" if span else "")
        found = self.tapes.play(self.kv, shape, words, recorded, *inputs)
        return function(*inputs) if found is None else found

    def observe(self, owner: nn.Module, first: int, start: Tensor, count: Tensor, width: int, *, last: bool) -> Recall:
        """The memory of a forward over the tokens just taken, `width` in each of rows first..first+B-1, `count` (B,) of them real.

        All A tokens ask, or with `last` only each row's last real one. Columns beyond `count` are written too, and never read.
        """
        span = self._span or max(self.lengths[first : first + len(start)])
        columns = torch.arange(width, device=start.device)
        ends = (start + count)[:, None] if last else start[:, None] + columns + 1
        return Recall(owner, self.kv, first, start[:, None] + columns, _Seen(ends, span))

    def grow(self, owner: nn.Module, lengths: Tensor, ancestors: Tensor) -> Recall:
        """The memory of a forward over draft nodes of rows 0..B-1.

        lengths: (B,) int64, true tokens; ancestors: (B, n, M) bool, the new nodes are the last n of M.
        """
        batch, count, total = ancestors.shape
        span = self._span or max(self.lengths[:batch]) + total
        self.kv.reserve(span)
        slots = lengths[:, None] + torch.arange(total - count, total, device=lengths.device)
        return Recall(owner, self.kv, 0, slots, _Seen(lengths[:, None].expand(-1, count), span, ancestors))


def _widened(values: Tensor, width: int) -> Tensor:
    """(B, A, ...) -> (B, width, ...), zeros behind."""
    missing = width - values.shape[1]
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1) if missing else values


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
