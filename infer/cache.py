"""A preallocated KV cache whose rows have lengths of their own, and the plan of one forward through it.

Letters: B rows, H KV heads, G query heads per KV head, N new tokens per row, S slots read, C capacity of a row.

Each layer owns one buffer of keys and one of values, laid out (H, B*C, d): slot s of row b lies at flat index b*C + s,
so one `index_copy_` writes any set of (row, slot) pairs and reading rows 0..n-1 is a view. Nothing is concatenated and
nothing is copied per step except accepted tree nodes that have to move up (`commit`).

A *plan* says where the tokens of one forward go and what they may see. Three plans exist: `Packed` (whole documents
side by side without a cache row in sight: training and prefill), and `Decode` (N new tokens for each of rows 0..B-1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

Piece = tuple[slice, slice, slice]
"""Rows, nodes, and the slots that any of them may see."""
ALL = slice(None)


class Plan(ABC):
    """Visibility of one forward. Masks are additive, built once per forward and reused by all layers."""

    pieces: tuple[Piece, ...] = ((ALL, ALL, ALL),)
    """What attends together, one call after the other; what is in none of them does not attend."""
    reach: Tensor | None = None
    """(B,) int64: the slots that a row may see begin with 0 and end here. None: they may be any, or looking costs more."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    @abstractmethod
    def visible(self, window: int) -> Tensor:
        """(B or 1, N, S) bool; window 0 is full attention, else keys nearer than `window` positions."""

    def mask(self, piece: int, *, groups: int, window: int, dtype: torch.dtype) -> Tensor:
        """(B or 1, 1, groups*N, S) additive mask of a piece, query heads folded into the length axis."""
        key = (piece, groups, window, dtype)
        if key not in self._masks:
            if window not in self._seen:
                self._seen[window] = self.visible(window)
            seen = self._seen[window][self.pieces[piece]]
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[key] = bias.repeat(1, groups, 1)[:, None]
        return self._masks[key]

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) of all tokens -> what the model computes with: the same, unless some are left out."""
        return x

    def spread(self, x: Tensor) -> Tensor:
        """The way back, zeros at tokens that were left out."""
        return x


class Packed(Plan):
    """Documents side by side in each row, no attention across them.

    segments: (B, T) int64, each document in one piece, 0 padding (which sees itself only, so that no row of the softmax is
    empty).
    positions: (B, T) int64, restarting in each document.
    """

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.segments, self.positions = segments, positions
        if segments.device.type == "cpu":  # elsewhere another call costs more than what nobody sees
            self.pieces = _documents(segments)

    def visible(self, window: int) -> Tensor:
        distance = self.positions[:, :, None] - self.positions[:, None, :]
        seen = (self.segments[:, :, None] == self.segments[:, None, :]) & (distance >= 0)
        seen &= (self.segments > 0)[:, :, None] | (distance == 0)
        if window:
            seen &= distance < window
        return seen


class Decode(Plan):
    """N new tokens in each of rows 0..B-1, at slots length..length+N-1, seeing the row's past and their ancestors.

    lengths: (B,) int64; depths: (B, N) int64; ancestors: (B, N, N) bool; `span` slots are read. To read only the last M
    of N nodes, the others having been read before, pass their rows of `ancestors`, (B, M, N), and all depths.

    read: (B, N) bool, of all nodes; with it the tokens it marks are laid side by side, (1, R), wherever their number
    decides what a forward costs, and by rows again where they attend.
    """

    def __init__(
        self, lengths: Tensor, depths: Tensor, ancestors: Tensor, *, span: int, read: Tensor | None = None
    ) -> None:
        super().__init__()
        self.lengths, self.depths, self.ancestors, self.span = lengths, depths, ancestors, span
        self._kept: Tensor | None = None  # (R,)
        is_cpu = lengths.device.type == "cpu"  # elsewhere another call costs more than the filling
        if is_cpu and len(lengths) > 1:
            self.bound()
        if read is not None:
            read = read[:, -ancestors.shape[1] :]
            self._kept = read.flatten().nonzero()[:, 0]
            if is_cpu:
                self.pieces = _pieces(read)

    def bound(self) -> None:
        """Let rows read no further than their own nodes: with more than one row, or where `span` may be more than any needs."""
        self.reach = self.lengths + self.depths.shape[1]

    def pack(self, x: Tensor) -> Tensor:
        return x if self._kept is None else x.flatten(0, 1)[self._kept][None]

    def spread(self, x: Tensor) -> Tensor:
        if self._kept is None:
            return x
        batch, count = self.ancestors.shape[:2]
        return (
            x.new_zeros(batch * count, *x.shape[2:]).index_copy_(0, self._kept, x[0]).view(batch, count, *x.shape[2:])
        )

    def visible(self, window: int) -> Tensor:
        batch, count, nodes = self.ancestors.shape
        slots = torch.arange(self.span, device=self.lengths.device)
        past = slots[None, None, :] < self.lengths[:, None, None]  # (B, 1, S)
        if window:
            query = (self.lengths[:, None] + self.depths[:, -count:])[:, :, None]
            past = past & (query - slots < window)
        seen = past.expand(batch, count, self.span).clone()
        tree = self.ancestors
        if window:
            tree = tree & (self.depths[:, -count:, None] - self.depths[:, None, :] < window)
        where = (self.lengths[:, None] + torch.arange(nodes, device=slots.device))[:, None, :].expand_as(tree)
        return seen.scatter_(2, where, tree)


def _documents(segments: Tensor) -> tuple[Piece, ...]:
    """Of documents side by side (B, T): one by one; or everything together, where that has not twice as many scores."""
    batch, count = segments.shape
    apart = list[Piece]()
    for row, numbers in enumerate(segments.tolist()):
        start = 0
        for number, tokens in groupby(numbers):
            end = start + len(list(tokens))
            if number:
                apart.append((slice(row, row + 1), slice(start, end), slice(start, end)))
            start = end
    if 2 * sum((nodes.stop - nodes.start) ** 2 for _, nodes, _ in apart) > batch * count**2:
        return Plan.pieces
    return tuple(apart)


def _pieces(read: Tensor) -> tuple[Piece, ...]:
    """Of nodes that are `read` (B, N) bool: the first of all rows together, then row by row what a few of them read besides;
    or everything together, where that has not twice as many nodes."""
    batch, count = read.shape
    reach: list[int] = (read * torch.arange(1, count + 1)).amax(dim=1).tolist()
    apart = [(slice(row, row + 1), slice(1, end), ALL) for row, end in enumerate(reach) if end > 1]
    if 2 * (batch + sum(nodes.stop - 1 for _, nodes, _ in apart)) > batch * count:
        return Plan.pieces
    return (ALL, slice(1), ALL), *apart


class KVCache:
    """Keys and values of up to `rows` rows of up to `capacity` tokens; buffers appear at a layer's first write.

    What transformers' models ask of a cache, `update` and `get_seq_length`; importing its own base class takes a second.
    """

    def __init__(self, *, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._slots: Tensor | None = None  # flat indices of this forward's tokens
        self._read: tuple[int, int, int] | None = (
            None  # first row, rows and slots handed to attention; None: only the new ones
        )

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in every row; buffers grow by half at least, one layer at a time."""
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, -(-max(length, self.capacity * 3 // 2) // 64) * 64
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                heads, _, width = buffer.shape
                with torch.inference_mode(False), torch.no_grad():
                    grown = buffer.new_zeros(heads, self.rows, self.capacity, width)
                    grown[:, :, :old] = buffer.view(heads, self.rows, old, width)
                    buffers[layer] = grown.flatten(1, 2)

    def write_at(self, slots: Tensor, *, read: tuple[int, int, int] | None) -> None:
        """Aim the next forward: `slots` (B*N,) flat indices; `read` (first row, rows, slots) or None for no past."""
        self._slots, self._read = slots, read

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (B, H, N, d) keys and values and return those that attention reads, (B, H, S, d) views."""
        assert self._slots is not None, "write_at must be called before a forward through the cache"
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        for buffer, new in ((keys, key_states), (values, value_states)):
            buffer.index_copy_(1, self._slots, new.transpose(0, 1).flatten(1, 2))  # (H, B*N, d)
        if self._read is None:
            return key_states, value_states
        return self._view(keys), self._view(values)

    def commit(self, slots: Tensor, targets: Tensor) -> None:
        """Move accepted nodes to their place: flat indices `slots` (M,) are copied to `targets` (M,) in every layer."""
        for buffer in (*self.keys, *self.values):
            buffer.index_copy_(1, targets, buffer.index_select(1, slots))

    def move(self, source: int, target: int, *, length: int) -> None:
        """Overwrite row `target` with the first `length` slots of row `source`."""
        for buffer in (*self.keys, *self.values):
            rows = buffer.view(buffer.shape[0], self.rows, self.capacity, -1)
            rows[:, target, :length] = rows[:, source, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are given explicitly, never derived from the cache."""
        return 0

    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self.keys, *self.values))

    def _allocate(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):  # so that they may be written to inside of it and outside
            return like.new_zeros(like.shape[1], self.rows * self.capacity, like.shape[3])

    def _view(self, buffer: Tensor) -> Tensor:
        assert self._read is not None
        first, rows, span = self._read
        heads, _, width = buffer.shape
        return buffer.view(heads, self.rows, self.capacity, width)[:, first : first + rows, :span].transpose(0, 1)
