"""What goes into the decode engine and what comes out: token ids in, token ids and integers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .sampling import SamplingParams

Finish = Literal["", "eos", "stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    id: str
    """Distinct from that of every other request which is waiting or running."""
    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    """Strings that end the answer; its text ends before the first of them to be complete (see text.py)."""


@dataclass
class Stats:
    """Integers of decoding, pooled by adding. Prefill and the token it yields are not in them.

    A round is one target forward. `emitted` counts tokens that reached the answer (nothing after an EOS or a stop string
    or past the token limit), `accepted` those of them that were drafted, `drafted` all proposed nodes.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    """reached[k]: rounds whose first k draft tokens were accepted and that offered one more at depth k+1."""
    survived: list[int] = field(default_factory=list)
    """survived[k]: of those, the rounds in which that token was accepted too."""

    @property
    def tau(self) -> float:
        """Mean tokens emitted per round, bonus included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """acceptance@k: P(draft token k accepted | 1..k-1 accepted), k = 1.."""
        return [hit / seen if seen else 0.0 for hit, seen in zip(self.survived, self.reached)]

    def count_round(self, *, drafted: int, offered: int, accepted: int, emitted: int) -> None:
        """One round: `offered` is the draft's depth, or `accepted` where the text ended inside the draft."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        grow = offered - len(self.reached)
        self.reached += [0] * grow
        self.survived += [0] * grow
        for k in range(min(accepted + 1, offered)):
            self.reached[k] += 1
            self.survived[k] += accepted > k

    def add(self, other: Stats) -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        grow = len(other.reached) - len(self.reached)
        self.reached += [0] * grow
        self.survived += [0] * grow
        for k, (seen, hit) in enumerate(zip(other.reached, other.survived)):
            self.reached[k] += seen
            self.survived[k] += hit


@dataclass
class Output:
    """A finished (or still growing) answer."""

    id: str
    tokens: list[int] = field(default_factory=list)
    """New token ids, with the EOS, or the token that completed a stop string, where one ended the answer."""
    from_draft: list[bool] = field(default_factory=list)
    """Per token: whether it was drafted and accepted (else it is the target's own)."""
    finish: Finish = ""
    """'eos', 'stop' (a stop string), 'length' (token limit reached), 'cancelled', 'error' or '' while running."""
    stats: Stats = field(default_factory=Stats)
    text: str = ""
    """Of a request with stop strings, its text, which ends before the stop string; '' for others, whose text the engine
    does not follow."""
    error: str = ""
    """Why the request failed, where finish is 'error': what was wrong with it, or that memory ran out."""

    def checked(self) -> Output:
        """This output; raises ValueError with what went wrong if the request failed."""
        if self.finish == "error":
            raise ValueError(self.error)
        return self


@dataclass(frozen=True)
class Progress:
    """What one step added to one request."""

    output: Output
    new_tokens: int
    """The last `new_tokens` entries of output.tokens are new."""
    is_last: bool
    """Whether the answer is finished and nothing more will be said of it."""
