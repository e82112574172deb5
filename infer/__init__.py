"""The verified decode loop: imports nothing else of draftsmith, so it serves alone.

The names below are imported on first use, because loading transformers takes seconds that `--help` should not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import Engine
    from .decoder import Answer, SpeculativeDecoder
    from .request import Output, Request, Stats
    from .sampling import SamplingParams
    from .target import Target

_HOME = {
    "Answer": "decoder",
    "Engine": "decode",
    "Output": "request",
    "Request": "request",
    "SamplingParams": "sampling",
    "SpeculativeDecoder": "decoder",
    "Stats": "request",
    "Target": "target",
}

__all__ = ["Answer", "Engine", "Output", "Request", "SamplingParams", "SpeculativeDecoder", "Stats", "Target"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
