"""Teacher batches are what the target computes on each document alone, and never anything that is not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.distill.features import frozen_logits, pick, precompute, teacher_batch
from draftsmith.distill.packing import Row, pack
from draftsmith.distill.tokens import Sample
from draftsmith.infer.target import Target

LENGTHS = (9, 5, 12, 3, 7)


def packed() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    samples = [
        Sample(f"doc{i}", torch.randint(3, 300, (n,), generator=generator).tolist(), [False] * 2 + [True] * (n - 2))
        for i, n in enumerate(LENGTHS)
    ]
    return pack(samples, length=20)


def test_packed_features_equal_those_of_each_document_alone(tiny_target: Target) -> None:
    rows = packed()
    teacher = teacher_batch(tiny_target, rows, taps=(0, 2))
    assert teacher.hidden.shape == (len(rows), 20, tiny_target.hidden_size)
    assert teacher.features is not None
    assert teacher.features.shape[-1] == 2 * tiny_target.hidden_size
    for index, row in enumerate(rows):
        for segment in range(1, len(row.ids) + 1):
            at = row.segments == segment
            tokens = row.tokens[at][None]
            reading = tiny_target.read_packed(
                tokens, torch.arange(tokens.shape[1])[None], torch.ones_like(tokens), taps=(0, 2)
            )
            assert reading.features is not None
            torch.testing.assert_close(teacher.hidden[index, at], reading.hidden[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(teacher.features[index, at], reading.features[0], atol=1e-5, rtol=1e-4)


def test_logits_are_the_target_s_and_carry_no_gradient(tiny_target: Target) -> None:
    hidden = torch.randn(3, tiny_target.hidden_size, requires_grad=True)
    logits = frozen_logits(tiny_target)(hidden)
    assert not logits.requires_grad
    assert torch.equal(logits, tiny_target.logits(hidden).detach())


def test_picked_precomputed_rows_equal_the_batch_computed_online(tiny_target: Target) -> None:
    rows = packed()
    stored = precompute(tiny_target, rows, taps=(1,))
    some = [1, 0]
    joined = pick(stored, some, tiny_target.device)
    online = teacher_batch(tiny_target, [rows[index] for index in some], taps=(1,))
    for name in ("tokens", "segments", "positions", "supervised"):
        assert torch.equal(getattr(joined, name), getattr(online, name))
    torch.testing.assert_close(joined.hidden, online.hidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(joined.features, online.features, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(joined.logits(joined.hidden), online.logits(online.hidden), atol=1e-4, rtol=1e-4)
    assert pick(precompute(tiny_target, rows, taps=()), [0], tiny_target.device).features is None


def test_precompute_prints_its_size_first(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    stored = precompute(tiny_target, packed() * 60, taps=(0, 1))
    assert stored.features is not None
    held = stored.hidden.nbytes + stored.features.nbytes
    assert f"{len(stored.hidden)} rows need {held / 2**20:.0f} MiB" in capsys.readouterr().err


def test_a_target_that_computes_nan_stops_with_the_documents_named(build_target: Callable[..., Target]) -> None:
    broken = build_target(seed=3)
    rows = packed()
    assert rows[1].ids == ("doc0", "doc1", "doc3")
    token = int(rows[1].tokens[1])
    assert not any((row.tokens == token).any() for row in (rows[0], *rows[2:])), "another row holds the spoiled token"
    with torch.no_grad():
        broken.embedding.weight[token] = torch.nan
    with pytest.raises(
        ValueError, match=r"last hidden state is not finite at .* first in row 1, which holds doc0, doc1, doc3"
    ):
        teacher_batch(broken, rows, taps=())
    with torch.no_grad():
        broken.embedding.weight[token] = 0.0
    teacher_batch(broken, rows, taps=(0,))
