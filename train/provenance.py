"""What made a run: command line, versions, source revision, machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "deepspeed", "safetensors")


def provenance() -> dict[str, Any]:
    """For run.json; nothing in it changes how a run is read back."""
    return {
        "argv": sys.argv,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "source": _revision(),
        "machine": {
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _revision() -> str | None:
    """Commit of the checkout this file is tracked in, with `-dirty` where it is changed; None outside of one."""
    folder, git = Path(__file__).resolve().parent, shutil.which("git")
    if git is None:
        return None
    tracked = subprocess.run([git, "ls-files", "--error-unmatch", Path(__file__).name], cwd=folder, capture_output=True)
    if tracked.returncode:
        return None
    named = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return named.stdout.strip() or None
