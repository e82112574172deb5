"""The merged attention against one dense softmax, written forward and differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.heads import unroll
from draftsmith.heads.unroll import Blocks, Unroll

HEADS, GROUPS, WIDTH = 2, 3, 8


def packed() -> tuple[Tensor, Tensor]:
    """Segments with padding in front, between and behind, and rows that ask in some of the documents only."""
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [0, 3, 3, 3, 3, 3, 3, 4, 5, 5]])
    active = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 1, 1]]).bool()
    return segments, active


def inputs(blocks: Blocks, steps: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Per step: queries, keys, values."""
    sizes = [(len(blocks.rows), len(blocks.keys))] + [(len(blocks.rows),) * 2] * steps
    return [
        [
            torch.randn(count, heads, WIDTH, dtype=dtype, requires_grad=True)
            for count, heads in ((rows, HEADS * GROUPS), (keys, HEADS), (keys, HEADS))
        ]
        for rows, keys in sizes
    ]


def dense(segments: Tensor, blocks: Blocks, given: list[list[Tensor]], step: int) -> Tensor:
    """One softmax over all keys of all steps, with a mask: the equation as it stands."""
    document = segments.flatten()
    keys = torch.cat([given[s][1] for s in range(step + 1)]).repeat_interleave(GROUPS, dim=1)
    values = torch.cat([given[s][2] for s in range(step + 1)]).repeat_interleave(GROUPS, dim=1)
    row, key = blocks.rows[:, None], blocks.keys[None, :]
    first = (document[row] == document[key]) & (key <= row)
    own = torch.eye(len(blocks.rows), dtype=torch.bool).repeat(1, step)
    seen = torch.cat([first, own], dim=1)
    scores = torch.einsum("rhd,khd->hrk", given[step][0], keys) * WIDTH**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrk,khd->rhd", weights, values)


@pytest.mark.parametrize("block", [1, 2, 256])
def test_merged_attention_equals_one_dense_softmax(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(unroll, "BLOCK", block)
    segments, active = packed()
    blocks = Blocks.find(segments, active)
    given = inputs(blocks, 3, torch.float64)
    flat = [tensor for step in given for tensor in step]
    memory = Unroll(blocks)
    merged = [memory.attend(0, *step) for step in given]
    expected = [dense(segments, blocks, given, step) for step in range(4)]
    torch.testing.assert_close(torch.stack(merged), torch.stack(expected))
    weights = torch.randn(4, *merged[0].shape, dtype=torch.float64)
    ours = torch.autograd.grad((torch.stack(merged) * weights).sum(), flat)
    theirs = torch.autograd.grad((torch.stack(expected) * weights).sum(), flat)
    for got, wanted in zip(ours, theirs):
        torch.testing.assert_close(got, wanted)


def test_everyone_may_ask_at_step_0() -> None:
    """What a layer with another one above it needs."""
    segments, active = packed()
    blocks = Blocks.find(segments, active)
    (_, key, value), *_ = inputs(blocks, 0, torch.float64)
    query = torch.randn(len(blocks.keys), HEADS * GROUPS, WIDTH, dtype=torch.float64)
    out = Unroll(blocks).attend(0, query, key, value)
    torch.testing.assert_close(out, dense(segments, blocks.everyone, [[query, key, value]], 0))
    with pytest.raises(AssertionError, match="queries"):
        Unroll(blocks).attend(0, query[:-1], key, value)


def test_keys_are_the_documents_prefixes_up_to_the_last_row_that_asks() -> None:
    segments, active = packed()
    blocks = Blocks.find(segments, active)
    assert blocks.rows.tolist() == active.flatten().nonzero()[:, 0].tolist()
    assert blocks.keys.tolist() == [0, 1, 2, 3, 4, 11, 12, 13, 14, 18, 19]
    assert torch.equal(blocks.keys[blocks.ask], blocks.rows)


def test_padding_that_asks_is_caught() -> None:
    with pytest.raises(AssertionError, match="padding"):
        Blocks.find(torch.tensor([[1, 1, 0]]), torch.tensor([[False, True, True]]))


def test_nobody_asking_is_no_error() -> None:
    segments, active = packed()
    blocks = Blocks.find(segments, torch.zeros_like(active))
    given = inputs(blocks, 1, torch.float32)
    memory = Unroll(blocks)
    out = [memory.attend(0, *step) for step in given]
    assert out[1].shape == (0, HEADS * GROUPS, WIDTH)
    out[1].sum().backward()


def test_half_precision_stays_near_full() -> None:
    segments, active = packed()
    blocks = Blocks.find(segments, active)
    given = inputs(blocks, 2, torch.bfloat16)
    memory = Unroll(blocks)
    out = [memory.attend(0, *step) for step in given][-1]
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    wide = [[tensor.detach().float().requires_grad_() for tensor in step] for step in given]
    expected = dense(segments, blocks, wide, 2)
    expected.sum().backward()
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
    grads = [(tensor.grad, other.grad) for step, twin in zip(given, wide) for tensor, other in zip(step, twin)]
    for got, wanted in grads:
        if wanted is not None:
            assert got is not None
            torch.testing.assert_close(got.float(), wanted, rtol=0.1, atol=0.1)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_is_linear_in_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest tensor and everything kept for the backward pass, on one document of twice the length."""
    monkeypatch.setattr(unroll, "BLOCK", 32)
    largest, kept = [], []
    for length in (256, 512):
        segments = torch.ones(1, length, dtype=torch.int64)
        blocks = Blocks.find(segments, segments > 0)
        given, sizes = inputs(blocks, 3, torch.float32), []
        memory = Unroll(blocks)

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Largest() as mode:
            out = [memory.attend(0, *step) for step in given]
            torch.stack(out).sum().backward()
        largest.append(mode.elements)
        kept.append(sum(sizes))
    assert largest[1] <= 2 * largest[0]
    assert kept[1] <= 2 * kept[0]
