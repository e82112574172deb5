"""A target, a draft model like it, and prompts, for the laws that hold whoever drafts; a file may define its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.infer.target import Target

from . import drafting


@pytest.fixture(scope="module")
def target(build_target: Callable[..., Target]) -> Target:
    return drafting.repeating(build_target(num_hidden_layers=2))


@pytest.fixture(scope="module")
def draft(target: Target, build_target: Callable[..., Target]) -> Target:
    return drafting.perturbed(target, build_target(num_hidden_layers=2))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return drafting.prompts(6, seed=3, vocab_size=target.vocab_size)
