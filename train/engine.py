"""How processes are joined: one alone, DDP, FSDP2 or DeepSpeed ZeRO, chosen by `accelerate launch --config_file`.

Facts about accelerate 1.15 and DeepSpeed 0.19 that this file answers for:
- without CUDA, torchrun's processes join as "no distribution" unless `cpu=True` is given, and gradients are not
  synchronised, without an error; with `cpu=True`, DeepSpeed and FSDP are switched off, without an error. FSDP runs on
  CPU once accelerate takes the processes for those of several devices;
- DeepSpeed asks for its batch size, clipping and 16-bit gathering in its own config, beside the training code;
- under ZeRO-3 accelerate tells transformers to split every model it loads, the frozen target too; it is told otherwise;
- DeepSpeed averages gradients over processes and micro-steps; so does accelerate. `loss_scale` undoes both;
- DeepSpeed would compile a shared-memory collective on CPU at the first start (a minute, and g++); gloo serves.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.integrations import unset_hf_deepspeed_config

from ..heads import LossSums, Objective, TeacherBatch, TrainedDrafter
from .joint import Joint
from .optimiser import make_optimiser
from .recipe import Recipe
from .trackers import find_trackers

REPLICATED = "replicated"
"""Every process holds the whole drafter and its optimiser: one process, or DDP."""


@dataclass(frozen=True)
class Engine:
    """The joined processes and what the loop needs to know of them."""

    accelerator: Accelerator
    name: str
    """`replicated`, `fsdp2`, `zero-1`, `zero-2`, `zero-3`, `zero-2-offload` or `zero-3-offload`: what a checkpoint's training
    state is bound to."""
    micro_steps: int
    """Forwards per process and optimiser step."""

    @property
    def rank(self) -> int:
        number: int = self.accelerator.process_index
        return number

    @property
    def world(self) -> int:
        """Number of processes."""
        number: int = self.accelerator.num_processes
        return number

    @property
    def loss_scale(self) -> int:
        """What a micro-step's share of the loss is multiplied by, so that averaging over processes and micro-steps
        adds the shares up to the very loss of one process in one step."""
        return self.micro_steps * self.world

    def agree(self, seconds: float, is_asked: bool) -> tuple[float, bool]:
        """The latest clock and whether any process was asked to stop; a collective call."""
        if self.world == 1:
            return seconds, is_asked
        mine = torch.tensor([[seconds, float(is_asked)]], dtype=torch.float64, device=self.accelerator.device)
        clocks: Any = self.accelerator.gather(mine)
        latest = clocks.amax(dim=0).tolist()
        return latest[0], latest[1] > 0

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Within it the drafter has all its weights, also where they are sharded, so that methods other than forward can
        be called without gradients; a collective call."""
        if self.name.startswith("zero-3"):
            from deepspeed import zero

            with zero.GatheredParameters(list(model.parameters())):
                yield
        elif isinstance(model, FSDPModule):
            model.unshard()
            yield
            model.reshard()
        else:
            yield

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors of the model whole, on process 0 (elsewhere empty or parts); a collective call."""
        whole: Any = self.accelerator.get_state_dict(model)
        return dict(whole or {})  # None away from process 0

    def weights(self, state: dict[str, Tensor], drafter: TrainedDrafter) -> dict[str, Tensor]:
        """The drafter's tensors in a `state`, under the names of its own `state_dict`."""
        own: dict[str, Tensor] = drafter.state_dict()
        if self.name.startswith("zero-3"):
            return {name: state.get(_Unit.name_of(name), tensor) for name, tensor in own.items()}  # it has no buffers
        prefix = "" if all(name in state for name in own) else "drafter."  # within train.joint.Joint
        return {name: state[prefix + name] for name in own}


def join(recipe: Recipe) -> Engine:
    """Join the processes of this launch. Raises ValueError if they do not divide the recipe's batch or the launch
    config contradicts the recipe."""
    on_cpu = not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no other
    if on_cpu and deepspeed:
        _compile_nothing()
    if on_cpu and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
    # Or DDP holds gradients twice. Buffers are maps of ids, the same in every process.
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)]
    if on_cpu and "LOCAL_RANK" in os.environ:
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    trackers: list[Any] = list(find_trackers(recipe.trackers))
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,
        mixed_precision="no",
        kwargs_handlers=handlers,
        log_with=trackers or None,
        project_dir=recipe.out,
    )
    world = accelerator.num_processes
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    assert world == launched, f"{launched} processes were launched, accelerate joined {world}"
    micro_steps = count_micro_steps(recipe, world)
    accelerator.gradient_accumulation_steps = micro_steps
    if deepspeed:
        unset_hf_deepspeed_config()
        warnings.filterwarnings(
            "ignore", message="`torch.distributed", category=FutureWarning
        )  # names DeepSpeed still calls
        plugin: Any = accelerator.state.deepspeed_plugin
        _configure_deepspeed(plugin.deepspeed_config, recipe, micro_steps)
    return Engine(accelerator, _name(accelerator), micro_steps)


def count_micro_steps(recipe: Recipe, world: int) -> int:
    """Forwards per process and optimiser step. Raises ValueError if the rows of a step do not divide over the processes."""
    if recipe.rows_per_step % world:
        raise ValueError(
            f"rows_per_step {recipe.rows_per_step} does not divide over {world} processes; set it to a multiple of {world}."
        )
    return math.ceil(recipe.rows_per_step / world / recipe.rows_per_forward)


def prepare(
    engine: Engine, recipe: Recipe, drafter: TrainedDrafter, joint: Joint | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The drafter inside the engine, and its optimiser over fp32 weights. The target stays outside, but for its adapters if it
    is trained too (`joint`). What the model returns is for `unpack`. Raises ValueError if nothing is trainable."""
    drafter.float()
    if not any(parameter.requires_grad for parameter in drafter.parameters()):
        raise ValueError(
            "this head has no trainable weights, nothing would be trained; check its settings under `head`."
        )
    further: list[dict[str, Any]] = []
    inside: nn.Module = joint or drafter
    if joint:
        further.append({"params": list(joint.adapter), "lr_share": joint.settings.lr_share})
        if engine.name not in (REPLICATED, "zero-1", "zero-2"):
            raise ValueError(f"backbone trains under ddp, zero1 and zero2; this launch is {engine.name}.")
    elif engine.name.startswith("zero-3"):
        inside = _Unit(drafter.to(engine.accelerator.device))
    optimiser = make_optimiser(recipe.optimiser, drafter, *further, is_whole=engine.name == REPLICATED)
    model, prepared = engine.accelerator.prepare(inside, optimiser)
    return model, prepared


class _Unit(nn.Module):
    """The drafter for ZeRO-3: one module with all its weights, which are gathered together, once per pass.

    Left to itself, DeepSpeed gathers them for every call of every layer, and how often a layer is called depends on a
    process' own rows: the processes would wait for different weights. It looks for tensors in dicts, so one is returned.
    """

    def __init__(self, drafter: TrainedDrafter) -> None:
        super().__init__()
        object.__setattr__(self, "drafter", drafter)  # past the registry: its layers are not to be found
        for name, parameter in drafter.named_parameters():
            self.register_parameter(self.name_of(name), parameter)

    drafter: TrainedDrafter

    @staticmethod
    def name_of(parameter: str) -> str:
        """What a parameter of the drafter is called here."""
        return parameter.replace(".", "/")

    def forward(self, teacher: TeacherBatch, objective: Objective) -> dict[str, Any]:
        return dict(vars(self.drafter(teacher, objective)))


def unpack(out: LossSums | dict[str, Any]) -> LossSums:
    """What the drafter returned, under any engine."""
    return out if isinstance(out, LossSums) else LossSums(**out)


def _name(accelerator: Accelerator) -> str:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        offload = plugin.deepspeed_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        return f"zero-{plugin.zero_stage}" + ("-offload" if offload != "none" else "")
    return "fsdp2" if accelerator.distributed_type == DistributedType.FSDP else REPLICATED


def _compile_nothing() -> None:
    """Leave the collectives of DeepSpeed on CPU to gloo."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _configure_deepspeed(config: dict[str, Any], recipe: Recipe, micro_steps: int) -> None:
    """What the recipe decides is written into DeepSpeed's config; what would contradict it there is an error."""
    own: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.rows_per_forward,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": recipe.optimiser.clip,
        "torch_autocast": {
            "enabled": recipe.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # gradients are exchanged in fp32
        },
    }
    for key, value in own.items():
        if config.get(key, "auto") not in ("auto", value):
            raise ValueError(
                f"the DeepSpeed config sets {key} to {config[key]!r}, the recipe to {value!r}; set it to auto there."
            )
        config[key] = value
    for key in ("fp16", "bf16"):
        if config.get(key, {}).get("enabled") is True:
            raise ValueError(f"the DeepSpeed config enables {key}; leave it out, the recipe's `precision` decides.")
    zero = config["zero_optimization"]
    if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise ValueError(
            "ZeRO-3 without stage3_gather_16bit_weights_on_model_save could not save the drafter at the end; set it to true "
            "in the DeepSpeed config (zero3_save_16bit_model in an accelerate config)."
        )
