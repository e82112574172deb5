"""Penalties for what has been written, at every node of a draft with that node's own prefix.

The prefix of a node is the prompt, the output up to the anchor, and the drafted tokens from the anchor down to the node,
its own included; a drafted token counts as output. At each node, with n the times a token was written there:

    logit > 0 ? logit / repetition : logit * repetition      tokens of prompt and output (Keskar et al. 2019; transformers, vLLM)
    logit - frequency * n - presence * (n > 0)               tokens of the output (vLLM, the OpenAI interface)

in this order, in float32, before temperature. So the target's distribution is that of plain decoding with the same
penalties, whatever was drafted, and every verifier judges by it.

Worked example: prompt "a b", output "b", draft "c b" below the anchor "b" (nodes 0, 1, 2). At node 2 the text reads
"a b b c b": seen are a, b, c, and n(b) = 2, n(c) = 1, n(a) = 0. At node 0 it reads "a b b": n(b) = 1, c is not seen.

Letters: B rows, N nodes, V vocabulary, L distinct tokens of a text, M = L + N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import Sampling
from .tree import TokenTree


class TokenCounts:
    """The distinct tokens of a prompt and what was written after it, and how often each was written."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.counts: dict[int, int] = dict.fromkeys(prompt, 0)

    def add(self, token: int) -> None:
        """One more token of output."""
        self.counts[token] = self.counts.get(token, 0) + 1


def penalise(logits: Tensor, tree: TokenTree, sampling: Sampling, texts: Sequence[TokenCounts | None]) -> Tensor:
    """The target's logits (B, N, V) after each row's penalties, float32; as they are where no row has any.

    texts: of each row with penalties the tokens up to and including its root; None for the others.
    """
    if not sampling.has_penalties:
        return logits
    ids, written, real = _table(texts, logits.device)  # (B, L) each
    same = (tree.tokens[:, :, None] == ids[:, None, :]) & real[:, None, :]  # (B, N, L): a node's token in the text
    ids = torch.cat([ids, tree.tokens], dim=1)  # (B, M); a token that occurs twice gets the same value twice
    written = torch.cat([written, (same * written[:, None]).sum(dim=-1)], dim=1)
    seen = torch.cat([torch.ones_like(real), same.any(dim=-1)], dim=1)
    drafted = (tree.tokens[:, 1:, None] == ids[:, None, :]).float()  # (B, N-1, M); the root is in the text already
    on_path = torch.bmm(tree.ancestors[:, :, 1:].float(), drafted)  # (B, N, M)
    count = written[:, None] + on_path
    repetition, presence, frequency = _strengths(sampling, logits.device)  # (B, 1, 1) each
    scores, where = logits.to(torch.float32, copy=True), ids[:, None].expand_as(count)
    values = scores.gather(2, where)
    repeated = torch.where(values < 0, values * repetition, values / repetition)
    values = torch.where(seen[:, None] | (on_path > 0), repeated, values) - frequency * count - presence * (count > 0)
    return scores.scatter_(2, where, values)


def _table(texts: Sequence[TokenCounts | None], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct tokens (B, L) int64, how often each was written (B, L) float32, and which columns are real (B, L) bool.

    Padding repeats a row's first token and its count, so that it gets that token's value. What is said of a row without
    penalties does not matter: its strengths change nothing.
    """
    counts = [{0: 0} if text is None else text.counts for text in texts]
    longest = max(map(len, counts))
    ids = [[*row, *[next(iter(row))] * (longest - len(row))] for row in counts]
    written = [[*row.values(), *[next(iter(row.values()))] * (longest - len(row))] for row in counts]
    real = torch.arange(longest) < torch.tensor([len(row) for row in counts])[:, None]
    return torch.tensor(ids, device=device), torch.tensor(written, device=device).float(), real.to(device)


def _strengths(sampling: Sampling, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    table = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in sampling.params]
    repetition, presence, frequency = torch.tensor(table, dtype=torch.float32, device=device).unbind(dim=1)
    return repetition[:, None, None], presence[:, None, None], frequency[:, None, None]
