"""Drafters by name: those that need no training, and trained ones through the loader that is handed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .candidates import DraftTree
from .draft_model import DraftModel
from .drafter import Drafter, NoDraft
from .grafted import Grafted
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup
from .recorded import recorded_like
from .target import Target
from .tree import Topology

DRAWN_TREE = Topology(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0)))
"""Shape of the trees that a draft model samples: three first tokens, four levels."""
COPIES = "+prompt-lookup"
"""Behind another drafter's name: its trees get copies grafted on (grafted.py)."""
NAMES = (
    "none, prompt-lookup, lookahead, draft:MODEL (a folder or Hugging Face id), or the folder of a trained drafter; "
    f"{COPIES} behind any but the first two adds copies of earlier text to what it drafts"
)


def make_drafter(
    name: str,
    target: Target,
    load_trained: Callable[[Path, Target], Drafter] | None = None,
    *,
    draws: Literal["", "chain", "tree"] = "",
    quantize: str | None = None,
) -> Drafter:
    """The drafter called `name`, ready to draft for `target`.

    name: one of NAMES. load_trained: loads a trained drafter's folder (`heads.load_drafter`; this room knows no methods).
    draws: the shape that a draft model samples, keeping the rows it samples from (see `verifiers.NamedVerifier`); '' for the
    coupled draft of sample-match. It is loaded in the target's precision, on its device, and recorded if it is; quantize: with int8 or int4
    weights (a trained one is quantised by its loader). Raises ValueError if there is no such drafter or it does not fit
    the target.
    """
    if name.endswith(COPIES):
        check_graft(name, draws=draws)
        inner = make_drafter(name.removesuffix(COPIES), target, load_trained, quantize=quantize)
        return Grafted(inner, copier(target))
    if quantize is not None and name in ("none", "prompt-lookup", "lookahead"):
        raise ValueError(f"drafter {name!r} has no weights to quantise; leave --quantize-drafter out.")
    if name == "none":
        return NoDraft()
    if name == "prompt-lookup":
        return copier(target)
    if name == "lookahead":
        return Lookahead()
    kind, _, model = name.partition(":")
    if kind == "draft" and model:
        dtype = str(target.dtype).removeprefix("torch.")
        loaded = Target.load(model, dtype=dtype, device=str(target.device), quantize=quantize)
        draft = recorded_like(loaded, target)
        if draws == "tree":
            return DraftTree(draft, target, shape=DRAWN_TREE)
        return DraftModel(draft, target, is_drawn=draws == "chain")
    if load_trained is None or not name or not Path(name).is_dir():
        raise ValueError(f"there is no drafter {name!r}; expected {NAMES}.")
    return load_trained(Path(name), target)


def copier(target: Target) -> PromptLookup:
    """What copies of earlier text are drafted by."""
    return PromptLookup(stop_ids=target.eos_ids)


def check_graft(name: str, *, draws: str) -> None:
    """Raise ValueError unless `name`, which ends in COPIES, is a drafter that copies can be grafted on."""
    inner = name.removesuffix(COPIES)
    if inner in ("", "none", "prompt-lookup") or inner.endswith(COPIES):
        raise ValueError(f"{name!r} grafts copies on copies or on nothing; --drafter prompt-lookup does that alone.")
    if draws:
        raise ValueError(
            f"{name!r}: a copy has no probabilities to judge it by, as drawn drafts have; leave --verifier out (sample-match is "
            "exact for every drafter)."
        )
