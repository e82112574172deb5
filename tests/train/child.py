"""What a spawned process runs: the command line of `draftsmith.train`, or of `draftsmith`, with its output in a file."""

from __future__ import annotations

import os
import resource
import sys


def work(path: str, overrides: list[str], resume: bool, log: str, file_limit: int | None) -> None:
    """file_limit: largest file the process may write, in bytes; beyond it the system refuses, as a full disk does."""
    _speak_into(log)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    from draftsmith.train.__main__ import main

    sys.argv = ["draftsmith.train", path, *overrides, *(["--resume"] if resume else [])]
    sys.exit(main())


def verb(arguments: list[str], log: str) -> None:
    """`draftsmith VERB ...`."""
    _speak_into(log)
    from draftsmith.cli.main import app

    app(arguments)


def _speak_into(log: str) -> None:
    with open(log, "a", encoding="utf-8", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
