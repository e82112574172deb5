"""Which process writes what in a feature cache: record locks on one file, a byte per shard.

The system releases them when their process ends, however it ends, so a killed builder leaves nothing behind that others
would wait for. They hold between machines too where the folder's file system has locks (NFS has). A process holds one
claim at a time, as closing the file releases all that it holds.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".claims"
WHOLE_CACHE = 2**40
"""The claim to the manifest and the index; shards have their numbers."""


@contextmanager
def claim(folder: Path, number: int, *, wait: bool) -> Iterator[bool]:
    """Hold what `number` stands for; False if another process does and `wait` is not set. Raises ValueError if the
    file system of `folder` has no locks."""
    with (folder / FILE).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, number)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"{folder} cannot be locked ({error}); put the feature cache on another disk."
                ) from error
            yield False
        else:
            yield True
