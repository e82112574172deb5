"""Measures a drafter: the same prompts with and without it, side by side in one run, with every answer checked.

The result is one JSON document (`schema` below says what is in it). Integers are published, ratios follow from them:
tau = emitted / rounds, speed = sum of tokens over sum of seconds with the same engine on both sides.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from tqdm import tqdm

from .audit import audit
from .clock import now
from .decode import Engine
from .drafter import Drafter
from .grafted import Grafted
from .memory import num_bytes
from .request import Output, Request, Stats
from .sampling import SamplingParams
from .schedule import Scheduled
from .standby import Standby
from .target import Target
from .verifiers import verifier_named

FORMAT = 1

DEFINITIONS = {
    "prompts": "answers compared",
    "identical": "answers whose token ids equal those of plain decoding with the same engine and settings; null where the "
    "verifier does not promise that (settings.verifier, settings.promise): nothing is compared then",
    "near_ties": "of the others, those whose first difference is a tie within this precision (see audit); null likewise",
    "rounds": "target forwards in decode, prefill excluded, summed over rows",
    "drafted": "proposed tokens (tree nodes without the root)",
    "accepted": "drafted tokens that reached the text",
    "emitted": "tokens that rounds added to the text, bonus tokens included; the prefill's own token, tokens after EOS and "
    "tokens past the limit are not in it",
    "tau": "emitted / rounds, pooled over all rounds",
    "acceptance": "acceptance@k, k = 1..: P(draft token k accepted | draft tokens 1..k-1 accepted)",
    "tokens_per_s": "all new tokens / wall-clock seconds, prefill included, with the drafter; _plain: without it",
    "speedup": "tokens_per_s / tokens_per_s_plain",
    "memory": "bytes of the target's and the drafter's weights (None: it has none, or shares a model), of the target's cache at "
    "its largest, and the card's peak (None on a CPU)",
    "ms_draft": "mean milliseconds per step in the drafter; ms_verify: in the target's forward; ms_host: everything else "
    "(verification, cache, text), prefill excluded",
}


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt to answer."""

    id: str
    category: str
    tokens: Sequence[int]


@dataclass
class _Side:
    """One engine's totals over a group of prompts."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, other: _Side) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.steps += other.steps
        for phase, seconds in other.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def ms(self, phase: str) -> float:
        return 1e3 * self.phases.get(phase, 0.0) / self.steps if self.steps else 0.0


@dataclass
class _Pool:
    """What is summed for a category and for the total."""

    is_compared: bool = True
    prompts: int = 0
    identical: int = 0
    near_ties: int = 0
    stats: Stats = field(default_factory=Stats)
    plain: _Side = field(default_factory=_Side)
    drafted: _Side = field(default_factory=_Side)

    def add(self, other: _Pool) -> None:
        self.prompts += other.prompts
        self.identical += other.identical
        self.near_ties += other.near_ties
        self.stats.add(other.stats)
        self.plain.add(other.plain)
        self.drafted.add(other.drafted)

    def report(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "identical": self.identical if self.is_compared else None,
            "near_ties": self.near_ties if self.is_compared else None,
            "rounds": self.stats.rounds,
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "emitted": self.stats.emitted,
            "tau": self.stats.tau,
            "acceptance": self.stats.acceptance,
            "tokens_per_s_plain": self.plain.rate,
            "tokens_per_s": self.drafted.rate,
            "speedup": self.drafted.rate / self.plain.rate if self.plain.rate else 0.0,
            "ms_draft": self.drafted.ms("draft"),
            "ms_verify": self.drafted.ms("verify"),
            "ms_host": self.drafted.ms("host"),
        }


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvalPrompt],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    rows: int = 1,
    verifier: str = "sample-match",
    settings: dict[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Decode every prompt with and without the drafter and return the evaluation document.

    rows: requests decoded together on both sides (1: one at a time). settings: what else the document should record.
    Answers that differ from plain decoding's are audited against the target, unless `verifier` (a name of verifiers.py)
    does not promise to repeat them: then no answer is called identical.
    """
    if not prompts:
        raise ValueError("there is nothing to evaluate: no prompts were given.")
    sampling = sampling or SamplingParams()
    plain = Engine(target, rows=rows)
    rule = verifier_named(verifier)
    is_compared = rule.keeps_text(sampling.temperature)
    drafted = Engine(target, drafter=drafter, rows=rows, verifier=rule.verify)
    plain.clock.exact = drafted.clock.exact = True
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    _warm_up(plain, drafted, prompts[0])
    pools: dict[str, _Pool] = {}
    answers: list[dict[str, Any]] = []
    with tqdm(total=len(prompts), desc="evaluate", unit="prompt", disable=not progress) as bar:
        for turn, group in enumerate(_groups(prompts, rows)):
            requests = [Request(p.id, p.tokens, max_new_tokens, sampling) for p in group]
            pool = pools.setdefault(group[0].category, _Pool(is_compared))
            sides: dict[int, list[Output]] = {}
            for side in (turn % 2, 1 - turn % 2):  # alternate who goes first: the machine drifts
                engine, totals = ((plain, pool.plain), (drafted, pool.drafted))[side]
                sides[side] = _decode(engine, requests, totals)
            answers += [_compare(target, *each, sampling, pool) for each in zip(group, sides[0], sides[1])]
            bar.update(len(group))
            bar.set_postfix_str(f"tau {pool.stats.tau:.2f}")
    total = _Pool(is_compared)
    for pool in pools.values():
        total.add(pool)
    return {
        "format": FORMAT,
        "totals": total.report(),
        "categories": {name: pool.report() for name, pool in pools.items()},
        "answers": answers,
        "definitions": DEFINITIONS,
        "settings": {"max_new_tokens": max_new_tokens, "rows": rows, "sampling": vars(sampling), "target": target.name}
        | {"dtype": str(target.dtype).removeprefix("torch."), "fingerprint": target.fingerprint()}
        | {"verifier": verifier, "promise": rule.promise}
        | (settings or {}),
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")}
        | {"python": platform.python_version()},
        "machine": machine(target),
        "memory": _memory(target, drafter, drafted),
    }


def _groups(prompts: Sequence[EvalPrompt], rows: int) -> list[list[EvalPrompt]]:
    """One prompt at a time, or with several rows one category at a time (so that seconds belong to a category)."""
    if rows == 1:
        return [[prompt] for prompt in prompts]
    by_category: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return list(by_category.values())


def _warm_up(plain: Engine, drafted: Engine, prompt: EvalPrompt) -> None:
    for engine in (plain, drafted):
        _decode(engine, [Request("warm-up", prompt.tokens, 8)], _Side())


def _decode(engine: Engine, requests: list[Request], totals: _Side) -> list[Output]:
    before, steps = dict(engine.clock.seconds), engine.steps
    engine.forget()
    began = now()
    for request in requests:
        engine.add(request)
    outputs = {output.id: output.checked() for output in engine.run()}
    seconds = now() - began
    phases = {name: value - before.get(name, 0.0) for name, value in engine.clock.seconds.items()}
    totals.add(_Side(sum(len(output.tokens) for output in outputs.values()), seconds, engine.steps - steps, phases))
    return [outputs[request.id] for request in requests]


def _compare(
    target: Target, prompt: EvalPrompt, plain: Output, drafted: Output, sampling: SamplingParams, pool: _Pool
) -> dict[str, Any]:
    """Add one answer to the pool; audit it if it should equal plain decoding's and differs."""
    same = plain.tokens == drafted.tokens
    finding = None
    if pool.is_compared and not same:
        finding = audit(target, prompt.tokens, drafted.tokens, sampling=sampling, finish=drafted.finish)
    pool.prompts += 1
    pool.identical += same
    pool.near_ties += finding is not None and finding.verdict != "wrong"
    pool.stats.add(drafted.stats)
    return {
        "id": prompt.id,
        "category": prompt.category,
        "identical": same if pool.is_compared else None,
        "audit": None if finding is None else vars(finding),
        "prompt": list(prompt.tokens),
        "tokens": drafted.tokens,
        "from_draft": [int(flag) for flag in drafted.from_draft],
        "finish": drafted.finish,
        "rounds": drafted.stats.rounds,
        "tau": drafted.stats.tau,
    }


def _memory(target: Target, drafter: Drafter, engine: Engine) -> dict[str, int | None]:
    """Bytes of weights and of the target's cache; of all on the card at its fullest, where there is one."""
    is_cuda, inner = target.device.type == "cuda", drafter
    while isinstance(inner, Grafted | Scheduled | Standby):
        inner = inner.drafter
    return {
        "target_weights": num_bytes(target.model),
        "drafter_weights": num_bytes(inner) if isinstance(inner, torch.nn.Module) else None,
        "cache": engine.cache.num_bytes(),
        "peak": torch.cuda.max_memory_allocated(target.device) if is_cuda else None,
    }


def machine(target: Target) -> dict[str, Any]:
    """What figures depend on: the card's name or "cpu", threads, processor and system."""
    is_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "system": platform.system(),
    }
