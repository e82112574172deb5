"""Children that can be killed for real, cheaply: forked from a process that has imported and loaded everything once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LOOP = """
for _line in sys.stdin:
    _order, _, _rest = _line.strip().partition(" ")
    if _order == "start":
        _child = os.fork()
        if _child == 0:
            work(_rest)
            os._exit(0)
        print(_child, flush=True)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(int(_rest), 0)[1]), flush=True)
"""


class Nursery:
    """Runs `work(line)`, which `code` defines, in children. `code` may use `os`, `sys` and its arguments, sys.argv[1:]."""

    def __init__(self, code: str, *arguments: object) -> None:
        program = f"import os, sys\nimport torch\ntorch.set_num_threads(1)\n{code}\n{LOOP}"  # a child has no threads
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],  # `code` may import tests
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, line: object) -> int:
        """A child's process id."""
        return int(self._ask(f"start {line}"))

    def wait(self, child: int) -> int:
        """Exit status of a child; minus the signal's number if it was killed."""
        return int(self._ask(f"wait {child}"))

    def run(self, line: object, *, kill_after: float | None = None) -> int:
        """Exit status of one child, killed after some seconds if it is still there."""
        child = self.start(line)
        if kill_after is not None:
            time.sleep(kill_after)
            kill(child)
        return self.wait(child)

    def kill_when(self, line: object, happened: Callable[[], bool], *, pause: float) -> int:
        """Exit status of one child, killed `pause` seconds after something has happened, if it is still there."""
        child = self.start(line)
        while not happened() and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
        time.sleep(pause)
        kill(child)
        return self.wait(child)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()


def kill(child: int) -> None:
    """At once and without a chance to tidy up; nothing happens if it was faster."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
