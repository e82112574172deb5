"""The verified decode loop: imports nothing else of draftsmith, so it serves alone.

The names below are imported on first use, because loading transformers takes seconds that `--help` should not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiled import Compiled
    from .decode import Engine
    from .decoder import Answer, SpeculativeDecoder, Update
    from .recorded import CudaGraphs, RecordedTarget
    from .rejection import block, recursive, token_level, traversal
    from .request import Output, Progress, Request, Stats
    from .sampling import SamplingParams
    from .target import Target
    from .typical import typical_lossy
    from .verifiers import VERIFIERS
    from .verify import Verdict, Verifier, sample_match

_HOME = {
    "VERIFIERS": "verifiers",
    "Answer": "decoder",
    "Compiled": "compiled",
    "CudaGraphs": "recorded",
    "Engine": "decode",
    "Output": "request",
    "Progress": "request",
    "RecordedTarget": "recorded",
    "Request": "request",
    "SamplingParams": "sampling",
    "SpeculativeDecoder": "decoder",
    "Stats": "request",
    "Target": "target",
    "Update": "decoder",
    "Verdict": "verify",
    "Verifier": "verify",
    "block": "rejection",
    "recursive": "rejection",
    "sample_match": "verify",
    "token_level": "rejection",
    "traversal": "rejection",
    "typical_lossy": "typical",
}

__all__ = [
    "VERIFIERS",
    "Answer",
    "Compiled",
    "CudaGraphs",
    "Engine",
    "Output",
    "Progress",
    "RecordedTarget",
    "Request",
    "SamplingParams",
    "SpeculativeDecoder",
    "Stats",
    "Target",
    "Update",
    "Verdict",
    "Verifier",
    "block",
    "recursive",
    "sample_match",
    "token_level",
    "traversal",
    "typical_lossy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
