"""A recipe's run measured from config files: exact numbers of weights, bytes and operations, without a weight in memory.

The target and the drafter are built as `draftsmith train` builds them, on phantoms (phantom.py), and take one training
step on rows of one document each in which every token is learned: as much as a step can hold. So what is said of a
method follows from its own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..distill.feature_codec import COMPRESSIONS, bytes_per_token
from ..distill.features import teacher_batch
from ..distill.objectives import make_objective
from ..distill.packing import Row
from ..heads import METHODS, TrainedDrafter
from ..infer.cache import KVCache
from ..infer.embedded import resolve
from ..infer.pretrained import DTYPES
from ..infer.target import Target
from .assembly import build_drafter
from .phantom import Phantoms
from .recipe import Recipe
from .sharded import whole_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Measured:
    """What a run is made of; sizes in bytes."""

    weights: int
    """Numbers in the target's checkpoint."""
    active: int
    """Those a token is multiplied with: all, or with the chosen experts only."""
    target: int
    """The target in its precision."""
    splittable: int
    """The part of it that tensor parallelism splits over processes; the rest is whole everywhere."""
    cache: int
    """Keys and values of one token, in the form the architecture keeps them."""
    features: dict[str, int]
    """What the target computes for one token that training needs (last hidden state and taps), in each of the forms that a
    feature cache has; `exact` is also what `features: memory` holds."""
    taps: tuple[int, ...]
    """Layers read."""
    trained: int
    """Parameters of the drafter that are trained."""
    frozen: int
    """Parameters of the drafter that are not."""
    reading: int
    """Most that a forward of the target takes beyond its weights, what it leaves included."""
    taught: int
    """What it leaves for the drafter: the teacher batch of one micro-step."""
    stepping: int
    """Most that forward and backward of the drafter take beyond weights, gradients and teacher batch."""
    read_flops: int
    """Floating-point operations of the target per token."""
    step_flops: int
    """Those of the drafter's forward and backward per token, the target's head included where it is asked."""


def read_architecture(name: str) -> PretrainedConfig:
    """The config of a target: a config.json, a model folder, `smollm2-135m`, or a Hugging Face id. Raises ValueError if it
    cannot be read or describes a model of another kind."""
    from transformers import AutoConfig

    place = Path(name).expanduser()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(place) if place.is_file() else resolve(name))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the architecture of {name!r} cannot be read: {error}\nName a config.json with --architecture, like those in "
            "configs/targets."
        ) from error
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name!r} is an encoder-decoder model, for which there is no plan yet; plan for a decoder-only one."
        )
    return config


def measure(recipe: Recipe, architecture: PretrainedConfig) -> Measured:
    """Build the run of `recipe` for a target of this architecture and take a step. Raises ValueError as `train` would for
    a drafter that does not fit the target."""
    from transformers import AutoModelForCausalLM

    if recipe.backbone:
        raise ValueError(
            "there is no plan for joint training yet; plan with backbone=null for all but the adapters' part."
        )
    with Phantoms() as phantoms:
        dtype = DTYPES[recipe.target_dtype]
        target = Target(
            AutoModelForCausalLM.from_config(architecture, dtype=dtype), _no_tokenizer(), name=recipe.target
        )
        drafter = _drafter(recipe, target)
        sizes = [parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad]
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        weights = _count(target.model)
        held = sum(parameter.numel() for parameter in drafter.parameters())
        experts = sum(parameter.numel() for parameter in _experts(target))
        split = sum(parameter.numel() for parameter in _split(target.model))
        cache = _cache(target)
        step = _step(recipe, target, drafter, phantoms)
    settings = architecture.get_text_config(decoder=True).to_dict()
    return Measured(
        weights=weights,
        active=weights
        - experts
        + experts * (settings.get("num_experts_per_tok") or 0) // max(1, _num_experts(settings)),
        target=weights * dtype.itemsize,
        splittable=split * dtype.itemsize,
        cache=cache,
        features={
            kind: bytes_per_token(target.hidden_size, 1 + len(drafter.taps), kind, dtype) for kind in COMPRESSIONS
        },
        taps=drafter.taps,
        trained=sum(sizes),
        frozen=held - sum(sizes),
        **step,
    )


def _step(recipe: Recipe, target: Target, drafter: TrainedDrafter, phantoms: Phantoms) -> dict[str, int]:
    """One micro-step as the loop takes it."""
    length, count = recipe.data.row_length, recipe.rows_per_forward
    ones = torch.ones(length, dtype=torch.int64)
    row = Row(ones, ones, torch.arange(length), torch.arange(length) > 0, ("a document",))
    before = phantoms.restart()
    teacher = teacher_batch(target, [row] * count, taps=drafter.taps)
    reading, taught, read_flops = phantoms.peak - before, phantoms.now - before, phantoms.flops
    before = phantoms.restart()
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16"):
        out = drafter(teacher, make_objective(recipe.objective))
        loss = (out.sums * torch.tensor(out.weights).to(out.sums)).sum()
    loss.backward()
    tokens = length * count
    return {
        "reading": reading,
        "taught": taught,
        "stepping": phantoms.peak - before,
        "read_flops": read_flops // tokens,
        "step_flops": phantoms.flops // tokens,
    }


def _drafter(recipe: Recipe, target: Target) -> TrainedDrafter:
    """The drafter before its first step; what a warm start or a checkpoint would load has the same shapes."""
    checkpoint = recipe.head.model_dump().get("checkpoint")
    if checkpoint is None:
        return build_drafter(recipe.model_copy(update={"init": None}), target, []).float()
    method = METHODS[recipe.head.method][1]
    return method.from_folder(recipe.head, target, Path(resolve(checkpoint))).float()


def _no_tokenizer() -> Any:
    """A tokenizer that knows no token: shapes do not depend on it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def _cache(target: Target) -> int:
    """Bytes of keys and values per token."""
    cache = KVCache(rows=1, capacity=64)
    target.prefill([torch.zeros(2, dtype=torch.int64)], cache, first_row=0)
    return cache.num_bytes() // cache.capacity


def _count(model: nn.Module) -> int:
    """Numbers in a checkpoint of the model, tied ones once: parameters, and buffers that are saved."""
    saved = model.state_dict()
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in saved)
    return buffers + sum(parameter.numel() for parameter in model.parameters())


def _num_experts(settings: dict[str, Any]) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((int(settings[name]) for name in names if settings.get(name)), 0)


def _experts(target: Target) -> Iterator[nn.Parameter]:
    """Weights of routed experts, which transformers keeps in one tensor for all of a layer: (experts, out, in)."""
    count = _num_experts(target.text_config.to_dict())
    return (p for p in target.model.parameters() if count and p.dim() == 3 and len(p) == count)


def _split(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """What tensor parallelism splits: the weights of modules that transformers' plan for the model names, biases of
    products over split rows left out."""
    whole = whole_modules(model)
    plan = {name: style for name, style in model.tp_plan.items() if "wise" in style and name not in whole}
    for name, parameter in model.named_parameters():
        for pattern, style in plan.items():
            is_bias = name.endswith(".bias") and "rowwise" in style
            if not is_bias and (fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")):
                yield parameter
                break
