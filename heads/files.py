"""How a trained drafter lies on disk: `config.json` + `model.safetensors`, strict in both directions.

Under the key `draftsmith`, config.json holds the method's own config (every field, defaults included) and a `binding`:
the target's fingerprint, chat-template hash, objective and data hash. Loading against another target is an error that
says what differs. Its other keys are what other engines read (`TrainedDrafter.public_config`), so one folder serves both.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..infer.target import Target
from .base import Binding, TrainedDrafter

CONFIG, WEIGHTS, OWN = "config.json", "model.safetensors", "draftsmith"
FORMAT = 2
"""Version of this layout; a reader refuses a newer one. In format 1 our keys stood at the top level of config.json."""


def save_drafter(
    drafter: TrainedDrafter, directory: Path, *, binding: Binding, weights: dict[str, Tensor] | None = None
) -> None:
    """Write both files into `directory`, each under a temporary name first and then renamed.

    weights: replaces `drafter.state_dict()` where an engine holds the real ones. Raises ValueError on a full disk or an
    unwritable folder, leaving files of an earlier save as they were.
    """
    state = drafter.state_dict() if weights is None else weights
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} if weights is None else None
    assert expected is None or set(expected) == set(state)
    own = {
        "format": FORMAT,
        "draftsmith_version": version("draftsmith"),
        "head": drafter.config.model_dump(mode="json"),
        "binding": vars(binding),
    }
    config = drafter.public_config() | {OWN: own}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        _replace(directory / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        _replace(directory / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise ValueError(
            f"the drafter could not be saved to {directory}: {error}. Free some disk space or choose another folder; "
            "files of an earlier save are untouched."
        ) from error


def read_config(directory: Path) -> tuple[dict[str, Any], Binding]:
    """The method's config as a dict, and the binding. Raises ValueError if the folder is not a drafter's."""
    file = directory / CONFIG
    if not file.is_file():
        raise ValueError(
            f"{directory} holds no {CONFIG}; expected the folder of a trained drafter (it has {CONFIG} and {WEIGHTS})."
        )
    try:
        content = json.loads(file.read_text())
        content = content.get(OWN, content)
        head, binding, layout = content["head"], Binding(**content["binding"]), content["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a drafter's config ({error}); expected the key {OWN} with format, head, binding."
        ) from error
    if layout not in (1, FORMAT):
        raise ValueError(
            f"{file} has format {layout}, this version reads format {FORMAT}. Upgrade draftsmith or export again."
        )
    return head, binding


def note_measured(directory: Path, name: str, value: Any) -> None:
    """Put `value` under `name` into what the drafter in `directory` carries of measurements (`Binding.measured`).

    Raises ValueError if the folder is not a drafter's or cannot be written; then it stays as it was.
    """
    read_config(directory)
    file = directory / CONFIG
    config = json.loads(file.read_text())
    config.get(OWN, config)["binding"].setdefault("measured", {})[name] = value
    try:
        _replace(file, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise ValueError(f"{file} could not be written: {error}. It is as it was.") from error


def read_weights(drafter: TrainedDrafter, directory: Path) -> None:
    """Load the tensors into `drafter`, which must name exactly the same ones with the same shapes."""
    file = directory / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is missing or damaged ({error}); copy it again or save the drafter again.") from error
    expected = drafter.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if tensors[name].shape != expected[name].shape
    ]
    if missing or unknown or shapes:
        raise ValueError(
            f"{file} does not fit its config: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}, "
            f"shapes {shapes or 'fine'}. The two files come from different saves."
        )
    bad = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if bad:
        raise ValueError(f"{file} holds NaN or infinite values in {bad}; this training run diverged.")
    drafter.load_state_dict(tensors)


def check_binding(binding: Binding, target: Target, directory: Path) -> None:
    """Refuse a drafter that was trained for another target or another chat template, saying what differs."""
    mine = target.fingerprint()
    differs = [
        f"{key}: drafter {binding.target.get(key)!r}, target {value!r}"
        for key, value in mine.items()
        if key not in ("name", "quantization") and binding.target.get(key) != value  # a quantised target drafts alike
    ]
    if target.template_hash and binding.template_hash and target.template_hash != binding.template_hash:
        differs.append(f"chat template: drafter {binding.template_hash}, target {target.template_hash}")
    if differs:
        raise ValueError(
            f"the drafter in {directory} was trained for target {binding.target.get('name')!r}, not for {target.name!r}: "
            f"{'; '.join(differs)}. Load the target it was trained for, or train a drafter for this one."
        )


def _replace(path: Path, content: bytes) -> None:
    """Write under a temporary name in the same folder, flush to disk, then rename over `path`; the next save replaces what a
    kill leaves of it."""
    work = path.with_name(f".writing-{path.name}")
    try:
        with work.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
