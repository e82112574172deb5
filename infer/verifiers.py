"""The verifiers by name, and what each promises of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rejection import block, recursive, token_level, traversal
from .typical import typical_lossy
from .verify import Verifier, sample_match

Promise = Literal["same text", "same distribution", "lossy"]


@dataclass(frozen=True)
class NamedVerifier:
    """A verifier and what a user should know of it."""

    verify: Verifier
    promise: Promise
    """`same text`: with one seed, token for token that of plain decoding. `same distribution`: the target's own, but with
    one seed another text than plain decoding's; greedy text is the same. `lossy`: neither."""
    draws: Literal["", "chain", "tree"] = ""
    """What it judges: a sampled draft with the rows it was drawn from, of this shape; '' for any draft."""

    @property
    def meaning(self) -> str:
        """The promise, for a person."""
        return {
            "same text": "with one seed, the very text of plain decoding",
            "same distribution": "the target's distribution, but with one seed another text than plain decoding's",
            "lossy": "LOSSY, the text is not the target's own",
        }[self.promise]

    def keeps_text(self, temperature: float) -> bool:
        """Whether plain decoding with the same settings writes the same tokens."""
        return self.promise == "same text" or (self.promise == "same distribution" and temperature == 0)


VERIFIERS = {
    "sample-match": NamedVerifier(sample_match, "same text"),
    "token-level": NamedVerifier(token_level, "same distribution", draws="chain"),
    "block": NamedVerifier(block, "same distribution", draws="chain"),
    "recursive": NamedVerifier(recursive, "same distribution", draws="tree"),
    "traversal": NamedVerifier(traversal, "same distribution", draws="tree"),
    "typical": NamedVerifier(typical_lossy, "lossy"),
}


def verifier_named(name: str) -> NamedVerifier:
    """Raises ValueError for a name that is none, with those that are."""
    if name not in VERIFIERS:
        known = ", ".join(f"{key} (LOSSY)" if rule.promise == "lossy" else key for key, rule in VERIFIERS.items())
        raise ValueError(f"there is no verifier {name!r}; expected {known}.")
    return VERIFIERS[name]
