"""How the command line speaks when something goes wrong: one line, an exit code, and what has been kept."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

USER_ERROR, INTERRUPTED = 2, 130


@contextmanager
def reported(kept: str) -> Iterator[None]:
    """Turn mistakes and interruptions inside a verb into a line on stderr.

    kept: what survives an interruption, as a sentence. ValueError and OSError (the user's input, a missing file, a full
    disk) end with exit code 2 and no traceback, Ctrl-C with 130; anything else is our fault and keeps its traceback.
    DRAFTSMITH_TRACEBACK=1 shows the traceback of those too.
    """
    _quiet_deepspeed()
    try:
        yield
    except BrokenPipeError:
        raise  # the reader went away (`| head`): typer ends quietly
    except (ValueError, OSError) as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        _print_red("error:", str(error))
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as error:
        _print_red("interrupted:", kept)
        raise typer.Exit(INTERRUPTED) from error


def _print_red(label: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    sys.stdout.flush()
    Console(stderr=True, highlight=False).print(Text.assemble((label, "bold red"), " ", text), soft_wrap=True)


def _quiet_deepspeed() -> None:
    """transformers imports DeepSpeed, which says on stdout that it found no GPU; stdout is for the answer."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
