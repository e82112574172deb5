"""The verified loop: draft, target forward, verify, commit, emit, for a batch whose rows join, advance and leave freely.

It knows none of the methods: a drafter is the protocol of `drafter.py`, a verifier a pure function. Plain decoding is
the same loop with a drafter that proposes nothing.

Letters: B active rows (always rows 0..B-1 of every buffer), N nodes, A kept nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from .cache import KVCache
from .clock import Clock
from .drafter import Drafter, NoDraft
from .penalties import penalise
from .prefill import accepted, observations
from .prefixes import Prefixes, read_on
from .request import Finish, Output, Progress, Request
from .row import Row
from .sampling import Sampling
from .shortage import memory_fault
from .tapes import give_up_idle
from .target import Reading, Target
from .tree import TokenTree
from .verify import Settled, Verdict, Verifier, sample_match, score

PREFILL_TOKENS = 512
"""Most prompt tokens read in one forward (their attention mask is that square)."""


class Engine:
    """Continuous batching over one target and one drafter.

    rows: requests decoded at the same time; others wait and join as rows leave, so nothing waits for the longest
    answer. The text of a request does not depend on who shares its batch (fp32). `add` and `cancel` may be called between
    any two steps, from the thread that drives the engine. What goes wrong with one request ends that request alone, with
    finish "error" and the reason in its output. After a step that was interrupted (Ctrl-C, an error that is no request's)
    the next one reads again what the requests have written, and goes on.
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
        self._ids: set[str] = set()  # of requests that are not finished, or whose end was not reported
        self._queue: deque[Row] = deque()
        self._joining: list[Row] = []  # whose prompts are being read
        self._refused: list[Output] = []
        self._news: list[Row] = []  # of which there is something to tell
        self._told: deque[Progress] = deque()  # what a step did and `stream` has not yielded yet
        self._joins_alone = False  # prompts are read one by one once memory has run out
        self._is_torn = False  # a step began and has not ended
        self._begin_empty()

    def _begin_empty(self) -> None:
        """No row is active, and nothing is kept of those that were."""
        device = self.target.device
        self.cache = self.target.new_cache(rows=self.max_rows, capacity=256)
        self.state = self.drafter.start(rows=self.max_rows, capacity=256)
        self._rows: list[Row] = []
        self._prefixes = Prefixes(shares=not self.target.is_encoder_decoder)
        self._anchors = torch.zeros(0, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._set_sampling()

    def add(self, request: Request) -> None:
        """Queue a request. One that the target cannot answer comes out of the next step, with finish "error".

        Raises ValueError if a request of the same id is not finished.
        """
        if request.id in self._ids:
            raise ValueError(f"a request {request.id!r} is not finished; give every request an id of its own.")
        self._ids.add(request.id)
        try:
            self._queue.append(Row.open(request, self.target))
        except ValueError as error:
            self._refused.append(Output(request.id, finish="error", error=str(error)))

    @torch.inference_mode()
    def cancel(self, id: str) -> bool:
        """End a waiting or running request; what it has written so far comes out of the next step, with finish
        "cancelled". False if there is no such request, because it is finished already or never was."""
        rows = [row for row in (*self._rows, *self._joining, *self._queue) if row.request.id == id]
        if not rows or rows[0].output.finish:
            return False
        row = rows[0]
        self._end(row, "cancelled")
        if row in self._queue:
            self._queue.remove(row)
        elif not self._is_torn:  # else it is left out when the next step starts over
            self._is_torn = True
            self._leave(self._rows.index(row))
            self._is_torn = False
        return True

    def forget(self) -> None:
        """Use nothing that finished requests have left in the cache: for measurements that depend on nothing before them."""
        self._prefixes.forget()

    def run(self) -> Iterator[Output]:
        """Decode until nothing is left, yielding each output when it is finished; `add` may be called meanwhile."""
        for progress in self.stream():
            if progress.is_last:
                yield progress.output

    def stream(self) -> Iterator[Progress]:
        """Decode until nothing is left, yielding what every step added to every request.

        Leaving it and coming back loses nothing.
        """
        while self._told or self._refused or self._news or self._queue or self._rows or self._joining:
            if not self._told:
                self._told.extend(self.step())
            while self._told:
                yield self._told.popleft()

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Tell what has ended, or let waiting requests join, which emits their first tokens, or else do one round."""
        if self._is_torn:
            self._start_over()
        if not self._refused and not self._news:
            self._is_torn = True
            if not self._admit() and self._rows:
                self._round()
        self._is_torn = False
        return self._report()

    def _round(self) -> None:
        self.steps += 1
        try:
            with self.clock.time("draft"):
                tree = self.drafter.draft(self.state, self._anchors, self._lengths, self._sampling)
            with self.clock.time("verify"):
                longest = max(row.length for row in self._rows)
                reading = self.target.verify(tree, self._lengths, self.cache, longest=longest, taps=self.drafter.taps)
                logits = score(self.target, tree, reading.hidden)
            with self.clock.time("host"):
                logits = penalise(logits, tree, self._sampling, [row.counts for row in self._rows])
                verdict = self.verifier(tree, logits, self._lengths, self._sampling)
                settled = Settled.of(tree, verdict)  # of a greedy round the one transfer to the host
                self._commit(tree, reading, logits, verdict, settled)
                self._emit(settled)
            return
        except (RuntimeError, MemoryError) as error:
            fault = memory_fault(error)
        self._start_over(failed=max(self._rows, key=lambda row: row.length), fault=fault)

    def _commit(self, tree: TokenTree, reading: Reading, logits: Tensor, verdict: Verdict, settled: Settled) -> None:
        """Keep the accepted rows of the cache, tell the drafter, move the anchors."""
        path = verdict.path[:, : max(settled.counts)]
        if not settled.is_in_place:
            index = torch.arange(path.shape[1], device=path.device)
            start = torch.arange(len(path), device=path.device) * self.cache.capacity + self._lengths
            self.cache.commit((start[:, None] + path).flatten(), (start[:, None] + index).flatten())
        ends = [row.length + count for row, count in zip(self._rows, settled.counts)]
        seen = accepted(tree, reading, logits, verdict, path, start=self._lengths, ends=ends)
        with self.clock.time("draft"):
            self.drafter.observe(self.state, seen)
        for row, end in zip(self._rows, ends):
            row.length = end
        self._lengths = self._lengths + verdict.count
        self._anchors = verdict.bonus

    def _emit(self, settled: Settled) -> None:
        """Append each row's accepted tokens and bonus to its text, cut where the answer ends; retire rows."""
        self._news += self._rows
        for index, row in enumerate(self._rows):
            accepted = settled.counts[index] - 1
            emitted = row.append(settled.tokens[index], accepted)
            accepted = min(accepted, emitted)
            row.output.stats.count_round(
                drafted=settled.drafted[index],
                offered=accepted if emitted <= accepted else settled.offered[index],
                accepted=accepted,
                emitted=emitted,
            )
        self._retire()

    def _report(self) -> list[Progress]:
        """What has happened since the last one."""
        refused, self._refused = self._refused, []
        news, self._news = dict.fromkeys(self._news), []
        progress = [Progress(output, 0, is_last=True) for output in refused] + [row.news() for row in news]
        self._ids.difference_update(each.output.id for each in progress if each.is_last)
        return progress

    def _admit(self) -> bool:
        """Let waiting requests join once an eighth of the rows is free, reading their prompts together. Whether any has."""
        free = self.max_rows - len(self._rows)
        if not self._queue or free < min(max(1, self.max_rows // 8), len(self._queue)):
            return False
        # Rows side by side attend together, as far as the longest reaches.
        first = sorted(islice(self._queue, free), key=lambda row: -len(row.text))
        self._queue = deque([*first, *islice(self._queue, len(first), None)])
        while self._queue and len(self._rows) < self.max_rows:
            room = 1 if self._joins_alone else self.max_rows - len(self._rows)
            self._joining = self._prefixes.gather(self._queue, self._rows, room=room, budget=PREFILL_TOKENS)
            for _ in self._joining:
                self._queue.popleft()
            try:
                self._join(self._joining)
                continue
            except (RuntimeError, MemoryError) as error:
                fault = memory_fault(error)
            self._joins_alone = True
            self._start_over(failed=self._joining[0] if len(self._joining) == 1 else None, fault=fault)
        return bool(self._news)

    def _join(self, group: list[Row]) -> None:
        """Prefill a group of requests into the next free rows and emit each one's first token."""
        with self.clock.time("prefill"):
            device, first_row = self.target.device, len(self._rows)
            texts = [row.text for row in group]
            prompts = [torch.tensor(text, dtype=torch.int64) for text in texts]
            place = {"first_row": first_row, "budget": PREFILL_TOKENS}
            held = self._prefixes.take(texts, self._rows, self.cache, self.drafter, self.state)
            if any(held):
                reading = read_on(self.target, texts, held, self.cache, **place, taps=self.drafter.taps)
            else:
                reading = self.target.read_prompts(prompts, self.cache, **place, taps=self.drafter.taps)
            lengths = torch.tensor([len(text) for text in texts], device=device)
            roots = TokenTree.root(torch.tensor([text[-1] for text in texts], device=device))
            sampling = Sampling([row.request.sampling for row in group], device)
            ends = lengths.cumsum(0) - 1
            logits = self.target.logits(reading.hidden[0, ends])[:, None]  # (R, 1, V)
            logits = penalise(logits, roots, sampling, [row.counts for row in group])
            anchors = sampling.choose(logits, lengths[:, None])[:, 0]
            for seen in observations(prompts, reading, anchors, held, first_row=first_row):
                self.drafter.observe(self.state, seen)
        for row, text in zip(group, texts):
            row.length = len(text)
        self._rows, self._joining = self._rows + group, []
        self._anchors = torch.cat([self._anchors, anchors])
        self._lengths = torch.cat([self._lengths, lengths])
        self._set_sampling()
        self._news += group
        for row, token in zip(group, anchors.tolist()):
            row.append([token], 0)
        self._retire()

    def _retire(self) -> None:
        for index in reversed(range(len(self._rows))):
            if self._rows[index].output.finish:
                self._leave(index)

    def _leave(self, index: int) -> None:
        """Drop a finished row; the last row takes its place, so active rows stay contiguous."""
        last = len(self._rows) - 1
        self._prefixes.leave(last, self._rows[last])
        stay = list(range(last))
        if index != last:
            self.cache.move(last, index, length=self._rows[last].length)
            self.drafter.move(self.state, last, index)
            self._rows[index] = self._rows[last]
            stay[index] = last
        self._rows.pop()
        self._anchors, self._lengths = self._anchors[stay], self._lengths[stay]
        self._set_sampling()

    def _end(self, row: Row, finish: Finish, error: str = "") -> None:
        row.end(finish, error)
        self._news.append(row)

    def _start_over(self, *, failed: Row | None = None, fault: str = "") -> None:
        """A step did not end, since memory ran out (`fault`) or something interrupted it, and may have left caches and drafter
        half-way: `failed` ends, and all others join again by reading what they have written. Noise belongs to positions, so
        no text changes."""
        rows, queue = len(self._rows), list[Row]()
        for row in dict.fromkeys([*self._rows, *self._joining, *self._queue]):
            if row.output.finish:
                self._news.append(row)
            elif row is failed or not row.can_go_on(self.target):
                self._end(row, "error", row.why_over(fault, rows=rows))
            else:
                queue.append(row)
        self._queue, self._rows, self._joining = deque(queue), [], []
        if fault:
            self.target.give_up(self.cache)
        self.cache, self.state = KVCache(rows=0, capacity=0), None  # so that buffers are free before more are asked for
        if fault:
            give_up_idle()
        self._begin_empty()

    def _set_sampling(self) -> None:
        self._sampling = Sampling([row.request.sampling for row in self._rows], self.target.device)
