"""Laws of the kernel for few queries: torch's attention, as far as each row reaches; and torch's own where it cannot be had."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.infer import few_queries
from draftsmith.infer.attention import _attend_within

COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="the kernel takes a C compiler")


def cached(rows: int, heads: int, slots: int, width: int, *, capacity: int = 96) -> Tensor:
    """(rows, heads, slots, width): a view of rows 1.. of a cache's buffer."""
    buffer = torch.randn(heads, (rows + 1) * capacity, width)
    return buffer.view(heads, rows + 1, capacity, width)[:, 1:, :slots].transpose(0, 1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, reach: Tensor) -> Tensor:
    found = few_queries.attend(query, key, value, mask, reach, None)
    assert found is not None, "there is a compiler, and no kernel"
    return found


def by_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, reach: Tensor) -> Tensor:
    parts = []
    for row, end in enumerate(reach.tolist()):
        own = slice(row, row + 1)
        seen = mask.expand(len(query), -1, -1, -1)[own, ..., :end]
        parts.append(F.scaled_dot_product_attention(query[own], key[own, :, :end], value[own, :, :end], attn_mask=seen))
    return torch.cat(parts)


def seen_by(rows: int, queries: int, slots: int, reach: Tensor) -> Tensor:
    """A mask of holes, in which every query sees one slot at least."""
    seen = torch.rand(rows, 1, queries, slots) < 0.7
    seen[..., 0] = True
    seen &= torch.arange(slots) < reach[:, None, None, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@needs_compiler
@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 24])
def test_it_is_torchs_attention(width: int, queries: int) -> None:
    rows, heads, slots = 5, 3, 61
    query = torch.randn(rows, queries, heads, width).transpose(1, 2)
    key, value = cached(rows, heads, slots, width), cached(rows, heads, slots, width)
    reach = torch.tensor([1, 8, 9, 40, 61])
    mask = seen_by(rows, queries, slots, reach)
    found = attend(query, key, value, mask, reach)
    torch.testing.assert_close(found, by_rows(query, key, value, mask, reach), atol=2e-6, rtol=2e-5)


@needs_compiler
def test_large_scores_and_those_that_differ_much() -> None:
    """Weights from 1 down to nothing: the exponential is right where it underflows, too."""
    query = 40 * torch.randn(3, 2, 3, 64)
    key, value, reach = cached(3, 2, 50, 64), cached(3, 2, 50, 64), torch.tensor([50, 50, 50])
    mask = torch.zeros(1, 1, 3, 50)  # one for all rows
    found = attend(query, key, value, mask, reach)
    torch.testing.assert_close(found, by_rows(query, key, value, mask, reach), atol=2e-4, rtol=1e-4)


@needs_compiler
def test_what_lies_behind_a_rows_reach_counts_for_nothing_whatever_it_is() -> None:
    query, reach = torch.randn(4, 2, 3, 32), torch.tensor([5, 16, 17, 33])
    key, value = cached(4, 2, 40, 32), cached(4, 2, 40, 32)
    mask = seen_by(4, 3, 40, reach)
    before = attend(query, key, value, mask, reach)
    for row, end in enumerate(reach.tolist()):
        key[row, :, end:] = torch.nan
        value[row, :, end:] = torch.inf
        mask[row, ..., end:] = 0
    assert torch.equal(attend(query, key, value, mask, reach), before)
    for row in range(4):
        own = slice(row, row + 1)
        assert torch.equal(attend(query[own], key[own], value[own], mask[own], reach[own]), before[own])


@needs_compiler
def test_what_is_no_number_stays_none() -> None:
    key, value, reach = cached(2, 2, 20, 32), cached(2, 2, 20, 32), torch.tensor([20, 20])
    key[1, 0, 11] = torch.nan
    found = attend(torch.randn(2, 2, 3, 32), key, value, torch.zeros(1, 1, 3, 20), reach)
    assert found[1, 0].isnan().all()
    assert not found[0].isnan().any()
    assert not found[1, 1].isnan().any()


@needs_compiler
def test_a_reach_beyond_the_slots_ends_with_them_and_a_query_that_sees_nothing_gets_zeros() -> None:
    query, key, value = torch.randn(2, 2, 3, 32), cached(2, 2, 20, 32), cached(2, 2, 20, 32)
    mask = torch.zeros(2, 1, 3, 20)
    mask[1, :, 2] = -torch.inf
    found = attend(query, key, value, mask, torch.tensor([1000, 20]))
    expected = by_rows(query, key, value, mask, torch.tensor([20, 20]))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1, :, :2], expected[1, :, :2])
    assert torch.equal(found[1, :, 2], torch.zeros(2, 32))


def test_numbers_that_are_nothing_for_it_go_to_torch() -> None:
    reach = torch.tensor([9, 12])
    for dtype, queries, width in (
        (torch.bfloat16, 3, 32),
        (torch.float32, few_queries.MOST + 1, 32),
        (torch.float32, 3, 24),
    ):
        query, key = torch.randn(2, 2, queries, width, dtype=dtype), torch.randn(2, 2, 12, width, dtype=dtype)
        mask = torch.zeros(2, 1, queries, 12, dtype=dtype)
        mask[0, ..., 9:] = -torch.inf
        assert few_queries.attend(query, key, key, mask, reach, None) is None
        found = _attend_within(query, key, key, mask, reach, None, None)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, key, attn_mask=mask))
    leaf = torch.randn(2, 2, 3, 32, requires_grad=True)
    assert few_queries.attend(leaf, leaf, leaf, torch.zeros(1, 1, 3, 3), reach, None) is None


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing compiled yet in this process."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    few_queries._kernel.cache_clear()
    yield tmp_path
    few_queries._kernel.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "cc 'half a quote"])
def test_without_a_compiler_torch_attends(fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
    query, key, reach = torch.randn(2, 2, 3, 64), cached(2, 2, 30, 64), torch.tensor([11, 30])
    mask = seen_by(2, 3, 30, reach)
    assert few_queries.attend(query, key, key, mask, reach, None) is None
    found = _attend_within(query, key, key, mask, reach, None, None)
    torch.testing.assert_close(found, by_rows(query, key, key, mask, reach))
    assert not list(fresh.rglob("*.so")), "half a kernel was left"


@needs_compiler
def test_several_who_compile_it_at_once_get_the_same(fresh: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: few_queries._built(64, torch.backends.cpu.get_cpu_capability()), range(4)))
    assert [path.name for path in fresh.iterdir()] == [path.name for path in built]
