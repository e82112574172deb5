"""Drafters by name: those that need no training, and trained ones through the loader that is handed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .draft_model import DraftModel
from .drafter import Drafter, NoDraft
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup
from .target import Target

NAMES = "none, prompt-lookup, lookahead, draft:MODEL (a folder or Hugging Face id), or the folder of a trained drafter"


def make_drafter(
    name: str,
    target: Target,
    load_trained: Callable[[Path, Target], Drafter] | None = None,
    *,
    quantize: str | None = None,
) -> Drafter:
    """The drafter called `name`, ready to draft for `target`.

    name: one of NAMES. load_trained: loads a trained drafter's folder (`heads.load_drafter`; this room knows no methods).
    A draft model is loaded in the target's precision, on its device; quantize: with int8 or int4 weights (a trained one
    is quantised by its loader). Raises ValueError if there is no such drafter or it does not fit the target.
    """
    if quantize is not None and name in ("none", "prompt-lookup", "lookahead"):
        raise ValueError(f"drafter {name!r} has no weights to quantise; leave --quantize-drafter out.")
    if name == "none":
        return NoDraft()
    if name == "prompt-lookup":
        return PromptLookup(stop_ids=target.eos_ids)
    if name == "lookahead":
        return Lookahead()
    kind, _, model = name.partition(":")
    if kind == "draft" and model:
        dtype = str(target.dtype).removeprefix("torch.")
        return DraftModel(Target.load(model, dtype=dtype, device=str(target.device), quantize=quantize), target)
    if load_trained is None or not name or not Path(name).is_dir():
        raise ValueError(f"there is no drafter {name!r}; expected {NAMES}.")
    return load_trained(Path(name), target)
