"""The draft of one round as a tree of tokens, and everything that follows from its parents.

Letters: B rows, N nodes, V vocabulary.

Node 0 is the root: the *anchor*, the last emitted token, which the target has not read yet. Every other node is a
proposed token whose parent stands before it in the arrays. A chain is a tree without branches. A node of depth d sits
at absolute position `length + d`, where `length` counts the tokens that the target has read; its logits score the
token at position `length + d + 1`.

Worked example, `length = 10`, anchor "the", draft "cat sat" with the alternative "dog":

    node      0     1     2     3
    token     the   cat   dog   sat
    parent    -1    0     0     1
    depth     0     1     1     2
    position  10    11    11    12        logits of node 1 score the token at position 12
    path of 3: [0, 1, 3]                  node 3 sees nodes 0, 1 and itself, never node 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens of every row of a batch.

    tokens: (B, N) int64, column 0 the anchors.
    parents: (B, N) int64, -1 at the root, parents before children.
    valid: (B, N) bool; an invalid node can never be accepted: it is padding (no token id marks padding), or it is read
        only for what the target makes of it (`Observation.logits`).
    probs: (B, N, V) float32 or None; for stochastic drafts `probs[b, j]` is the very row that node j's token was drawn
        from (for children drawn without replacement, the row before its earlier siblings were removed).
    confidence: (B, N) float32 or None; the drafter's own estimate of P(node accepted | its parent was), 1 at the root. It
        may depend on the tokens above the node, never on the node's own where that was drawn (see schedule.py).
    read: (B, N) bool or None; the nodes that the target reads, all if None. A node that it does not read is invalid and
        costs nothing; its hidden state and logits are zeros.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    read: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        assert len(shape) == 2, f"tree tokens are (B, N), got {tuple(shape)}"
        assert self.parents.shape == shape, f"parents {tuple(self.parents.shape)} do not match tokens {tuple(shape)}"
        assert self.valid.shape == shape, f"valid {tuple(self.valid.shape)} does not match tokens {tuple(shape)}"

    @classmethod
    def root(cls, anchors: Tensor) -> TokenTree:
        """A draft of nothing: the anchors (B,) alone, which makes a round of plain decoding."""
        return cls.chain(anchors, anchors.new_zeros(len(anchors), 0))

    @classmethod
    def chain(
        cls,
        anchors: Tensor,
        draft: Tensor,
        *,
        valid: Tensor | None = None,
        probs: Tensor | None = None,
        confidence: Tensor | None = None,
    ) -> TokenTree:
        """A chain: anchors (B,) followed by draft (B, K); `valid` (B, K) bool marks real tokens, all of them if None.

        `probs` (B, K, V) are the rows the tokens were drawn from; the root gets a row of zeros. `confidence` (B, K) is as
        above, without the root's.
        """
        batch, length = draft.shape
        tokens = torch.cat([anchors[:, None], draft], dim=1)
        parents = torch.arange(-1, length, device=tokens.device).expand(batch, length + 1)
        if valid is None:
            valid = torch.ones_like(draft, dtype=torch.bool)
        valid = torch.cat([valid.new_ones(batch, 1), valid], dim=1)
        if probs is not None:
            probs = torch.cat([probs.new_zeros(batch, 1, probs.shape[-1]), probs], dim=1)
        if confidence is not None:
            confidence = torch.cat([confidence.new_ones(batch, 1), confidence], dim=1)
        return cls(tokens, parents, valid, probs, confidence)

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def depths(self) -> Tensor:
        """(B, N) int64: edges between each node and the root."""
        return self.ancestors.sum(dim=-1) - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """(B, N, N) bool: `[b, i, j]` is True where node j is i or an ancestor of i. The tree's attention mask."""
        batch, count = self.tokens.shape
        if count == 1:
            return torch.ones(batch, 1, 1, dtype=torch.bool, device=self.tokens.device)
        steps = torch.zeros(batch, count, count, device=self.tokens.device)
        steps.scatter_(2, self.parents.clamp(min=0)[:, :, None], 1.0)  # (B, N, N): one step towards the root
        reach = (steps + torch.eye(count, device=steps.device)).clamp(max=1)
        for _ in range((count - 1).bit_length()):  # squaring doubles the number of steps covered
            reach = torch.bmm(reach, reach).clamp(max=1)
        return reach > 0


@dataclass(frozen=True)
class Topology:
    """A fixed tree shape shared by all rows and rounds: rank paths compiled once.

    A path such as (0, 2) means: the best candidate of step 0, then candidate number 2 of step 1 below it.
    Paths are prefix-closed and exclude the root.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        orphans = [path for path in self.paths if not path or path[:-1] not in known]
        if orphans or len(known) != len(self.paths) + 1:
            raise ValueError(
                f"tree paths must be non-empty, distinct and contain each path's prefix; got {self.paths!r}, "
                f"fault at {orphans[:3] or 'a repeated path'}. Add the missing prefixes."
            )
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, length: int) -> Topology:
        """The tree of the best candidate at each of `length` steps."""
        return cls(tuple((0,) * k for k in range(1, length + 1)))

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def width(self) -> int:
        """Candidates needed per step: one more than the largest rank in use."""
        return max((max(path) for path in self.paths), default=-1) + 1

    def fill(self, anchors: Tensor, candidates: Tensor, log_probs: Tensor | None = None) -> TokenTree:
        """The tree with tokens: candidates (B, K, R) int64 hold each step's R best tokens, the same for every parent, and
        log_probs (B, K, R) the draft's log-probabilities of them, of which confidences are made."""
        parents, steps, ranks = _compiled(self.paths, str(anchors.device))
        batch = len(anchors)
        tokens = torch.cat([anchors[:, None], candidates[:, steps, ranks]], dim=1)
        valid, confidence = torch.ones_like(tokens, dtype=torch.bool), None
        if log_probs is not None:
            found = log_probs[:, steps, ranks].float().exp().clamp(max=1)
            confidence = torch.cat([found.new_ones(batch, 1), found], dim=1)
        return TokenTree(tokens, parents.expand(batch, -1), valid, confidence=confidence)


@lru_cache(maxsize=64)
def _compiled(paths: tuple[tuple[int, ...], ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parents (N,), and per non-root node its step (N-1,) and rank (N-1,), all int64."""
    index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    with torch.inference_mode(False):  # they are kept, and may next be asked for outside inference
        parents = torch.tensor([-1] + [index[path[:-1]] for path in paths], device=device)
        steps = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64, device=device)
        ranks = torch.tensor([path[-1] for path in paths], dtype=torch.int64, device=device)
    return parents, steps, ranks
