"""What a run will take, before anything is bought, loaded or launched: memory per GPU, disk, speed, and the command.

    draftsmith plan RECIPE --nodes 2 --gpus 8 --gpu-memory 80 --tokens 2e8 --hours 24

Everything follows from the recipe and the target's config.json. Weights, bytes and operations of one micro-step are
measured on tensors without contents (blueprint.py), what an engine holds is arithmetic (memory.py). A micro-step is
planned full: one document per row, every token learned; real rows take less.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from transformers import PretrainedConfig

from .blueprint import Measured, measure
from .engine import count_micro_steps
from .memory import LAUNCHES, Share, share
from .recipe import Recipe
from .sharded import unsplittable

GIB = 2**30
RESERVED = 2 * GIB
"""Left to CUDA, the collectives' buffers and fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """The machines."""

    nodes: int
    gpus: int
    """Per node."""
    gpu_memory: float
    """GiB of one GPU."""

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Option:
    """One way to lay the run out, in bytes per GPU."""

    launch: str
    """File of configs/accelerate."""
    shards: int
    """Processes that hold one copy of the target together (the recipe's `target_shards`); 1: each has its own."""
    target: int
    drafter: Share
    activations: int
    """What the target's forward and the drafter's step take: both where they run at once, else the larger."""
    fits: bool

    @property
    def total(self) -> int:
        return self.target + self.drafter.total + self.activations + RESERVED


@dataclass(frozen=True)
class Plan:
    """Figures of a run on a cluster."""

    measured: Measured
    cluster: Cluster
    micro_steps: int
    options: tuple[Option, ...]
    chosen: Option | None
    """The first that fits."""
    whole_target_only: str | None
    """Why the target cannot be split over any number of these processes; None if it can."""
    tokens: int | None
    """Read in the whole training; None if not known."""
    epoch_tokens: int | None
    """Read in one pass, which is what a feature cache holds; None if not known."""
    compression: str
    """In which form it would hold it (the recipe's `data.cache.compression`)."""
    hours: float | None

    @property
    def tokens_per_second(self) -> float | None:
        """Over all GPUs, to be done in `hours`."""
        return None if self.tokens is None or self.hours is None else self.tokens / (3600 * self.hours)

    @property
    def flops_per_second(self) -> float | None:
        """What each GPU has to sustain for that."""
        rate = self.tokens_per_second
        per_token = self.measured.read_flops + self.measured.step_flops
        return None if rate is None else rate * per_token / self.cluster.world

    def to_json(self) -> str:
        """All figures, derived ones included; sizes in bytes."""
        totals = [option.total for option in self.options]
        rates = {"tokens_per_second": self.tokens_per_second, "flops_per_second": self.flops_per_second}
        return json.dumps(asdict(self) | {"totals": totals} | rates)

    def answers(self, length: int) -> int:
        """Answers of `length` tokens that one GPU can write at the same time beside the whole target; 0 if that does not
        fit."""
        room = self.cluster.gpu_memory * GIB - RESERVED - self.measured.target
        return max(0, int(room // (self.measured.cache * length)))


def make_plan(
    recipe: Recipe, architecture: PretrainedConfig, cluster: Cluster, *, epoch_tokens: int | None, hours: float | None
) -> Plan:
    """Measure the run and lay it out in every way. epoch_tokens: of the training data, with prompts and padding.

    Raises ValueError if the recipe's batch does not divide over the processes or the drafter does not fit the target.
    """
    micro_steps = count_micro_steps(recipe, cluster.world)
    measured = measure(recipe, architecture)
    # A whole target reads the next rows while the drafter's step runs (`assembly.reads_ahead`).
    is_ahead = recipe.data.read_ahead and recipe.data.features == "online" and recipe.backbone is None
    launches = LAUNCHES if recipe.optimiser.name == "adamw" else LAUNCHES[:1]  # Muon wants whole matrices
    options, reason = _layouts(measured, architecture, cluster, is_ahead, launches)
    whole = recipe.data.row_length * recipe.rows_per_step
    passes = None if recipe.epochs is None or epoch_tokens is None else int(recipe.epochs * epoch_tokens)
    return Plan(
        measured=measured,
        cluster=cluster,
        micro_steps=micro_steps,
        options=options,
        chosen=next((option for option in options if option.fits), None),
        whole_target_only=reason,
        tokens=recipe.steps * whole if recipe.steps else passes,
        epoch_tokens=epoch_tokens,
        compression=recipe.data.cache.compression,
        hours=hours,
    )


def _layouts(
    measured: Measured, architecture: PretrainedConfig, cluster: Cluster, is_ahead: bool, launches: Sequence[str]
) -> tuple[tuple[Option, ...], str | None]:
    """The whole target everywhere, and split over the fewest processes over which something fits, or else over the most;
    and why it cannot be split if it cannot."""
    world, reason = cluster.world, None
    options = [_option(measured, cluster, launch, 1, is_ahead) for launch in launches]
    split: list[Option] = []
    for shards in (number for number in range(2, world + 1) if world % number == 0):
        if why := unsplittable(architecture, shards):
            reason = reason or why
            continue
        split = [_option(measured, cluster, launch, shards, False) for launch in launches]
        if any(option.fits for option in split):
            break
    return (*options, *split), None if split else reason


def _option(measured: Measured, cluster: Cluster, launch: str, shards: int, is_ahead: bool) -> Option:
    target = measured.target - measured.splittable + measured.splittable // shards
    drafter = share(launch, trained=measured.trained, frozen=measured.frozen, world=cluster.world)
    step = measured.taught + measured.stepping
    activations = measured.reading + step if is_ahead else max(measured.reading, step)
    option = Option(launch, shards, target, drafter, activations, fits=False)
    return replace(option, fits=option.total <= cluster.gpu_memory * GIB)


def launch_command(option: Option, cluster: Cluster, recipe: str, overrides: Sequence[str]) -> str:
    """What to run; on several nodes, on each of them with its own number for RANK and the address of node 0 for HOST."""
    words = ["accelerate launch", "--config_file", f"configs/accelerate/{option.launch}.yaml"]
    words += ["--num_processes", str(cluster.world)]
    if cluster.nodes > 1:
        words += ["--num_machines", str(cluster.nodes), "--machine_rank RANK"]
        words += ["--main_process_ip HOST --main_process_port 29500"]
    split = ["target_sharding=tensor", f"target_shards={option.shards}"] if option.shards > 1 else []
    return " ".join([*words, "-m draftsmith.train", *map(shlex.quote, [recipe, *overrides]), *split])
