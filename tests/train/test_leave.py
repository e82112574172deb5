"""Laws: a process that leaves has said everything, has the status it was given, and waits for no thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys, threading, time
from draftsmith.train.leave import leave
class Slow:
    def __del__(self):
        print("taken apart")
held = Slow()
threading.Thread(target=time.sleep, args=(60,)).start()
print("said", end="")
print("warned", end="", file=sys.stderr)
leave({status})
"""


@pytest.mark.parametrize("status", [0, 3])
def test_leaving_flushes_keeps_the_status_and_takes_nothing_apart(status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(status=status)], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "said", "warned")
