"""Trained drafters: one file per method, and the one dict that names them all."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..infer.packed import pack
from ..infer.target import Target
from .base import Binding, HeadConfig, LossSums, Objective, TeacherBatch, TrainedDrafter
from .dflash import DFlash, DFlashConfig
from .draft_model import DraftModelConfig, TrainedDraftModel
from .eagle3 import Eagle3, Eagle3Config
from .files import check_binding, read_config, read_weights
from .hydra import Hydra, HydraConfig
from .medusa import Medusa, MedusaConfig
from .pard import Pard, PardConfig

METHODS: dict[str, tuple[type[HeadConfig], type[TrainedDrafter]]] = {
    "medusa": (MedusaConfig, Medusa),
    "hydra": (HydraConfig, Hydra),
    "eagle3": (Eagle3Config, Eagle3),
    "dflash": (DFlashConfig, DFlash),
    "draft_model": (DraftModelConfig, TrainedDraftModel),
    "pard": (PardConfig, Pard),
}


def load_drafter(directory: str | Path, target: Target, *, is_packed: bool = True) -> TrainedDrafter:
    """The trained drafter in `directory`, ready to draft for `target`.

    is_packed: on a CPU, lay its matrices out for the processor (see infer/packed.py); the numbers are the same.
    Raises ValueError if the folder is not a drafter's, its tensors do not fit its config, or it was trained for another
    target.
    """
    directory = Path(directory)
    head, binding = read_config(directory)
    if head.get("method") not in METHODS:
        raise ValueError(
            f"{directory} holds a drafter of method {head.get('method')!r}; known methods: {', '.join(METHODS)}."
        )
    check_binding(binding, target, directory)
    config_class, drafter_class = METHODS[head["method"]]
    drafter = drafter_class.from_folder(config_class.model_validate(head), target, directory)
    read_weights(drafter, directory)
    drafter.measured = binding.measured
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if is_packed:
        looked_up = {id(weight) for weight in drafter.indexed}
        owners = {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
        skip = {name.rpartition(".")[2] for name, module in owners.items() if id(module.weight) in looked_up}
        pack(drafter, skip=skip)
    return drafter


__all__ = [
    "METHODS",
    "Binding",
    "HeadConfig",
    "LossSums",
    "Objective",
    "TeacherBatch",
    "TrainedDrafter",
    "load_drafter",
]
