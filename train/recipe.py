"""The recipe: everything that decides a training run, in one YAML file, with `a.b=c` overrides on the command line.

    target: smollm2-135m
    head: {method: ..., ...}
    data: {responses: responses.jsonl}
    epochs: 3
    out: runs/demo

Every field has its meaning under it. Unknown keys are errors that name the nearest known one. What is not written in
the recipe but follows from it (steps, micro-steps, held-out batches) is printed and saved with how it was derived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from ..distill.feature_codec import Compression
from ..distill.objectives import ObjectiveConfig
from ..heads import METHODS, HeadConfig
from ..infer.precision import AUTO, has_bf16, resolve_dtype
from .parsing import apply_overrides, explain, read_yaml

if TYPE_CHECKING:
    AnyHead = HeadConfig
else:
    AnyHead = Annotated[
        Union[tuple(Annotated[config, Tag(method)] for method, (config, _) in METHODS.items())],  # noqa: UP007
        Discriminator("method"),
    ]


class Section(BaseModel):
    """A part of the recipe: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cache(Section):
    """The feature cache of `features: disk`; `draftsmith cache` builds it beforehand."""

    folder: str | None = None
    """Where it lies; None means `features` in the run's `out`. Name a folder that several runs share."""
    compression: Compression = "int8"
    """Of the training rows: exact (the target's precision), bf16, int8 (half of bf16) or int6 (3/8 of bf16); held-out rows
    are stored exactly. What each costs in fidelity stands in distill/feature_codec.py."""
    shard_mib: float = Field(default=256, gt=0)
    """About the size of one file; a process holds a few times as much in memory while it writes one."""


class Data(Section):
    """What is learned from, and what is held out."""

    responses: str
    """File with the target's own answers (`draftsmith respond`), or any conversations with answers."""
    held_out: str | None = None
    """File for the held-out evaluation; None takes the held-out split of `responses`."""
    row_length: int = Field(1024, ge=8)
    """Tokens per packed row."""
    max_length: int | None = Field(None, ge=8)
    """Longer samples are cut here, and counted; None means `row_length`."""
    max_samples: int | None = Field(None, ge=1)
    """At most this many training samples, chosen by hash of their id; None takes all."""
    max_held_out: int | None = Field(200, ge=1)
    """At most this many held-out samples, likewise."""
    features: Literal["online", "memory", "disk"] = "online"
    """online: the target reads every batch in its step. memory: each row is read once and what the target computed is
    kept in main memory for later epochs. disk: likewise, in the files of `cache`, for later runs too. Sizes are printed."""
    read_ahead: bool = True
    """On CUDA, the next rows are read during the step, which takes the memory of both at once. A target that is split over
    processes, or trained too, reads when it is asked."""
    cache: Cache = Cache()
    """Where features on disk lie, and how they are stored."""
    max_bad_share: float = Field(0.01, ge=0, le=1)
    """Above this share of unusable conversations the run stops."""


class Optimiser(Section):
    """AdamW or Muon, with a linear warm-up and a cosine to `final_lr_share`."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices by train/optimiser.py, the rest by AdamW; in one process or under ddp."""
    lr: float = Field(gt=0)
    """Highest learning rate. It differs per method and size, so it has no default (Medusa: 1e-3)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment (EAGLE, arXiv 2401.15077)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of every trained tensor."""
    clip: float = Field(0.5, gt=0)
    """Gradients are scaled down to this global norm (EAGLE)."""
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the run in which the rate rises linearly."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """Rate at the end, as a share of `lr`."""


class Backbone(Section):
    """Joint training of the target through LoRA adapters (train/joint.py). It makes another target, to whose text decoding
    is then faithful."""

    rank: int = Field(32, ge=1)
    """Rank of the adapters (Medusa-2: 32)."""
    alpha: int = Field(16, ge=1)
    """Their output is scaled by alpha / rank (Medusa-2: 16)."""
    modules: str | tuple[str, ...] = "all-linear"
    """Linear layers that get one, by the ends of their names; all-linear: all but the output head."""
    lr_share: float = Field(0.25, gt=0)
    """Their learning rate, as a share of `optimiser.lr` (Medusa-2: a quarter)."""
    head_weight: float = Field(0.01, gt=0)
    """Weight of the drafter's loss beside the target's own, at the end of a ramp over the run (Medusa-2's self-distillation)."""


class Wandb(Section):
    """Weights & Biases; metrics.jsonl and run.json are written in any case."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: $WANDB_MODE where it is set, else online where a key is known, else offline."""
    project: str = "draftsmith"
    """Project of the run."""
    name: str | None = None
    """Name of the run; None takes the name of the `out` folder."""


class Recipe(Section):
    """One training run."""

    target: str
    """`smollm2-135m` (embedded), a local folder, or a Hugging Face model id."""
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Precision of the frozen target; auto: bfloat16 where this machine multiplies it, else float32 (`infer.precision`)."""
    target_sharding: Literal["none", "tensor"] = "none"
    """none: every process holds the whole target. tensor: its layers are split over processes (train/sharded.py), for
    targets that do not fit one device."""
    target_shards: int | None = Field(None, ge=2)
    """Neighbouring processes that hold one copy together, those of one node for instance; None: all."""
    head: SerializeAsAny[AnyHead]
    """What is trained: `method` and that method's own fields."""
    init: str | None = None
    """Folder of a drafter whose weights to begin from (warm start); it must have this `head`."""
    backbone: Backbone | None = None
    """Train the target along with the drafter, and how; None leaves it as it is."""
    objective: ObjectiveConfig
    """How the draft's distributions are compared with the target's."""
    data: Data
    """What is learned from."""
    optimiser: Optimiser
    """How the weights move."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; give either this or `epochs`."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the packed rows; give either this or `steps`."""
    minutes: float | None = Field(None, gt=0)
    """Wall-clock budget. The learning rate follows the clock where it is ahead of the steps, so the run ends in time and
    fully annealed; such a run is not repeatable to the bit."""
    rows_per_step: int = Field(16, ge=1)
    """Packed rows per optimiser step, over all processes: the same recipe is the same training on any number of them."""
    rows_per_forward: int = Field(4, ge=1)
    """At most this many rows in one forward of one process; the number of accumulated micro-steps follows."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Compute of the drafter: bf16 is autocast over fp32 weights and fp32 gradients; auto as for the target."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between held-out evaluations; None evaluates once, at the end."""
    decode_prompts: int = Field(8, ge=0)
    """Held-out prompts that every evaluation answers with the real decode loop, greedily and with chain drafts, for tau as
    it is beside tau as predicted; 0 leaves it out."""
    decode_tokens: int = Field(32, ge=1)
    """Length of those answers."""
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; None saves once, at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides the initial weights, the data order and every draw of the training."""
    out: str
    """Folder of the run: run.json, metrics.jsonl, timing.jsonl, checkpoints/, drafter/."""
    wandb: Wandb = Wandb()
    """Tracking beyond the files."""
    trackers: tuple[str, ...] = ()
    """Further trackers: names that accelerate knows (tensorboard, mlflow, trackio, ...), or `module:Class` of one's own
    `accelerate.tracking.GeneralTracker`."""

    @field_validator("target_dtype")
    @classmethod
    def _target_dtype_here(cls, name: str) -> str:
        """The saved recipe says what was computed in, so that a run is not resumed in another precision unnoticed."""
        return resolve_dtype(name)

    @field_validator("precision")
    @classmethod
    def _precision_here(cls, name: str) -> str:
        return name if name != AUTO else "bf16" if has_bf16() else "fp32"

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        """Every check between fields stands here."""
        if (self.steps is None) == (self.epochs is None):
            given = "neither was" if self.steps is None else "both were"
            raise ValueError(
                f"give exactly one of `steps` and `epochs`; {given} given. Add `steps: N`, or set the other to null."
            )
        longest = self.data.max_length or self.data.row_length
        if longest > self.data.row_length:
            raise ValueError(
                f"data.max_length {longest} does not fit into data.row_length {self.data.row_length}; raise row_length or lower it."
            )
        if self.rows_per_forward > self.rows_per_step:
            raise ValueError(
                f"rows_per_forward {self.rows_per_forward} exceeds rows_per_step {self.rows_per_step}; lower it to that."
            )
        if self.target_shards and self.target_sharding == "none":
            raise ValueError(
                "target_shards applies to a split target only; remove it or set target_sharding to tensor."
            )
        if self.target_sharding != "none" and self.backbone:
            raise ValueError("backbone adapts a whole target; set target_sharding to none or remove backbone.")
        if self.target_sharding != "none" and self.head.model_dump().get("on_policy"):
            raise ValueError(
                "on_policy reads rows of some processes only and a sharded target is read by all together; set head.on_policy to 0 "
                "or target_sharding to none."
            )
        return self

    @property
    def cache_folder(self) -> Path:
        """Folder of the feature caches, one below it for each split."""
        return Path(self.data.cache.folder or Path(self.out) / "features")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file with `a.b=c` overrides applied. Raises ValueError with every fault in one message."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"recipe {str(path)!r} cannot be read: {error}. Name a YAML file, like those in configs/recipes."
        ) from error
    content = read_yaml(text, source=str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values like `target: smollm2-135m`, got {type(content).__name__}.")
    return parse_recipe(apply_overrides(content, overrides), source=str(path))


def parse_recipe(content: dict[str, Any], *, source: str) -> Recipe:
    """The recipe in a plain dict; `source` names it in errors."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        variants: dict[str, type[BaseModel]] = {method: config for method, (config, _) in METHODS.items()}
        raise explain(error, Recipe, variants, source=source) from error


def differences(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """`key: saved value, value now` for every field in which a saved recipe differs; where a run and its features lie,
    how it is tracked, and how often it is saved, may differ."""
    with contextlib.suppress(ValidationError):  # fields that came later have their defaults
        saved = Recipe.model_validate(saved).model_dump(mode="json")
    now, then = _flat(recipe.model_dump(mode="json")), _flat(saved)
    free = _FREE if recipe.data.features == "disk" else (*_FREE, "data.cache")
    return [
        f"{key}: {then.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted(then | now)
        if then.get(key) != now.get(key) and not any(f"{key}.".startswith(f"{part}.") for part in free)
    ]


_FREE = (
    "out",
    "wandb",
    "trackers",
    "save_every",
    "keep_checkpoints",
    "target_sharding",
    "target_shards",
    "data.cache.folder",
    "data.cache.shard_mib",
    "data.read_ahead",
)


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
