"""What one process of each launch config holds of the drafter, in bytes.

Everything trained is float32: weights, gradients, and AdamW's two moments are 4 + 4 + 8 bytes per trained weight. With P
trained weights, F frozen ones of the drafter's own (an embedding that is not trained) and N processes:

| launch config | weights | gradients | optimiser | working memory | main memory |
| --- | --- | --- | --- | --- | --- |
| ddp | 4 (P + F) | 4 P | 8 P | | |
| fsdp2 | 4 (P + F) / N | 4 P / N | 8 P / N | 12 P + 4 F | |
| zero1 | 4 (P + F) | 4 P | 12 P / N | bucket | |
| zero2 | 4 (P + F) | 4 P / N | 12 P / N | bucket, and as much for gradients on their way into it | |
| zero3 | 4 (P + F) / N | 4 P / N | 12 P / N | bucket + 4 (P + F) | |
| ..._offload | as above | 0 | 0 | as above | 16 P / N |

Muon keeps one moment of hidden matrices, so it needs less. Under ZeRO the optimiser has weights of its own (4 of the 12).
Working memory is what exists during a step only: none of note for a fused update (ddp); gathered weights, their gradients
and those being exchanged (fsdp2, which wraps the drafter as one unit); DeepSpeed's exchange bucket, `reduce_bucket_size`
numbers (configs/deepspeed); weights gathered for use (zero3).
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKET = 50_000_000
"""`reduce_bucket_size` of configs/deepspeed: DeepSpeed's own 500,000,000 would take 2 GB whatever is trained."""


@dataclass(frozen=True)
class Share:
    """One process' bytes."""

    weights: int
    gradients: int
    optimiser: int
    working: int
    host: int
    """In main memory."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimiser + self.working


LAUNCHES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero2_offload", "zero3_offload")
"""Files of configs/accelerate, the simplest first."""


def share(launch: str, *, trained: int, frozen: int, world: int) -> Share:
    """One process' share under `configs/accelerate/{launch}.yaml` with `world` processes.

    trained, frozen: weights of the drafter.
    """
    assert launch in LAUNCHES, f"there is no launch config {launch}"
    whole, part = 4 * (trained + frozen), 4 * trained // world
    if launch == "ddp":
        return Share(whole, 4 * trained, 8 * trained, 0, 0)
    if launch == "fsdp2":
        return Share(whole // world, part, 2 * part, whole + 8 * trained, 0)
    bucket, stage = 4 * BUCKET, launch.removeprefix("zero")[0]
    weights = whole // world if stage == "3" else whole
    gradients = 4 * trained if stage == "1" else part
    working = bucket + {"1": 0, "2": min(bucket, 4 * trained), "3": whole}[stage]
    if launch.endswith("_offload"):
        return Share(weights, 0, 0, working, 4 * part)
    return Share(weights, gradients, 3 * part, working, 0)
