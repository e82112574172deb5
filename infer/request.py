"""What goes into the decode engine and what comes out: token ids in, token ids and integers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    id: str
    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError(f"request {self.id!r} has an empty prompt; give at least one token id.")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.id!r}: max_new_tokens must be at least 1, got {self.max_new_tokens}.")


@dataclass
class Stats:
    """Integers of decoding, pooled by adding. Prefill and the token it yields are not in them.

    A round is one target forward. `emitted` counts tokens that reached the text (nothing after EOS or past the token
    limit), `accepted` those of them that were drafted, `drafted` all proposed nodes.
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
    """New token ids, the EOS included where one ended the answer."""
    from_draft: list[bool] = field(default_factory=list)
    """Per token: whether it was drafted and accepted (else it is the target's own)."""
    finish: str = ""
    """'eos', 'length' (token limit reached) or '' while running."""
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Progress:
    """What one step added to one request."""

    output: Output
    new_tokens: int
    """The last `new_tokens` entries of output.tokens are new."""
