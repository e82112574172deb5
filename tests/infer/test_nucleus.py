"""Top-p by selection is top-p by sorting, ties and all, however far the border is from the likeliest token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.infer import nucleus
from draftsmith.infer.nucleus import in_nucleus, nucleus_by_selection, nucleus_by_sorting

KINDS = ["peaked", "flat", "all equal", "tied in groups", "mostly impossible", "one token"]


def table(kind: str, rows: int = 12, vocab: int = 3000) -> Tensor:
    logits = torch.randn(rows, vocab) * (6 if kind == "peaked" else 0.2)
    if kind == "all equal":
        logits = torch.zeros(rows, vocab)
    if kind == "tied in groups":
        logits = (torch.randn(rows, vocab) * 2).round()
    if kind == "mostly impossible":
        logits[:, torch.randperm(vocab)[20:]] = -torch.inf
    if kind == "one token":
        logits[:, 7] = 200
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_selection_finds_what_sorting_finds(kind: str) -> None:
    logp = table(kind)
    limits = torch.tensor([1e-6, 0.05, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999, 0.99999, 1.0, 0.8])
    expected = nucleus_by_sorting(logp, limits)
    assert torch.equal(nucleus_by_selection(logp, limits), expected)
    assert bool(expected.any(dim=-1).all())


def test_the_set_is_the_smallest_that_reaches_p() -> None:
    logp, limit = table("flat"), 0.6
    keep = nucleus_by_selection(logp, torch.full((12,), limit))
    mass = torch.where(keep, logp.exp(), 0).double().sum(-1)
    least = torch.where(keep, logp, torch.inf).amin(-1).exp()
    assert bool((mass >= limit - 1e-5).all())
    assert bool((mass - least < limit + 1e-5).all())


def test_of_tied_tokens_the_first_ids_are_kept() -> None:
    logp = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]]).log()
    for find in (nucleus_by_selection, nucleus_by_sorting):
        assert find(logp, torch.tensor([0.5])).tolist() == [[False, True, True, True, False, False]]


@pytest.mark.parametrize("widths", [(), (1,), (2, 5), (64, 1024), (5000,)])
def test_how_far_one_looks_first_changes_nothing(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    logp, limits = torch.cat([table(kind) for kind in KINDS]), torch.rand(12 * len(KINDS))
    expected = nucleus_by_sorting(logp, limits)
    monkeypatch.setattr(nucleus, "WIDTHS", widths)
    assert torch.equal(nucleus_by_selection(logp, limits), expected)


def test_rows_have_their_own_limit() -> None:
    logp = table("flat", rows=6).view(3, 2, 3000)
    keep = in_nucleus(logp, torch.tensor([0.2, 1.0, 0.7]))
    assert bool(keep[1].all())
    assert torch.equal(keep[0], in_nucleus(logp[:1], torch.tensor([0.2]))[0])
    assert int(keep[0].sum()) < int(keep[2].sum()) < 2 * 3000


@pytest.mark.gpu
def test_sorting_on_cuda_finds_what_selection_finds_on_a_cpu() -> None:
    logp, limits = torch.cat([table(kind) for kind in KINDS]), torch.rand(12 * len(KINDS)).clamp(max=0.98)
    there = in_nucleus(logp.cuda()[:, None], limits.cuda()).cpu()[:, 0]
    assert (there != nucleus_by_selection(logp, limits)).sum() <= 12  # sums may round otherwise at the border
