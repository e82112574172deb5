"""Rows kept of a linear layer are those of the layer as it is now."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.infer.packed import PackedLinear
from draftsmith.infer.selection import Selection


@pytest.mark.parametrize("bias", [True, False])
def test_what_changes_between_two_calls_is_seen(bias: bool) -> None:
    head, selection = nn.Linear(4, 9, bias=bias).requires_grad_(False), Selection()
    hidden, rows = torch.randn(3, 4), torch.tensor([1, 5, 8])

    def check() -> None:
        wanted = F.linear(hidden, head.weight[rows], head.bias[rows] if bias else None)
        assert torch.equal(selection.linear(hidden, head, rows), wanted)

    check()
    check()
    head.weight.mul_(2)
    check()
    rows[1] = 6
    check()
    rows = torch.tensor([0, 1])
    check()


def test_rows_are_copied_once() -> None:
    head, selection, rows = nn.Linear(4, 9), Selection(), torch.tensor([1, 5])
    selection.linear(torch.randn(1, 4), head, rows)
    kept = selection._kept
    selection.linear(torch.randn(2, 4), head, rows)
    assert selection._kept is kept


def test_selected_in_decoding_it_trains_later() -> None:
    head, selection, rows = nn.Linear(4, 9).requires_grad_(False), Selection(), torch.tensor([1, 5])
    with torch.inference_mode():
        selection.linear(torch.randn(1, 4), head, rows)
    hidden = torch.randn(2, 4, requires_grad=True)
    selection.linear(hidden, head, rows).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, head.weight[rows].sum(0).expand(2, 4))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed without oneDNN")
def test_a_packed_head_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restores its matrix anew whenever it is asked for it."""
    plain, rows, hidden = nn.Linear(16, 24).requires_grad_(False), torch.tensor([1, 5]), torch.randn(3, 16)
    head, selection, asked = PackedLinear(plain), Selection(), []
    restored = PackedLinear.weight
    monkeypatch.setattr(PackedLinear, "weight", property(lambda self: asked.append(1) or restored.fget(self)))
    for _ in range(3):
        found = selection.linear(hidden, head, rows)  # type: ignore[arg-type]
        assert torch.equal(found, F.linear(hidden, plain.weight[rows], plain.bias[rows]))
    assert asked == [1]
