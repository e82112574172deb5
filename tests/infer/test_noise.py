"""Position-keyed noise: a pure function of its key, uniform, independent across keys, and never 0 or 1."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from draftsmith.infer import noise

FALSE_ALARM = 1e-6
WORDS = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def signed(word: int) -> int:
    """A 64-bit word as int64 holds it."""
    return (word % WORDS) - WORDS * (word % WORDS >= WORDS // 2)


def mix_by_hand(word: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORDS
    return word ^ word >> 31


def unmix(word: int) -> int:
    """The inverse of `mix_by_hand`."""

    def unshift(value: int, bits: int) -> int:
        result = value
        for _ in range(64 // bits):
            result = value ^ result >> bits
        return result

    word = unshift(word, 31) * pow(0x94D049BB133111EB, -1, WORDS) % WORDS
    word = unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, WORDS) % WORDS
    return unshift(word, 30)


def grid(rows: int, ids: int, *, stream: int = 0, seed: int = 3) -> Tensor:
    return noise.uniform(torch.full((rows,), seed), torch.arange(rows), torch.arange(ids), stream=stream)


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1))


def test_mix_gives_the_published_splitmix64_sequence() -> None:
    state = torch.tensor([signed(GOLDEN * step) for step in (1, 2, 3)])
    assert [word % WORDS for word in noise.mix(state).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_mix_is_a_bijection() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (200,))
    assert [unmix(word % WORDS) for word in noise.mix(words).tolist()] == [word % WORDS for word in words.tolist()]


@pytest.mark.parametrize("word", [0, WORDS - 1])
def test_the_extreme_words_stay_inside_the_open_interval(word: int) -> None:
    """A draw of exactly 0 or 1 is infinite Gumbel noise, and infinity minus infinity is no token."""
    key = mix_by_hand((mix_by_hand((3 * GOLDEN + 1) % WORDS) + 5 * GOLDEN) % WORDS)
    identity = signed((unmix(word) - key) * pow(GOLDEN, -1, WORDS))  # the id whose word this is
    arguments = torch.tensor([3]), torch.tensor([5]), torch.tensor([identity])
    value = noise.uniform(*arguments).item()
    assert 0 < value < 1
    assert abs(value - (word > 0)) < 1e-15
    assert bool(noise.gumbel(*arguments).isfinite().all())


def test_no_key_is_special() -> None:
    """mix(0) is 0; a counter of zeros must not come out as the smallest number there is."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert 1e-6 < noise.uniform(zero, zero, zero).item() < 1 - 1e-6


def test_a_draw_depends_on_its_own_key_alone() -> None:
    seeds, positions, ids = torch.tensor([4, -9, 4]), torch.tensor([0, 7, 2**40]), torch.tensor([5, 0, 49151, 8])
    together = noise.uniform(seeds, positions, ids)
    for row in range(3):
        for column in range(4):
            one = noise.uniform(seeds[row : row + 1], positions[row : row + 1], ids[column : column + 1])
            assert one.item() == together[row, column].item()


@pytest.mark.parametrize("changed", ["seed", "position", "id", "stream"])
def test_every_part_of_the_key_matters(changed: str) -> None:
    def at(**options: int) -> float:
        key = {"seed": 1, "position": 1, "id": 1, "stream": 1} | options
        parts = (torch.tensor([key[name]]) for name in ("seed", "position", "id"))
        return noise.uniform(*parts, stream=key["stream"]).item()

    assert len({at(**{changed: value}) for value in range(100)}) == 100


def test_draws_are_uniform() -> None:
    values = grid(400, 500).flatten()
    assert chi_square(torch.histc(values, bins=100, min=0, max=1)) > FALSE_ALARM


@pytest.mark.parametrize("lag", ["id", "position", "seed", "stream"])
def test_neighbouring_keys_are_independent(lag: str) -> None:
    """Counts of pairs of neighbours over a 10 by 10 grid."""
    base = grid(400, 500)
    pairs = {
        "id": (base[:, :-1], base[:, 1:]),
        "position": (base[:-1], base[1:]),
        "seed": (base, grid(400, 500, seed=4)),
        "stream": (base, grid(400, 500, stream=1)),
    }
    first, second = pairs[lag]
    cells = (first * 10).long() * 10 + (second * 10).long()
    assert chi_square(torch.bincount(cells.flatten(), minlength=100).double()) > FALSE_ALARM


def test_gumbel_noise_makes_argmax_a_draw() -> None:
    p = torch.tensor([0.6, 0.25, 0.1, 0.05])
    rows = 100_000
    values = noise.gumbel(torch.full((rows,), 11), torch.arange(rows), torch.arange(4))
    assert values.dtype == torch.float32
    seen = torch.bincount((p.log() + values).argmax(dim=1), minlength=4)
    statistic = float(((seen - rows * p) ** 2 / (rows * p)).sum())
    assert chi2.sf(statistic, 3) > FALSE_ALARM


def test_noise_of_single_tokens_is_that_of_the_whole_row() -> None:
    seeds, positions = torch.tensor([4, -9, 4]), torch.tensor([0, 7, 2**40])
    whole = noise.gumbel(seeds, positions, torch.arange(1000))
    row, token = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 999, 17, 3, 3])
    assert torch.equal(noise.gumbel_at(seeds[row], positions[row], token), whole[row, token])


@pytest.mark.gpu
def test_noise_on_cuda_is_that_of_a_cpu() -> None:
    """The words are equal to the bit; logarithms may differ in the last place."""
    seeds, positions, ids = torch.arange(8), torch.arange(8) * 1000, torch.arange(50_000)
    here, there = noise.uniform(seeds, positions, ids), noise.uniform(seeds.cuda(), positions.cuda(), ids.cuda())
    assert torch.equal(here, there.cpu())
    there = noise.gumbel(seeds.cuda(), positions.cuda(), ids.cuda()).cpu()
    torch.testing.assert_close(noise.gumbel(seeds, positions, ids), there, atol=1e-6, rtol=1e-6)
