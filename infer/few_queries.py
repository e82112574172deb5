"""Attention of a few queries per row on a CPU: a kernel in C, compiled once for a machine and a head's width.

Torch's own attention multiplies matrices, which pays for many queries. Of a round of plain decoding in a batch it is the
largest part besides the linear layers, and mostly overhead. Where there is no compiler, or the numbers are of another
kind, torch's attention does the same.

Letters: B rows, H KV heads, Q queries (query heads of one KV head side by side), S slots, d head width.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .embedded import cache_root

MOST = 24
"""Queries per row and KV head up to which it is faster than torch's attention, on the machines tried."""
LANES, TOGETHER = 8, 4
"""As the source has them."""
_FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512vl"]}
"""What the compiler may assume, by what torch found; beyond that, what it assumes by itself."""
_SOURCE = Path(__file__).with_suffix(".c")


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, reach: Tensor, scaling: float | None
) -> Tensor | None:
    """query (B, H, Q, d), key and value (B, H, S, d), mask (B or 1, 1, Q, S) additive, reach (B,) int64 slots that each row
    reads, from the first -> (B, H, Q, d). None if this is nothing for the kernel."""
    rows, heads, queries, width = query.shape
    given = (query, key, value, mask)
    if queries > MOST or any(x.dtype != torch.float32 or x.stride(-1) != 1 for x in given) or value.shape[3] != width:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    kernel = _kernel(width, torch.backends.cpu.get_cpu_capability())
    if kernel is None:
        return None
    threads, slots = torch.get_num_threads(), key.shape[2]
    longest = -(-slots // LANES) * LANES
    mask = mask.expand(rows, -1, -1, -1)
    scores, out = query.new_empty(threads, TOGETHER, longest), query.new_empty(query.shape)
    kernel(
        *(x.data_ptr() for x in (*given[:3], mask, reach, scores, out)),
        *(rows, heads, queries, slots, longest),
        *((ctypes.c_int64 * 3)(*x.stride()[:3]) for x in given[:3]),
        (ctypes.c_int64 * 2)(mask.stride(0), mask.stride(2)),
        width**-0.5 if scaling is None else scaling,
        threads,
    )
    return out


@cache
def _kernel(width: int, capability: str) -> Callable[..., None] | None:
    """The compiled function for heads of this width; None where it cannot be had."""
    if width % 16 or width > 256:
        return None
    try:
        library = ctypes.CDLL(str(_built(width, capability)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    function = library.attend
    pointers, sizes, steps = 7 * [ctypes.c_void_p], 5 * [ctypes.c_int64], 4 * [ctypes.POINTER(ctypes.c_int64)]
    function.argtypes = [*pointers, *sizes, *steps, ctypes.c_float, ctypes.c_int]
    function.restype = None
    return function


def _built(width: int, capability: str) -> Path:
    """The library, compiled if it was not yet; whoever else compiles it at the same time makes the same one. It is linked
    without an OpenMP of its own: torch's threads, which are loaded already, do the work."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp", f"-DWIDTH={width}"]
    flags += _FLAGS.get(capability, [])
    told = "\0".join([*compiler, *flags, platform.machine(), capability, _SOURCE.read_text()])
    folder = cache_root()
    library = folder / f"few_queries-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            parts, whole = Path(scratch) / "few_queries.o", Path(scratch) / "few_queries.so"
            for command in (
                [*compiler, *flags, "-c", str(_SOURCE), "-o", str(parts)],
                [*compiler, "-shared", str(parts), "-o", str(whole), "-lm"],
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=120)
            whole.replace(library)
    return library
