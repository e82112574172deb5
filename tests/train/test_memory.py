"""Laws of what engines hold: it is all there once, and AdamW's part is AdamW's."""

from __future__ import annotations

import pytest
import torch

from draftsmith.train.memory import BUCKET, LAUNCHES, share

P, F = 1_000_000, 200_000


def test_adamw_has_two_fp32_moments_per_weight() -> None:
    layer = torch.nn.Linear(100, 200, bias=False)
    optimiser = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 100)).sum().backward()
    optimiser.step()
    moments = [value for state in optimiser.state.values() for value in state.values() if value.dim() > 0]
    size = sum(value.numel() * value.element_size() for value in moments)
    assert size == share("ddp", trained=20_000, frozen=0, world=1).optimiser


@pytest.mark.parametrize("world", [1, 2, 8])
def test_shares_of_all_processes_are_the_whole_state_once(world: int) -> None:
    for launch in LAUNCHES:
        found = share(launch, trained=P, frozen=F, world=world)
        own_weights = 4 * P if launch.startswith("zero") else 0
        moments = (found.host if launch.endswith("_offload") else found.optimiser) * (1 if launch == "ddp" else world)
        extra = 4 * P if launch.endswith("_offload") else 0  # the gradients lie there too
        assert moments == 8 * P + own_weights + extra, launch
        is_split = launch in ("fsdp2", "zero3", "zero3_offload")
        assert found.weights * (world if is_split else 1) == 4 * (P + F), launch


def test_more_splitting_takes_less() -> None:
    held = {name: share(name, trained=P, frozen=F, world=8) for name in LAUNCHES}
    kept = {name: part.weights + part.gradients + part.optimiser for name, part in held.items()}
    assert kept["ddp"] > kept["zero1"] > kept["zero2"] > kept["zero3"] > kept["zero3_offload"]
    assert kept["zero2"] > kept["zero2_offload"]
    assert [name for name in LAUNCHES if held[name].host] == ["zero2_offload", "zero3_offload"]
    assert held["zero1"].working == 4 * BUCKET
    assert held["ddp"].total == 4 * (P + F) + 4 * P + 8 * P
