"""Laws of the learning rate."""

from __future__ import annotations

import math

import pytest

from draftsmith.train.recipe import Optimiser
from draftsmith.train.schedule import progress, rate


def test_rate_rises_linearly_then_falls_as_a_cosine() -> None:
    settings = Optimiser(lr=2.0, warmup_share=0.2, final_lr_share=0.1)
    assert rate(0.1, settings) == pytest.approx(1.0)
    assert rate(0.2, settings) == pytest.approx(2.0)
    assert rate(0.6, settings) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rate(0.4, settings) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rate(1.0, settings) == pytest.approx(0.2)


def test_no_step_has_rate_zero_and_without_warm_up_the_first_is_nearly_full() -> None:
    settings = Optimiser(lr=1.0, warmup_share=0.0)
    rates = [rate(progress(step, 100, seconds=0, minutes=None), settings) for step in range(100)]
    assert all(value > 0 for value in rates)
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.999
    warm = Optimiser(lr=1.0, warmup_share=0.05)
    assert rate(progress(0, 100, seconds=0, minutes=None), warm) == pytest.approx(0.1)


def test_clock_takes_over_where_it_is_ahead() -> None:
    assert progress(10, 100, seconds=1.0, minutes=1.0) == pytest.approx(0.105)
    assert progress(10, 100, seconds=30.0, minutes=1.0) == pytest.approx(0.5)
    assert progress(10, 100, seconds=90.0, minutes=1.0) == 1.0
