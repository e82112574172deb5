"""Killed while it writes, a process leaves what was there before and the one file that its next attempt replaces."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHARD = """
import sys, torch
from pathlib import Path
from draftsmith.distill.feature_shard import write_shard
parts = {"hidden": torch.ones(400_000, 1, 64)}
while True:
    write_shard(Path(sys.argv[1]) / "shard-00000.safetensors", parts, [400_000], compression="exact", identity="x")
"""
DRAFTER = """
import sys
from pathlib import Path
from draftsmith.heads.files import _replace
while True:
    _replace(Path(sys.argv[1]) / "model.safetensors", b"1" * 100_000_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "name"), [(SHARD, "shard-00000.safetensors"), (DRAFTER, "model.safetensors")])
def test_a_kill_leaves_one_file_at_most(code: str, name: str, tmp_path: Path) -> None:
    for pause in (0.0, 0.03, 0.11):  # seconds after the first file of the run is seen
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
            ends = time.monotonic() + 120
            before = sorted(tmp_path.iterdir())
            while sorted(tmp_path.iterdir()) == before and process.poll() is None:
                assert time.monotonic() < ends, "it never began to write"
                time.sleep(0.001)
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert {path.name for path in tmp_path.iterdir()} <= {name, f".writing-{name}"}
