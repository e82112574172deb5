"""Was this text the target's own? Replays an answer teacher-forced and looks at the first token that was not its choice.

In fp32 the verified loop repeats plain decoding token for token. In bf16 a forward over 1 and over 32 tokens may round
differently, so two tokens that are nearly tied can swap; that is a property of the precision, not of the loop. The
audit tells the two apart. A *near-tie* is a difference that rounding explains: were the emitted token's logit higher
and the choice's lower by half the tolerance each, the target would have chosen the emitted one. Anything else is *wrong*.

The tolerance is measured on the answer itself. It is read twice, whole, and in blocks through a cache as the decoder
reads it; the lead of the best token over the second best changes between the two, and twice the largest change counts,
or FLOOR_ULPS where that is more. Sampled text is replayed with its seed: noise belongs to positions, so the choice is
known there too.

Letters: T answer tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .penalties import TokenCounts, penalise
from .sampling import Sampling, SamplingParams
from .target import Target
from .tree import TokenTree

FLOOR_ULPS = 2
"""Units in the last place of the logits' dtype, at the size of the largest logit: never is less than this a difference."""
BLOCK = 256
"""Positions whose logits are held at a time."""
READ_WIDTH = 8
"""Tokens read together in the second reading."""
PROMPT_BUDGET = 2048
"""Prompt tokens read together in the second reading."""

Judgement = Literal["exact", "near-tie", "wrong"]


@dataclass(frozen=True)
class Audit:
    """The finding for one answer."""

    verdict: Judgement
    position: int | None = None
    """Index into the answer of the first wrong token; without one, of the first near-tie; None if all are the choice. It is
    the answer's length where the answer stops and the target would go on."""
    emitted: int | None = None
    """The token there; None if the answer stops there."""
    choice: int | None = None
    """The target's choice there; None if nothing may follow there (the answer goes on after its end)."""
    gap: float | None = None
    """By how much the choice beats the emitted token, in logits (noise included when sampling); None if the emitted token
    could not have been chosen by any margin, being outside top-k or top-p, or if one of the two is missing."""
    top2: float | None = None
    """The gap between the target's two best logits there."""
    tolerance: float | None = None
    """The gap up to which this precision explains a difference."""
    end_checked: bool = True
    """Whether the answer's end was judged too; False if nothing says why it ends without an EOS."""


@torch.inference_mode()
def audit(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    finish: str = "",
    max_new_tokens: int | None = None,
) -> Audit:
    """Replay `answer` after `prompt`.

    sampling: the settings it was made with (greedy if None). finish: why it ended, as in `Output.finish`; "" if unknown.
    max_new_tokens: its limit, if known. An answer that ends without an EOS though nothing stopped it (`eos` with the EOS
    taken off, or shorter than its limit) must be followed by one; one that goes on after an EOS or past its limit is wrong.
    Raises ValueError if the ids are not the target's or do not fit its context.
    """
    _check(target, prompt, answer)
    ends = _must_end(target, answer, finish, max_new_tokens)
    limit = _last_allowed(target, answer, max_new_tokens)
    replay = _Replay(target, prompt, answer, sampling or SamplingParams(), judge_end=ends is True)
    finding = replay.finding(limit)
    if limit < len(answer) and finding.verdict != "wrong":
        return Audit("wrong", limit, emitted=answer[limit])
    if ends is None:
        return replace(finding, end_checked=False)
    return finding


def choices(
    target: Target, prompt: Sequence[int], answer: Sequence[int], *, sampling: SamplingParams | None = None
) -> list[int]:
    """The target's own choice at every position of an answer, each after the answer's tokens before it."""
    _check(target, prompt, answer)
    with torch.inference_mode():
        return _Replay(target, prompt, answer, sampling or SamplingParams(), judge_end=False).choice.tolist()


def _check(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> None:
    if not prompt:
        raise ValueError("there is no prompt: an audit replays an answer after what it answered. Give its token ids.")
    strange = [token for token in (*prompt, *answer) if not 0 <= token < target.vocab_size]
    if strange:
        raise ValueError(
            f"token id {strange[0]} is none of the target's {target.vocab_size}; was it made by another target?"
        )
    target.check_room(prompt, len(answer))


def _must_end(target: Target, answer: Sequence[int], finish: str, limit: int | None) -> bool | None:
    """Whether the target has to choose an EOS after the answer; None if that cannot be known."""
    if answer and answer[-1] in target.eos_ids:
        return False
    if finish == "length" or (not finish and limit is not None):
        return limit is not None and len(answer) < limit
    return True if finish == "eos" else None


def _last_allowed(target: Target, answer: Sequence[int], limit: int | None) -> int:
    """How many tokens the answer may have: up to its first EOS and its limit."""
    ends = [index + 1 for index, token in enumerate(answer) if token in target.eos_ids]
    return min([len(answer), *ends[:1], *([] if limit is None else [limit])])


class _Replay:
    """One answer, and what the target makes of every position of it. Row i scores answer token i."""

    def __init__(
        self, target: Target, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, *, judge_end: bool
    ) -> None:
        self.target, self.prompt, self.answer = target, prompt, answer
        self.sampling = Sampling([params], target.device)
        self.hidden = target.replay(prompt, answer)  # (T+1, D)
        self.rows = torch.arange(len(answer) + judge_end, device=target.device)
        choices = [self.sampling.choose(logits, self._positions(part))[0] for part, logits in self._blocks(self.hidden)]
        self.choice = torch.cat(choices) if choices else self.rows
        emitted = [*answer, *([self._best_end()] if judge_end else [])]
        self.emitted = torch.tensor(emitted, dtype=torch.int64, device=target.device)

    def finding(self, limit: int) -> Audit:
        """The verdict on the first `limit` tokens, and on the end where it is judged."""
        differs = self.rows[self.choice != self.emitted]
        differs = differs[(differs < limit) | (differs == len(self.answer))]
        if len(differs) == 0:
            return Audit("exact")
        tolerance = self._tolerances(differs)
        wrong = (~self._would_choose(differs, tolerance)).nonzero()[:, 0]
        first = int(wrong[0]) if len(wrong) else 0
        place = int(differs[first])
        logits = self._logits(self.hidden, differs[first : first + 1])[0, 0].float()
        best, second = logits.topk(2).values.tolist()
        return Audit(
            "wrong" if len(wrong) else "near-tie",
            place,
            emitted=self.answer[place] if place < len(self.answer) else None,
            choice=int(self.choice[place]),
            gap=self._gap(logits, place),
            top2=best - second,
            tolerance=float(tolerance[first]),
        )

    def _best_end(self) -> int:
        """The EOS that stands for the answer's end: the target's choice there if it is one, else the likeliest."""
        choice, ends = int(self.choice[-1]), self.target.eos_ids
        if choice in ends or not ends:
            return choice
        logits = self._logits(self.hidden, self.rows[-1:])[0, 0]
        return max(ends, key=lambda token: float(logits[token]))

    def _would_choose(self, rows: Tensor, tolerance: Tensor) -> Tensor:
        """(R,) bool: would the target choose the emitted tokens at these rows, were its logits off by the tolerance?"""
        found = []
        for part, margin in zip(rows.split(BLOCK), tolerance.split(BLOCK)):
            logits, half = self._logits(self.hidden, part).float(), margin[:, None] * 0.5001
            for tokens, shift in ((self.emitted[part], half), (self.choice[part], -half)):
                logits[0].scatter_add_(1, tokens[:, None], shift)
            found.append(self.sampling.choose(logits, self._positions(part))[0] == self.emitted[part])
        return torch.cat(found)

    def _tolerances(self, rows: Tensor) -> Tensor:
        """(R,) float32: what rounding can do to the gap between two logits at these rows."""
        again = _as_decoded(self.target, self.prompt, self.answer)
        largest, change = [], torch.zeros((), device=rows.device)
        for (_, one), (_, two) in zip(self._blocks(self.hidden), self._blocks(again)):
            best = one[0].topk(2).indices
            leads = [logits[0].gather(1, best).float().diff(dim=1) for logits in (one, two)]
            change = torch.maximum(change, (leads[0] - leads[1]).abs().max())
            largest.append(one[0].float().abs().amax(dim=1))
        exponent = torch.cat(largest)[rows].clamp(min=1.0).log2().floor()
        floor = FLOOR_ULPS * torch.finfo(self.target.dtype).eps * 2.0**exponent
        return floor.clamp(min=2 * float(change))

    def _gap(self, logits: Tensor, place: int) -> float | None:
        """The lead of the choice over the emitted token in logits (V,) float32, noise included."""
        scores, scale = logits, 1.0
        if not self.sampling.is_greedy:
            scores = self.sampling.scores(logits[None, None], self._positions(self.rows[place : place + 1]))[0, 0]
            scale = self.sampling.params[0].temperature
        ahead, behind = scores[self.choice[place]].item(), scores[self.emitted[place]].item()
        return (ahead - behind) * scale if math.isfinite(behind) else None

    def _blocks(self, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows (R,), their logits (1, R, V)), in order."""
        for part in self.rows.split(BLOCK):
            if len(part):
                yield part, self._logits(hidden, part)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(1, R, V), after penalties, each row's for the answer before it."""
        logits = self.target.logits(hidden[rows])
        if not self.sampling.has_penalties:
            return logits[None]
        texts, written = [], self.target.written(self.prompt)
        for row in rows.tolist():
            texts.append(TokenCounts(written))
            for token in self.answer[:row]:
                texts[-1].add(token)
        settings = Sampling(self.sampling.params * len(texts), logits.device)
        return penalise(logits[:, None], TokenTree.root(torch.zeros_like(rows)), settings, texts).transpose(0, 1)

    def _positions(self, rows: Tensor) -> Tensor:
        """(1, R): absolute positions of the tokens that these rows score."""
        return rows[None] + len(self.prompt)


def _as_decoded(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """(T+1, D): the same hidden states as `Target.replay`, read through a cache, READ_WIDTH tokens of the answer at a time."""
    cache = target.new_cache(rows=1, capacity=len(prompt) + len(answer) + READ_WIDTH)
    tokens = torch.tensor(list(prompt), device=target.device)
    parts = [target.read_prompts([tokens], cache, first_row=0, budget=PROMPT_BUDGET).hidden[0, -1:]]
    text, start = torch.tensor([list(answer)], dtype=torch.int64, device=target.device), len(prompt)
    for chunk in text.split(READ_WIDTH, dim=1):
        if chunk.shape[1]:
            tree, read = TokenTree.chain(chunk[:, 0], chunk[:, 1:]), torch.tensor([start], device=target.device)
            parts.append(target.verify(tree, read, cache, longest=start).hidden[0])
            start += chunk.shape[1]
    return torch.cat(parts)
