"""Laws of block attention in training: it is masked attention, at a fraction of the memory, and anchors are drawn fairly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.heads import blocks
from draftsmith.heads.blocks import BlockMemory, sample_anchors, split_anchors
from draftsmith.heads.unroll import Blocks

SEGMENTS = torch.tensor([[1] * 9 + [2] * 7 + [0] * 2, [1] * 4 + [2] * 12 + [0] * 2])
HEADS, GROUPS, WIDTH = 2, 3, 4


def anchors(share: float = 0.6, *, seed: int = 0) -> Tensor:
    """(B, T) bool; the row before a document's last token is the last that may be one."""
    inside = torch.zeros_like(SEGMENTS, dtype=torch.bool)
    inside[:, :-1] = (SEGMENTS[:, :-1] == SEGMENTS[:, 1:]) & (SEGMENTS[:, :-1] > 0)
    return inside & (torch.rand(SEGMENTS.shape, generator=torch.Generator().manual_seed(seed)) < share)


def tensors(view: Blocks, size: int) -> list[Tensor]:
    """query, own key, own value, context keys, context values; float64, with gradient."""
    generator = torch.Generator().manual_seed(1)
    rows, keys = len(view.rows) * size, len(view.keys)
    shapes = [(rows, HEADS * GROUPS, WIDTH), *[(rows, HEADS, WIDTH)] * 2, *[(keys, HEADS, WIDTH)] * 2]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def run(view: Blocks, size: int, is_causal: bool, given: list[Tensor]) -> Tensor:
    memory = BlockMemory(view, size=size, is_causal=is_causal)
    memory.keep(0, given[3], given[4])
    return memory.attend(0, *given[:3])


def dense(view: Blocks, size: int, is_causal: bool, given: list[Tensor]) -> Tensor:
    """The same with one mask over all context keys and all slots, from the definition."""
    query, key, value, keys, values = given
    places = view.keys[None]  # (1, N)
    row = view.rows[:, None]
    segment = SEGMENTS.flatten()
    sees = (
        (places <= row) & (segment[places] == segment[row]) & (places // SEGMENTS.shape[1] == row // SEGMENTS.shape[1])
    )
    sees = sees.repeat_interleave(size, dim=0)  # (R*b, N)
    slots = torch.arange(len(view.rows) * size)
    own = slots[:, None] // size == slots[None] // size
    if is_causal:
        own &= slots[None] <= slots[:, None]
    mask = torch.cat([sees, own], dim=1)
    every = [torch.cat(pair).repeat_interleave(GROUPS, dim=1) for pair in ((keys, key), (values, value))]
    scores = torch.einsum("qhd,khd->hqk", query, every[0]) * WIDTH**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, every[1])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [1, 6, 256])
def test_block_attention_equals_masked_attention_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, queries: int
) -> None:
    monkeypatch.setattr(blocks, "QUERIES", queries)
    view = Blocks.find(SEGMENTS, anchors())
    given = tensors(view, 3)
    sparse, truth = run(view, 3, is_causal, given), dense(view, 3, is_causal, given)
    torch.testing.assert_close(sparse, truth)
    weight = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for found, right in zip(
        torch.autograd.grad((sparse * weight).sum(), given), torch.autograd.grad((truth * weight).sum(), given)
    ):
        torch.testing.assert_close(found, right)


def test_a_block_neither_sees_other_blocks_nor_other_documents_nor_what_follows_its_anchor() -> None:
    view = Blocks.find(SEGMENTS, anchors())
    size, block = 3, 4
    given = tensors(view, size)
    out = run(view, size, False, given)[block * size : (block + 1) * size]
    _, key, value, keys, values = torch.autograd.grad(out.sum(), given)
    touched = (value != 0).flatten(1).any(dim=1) | (key != 0).flatten(1).any(dim=1)
    assert touched.nonzero()[:, 0].tolist() == list(range(block * size, (block + 1) * size))
    anchor = int(view.rows[block])
    segment = SEGMENTS.flatten()
    reads = view.keys[((keys != 0) | (values != 0)).flatten(1).any(dim=1)].tolist()
    first = next(
        place for place in view.keys.tolist() if segment[place] == segment[anchor] and place // 18 == anchor // 18
    )
    assert reads == list(range(first, anchor + 1))


def test_a_batch_without_anchors_gives_zero_gradients_to_everything() -> None:
    view = Blocks.find(SEGMENTS, torch.zeros_like(SEGMENTS, dtype=torch.bool))
    given = tensors(view, 3)
    out = run(view, 3, False, given)
    assert out.shape == (0, HEADS * GROUPS, WIDTH)
    assert all(gradient.numel() == 0 for gradient in torch.autograd.grad(out.sum(), given))


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.size = max(self.size, part.untyped_storage().nbytes() // part.element_size())
        return out


def test_no_score_matrix_of_all_slots_by_all_tokens_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "QUERIES", 8)
    length, size = 128, 4
    segments = torch.ones(1, length, dtype=torch.int64)
    active = torch.ones_like(segments, dtype=torch.bool)
    active[:, -1] = False
    view = Blocks.find(segments, active)
    given = tensors(view, size)
    slots = len(view.rows) * size
    with Largest() as seen:
        run(view, size, False, given).sum().backward()
    assert 0 < seen.size <= slots * HEADS * GROUPS * WIDTH < slots * length


def test_sampled_anchors_stand_for_all_of_them() -> None:
    active = anchors(0.9)
    value = torch.arange(active.numel(), dtype=torch.float32).view_as(active)
    truth, total, draws = (value * active).sum(dim=1), torch.zeros(2), 400
    for _ in range(draws):
        chosen, scale = sample_anchors(active, 5)
        assert bool((chosen <= active).all())
        assert chosen.sum(dim=1).tolist() == [5, 5]
        total += (value * chosen).sum(dim=1) * scale
    torch.testing.assert_close(total / draws, truth, rtol=0.05, atol=0.0)


def test_all_anchors_are_taken_where_there_are_few() -> None:
    active = anchors(0.3)
    chosen, scale = sample_anchors(active, 100)
    assert torch.equal(chosen, active)
    assert scale.tolist() == [1.0, 1.0]
    nothing, scale = sample_anchors(torch.zeros_like(active), 100)
    assert not nothing.any()
    assert scale.isfinite().all()


@pytest.mark.parametrize("count", [1, 4, 1000])
def test_shares_of_anchors_cover_each_once(count: int) -> None:
    active = anchors()
    shares = list(split_anchors(active, count))
    assert torch.equal(torch.stack(shares).sum(dim=0), active.long())
    assert all(0 < int(share.sum()) <= count for share in shares)
    assert [int(share.sum()) for share in split_anchors(torch.zeros_like(active), count)] == [0]
