"""Telling that memory ran out from every other error: each device's allocator says it in its own way."""

from __future__ import annotations

import torch

_CPU = ("can't allocate memory", "not enough memory")
"""What PyTorch's CPU allocator says, as a plain RuntimeError, on Linux and on Windows."""


def memory_fault(error: RuntimeError | MemoryError) -> str:
    """The first line of an out-of-memory error; any other error is raised again."""
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _CPU)
    if not is_memory:
        raise error
    return str(error).partition("\n")[0] or "out of memory"
