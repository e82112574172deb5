"""What is stored is what was computed, up to the precision that each form of storage promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.distill.feature_codec import COMPRESSIONS, Compression, bytes_per_token, decode, encode


def residual_stream(positions: int = 400, vectors: int = 3, width: int = 64) -> Tensor:
    """Like a real one: a few channels a hundred times the others, and one position with a huge entry in another."""
    values = torch.randn(positions, vectors, width)
    values[:, :, 5] = values[:, :, 5] * 100 + 80
    values[0, :, 9] = 3000.0
    return values


def error(values: Tensor, compression: Compression) -> Tensor:
    """(width,) root mean square error of each channel, relative to that channel; the huge position left out."""
    stored = encode(values, compression)
    again = decode(stored, compression, values.dtype)
    assert again.shape == values.shape
    return (again - values)[1:].square().mean(dim=(0, 1)).sqrt() / values[1:].square().mean(dim=(0, 1)).sqrt()


@pytest.mark.parametrize(("compression", "most"), [("exact", 0.0), ("bf16", 0.003), ("int8", 0.02), ("int6", 0.08)])
def test_every_channel_keeps_its_precision_beside_much_larger_ones(compression: Compression, most: float) -> None:
    assert float(error(residual_stream(), compression).max()) <= most


def test_a_scale_per_row_alone_would_lose_the_small_channels() -> None:
    """Why channels have scales: the same integers without them are ten times worse on this stream."""
    values = residual_stream()
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    plain = ((values / scale).round() * scale - values)[1:].square().mean(dim=(0, 1)).sqrt()
    small = torch.arange(64) != 5
    assert float(error(values, "int8")[small].mean()) < 0.1 * float(plain[small].mean())


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_bytes_per_token_are_those_of_the_tensors(compression: Compression) -> None:
    values = residual_stream().bfloat16()
    stored = encode(values, compression)
    size = sum(tensor.nbytes for kind, tensor in stored.items() if kind != "channels")
    assert size == len(values) * bytes_per_token(64, 3, compression, torch.bfloat16)


def test_six_bits_are_more_than_twice_as_small_as_bf16_and_eight_nearly() -> None:
    half = bytes_per_token(576, 4, "bf16", torch.float32)
    assert half / bytes_per_token(576, 4, "int6", torch.float32) > 2.6
    assert half / bytes_per_token(576, 4, "int8", torch.float32) > 1.99


def test_integers_use_their_whole_range_and_no_more() -> None:
    whole = torch.arange(-31, 32).repeat(4)[: 4 * 63].reshape(1, 1, -1).float()
    stored = encode(whole, "int6")
    assert stored["values"].shape[-1] == 3 * whole.shape[-1] // 4
    equal = torch.ones(5, 2, 8)
    for compression in ("int8", "int6"):
        again = decode(encode(equal, compression), compression, torch.float32)  # type: ignore[arg-type]
        torch.testing.assert_close(again, equal, rtol=0.005, atol=0)


def test_packed_numbers_come_back_in_their_places() -> None:
    values = torch.zeros(7, 1, 8)
    for place in range(8):
        values[place % 7, 0, place] = (-1.0) ** place * (place + 1)
    again = decode(encode(values, "int6"), "int6", torch.float32)
    torch.testing.assert_close(again, values, rtol=0.02, atol=0)


def test_dead_channels_and_empty_rows_stay_zero() -> None:
    values = torch.randn(6, 2, 8)
    values[:, :, 3], values[2] = 0.0, 0.0
    for compression in ("int8", "int6"):
        again = decode(encode(values, compression), compression, torch.float32)  # type: ignore[arg-type]
        assert bool(torch.isfinite(again).all())
        assert not bool(again[:, :, 3].any())
        assert not bool(again[2].any())


def test_how_positions_are_taken_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = residual_stream()
    whole = encode(values, "int8")
    monkeypatch.setattr("draftsmith.distill.feature_codec._POSITIONS", 400)
    assert torch.equal(encode(values, "int8")["values"], whole["values"])
    monkeypatch.setattr("draftsmith.distill.feature_codec._POSITIONS", 33)
    torch.testing.assert_close(
        decode(encode(values, "int8"), "int8", torch.float32), decode(whole, "int8", torch.float32), rtol=0.1, atol=0.1
    )


def test_a_width_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size is 6; use int8 or bf16"):
        encode(torch.randn(3, 1, 6), "int6")
