"""The real decode loop on held-out prompts, in the middle of training: tau as it is, beside tau as predicted.

The drafter is saved and loaded as a user would, so what is measured is the file: names, precision, configuration and
drafting, not only the loss. Greedy with chain drafts, which is what the prediction is about.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ..distill.packing import Row
from ..heads import load_drafter
from ..infer.decode import Engine
from ..infer.request import Request, Stats
from .assembly import Run
from .metrics import Values

FOLDER = ".decoding"
"""In the run's folder, for as long as it is needed."""


@dataclass(frozen=True)
class Decoded:
    """What decoding gave; nothing at all if it was left out."""

    stats: Stats | None

    def values(self, prefix: str) -> Values:
        """For metrics.jsonl: `prefix/real_tau` and the integers behind it."""
        if self.stats is None:
            return {}
        figures = {"real_tau": self.stats.tau, "rounds": self.stats.rounds, "emitted": self.stats.emitted}
        return {f"{prefix}/{name}": value for name, value in figures.items()}

    def measured(self) -> dict[str, Any]:
        """What a checkpoint carries of it."""
        return {} if self.stats is None else {"real_tau": self.stats.tau}

    def __str__(self) -> str:
        return "" if self.stats is None else f", real tau {self.stats.tau:.3f} in {self.stats.rounds} rounds"


def decode_held_out(run: Run) -> Decoded:
    """Answer `decode_prompts` held-out prompts with the drafter as it stands, each process its share; a collective call.

    A run's folder must be one that all processes see.
    """
    asked = held_out_prompts(run.held_out.rows, run.recipe.decode_prompts, longest=_longest(run))
    if not asked:
        return Decoded(None)
    accelerator, folder, target = run.engine.accelerator, Path(run.recipe.out) / FOLDER, run.drafter.target
    state = run.engine.state(run.model)
    if run.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        run.drafter.save(folder, binding=run.binding, weights=run.engine.weights(state, run.drafter))
    accelerator.wait_for_everyone()
    drafter = load_drafter(folder, target)
    drafter.use_chain()
    together = run.recipe.target_shards or run.engine.world if run.recipe.target_sharding == "tensor" else 1
    mine = asked[run.engine.rank // together :: run.engine.world // together]  # one target, one decode
    engine = Engine(target, drafter=drafter, rows=max(1, len(mine)))
    for number, prompt in enumerate(mine):
        engine.add(Request(str(number), prompt, run.recipe.decode_tokens))
    stats = Stats()
    for output in engine.run():
        stats.add(output.checked().stats)
    everywhere, stats = gather_object([stats]), Stats()
    for part in everywhere[::together]:
        stats.add(part)
    accelerator.wait_for_everyone()
    if run.is_main:
        shutil.rmtree(folder)
    return Decoded(stats)


def held_out_prompts(rows: Sequence[Row], count: int, *, longest: int) -> list[list[int]]:
    """Up to `count` beginnings of documents, each up to its first learned token, spread evenly over the rows; none of more
    than `longest` tokens."""
    found = []
    for row in rows:
        for segment in range(1, int(row.segments.max()) + 1):
            inside = row.segments == segment
            learned = row.supervised[inside].nonzero()
            if len(learned) and 0 < int(learned[0]) <= longest:
                found.append(row.tokens[inside][: int(learned[0])].tolist())
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _longest(run: Run) -> int:
    return run.drafter.target.max_length - run.recipe.decode_tokens
