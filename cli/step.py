"""`draftsmith step`: what one training step of a recipe costs here, beside what its arithmetic alone would.

Random tokens and features of the recipe's shapes: what is timed is forward, backward and update, without data.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .report import reported

if TYPE_CHECKING:
    import torch

    from ..heads import LossSums, TeacherBatch, TrainedDrafter
    from ..infer.target import Target
    from ..train.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """Seconds are medians over the steps but for `best`."""

    tokens: int
    """Positions of a step, as the packages of the field count them."""
    forward: float
    backward: float
    update: float
    best: float
    floating_operations: int
    """Of all matrix products in one step."""
    product_rate: float
    """Floating operations per second of one large product of that precision, alone."""
    peak_bytes: int
    """Main memory of the whole process; on a GPU, device memory."""
    own_bytes: int
    """Of it, what came on top of what was there before the first step: libraries, target and drafter."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update

    @property
    def floor(self) -> float:
        """Seconds that the products would take at the rate of the large one."""
        return self.floating_operations / self.product_rate


def step(
    recipe: Annotated[Path, typer.Argument(help="YAML file, like those in configs/recipes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to set, like data.row_length=1024.", metavar="KEY=VALUE")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed, after two that are not.", min=1)] = 8,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if absent.", min=1)] = None,
) -> None:
    """Time one training step of a recipe on random data of its shapes.

    Prints forward, backward and update, tokens per second, peak memory, and the
    time its matrix products would need at the rate of one large product.

    Example: draftsmith step configs/recipes/eagle3_smollm2.yaml precision=fp32 --steps 4
    """
    with reported("nothing was written."):
        from ..train.recipe import load_recipe

        cost = measure(load_recipe(recipe, overrides or ()), steps=steps, threads=threads)
        print(
            f"{cost.tokens / cost.seconds:,.0f} tokens/s (best step {cost.tokens / cost.best:,.0f}), {cost.tokens} tokens per step\n"
            f"forward {cost.forward:.3f} s, backward {cost.backward:.3f} s, update {cost.update:.3f} s\n"
            f"peak memory {cost.peak_bytes / 2**30:.2f} GiB, {cost.own_bytes / 2**30:.2f} GiB of it the step's own, beside "
            "libraries, the whole target and the drafter\n"
            f"matrix products: {cost.floating_operations / 1e9:.0f} GFLOP, {cost.floor:.3f} s at the {cost.product_rate / 1e9:.0f} GFLOP/s "
            f"of one large product; the step takes {cost.seconds / cost.floor:.2f} times that"
        )


def measure(recipe: Recipe, *, steps: int, threads: int | None) -> Cost:
    """Time `steps` optimiser steps over `rows_per_forward` rows of `data.row_length` tokens."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from tqdm import trange

    from ..distill.objectives import make_objective
    from ..infer.target import Target
    from ..train.optimiser import make_optimiser

    torch.manual_seed(recipe.seed)
    torch.set_num_threads(threads or torch.get_num_threads())
    target = Target.load(recipe.target, dtype=recipe.target_dtype)
    drafter, teacher = _random_work(recipe, target)
    objective = make_objective(recipe.objective)
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimiser = make_optimiser(recipe.optimiser, drafter, is_whole=True)
    is_low = recipe.precision == "bf16"

    def once() -> tuple[float, float, float]:
        began = _now(target)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=is_low):
            out: LossSums = drafter(teacher, objective)
        forward = _now(target)
        (out.sums * torch.tensor(out.weights).to(out.sums) / out.counts.clamp(min=1).to(out.sums)).sum().backward()
        backward = _now(target)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return forward - began, backward - forward, _now(target) - backward

    before = _begin_peak(target)
    with FlopCounterMode(display=False) as counter:
        once()
    once()
    found = [once() for _ in trange(steps, desc="steps", disable=not sys.stderr.isatty())]
    forward, backward, update = (statistics.median(part) for part in zip(*found))
    rate = _product_rate(target, torch.bfloat16 if is_low else torch.float32)
    best = min(sum(times) for times in found)
    work = counter.get_total_flops()
    peak = _peak(target)
    return Cost(teacher.tokens.numel(), forward, backward, update, best, work, rate, peak, peak - before)


def _random_work(recipe: Recipe, target: Target) -> tuple[TrainedDrafter, TeacherBatch]:
    """The recipe's drafter, and one document per row, all of it supervised, in tokens that the drafter can propose."""
    import torch

    from ..distill.features import frozen_logits
    from ..heads import METHODS, TeacherBatch

    method: Any = METHODS[recipe.head.method][1]
    size = recipe.head.model_dump().get("draft_vocab_size")
    options: dict[str, Any] = {}
    known = torch.arange(target.vocab_size)
    if size is not None:
        others = torch.randperm(target.vocab_size)
        others = others[~torch.isin(others, torch.tensor(target.eos_ids))]
        known = torch.cat([torch.tensor(target.eos_ids), others])[:size].sort().values
        options["token_map"] = known
    drafter: TrainedDrafter = method(recipe.head, target, **options).float().to(target.device)
    shape = (recipe.rows_per_forward, recipe.data.row_length)
    place, taps = target.device, drafter.taps
    teacher = TeacherBatch(
        tokens=known[torch.randint(len(known), shape)].to(place),
        segments=torch.ones(shape, dtype=torch.int64, device=place),
        positions=torch.arange(shape[1], device=place).expand(shape),
        supervised=torch.ones(shape, dtype=torch.bool, device=place),
        hidden=torch.randn(*shape, target.hidden_size, dtype=target.dtype, device=place),
        features=torch.randn(*shape, len(taps) * target.hidden_size, dtype=target.dtype, device=place)
        if taps
        else None,
        logits=frozen_logits(target),
    )
    return drafter, teacher


def _product_rate(target: Target, dtype: torch.dtype) -> float:
    """Floating operations per second of a (1024, 2048) by (2048, 4096) product, the fastest of ten."""
    import torch

    left, right = (torch.randn(*shape, dtype=dtype, device=target.device) for shape in ((1024, 2048), (2048, 4096)))
    taken = []
    for _ in range(10):
        began = _now(target)
        torch.mm(left, right)
        taken.append(_now(target) - began)
    return 2 * 1024 * 2048 * 4096 / min(taken)


def _status(name: str) -> int:
    """Bytes of an entry of Linux' /proc/self/status; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0


def _now(target: Target) -> float:
    import torch

    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _begin_peak(target: Target) -> int:
    """Bytes in use now, from where the peak is counted anew where the system can."""
    import torch

    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") or _peak(target)


def _peak(target: Target) -> int:
    import torch

    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
