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


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words: int64 in, int64 out, any shape."""
    values = (values ^ _shift_right(values, 30)) * _MIX_1
    values = (values ^ _shift_right(values, 27)) * _MIX_2
    return values ^ _shift_right(values, 31)


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor, *, stream: int = STREAM_TARGET) -> Tensor:
    """Uniform draws in the open interval (0, 1), float64, 52 bits.

    seeds, positions: (R,) int64; ids: (V,) int64 -> (R, V). `stream` separates independent uses of one position.
    """
    key = mix(mix(seeds * _GOLDEN + stream + 1) + positions * _GOLDEN)  # (R,); + 1 because mix(0) is 0
    bits = mix(key[:, None] + ids[None, :] * _GOLDEN)  # (R, V)
    # 52 bits: the half that keeps 0 out needs the 53rd, and rounding it away would let 1 in (infinite Gumbel noise).
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor, *, stream: int = STREAM_TARGET) -> Tensor:
    """Standard Gumbel noise, float32, shapes as `uniform`. Computed in float64: 24 bits would bias rare tokens."""
    return -torch.log(-torch.log(uniform(seeds, positions, ids, stream=stream))).float()
