"""What `draftsmith bench` compares, case by case: the same prompts on both sides, in turn, in one run.

A case is a list of groups of prompts. Each group is answered by both sides, the first of them changing from group to
group; its ratio is that of the tokens per second. A drift of the machine so touches both alike.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .stock import Answers, load_stock, our_texts, stock_texts

if TYPE_CHECKING:
    from ..infer.decode import Engine
    from ..infer.drafter import Drafter
    from ..infer.target import Target

Prompts = list[list[int]]
LENGTH = 5
"""Tokens that a draft model proposes per round, on both sides."""
LOOKUP = 10
"""Tokens that prompt lookup proposes at most, on both sides."""
FIXED = 64
"""New tokens where answers do not end by themselves."""
BATCHES = (1, 4, 16, 32)


@dataclass(frozen=True)
class Row:
    """One line of the table; `low` and `high` are the quartiles of the ratio (its extremes below four groups)."""

    name: str
    ours: float
    peer: float
    ratio: float
    low: float
    high: float
    n: int
    unit: str = "tokens/s"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    groups: list[Prompts]
    ours: Callable[[Prompts], Answers]
    peer: Callable[[Prompts], Answers]

    def measure(self, show: bool) -> Row:
        """Answer every group on both sides."""
        from tqdm import tqdm

        rates: dict[str, list[float]] = {"ours": [], "peer": []}
        sides = {"ours": self.ours, "peer": self.peer}
        for index, group in enumerate(tqdm(self.groups, desc=self.name, disable=not show, leave=False)):
            for side in sorted(sides, reverse=bool(index % 2)):
                answers = sides[side](group)
                rates[side].append(answers.num_tokens / answers.seconds)
        ratios = [one / other for one, other in zip(rates["ours"], rates["peer"])]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 3 else (min(ratios), 0.0, max(ratios))
        middle = {side: statistics.median(found) for side, found in rates.items()}
        return Row(self.name, middle["ours"], middle["peer"], statistics.median(ratios), low, high, len(ratios))


class Bench:
    """The cases, over one target; engines and peers are made when a case asks for them and warmed up once."""

    def __init__(
        self, target: Target, name: str, *, drafter: str, draft: str | None, rows: int, max_new_tokens: int
    ) -> None:
        self.target, self.name, self.drafter, self.draft = target, name, drafter, draft
        self.rows, self.max_new_tokens = rows, max_new_tokens
        self.dtype = str(target.dtype).removeprefix("torch.")

    def cases(self, *, singles: int, prompts: int) -> Iterator[Case]:
        """Lazily: a case's models are loaded when it is measured."""
        from ..infer.precision import has_bf16
        from .evaluate import eval_prompts

        many = [list(prompt.tokens) for prompt in eval_prompts(self.target, None, split=None, limit=prompts)]
        alone = [[prompt] for prompt in many[:singles]]
        yield Case(f"plain, one at a time, {self.dtype}", alone, self._plain(1), self._stock())
        other = "float32" if self.dtype != "float32" else "bfloat16"
        if other != "bfloat16" or has_bf16(self.target.device):
            yield Case(f"plain, one at a time, {other}", alone, self._plain(1, dtype=other), self._stock(dtype=other))
        batch = [many[: self.rows]]
        yield Case(
            f"plain, batch {self.rows}, {FIXED} tokens", 3 * batch, self._fixed(self.rows), self._stock(fixed=True)
        )
        yield Case(f"plain, batch {self.rows}, real stops", [many], self._plain(self.rows), self._stock())
        yield Case(
            f"plain, batch {4 * self.rows} against {self.rows}, real stops",
            [many],
            self._plain(4 * self.rows),
            self._stock(),
        )
        yield Case("draft model, one at a time", alone, self._assisted(), self._stock(assistant=self.draft or "self"))
        copied = [[list(p.tokens)] for p in self._copying(singles)]
        yield Case("prompt lookup, one at a time", copied, self._lookup(), self._stock(lookup=LOOKUP))
        yield Case(f"{self.drafter} against stock plain, one at a time", alone, self._drafted(1), self._stock())
        for size in BATCHES:
            name = f"{self.drafter} over plain, batch {size}"
            yield Case(name, [many[:size]] * (2 if size > 1 else 4), self._drafted(size), self._plain(size))

    def _copying(self, count: int) -> list[Any]:
        """Prompts whose answers repeat parts of them."""
        from .evaluate import eval_prompts

        found = eval_prompts(self.target, None, split=None, limit=None)
        return [p for p in found if p.category in ("summarisation", "extraction", "code")][:count]

    # Our side ---------------------------------------------------------------------------------------------------------

    def _engine(self, rows: int, drafter: Drafter | None = None, target: Target | None = None) -> Engine:
        from ..infer.decode import Engine

        return Engine(target or self.target, drafter=drafter, rows=rows)

    def _load(self, name: str, *, dtype: str) -> Target:
        from ..infer.recorded import recorded_like
        from ..infer.target import Target

        return recorded_like(Target.load(name, dtype=dtype), self.target)

    def _plain(self, rows: int, *, dtype: str | None = None) -> Callable[[Prompts], Answers]:
        def load() -> Engine:
            same = dtype in (None, self.dtype)
            return self._engine(rows, target=self.target if same else self._load(self.name, dtype=dtype or ""))

        return self._ours(load, self.max_new_tokens)

    def _fixed(self, rows: int) -> Callable[[Prompts], Answers]:
        def load() -> Engine:
            endless = copy.copy(self.target)
            endless.eos_ids = ()
            return self._engine(rows, target=endless)

        return self._ours(load, FIXED)

    def _assisted(self) -> Callable[[Prompts], Answers]:
        def load() -> Engine:
            from ..infer.draft_model import DraftModel

            model = self.target if self.draft is None else self._load(self.draft, dtype=self.dtype)
            return self._engine(1, DraftModel(model, self.target, length=LENGTH, min_confidence=0))

        return self._ours(load, self.max_new_tokens)

    def _lookup(self) -> Callable[[Prompts], Answers]:
        def load() -> Engine:
            from .opening import open_drafter

            return self._engine(1, open_drafter("prompt-lookup", self.target, tree="fit", rows=1))

        return self._ours(load, self.max_new_tokens)

    def _drafted(self, rows: int) -> Callable[[Prompts], Answers]:
        def load() -> Engine:
            from .opening import open_drafter

            return self._engine(rows, open_drafter(self.drafter, self.target, tree="fit", rows=rows))

        return self._ours(load, self.max_new_tokens)

    def _ours(self, load: Callable[[], Engine], limit: int) -> Callable[[Prompts], Answers]:
        made: list[Engine] = []

        def answer(prompts: Prompts) -> Answers:
            if not made:
                made.append(load())
                our_texts(made[0], prompts[:1], max_new_tokens=8)
            return our_texts(made[0], prompts, max_new_tokens=limit)

        return answer

    # The other side ---------------------------------------------------------------------------------------------------

    def _stock(
        self, *, dtype: str | None = None, fixed: bool = False, assistant: str | None = None, lookup: int = 0
    ) -> Callable[[Prompts], Answers]:
        made: list[Any] = []
        options: dict[str, Any] = {"eos_ids": () if fixed else self.target.eos_ids, "lookup": lookup}

        def answer(prompts: Prompts) -> Answers:
            if not made:
                made.append(load_stock(self.name, dtype=dtype or self.dtype, device=str(self.target.device)))
                if assistant is not None:
                    options["assistant"] = load_stock(
                        self.name if assistant == "self" else assistant,
                        dtype=self.dtype,
                        device=str(self.target.device),
                        draft_length=LENGTH,
                    )
                stock_texts(made[0], prompts[:1], max_new_tokens=8, **options)
            limit = FIXED if fixed else self.max_new_tokens
            parts = [
                stock_texts(made[0], prompts[start : start + self.rows], max_new_tokens=limit, **options)
                for start in range(0, len(prompts), self.rows)
            ]
            return sum_answers(parts)

        return answer


def sum_answers(parts: Sequence[Answers]) -> Answers:
    """Several calls as one."""
    return Answers([text for part in parts for text in part.texts], sum(part.seconds for part in parts))
