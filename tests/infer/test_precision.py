"""`auto` is the precision that this machine is faster at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from draftsmith.infer.precision import has_bf16, resolve_dtype
from draftsmith.infer.target import Target


def seconds(dtype: torch.dtype) -> float:
    """Of a product, at best."""
    left, right = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        torch.mm(left, right)
        taken.append(time.perf_counter() - began)
    return min(taken)


def test_bf16_is_taken_where_it_is_not_emulated() -> None:
    """An emulated product takes hundreds of times as long; one in hardware at most a little longer, if it is small."""
    assert has_bf16("cpu") == (seconds(torch.bfloat16) < 4 * seconds(torch.float32))


@pytest.mark.parametrize("supported", [True, False])
def test_auto_is_resolved_and_names_stay(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.infer.precision.has_bf16", lambda device=None: supported)
    assert resolve_dtype("auto") == ("bfloat16" if supported else "float32")
    assert [resolve_dtype(name) for name in ("float32", "bfloat16", "float16")] == ["float32", "bfloat16", "float16"]


def test_a_target_says_what_it_was_loaded_in(tiny_target_dir: Path) -> None:
    target = Target.load(str(tiny_target_dir), dtype="auto", device="cpu")
    assert target.dtype == (torch.bfloat16 if has_bf16("cpu") else torch.float32)
