"""Answers that the drafter writes itself, for training on what it would say (on-policy distillation).

GKD (Agarwal et al. 2023, arXiv 2306.13649) and DistillSpec (Zhou et al. 2023, arXiv 2310.08461): a share of the batch
has its answers sampled from the draft model, the target reads them, and the divergence is taken there. No gradient flows
through the sampling. Answers keep their lengths, so that what counts does not change: tokens that end an answer stay
where they are, and none is sampled elsewhere.

Letters: B packed rows, T positions, N documents, L the longest one's tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..infer.cache import KVCache
from ..infer.target import Target
from ..infer.tree import TokenTree
from .base import TeacherBatch

PREFILL_TOKENS = 2048
"""Prompt tokens read in one forward (their attention mask is that square)."""


@dataclass(frozen=True)
class _Documents:
    """The documents of some packed rows, side by side."""

    places: list[tuple[int, int]]
    """(row, first position) of each."""
    text: Tensor
    """(N, L) int64, padded with 0."""
    written: Tensor
    """(N, L) bool: tokens that are sampled."""
    lengths: list[int]
    """Tokens of each."""
    starts: Tensor
    """(N,) int64: the first sampled token of each."""


@torch.no_grad()
def resample(
    teacher: TeacherBatch,
    rows: Tensor,
    *,
    model: Target,
    logits: Callable[[Tensor], Tensor],
    target: Target,
    temperature: float,
) -> TeacherBatch:
    """The batch with the answers in `rows` (B,) bool written by `model`, and what the target computes on them.

    logits: the model's, over the target's vocabulary, (..., D) -> (..., V). Draws come from torch's own generator.
    """
    found = _split(teacher, rows, target)
    if found is None:
        return teacher
    _write(found, model=model, logits=logits, stops=list(target.eos_ids), temperature=temperature)
    tokens, hidden = teacher.tokens.clone(), teacher.hidden.clone()
    for (row, first), text, length in zip(found.places, found.text, found.lengths):
        tokens[row, first : first + length] = text[:length]
    reading = target.read_packed(tokens[rows], teacher.positions[rows], teacher.segments[rows])
    hidden[rows] = reading.hidden.to(hidden.dtype)
    return replace(teacher, tokens=tokens, hidden=hidden)


def _split(teacher: TeacherBatch, rows: Tensor, target: Target) -> _Documents | None:
    """Documents with something to write, or None if there are none. A document's first token is never written."""
    stops = torch.tensor(target.eos_ids, dtype=torch.int64, device=teacher.tokens.device)
    written = teacher.supervised & ~torch.isin(teacher.tokens, stops) & (teacher.positions > 0)
    places, texts, marks = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
    for row in rows.nonzero()[:, 0].tolist():
        for segment in range(1, int(teacher.segments[row].max()) + 1):
            inside = (teacher.segments[row] == segment).nonzero()[:, 0]
            if bool(written[row, inside].any()):
                places.append((row, int(inside[0])))
                texts.append(teacher.tokens[row, inside])
                marks.append(written[row, inside])
    if not places:
        return None
    padded = pad_sequence(marks, batch_first=True)
    starts = padded.int().argmax(dim=1)  # the first of equal values
    return _Documents(places, pad_sequence(texts, batch_first=True), padded, [len(text) for text in texts], starts)


def _write(
    found: _Documents, *, model: Target, logits: Callable[[Tensor], Tensor], stops: list[int], temperature: float
) -> None:
    """Sample all documents in step, one token per forward, into `found.text`."""
    text, at = found.text, found.starts.clone()
    longest = max(length - start for length, start in zip(found.lengths, found.starts.tolist()))
    cache = KVCache(rows=len(text), capacity=text.shape[1] + 1)
    documents, last, highest = torch.arange(len(text), device=text.device), text.shape[1] - 1, model.vocab_size - 1
    hidden = _read_prompts(found, model, cache)  # (N, D)
    for step in range(longest):
        scores = logits(hidden).float()
        scores[:, stops] = -torch.inf
        drawn = torch.multinomial((scores / temperature).softmax(dim=-1), 1)[:, 0]
        token = torch.where(found.written[documents, at], drawn, text[documents, at])
        text[documents, at] = token
        if step + 1 < longest:
            hidden = model.verify(TokenTree.root(token.clamp(max=highest)), at, cache, longest=int(at.max())).hidden[
                :, 0
            ]
            at = (at + 1).clamp(max=last)  # a document that has ended reads padding, and nobody reads it


def _read_prompts(found: _Documents, model: Target, cache: KVCache) -> Tensor:
    """Read each document up to its first sampled token, several in one forward; the states at the last ones, (N, D)."""
    prompts = [text[:start].clamp(max=model.vocab_size - 1) for text, start in zip(found.text, found.starts.tolist())]
    states, first = [], 0
    while first < len(prompts):
        end = first + 1
        while end < len(prompts) and sum(map(len, prompts[first : end + 1])) <= PREFILL_TOKENS:
            end += 1
        hidden = model.prefill(prompts[first:end], cache, first_row=first).hidden[0]
        states.append(hidden[found.starts[first:end].cumsum(0) - 1])
        first = end
    return torch.cat(states)
