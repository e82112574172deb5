"""Lookahead decoding: the target writes n-grams ahead of itself and proposes them later. No weights, no files.

Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding" (window W, n-gram N, guesses
G). Every round's forward holds two things beside the anchor:

- the *window*: N-1 levels of tokens, level 0 being W-1 guessed tokens after the anchor, level l the target's tokens of
  l rounds ago. With B_0 the anchor and B_1.. level 0, item j of level l sees B_0..B_j and item j of levels 1..l. That is
  a tree: B is a chain, and from B_j hangs the branch of items j of levels 1, 2, ... Its nodes are only read, never
  accepted (`valid` is False). The target's tokens after the last level are the new last level (a Jacobi step), and with
  levels 1.. of the same j they make the N-gram B_j, ..., which goes into the pool;
- the *guesses*: the newest G pooled n-grams that start with the anchor, merged into a prefix tree and verified.

Worked example, W = 3, N = 4 (nodes by token; positions count from the anchor's):

    anchor B0 -- B1 -- B2          positions 0 1 2       level 0 is B1 B2
      |           |     |
      x0          x1    x2         positions 1 2 3       level 1
      |           |     |
      y0          y1    y2         positions 2 3 4       level 2; the target's tokens after them, z0 z1 z2, give
                                                         the 4-grams B0 x0 y0 z0, B1 x1 y1 z1, B2 x2 y2 z2
    next window: level 0 = x1 x2, level 1 = y0 y1 y2, level 2 = z0 z1 z2

Unlike the original, n-grams of the prompt and of the emitted text are pooled always, equal prefixes are verified once, a
guess that matches whole keeps its bonus token (N tokens per round instead of N-1), and any sampling is exact: guesses
are a function of the past, so sample-match verifies them.

Letters: B rows, N n-gram size, W window, G guesses per round, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .drafter import Observation
from .sampling import Sampling
from .tree import TokenTree

Gram = tuple[int, ...]


class Pool:
    """For each token the newest `size` runs of tokens that followed it."""

    def __init__(self, *, size: int) -> None:
        self._size = size
        self._runs: dict[int, dict[Gram, None]] = {}  # oldest first

    def add(self, token: int, run: Gram) -> None:
        runs = self._runs.setdefault(token, {})
        runs.pop(run, None)
        runs[run] = None
        if len(runs) > self._size:
            del runs[next(iter(runs))]

    def tree(self, token: int) -> tuple[list[int], list[int]]:
        """The runs after `token` as a prefix tree, newest first: tokens and parents of nodes 1.., node 0 being `token`."""
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for run in reversed(self._runs.get(token, {})):
            at = 0
            for next_token in run:
                node = known.get((at, next_token))
                if node is None:
                    tokens.append(next_token)
                    parents.append(at)
                    node = known[at, next_token] = len(tokens)
                at = node
        return tokens, parents


class Row:
    """One request's window and pool."""

    def __init__(self, text: Sequence[int], *, window: int, ngram: int, guesses: int) -> None:
        self.pool = Pool(size=guesses)
        self.ngram = ngram
        self.tail: list[int] = []
        self.rounds = 0
        draw = random.Random(len(text))
        widths = [window - 1] + [window] * (ngram - 2)
        self.levels = [draw.choices(text, k=width) for width in widths]  # as good as any tokens, and of this text
        self.extend(text)

    def extend(self, text: Sequence[int]) -> None:
        """Pool the n-grams that `text`, appended to what came before, completes."""
        whole = [*self.tail, *text]
        for start in range(len(whole) - self.ngram + 1):
            self.pool.add(whole[start], tuple(whole[start + 1 : start + self.ngram]))
        self.tail = whole[max(0, len(whole) - self.ngram + 1) :]

    def advance(self, anchor: int, new: list[int]) -> None:
        """Pool the window's n-grams and shift it by one level and one position.

        new: the target's W tokens after the last level. Random tokens are pushed out of the levels by N-2 rounds; until
        then there is nothing to pool.
        """
        levels = [*self.levels[1:], new]
        if self.rounds >= self.ngram - 2:
            for token, *run in zip([anchor, *self.levels[0]], *levels):
                self.pool.add(token, tuple(run))
        self.levels = [levels[0][1:], *levels[1:]]
        self.rounds += 1


class Lookahead:
    """Drafts from the target's own Jacobi trajectories. Deterministic: exact under sample-match, greedy and sampled.

    window, ngram, guesses: W, N, G. The paper takes (15, 5, 15) for 7B targets on an A100, whose arithmetic is idle;
    the authors' code suggests the defaults here. A round reads at most (W + G)(N - 1) tokens.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, *, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        if window < 1 or ngram < 3 or guesses < 1:
            raise ValueError(
                f"lookahead needs window >= 1, ngram >= 3 and guesses >= 1, got {window}, {ngram}, {guesses}."
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self._parents = _window_parents(window, ngram)

    @property
    def depth(self) -> int:
        return self.ngram - 1

    def start(self, *, rows: int, capacity: int) -> list[Row | None]:
        return [None] * rows

    def move(self, state: list[Row | None], source: int, target: int) -> None:
        state[target] = state[source]

    def observe(self, state: list[Row | None], seen: Observation) -> None:
        texts = seen.texts()
        if seen.logits is None:
            state[seen.rows] = [Row(text, window=self.window, ngram=self.ngram, guesses=self.guesses) for text in texts]
            return
        if seen.logits.shape[1] <= len(
            self._parents
        ):  # the round was a plain one (standby.py): the window was not read
            for row, text in zip(state[seen.rows], texts):
                assert row is not None, "a row was observed before its prompt"
                row.extend(text[1:])
            return
        last_level = seen.logits[:, -self.window :].max(dim=-1).indices.tolist()
        for row, text, new in zip(state[seen.rows], texts, last_level):
            assert row is not None, "a row was observed before its prompt"
            row.advance(text[0], new)
            row.extend(text[1:])

    def draft(self, state: list[Row | None], anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        """Node 0, the guesses (padded to the row that has most), and the window, whose last level is last."""
        rows = [row for row in state[: len(anchors)] if row is not None]
        guesses = [row.pool.tree(anchor) for row, anchor in zip(rows, anchors.tolist())]
        most = max(len(tokens) for tokens, _ in guesses)
        tokens = [
            [*guess, *[0] * (most - len(guess)), *(token for level in row.levels for token in level)]
            for row, (guess, _) in zip(rows, guesses)
        ]
        window = [0 if parent < 0 else 1 + most + parent for parent in self._parents]
        parents = [[*above, *[0] * (most - len(above)), *window] for _, above in guesses]
        table = torch.tensor([tokens, parents], device=anchors.device)  # (2, B, nodes)
        counts = torch.tensor([len(guess) for guess, _ in guesses], device=anchors.device)
        valid = torch.arange(table.shape[2], device=anchors.device) < counts[:, None]
        return TokenTree(
            torch.cat([anchors[:, None], table[0]], dim=1),
            torch.cat([torch.full_like(anchors, -1)[:, None], table[1]], dim=1),
            torch.cat([torch.ones_like(valid[:, :1]), valid], dim=1),
        )


def _window_parents(window: int, ngram: int) -> list[int]:
    """Parents of the window's nodes, level by level, as indices into the window; -1 is the anchor."""
    base = [-1, *range(window - 1)]  # the nodes of B_0..B_{W-1}
    parents = base[:-1]
    above = base
    for level in range(1, ngram - 1):
        parents += above
        start = window - 1 + (level - 1) * window
        above = list(range(start, start + window))
    return parents
