"""The verified loop: draft, target forward, verify, commit, emit, for a batch whose rows join, advance and leave freely.

It knows none of the methods: a drafter is the protocol of `drafter.py`, a verifier a pure function. Plain decoding is
the same loop with a drafter that proposes nothing.

Letters: B active rows (always rows 0..B-1 of every buffer), N nodes, A kept nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache
from .clock import Clock
from .drafter import Drafter, NoDraft, Observation
from .request import Output, Progress, Request
from .sampling import Sampling
from .target import Reading, Target
from .tree import TokenTree
from .verify import Verdict, Verifier, sample_match, score

PREFILL_TOKENS = 2048
"""Most prompt tokens read in one forward (their attention mask is that square)."""


@dataclass
class _Row:
    request: Request
    output: Output
    length: int
    """Tokens the target has read."""


class Engine:
    """Continuous batching over one target and one drafter.

    rows: requests decoded at the same time; others wait and join as rows leave, so nothing waits for the longest
    answer. The text of a request does not depend on who shares its batch (fp32).
    """

    def __init__(
        self, target: Target, *, drafter: Drafter | None = None, rows: int = 32, verifier: Verifier = sample_match
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}.")
        self.target, self.verifier, self.max_rows = target, verifier, rows
        self.drafter: Drafter = drafter or NoDraft()
        self.clock = Clock(target.device)
        self.steps = 0
        self.cache = KVCache(rows=rows, capacity=256)
        self.state = self.drafter.start(rows=rows, capacity=256)
        self._queue: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._anchors = torch.zeros(0, dtype=torch.int64, device=target.device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=target.device)
        self._sampling = Sampling([], target.device)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it cannot fit the target's context or names unknown tokens."""
        need = len(request.prompt) + request.max_new_tokens
        if need > self.target.max_length:
            raise ValueError(
                f"request {request.id!r}: {len(request.prompt)} prompt tokens + {request.max_new_tokens} new ones exceed the "
                f"target's context of {self.target.max_length}. Shorten the prompt or lower max_new_tokens."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.target.vocab_size:
            raise ValueError(f"request {request.id!r}: token ids must lie in [0, {self.target.vocab_size}).")
        self._queue.append(request)

    def run(self) -> Iterator[Output]:
        """Decode until nothing is left, yielding each output when it is finished; `add` may be called meanwhile."""
        for progress in self.stream():
            if progress.output.finish:
                yield progress.output

    def stream(self) -> Iterator[Progress]:
        """Decode until nothing is left, yielding what every step added to every request."""
        while self._queue or self._rows:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Let waiting requests join, which emits their first tokens, or else do one round of every active row."""
        progress = self._admit()
        if progress or not self._rows:
            return progress
        self.steps += 1
        with self.clock.time("draft"):
            tree = self.drafter.draft(self.state, self._anchors, self._lengths, self._sampling)
        with self.clock.time("verify"):
            reading = self.target.verify(
                tree, self._lengths, self.cache, longest=max(row.length for row in self._rows), taps=self.drafter.taps
            )
            logits = score(self.target, tree, reading.hidden)
        with self.clock.time("host"):
            verdict = self.verifier(tree, logits, self._lengths, self._sampling)
            counts, width = self._commit(tree, reading, logits, verdict)
            return self._emit(tree, verdict, counts, width)

    def _commit(self, tree: TokenTree, reading: Reading, logits: Tensor, verdict: Verdict) -> tuple[list[int], int]:
        """Keep the accepted rows of the cache, tell the drafter, move the anchors. The round's one host sync is here."""
        counts: list[int] = verdict.count.tolist()
        width = max(counts)
        path = verdict.path[:, :width]
        index = torch.arange(width, device=path.device)
        start = torch.arange(len(counts), device=path.device) * self.cache.capacity + self._lengths
        if not torch.equal(path, index.minimum(verdict.count[:, None] - 1)):
            self.cache.commit((start[:, None] + path).flatten(), (start[:, None] + index).flatten())
        self._observe(tree, reading, logits, verdict, path)
        self._lengths = self._lengths + verdict.count
        self._anchors = verdict.bonus
        for row, count in zip(self._rows, counts):
            row.length += count
        return counts, width

    def _observe(self, tree: TokenTree, reading: Reading, logits: Tensor, verdict: Verdict, path: Tensor) -> None:
        rows = torch.arange(len(path), device=path.device)[:, None]
        features = None if reading.features is None else reading.features[rows, path]
        seen = Observation(
            rows=slice(0, len(path)),
            tokens=tree.tokens.gather(1, path),
            count=verdict.count,
            start=self._lengths,
            hidden=reading.hidden[rows, path],
            features=features,
            anchor=verdict.bonus,
            logits=logits,
        )
        with self.clock.time("draft"):
            self.drafter.observe(self.state, seen)

    def _emit(self, tree: TokenTree, verdict: Verdict, counts: list[int], width: int) -> list[Progress]:
        """Append each row's accepted tokens and bonus to its text, cut at EOS and at the token limit; retire rows."""
        kept = torch.cat([tree.tokens.gather(1, verdict.path[:, 1:width]), verdict.bonus[:, None]], dim=1).tolist()
        drafted: list[int] = (tree.valid.sum(dim=1) - 1).tolist()
        offered: list[int] = torch.where(tree.valid, tree.depths, 0).amax(dim=1).tolist()
        progress = []
        for index, row in enumerate(self._rows):
            accepted = counts[index] - 1
            emitted = self._append(row, [*kept[index][:accepted], kept[index][-1]], accepted)
            accepted = min(accepted, emitted)
            row.output.stats.count_round(
                drafted=drafted[index],
                offered=accepted if emitted <= accepted else offered[index],
                accepted=accepted,
                emitted=emitted,
            )
            progress.append(Progress(row.output, emitted))
        for index in reversed(range(len(self._rows))):
            if self._rows[index].output.finish:
                self._leave(index)
        return progress

    def _append(self, row: _Row, tokens: list[int], accepted: int) -> int:
        """Add tokens, the first `accepted` of them drafted, up to EOS or the limit; returns how many were added."""
        output, limit = row.output, row.request.max_new_tokens
        for count, token in enumerate(tokens):
            output.tokens.append(token)
            output.from_draft.append(count < accepted)
            if token in self.target.eos_ids:
                output.finish = "eos"
            elif len(output.tokens) == limit:
                output.finish = "length"
            if output.finish:
                return count + 1
        return len(tokens)

    def _admit(self) -> list[Progress]:
        """Let waiting requests join once an eighth of the rows is free: their prompts are read in one packed forward."""
        free = self.max_rows - len(self._rows)
        if not self._queue or free < min(max(1, self.max_rows // 8), len(self._queue)):
            return []
        progress: list[Progress] = []
        while self._queue and len(self._rows) < self.max_rows:
            group = [self._queue.popleft()]
            total = len(group[0].prompt)
            while self._queue and len(self._rows) + len(group) < self.max_rows:
                total += len(self._queue[0].prompt)
                if total > PREFILL_TOKENS:
                    break
                group.append(self._queue.popleft())
            progress += self._join(group)
        return progress

    def _join(self, group: list[Request]) -> list[Progress]:
        """Prefill a group of requests into the next free rows and emit each one's first token."""
        with self.clock.time("prefill"):
            device, first_row = self.target.device, len(self._rows)
            prompts = [torch.tensor(list(request.prompt), dtype=torch.int64) for request in group]
            reading = self._prefill(prompts, first_row)
            lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
            sampling = Sampling([request.sampling for request in group], device)
            ends = lengths.cumsum(0) - 1
            logits = self.target.logits(reading.hidden[0, ends])[:, None]  # (R, 1, V)
            anchors = sampling.choose(logits, lengths[:, None])[:, 0]
            for index, prompt in enumerate(prompts):
                part = slice(int(ends[index]) + 1 - len(prompt), int(ends[index]) + 1)
                seen = Observation(
                    rows=slice(first_row + index, first_row + index + 1),
                    tokens=prompt.to(device)[None],
                    count=lengths[index : index + 1],
                    start=torch.zeros_like(lengths[:1]),
                    hidden=reading.hidden[:, part],
                    features=None if reading.features is None else reading.features[:, part],
                    anchor=anchors[index : index + 1],
                )
                self.drafter.observe(self.state, seen)
        self._rows += [_Row(request, Output(request.id), len(request.prompt)) for request in group]
        self._anchors = torch.cat([self._anchors, anchors])
        self._lengths = torch.cat([self._lengths, lengths])
        self._sampling = Sampling([row.request.sampling for row in self._rows], device)
        return self._first_tokens(first_row, anchors.tolist())

    def _first_tokens(self, first_row: int, tokens: list[int]) -> list[Progress]:
        joined = self._rows[first_row:]
        progress = [Progress(row.output, self._append(row, [token], 0)) for row, token in zip(joined, tokens)]
        for index in reversed(range(first_row, len(self._rows))):
            if self._rows[index].output.finish:
                self._leave(index)
        return progress

    def _prefill(self, prompts: list[Tensor], first_row: int) -> Reading:
        """Read the prompts, packed; a single prompt longer than the budget is read in chunks."""
        if len(prompts[0]) <= PREFILL_TOKENS:
            return self.target.prefill(prompts, self.cache, first_row=first_row, taps=self.drafter.taps)
        parts = []
        for start in range(0, len(prompts[0]), PREFILL_TOKENS):
            chunk = prompts[0][None, start : start + PREFILL_TOKENS].to(self.target.device)
            read = torch.tensor([start], device=self.target.device)
            tree = TokenTree.chain(chunk[:, 0], chunk[:, 1:])
            parts.append(
                self.target.verify(tree, read, self.cache, longest=start, first_row=first_row, taps=self.drafter.taps)
            )
        features = (
            None
            if parts[0].features is None
            else torch.cat([part.features for part in parts if part.features is not None], 1)
        )
        return Reading(torch.cat([part.hidden for part in parts], dim=1), features)

    def _leave(self, index: int) -> None:
        """Drop a finished row; the last row takes its place, so active rows stay contiguous."""
        last = len(self._rows) - 1
        stay = list(range(last))
        if index != last:
            self.cache.move(last, index, length=self._rows[last].length)
            self.drafter.move(self.state, last, index)
            self._rows[index] = self._rows[last]
            stay[index] = last
        self._rows.pop()
        self._anchors, self._lengths = self._anchors[stay], self._lengths[stay]
        self._sampling = Sampling([row.request.sampling for row in self._rows], self.target.device)
