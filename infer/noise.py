"""Position-keyed noise: randomness as a pure function of (seed, absolute position, vocabulary id).

A counter-based generator in the manner of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"): the
counter is mixed by SplitMix64's finaliser (Steele et al. 2014), nothing is stored, and no draw depends on how many
came before it. Adding Gumbel noise to log-probabilities and taking the argmax draws from the distribution; because
the noise belongs to the position and not to the tree node, one seed gives the same text with any drafter, any tree,
any batch, or none.

Letters: R rows of noise, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

STREAM_TARGET = 0
"""The target's own choice (and drafts coupled to it)."""
STREAM_DRAFT = 1
"""Sampled drafts that rejection verifiers judge; independent of everything else."""
STREAM_COIN = 2
"""Accept or reject, one coin per node and round."""
STREAM_BONUS = 3
"""The token that ends a round of a rejection verifier."""


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words: int64 in, int64 out, any shape."""
    return _mix_in_place(values.clone())


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor, *, stream: int = STREAM_TARGET) -> Tensor:
    """Uniform draws in the open interval (0, 1), float64, 52 bits.

    seeds, positions: (R,) int64; ids: (V,) int64 -> (R, V). `stream` separates independent uses of one position.
    """
    return _fractions(_keys(seeds, positions, stream)[:, None] + ids * _GOLDEN)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor, *, stream: int = STREAM_TARGET) -> Tensor:
    """Standard Gumbel noise, float32, shapes as `uniform`. Computed in float64: 24 bits would bias rare tokens."""
    keys, offsets = _keys(seeds, positions, stream), ids * _GOLDEN
    if keys.is_cuda:
        return _gumbel(keys[:, None] + offsets)
    few = max(1, 2**16 // max(1, len(ids)))  # rows that stay in the processor's cache: four times faster
    return torch.cat([_gumbel(part[:, None] + offsets) for part in keys.split(few)])


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, *, stream: int = STREAM_TARGET) -> Tensor:
    """The entries of `gumbel` for single tokens: seeds, positions, ids (R,) int64 -> (R,) float32, the same numbers."""
    return _gumbel(_keys(seeds, positions, stream) + ids * _GOLDEN)


def _keys(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """(R,) int64; + 1 because mix(0) is 0."""
    return mix(mix(seeds * _GOLDEN + stream + 1) + positions * _GOLDEN)


def _gumbel(counters: Tensor) -> Tensor:
    """float32 noise of int64 counters, which are overwritten."""
    return _fractions(counters).log_().neg_().log_().neg_().float()


def _fractions(counters: Tensor) -> Tensor:
    """float64 in (0, 1) of int64 counters, which are overwritten.

    52 bits: the half that keeps 0 out needs the 53rd, and rounding it away would let 1 in (infinite Gumbel noise).
    """
    words = _mix_in_place(counters)
    return _shift_right(words, 12, torch.empty_like(words)).double().add_(0.5).mul_(2.0**-52)


def _mix_in_place(values: Tensor) -> Tensor:
    shifted = torch.empty_like(values)
    values.bitwise_xor_(_shift_right(values, 30, shifted)).mul_(_MIX_1)
    values.bitwise_xor_(_shift_right(values, 27, shifted)).mul_(_MIX_2)
    return values.bitwise_xor_(_shift_right(values, 31, shifted))


def _shift_right(values: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical (zero-filling) right shift of int64, into `out`."""
    torch.bitwise_right_shift(values, bits, out=out)
    return out.bitwise_and_((1 << (64 - bits)) - 1)
