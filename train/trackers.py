"""Trackers beyond Weights & Biases: any that accelerate knows by name, or one's own class, through accelerate's own API.

    trackers: [tensorboard, my_package.tracking:MyTracker]

A class of one's own is an `accelerate.tracking.GeneralTracker`; it is made as accelerate makes its own, with the run's
name and, if it says `requires_logging_directory`, the run's folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers, register_tracker_class


def find_trackers(names: Sequence[str]) -> list[str]:
    """What accelerate calls them. Raises ValueError for one that it does not know or whose package is not installed:
    accelerate itself would leave the latter out without a word."""
    return [_own(name) if ":" in name else _known(name) for name in names]


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, lists and None as text: what every tracker takes as a configuration."""
    found: dict[str, str | int | float | bool] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


def _known(name: str) -> str:
    if name == "wandb":
        raise ValueError("trackers: wandb has settings of its own; remove it here and set wandb.mode.")
    if name not in LOGGER_TYPE_TO_CLASS:
        known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS.keys() - {"wandb"}))
        raise ValueError(
            f"trackers: {name!r} is unknown; accelerate has {known}, and `module:Class` names one of your own."
        )
    if name not in get_available_trackers():
        raise ValueError(
            f"trackers: the package of {name} is not installed; run `pip install {name.replace('_', '-')}`."
        )
    return name


def _own(name: str) -> str:
    module, _, class_name = name.partition(":")
    try:
        found: Any = vars(importlib.import_module(module))[class_name]
    except (ImportError, KeyError) as error:
        raise ValueError(
            f"trackers: {name!r} cannot be imported ({error!r}); write module:Class of a module on the Python path."
        ) from error
    if not (isinstance(found, type) and issubclass(found, GeneralTracker)):
        raise ValueError(f"trackers: {name!r} is no accelerate.tracking.GeneralTracker; derive it from that.")
    if found not in LOGGER_TYPE_TO_CLASS.values():
        register_tracker_class(found)
    own: Any = found
    return str(own.name)
