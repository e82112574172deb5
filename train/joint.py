"""Joint training: the target learns along with its drafter, through LoRA adapters in its decoder layers.

Cai et al. 2024 (arXiv 2401.10774, "Medusa-2"), with their self-distillation: no text of another model is learned, the
network with its adapters off is the teacher of the network with its adapters on, so there is no second copy.

    loss = mean over learned tokens of KL(p_off || p_on)  +  lambda * the drafter's loss on the states of p_on
    lambda = head_weight * sin(pi/2 * share of the run that is done)

What comes out is another target. The verified loop gives exactly its text, and no longer exactly that of the target one
began with: how far the two are apart is the first term, logged as `backbone_kl`. The changed target is saved as a LoRA
adapter in `target/` beside the drafter, which belongs to it alone; `--target RUN/target` loads it.

Letters: B packed rows, T positions, D hidden, R learned rows, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..distill.packing import Row
from ..heads import LossSums, Objective, TeacherBatch, TrainedDrafter
from ..infer.adapter import CONFIG, INSTALL, WEIGHTS, mark
from ..infer.cache import Packed
from ..infer.layers import Tapping
from ..infer.packed import unpack
from ..infer.target import Target
from .recipe import Backbone

if TYPE_CHECKING:
    from peft import LoraConfig

FOLDER, DRIFT = "target", "backbone_kl"
_ROWS = 512
"""Rows whose logits are held at once; they are computed again in the backward pass instead of kept."""


class Joint(nn.Module):
    """A drafter and the adapters of its target, as one module for the engine."""

    def __init__(self, drafter: TrainedDrafter, settings: Backbone, *, seed: int) -> None:
        """Puts adapters into the drafter's target. Raises ValueError if peft is not installed or finds nothing to adapt."""
        super().__init__()
        self.drafter, self.settings = drafter, settings
        torch.manual_seed(seed)
        self.config = _adapt(drafter.target, settings)
        found = [(name, part) for name, part in drafter.target.model.named_parameters() if part.requires_grad]
        self.names = [name for name, _ in found]
        self.adapter = nn.ParameterList(part for _, part in found)

    def forward(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        """teacher: what the target computes with its adapters off. `extra[DRIFT]` carries the KL divergence, with gradient,
        and the number of rows it is over."""
        adapted = self._read(teacher)
        out: LossSums = self.drafter(adapted, objective)
        return replace(out, extra=out.extra | {DRIFT: self._drift(teacher, adapted.hidden)})

    def loss(self, out: LossSums, drafted: Tensor, rows: Sequence[Row], share: float) -> Tensor:
        """The loss of a micro-step. drafted: (), the drafter's own; rows: of the whole global batch; share: of the run that
        is done."""
        ramp = self.settings.head_weight * math.sin(math.pi / 2 * share)
        learned = sum(int(_next_is_learned(row.supervised[None], row.segments[None]).sum()) for row in rows)
        return ramp * drafted + out.extra[DRIFT][0] / max(1, learned)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the target is the one that the run began with."""
        _switch(self.drafter.target, False)
        yield
        _switch(self.drafter.target, True)

    def binding_target(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Fingerprint of the target as adapted by `weights` (see `export`)."""
        target = self.drafter.target
        mark(target.layers[-1], to_bytes(weights))
        try:
            return target.fingerprint()
        finally:
            del target.layers[-1].adapter_digest

    def export(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapter in peft's names, from the engine's `state_dict` of this module."""
        return {
            f"base_model.model.{name.replace('.default.', '.')}": whole[f"adapter.{index}"].detach().cpu().contiguous()
            for index, name in enumerate(self.names)
        }

    def save(self, folder: Path, weights: dict[str, Tensor], *, target: str) -> None:
        """Write the adapted target: adapter, config and tokenizer; `target` is what the adapter changes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.drafter.target.model.config.save_pretrained(folder)
        self.drafter.target.tokenizer.save_pretrained(folder)
        self.config.base_model_name_or_path = target
        self.config.save_pretrained(str(folder))
        work = folder / f".{WEIGHTS}.writing"
        work.write_bytes(to_bytes(weights))
        os.replace(work, folder / WEIGHTS)
        assert (folder / CONFIG).is_file(), "peft wrote its configuration elsewhere"

    def _read(self, teacher: TeacherBatch) -> TeacherBatch:
        """What the target computes with its adapters on, with gradient."""
        target = self.drafter.target
        plan = Packed(teacher.segments, teacher.positions)
        with Tapping(target.layers, self.drafter.taps) as tapped:
            out = target.model.base_model(
                input_ids=teacher.tokens, position_ids=teacher.positions, use_cache=False, plan=plan
            )
        features = torch.cat(tapped.outputs, dim=-1) if self.drafter.taps else None
        return replace(teacher, hidden=out.last_hidden_state, features=features)

    def _drift(self, teacher: TeacherBatch, hidden: Tensor) -> Tensor:
        """(2,): KL(p_off || p_on) summed over the rows whose next token is learned, and their number."""
        rows = _next_is_learned(teacher.supervised, teacher.segments).flatten().nonzero()[:, 0]
        before, after, total = (
            teacher.hidden.flatten(0, 1),
            hidden.flatten(0, 1),
            hidden.new_zeros((), dtype=torch.float32),
        )
        for part in rows.split(_ROWS):
            kept: Any = checkpoint(self._kl, before[part], after[part], use_reentrant=False, preserve_rng_state=False)
            total = total + kept
        return torch.stack([total, total.new_tensor(float(len(rows)))])

    def _kl(self, before: Tensor, after: Tensor) -> Tensor:
        """before, after: (R, D) -> ()."""
        target = self.drafter.target
        with torch.no_grad():
            log_p = target.logits(before).float().log_softmax(dim=-1)  # (R, V)
        log_q = target.logits(after).float().log_softmax(dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum()


def _next_is_learned(supervised: Tensor, segments: Tensor) -> Tensor:
    """(B, T) bool: positions at which the target itself predicts a learned token of the same document."""
    found = torch.zeros_like(supervised)
    found[:, :-1] = supervised[:, 1:] & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return found


def _adapt(target: Target, settings: Backbone) -> LoraConfig:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"backbone trains LoRA adapters, and {INSTALL}") from error
    wanted: Any = settings.modules if isinstance(settings.modules, str) else list(settings.modules)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=wanted, task_type="CAUSAL_LM")
    unpack(target.model)
    try:
        inject_adapter_in_model(config, target.model)
    except ValueError as error:
        raise ValueError(
            f"backbone.modules {settings.modules}: {error} Name linear layers of the target, or set it to all-linear."
        ) from error
    for parameter in target.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return config


def _switch(target: Target, on: bool) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in target.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(on)
