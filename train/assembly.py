"""What a run is put together from: target, data, draft vocabulary, drafter, engine, and the point to go on from."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ..distill.ahead import Ahead
from ..distill.features import Online
from ..distill.objectives import make_objective
from ..distill.packing import packing_efficiency
from ..distill.tokens import Sample
from ..distill.vocabulary import choose_vocabulary, coverage
from ..heads import METHODS, Binding, LossSums, Objective, TeacherBatch, TrainedDrafter
from ..heads.files import check_binding, read_config, read_weights
from ..infer.clock import Clock
from ..infer.target import Target
from . import checkpoint, data, engine
from .checkpoint import Position
from .joint import FOLDER as TARGET
from .joint import Joint
from .provenance import provenance
from .recipe import Recipe
from .sharded import ShardedTarget

CHECKPOINTS, RUN = "checkpoints", "run.json"


@dataclass(frozen=True)
class Run:
    """Everything the loop works on."""

    recipe: Recipe
    objective: Objective
    engine: engine.Engine
    model: nn.Module
    """The drafter as the engine wraps it; only its forward is ever called."""
    optimiser: torch.optim.Optimizer
    drafter: TrainedDrafter
    """The drafter itself: for its config, never for its methods during training."""
    joint: Joint | None
    """The drafter with its target's adapters, if the target is trained too."""
    rows: data.Rows
    held_out: data.Rows
    stream: data.Stream
    num_steps: int
    """Optimiser steps of the whole run."""
    position: Position
    """Where to begin: step 0, or the checkpoint's."""
    measured: dict[str, Any]
    """The checkpoint's last evaluation (`metrics.HeldOut.measured`); empty at step 0."""
    binding: Binding
    description: dict[str, Any]
    """Content of run.json."""
    checkpoints: Path
    """Folder of the checkpoints."""
    clock: Clock
    """Seconds spent in phase `input`: getting what the target computes on a batch, in this process. It is exact, since what a
    device still computes of the step before is no waiting for input."""

    @property
    def is_main(self) -> bool:
        return self.engine.rank == 0

    @cached_property
    def ahead(self) -> Ahead | None:
        """Reads the rows of the next micro-step meanwhile, where the device allows."""
        target = self.drafter.target
        return Ahead(self.rows.source, target.device) if reads_ahead(self.recipe, target) else None

    def share(self, batch: Sequence[int]) -> list[list[int]]:
        """This process' micro-batches of a global batch; equally many in every process."""
        return data.share(batch, rank=self.engine.rank, world=self.engine.world, most=self.recipe.rows_per_forward)

    def teach(self, micro: Sequence[int], then: Sequence[int] | None = None) -> TeacherBatch:
        """What the target computes on these training rows, as it was when the run began. then: the rows that are asked for
        next, if they are known."""
        with self.clock.time("input"), self.joint.off() if self.joint else contextlib.nullcontext():
            return self.ahead.batch(micro, then) if self.ahead else self.rows.teach(micro)

    def loss(self, out: LossSums, counts: Tensor, batch: Sequence[int], step: int) -> Tensor:
        """A micro-step's share of the loss of `step` (1-based). counts: (K,), of the global batch."""
        per_row = torch.tensor(out.weights) / counts.clamp(min=1)  # (K,)
        drafted = (out.sums * per_row.to(out.sums)).sum()
        if self.joint is None:
            return drafted
        rows = [self.rows.rows[index] for index in batch]
        return self.joint.loss(out, drafted, rows, (step - 0.5) / self.num_steps)

    def save_drafter(self, folder: Path, measured: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Write the drafter to `folder`, and beside it the target it was trained with if that is another one now. state:
        what `Engine.state` returns."""
        binding = replace(self.binding, measured=measured)
        if self.joint:
            weights = self.joint.export(state)
            self.joint.save(folder.with_name(TARGET), weights, target=self.recipe.target)
            binding = replace(binding, target=self.joint.binding_target(weights))
        self.drafter.save(folder, binding=binding, weights=self.engine.weights(state, self.drafter))

    def autocast(self) -> torch.autocast:
        """The precision that the drafter computes in."""
        return torch.autocast(self.drafter.target.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16")


def assemble(recipe: Recipe, *, resume: bool) -> Run:
    """Put the run together. Raises ValueError for whatever the user can put right; nothing is written but
    run.json and features on disk."""
    out = Path(recipe.out)
    places = checkpoint.checkpoints(out / CHECKPOINTS)
    if places and not resume:
        raise ValueError(
            f"{out} already holds a run ({places[-1].name}); continue it with --resume, or choose another `out`."
        )
    joined = engine.join(recipe)
    accelerator = joined.accelerator
    quiet: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if accelerator.is_main_process else contextlib.redirect_stderr(io.StringIO())
    )
    with quiet:  # every process reads the same files; one speaks
        target = load_target(recipe, joined)
        samples, train_rows, held_rows = data.load_rows(recipe, target)
        drafter = build_drafter(recipe, target, samples)
        rows, held_out = data.prepare(recipe, drafter, train_rows, held_rows)
        trained = f"{_size(drafter):,} weights of {recipe.head.method}"
        joint = Joint(drafter, recipe.backbone, seed=recipe.seed) if recipe.backbone else None
        if joint:  # kept features are the original target's; a drafter is measured on the states it will decode from
            held_out = replace(held_out, source=Online(target, held_rows, drafter.taps))
            trained += f", {_size(joint.adapter):,} of adapters of the target"
        model, optimiser = engine.prepare(joined, recipe, drafter, joint)
        stream = data.Stream(len(train_rows), recipe.rows_per_step, recipe.seed)
        num_steps = recipe.steps or math.ceil((recipe.epochs or 0) * len(train_rows) / recipe.rows_per_step)
        derived = _derive(recipe, joined, rows, held_out, num_steps=num_steps, trained=trained)
        print("\n".join(f"{name}: {value}" for name, value in derived.items()), file=sys.stderr)
    fresh = Position(
        0, 0.0, 0, joined.name, accelerator.num_processes, data.fingerprint(train_rows), target.fingerprint()
    )
    position, measured = _begin(places, fresh, recipe, joined)
    description = {"recipe": recipe.model_dump(mode="json"), "derived": derived} | provenance()
    if accelerator.is_main_process:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        checkpoint.clean(out / CHECKPOINTS)
        checkpoint.write_json(out / RUN, description)
    accelerator.wait_for_everyone()
    objective = recipe.objective.model_dump_json(exclude_defaults=True)
    binding = Binding(target.fingerprint(), target.template_hash, objective, position.data_hash)
    return Run(
        recipe=recipe,
        objective=make_objective(recipe.objective),
        engine=joined,
        model=model,
        optimiser=optimiser,
        drafter=drafter,
        joint=joint,
        rows=rows,
        held_out=held_out,
        stream=stream,
        num_steps=num_steps,
        position=position,
        measured=measured,
        binding=binding,
        description=description,
        checkpoints=out / CHECKPOINTS,
        clock=Clock(accelerator.device, exact=True),
    )


def reads_ahead(recipe: Recipe, target: Target) -> bool:
    """Whether the next rows are read during the step: on CUDA, by a whole target that nobody changes meanwhile."""
    rope = target.text_config.to_dict().get("rope_parameters") or {}
    changes = recipe.backbone is not None or rope.get("rope_type") in ("dynamic", "longrope")  # these write frequencies
    is_split = isinstance(target, ShardedTarget)
    return recipe.data.read_ahead and target.device.type == "cuda" and not changes and not is_split


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def load_target(recipe: Recipe, joined: engine.Engine) -> Target:
    """The frozen target, whole or this process' part of it; with a part, a collective call. Raises ValueError if it cannot
    be loaded or split so."""
    if recipe.target_sharding == "tensor" and joined.world > 1:
        shards = recipe.target_shards or joined.world
        if joined.world % shards:
            raise ValueError(f"target_shards {shards} does not divide {joined.world} processes; set it to a divisor.")
        return ShardedTarget.load_shards(recipe.target, dtype=recipe.target_dtype, shards=shards)
    return Target.load(recipe.target, dtype=recipe.target_dtype, device=str(joined.accelerator.device))


def _begin(
    places: list[Path], fresh: Position, recipe: Recipe, joined: engine.Engine
) -> tuple[Position, dict[str, Any]]:
    """Load the newest checkpoint, if there is one, into the prepared objects."""
    if not places:
        return fresh, {}
    description, position = checkpoint.read(places[-1])
    checkpoint.check(places[-1], description, position, fresh, recipe)
    checkpoint.load(places[-1], joined)
    return position, description["measured"]


def build_drafter(recipe: Recipe, target: Target, samples: list[Sample]) -> TrainedDrafter:
    """The drafter before its first step; `samples` decide a reduced draft vocabulary. Raises ValueError if it cannot be
    built for this target."""
    torch.manual_seed(recipe.seed)
    method = METHODS[recipe.head.method][1]
    if recipe.init is not None:
        drafter = method.from_folder(recipe.head, target, Path(recipe.init))
        _warm_start(drafter, Path(recipe.init), target)
        return drafter
    size = recipe.head.model_dump().get("draft_vocab_size")
    if size is None:
        return method(recipe.head, target)
    token_map = choose_vocabulary(samples, size, always=target.eos_ids, vocab_size=target.vocab_size)
    if samples:
        covered = f"{coverage(samples, token_map):.2%} of the supervised ones"
        print(f"draft vocabulary: {size} tokens cover {covered}", file=sys.stderr)
    build: Any = method  # those with a draft vocabulary take its token map
    made: TrainedDrafter = build(recipe.head, target, token_map=token_map)
    return made


def _warm_start(drafter: TrainedDrafter, folder: Path, target: Target) -> None:
    head, binding = read_config(folder)
    check_binding(binding, target, folder)
    wanted, settings = drafter.config.model_dump(mode="json"), type(drafter.config)
    with contextlib.suppress(ValidationError):  # fields that came later have their defaults
        head = settings.model_validate(head).model_dump(mode="json")
    if differ := [
        f"{key}: {head.get(key)!r} there, {value!r} here" for key, value in wanted.items() if head.get(key) != value
    ]:
        raise ValueError(
            f"the drafter in {folder} (init) has another head: {'; '.join(differ)}. Give `head` the same settings."
        )
    read_weights(drafter, folder)


def _derive(
    recipe: Recipe, joined: engine.Engine, rows: data.Rows, held_out: data.Rows, *, num_steps: int, trained: str
) -> dict[str, str]:
    """Numbers that follow from the recipe, with how."""
    world, count = joined.accelerator.num_processes, len(rows.rows)
    source = (
        "as given"
        if recipe.steps
        else f"{recipe.epochs:g} epochs x {count} rows / {recipe.rows_per_step} rows per step"
    )
    learned = sum(int(row.supervised.sum()) for row in rows.rows)
    return {
        "engine": f"{joined.name}, {world} processes on {joined.accelerator.device.type}",
        "rows": f"{count} of {recipe.data.row_length} tokens ({packing_efficiency(rows.rows):.1%} full), {learned} supervised tokens",
        "held-out rows": f"{len(held_out.rows)}",
        "steps": f"{num_steps} ({source})" + (f", at most {recipe.minutes:g} minutes" if recipe.minutes else ""),
        "micro-steps": f"{joined.micro_steps} per process ({recipe.rows_per_step} rows, {recipe.rows_per_forward} at once)",
        "trained": trained,
    }
