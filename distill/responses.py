"""Response files: one JSON line per answered conversation, beside a manifest of what made the answers.

Lines are appended and synced one by one, so a kill loses at most the line being written: a torn last line is
recognised by its missing line end and dropped. The manifest is written first; a file is continued only under an equal
manifest. Readers and the writer (`respond.py`) share the two models below, so neither can drift.

    responses.jsonl            {"id": ..., "messages": [...], "truncated": false, "sequences": [...]} per line
    responses.manifest.json    target fingerprint, template hash, sampling, max_new_tokens

One file serves any number of answers: writing is appending, and continuing reads it once, line by line, in the memory
that its ids take.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

Spelling = Literal["written", "counted", "unknown", "differs"]
"""How sure it is that the ids of an answer are those that the target wrote. written: they are. The others are of text
from a server, tokenised here: counted: as many tokens, in the prompt and the answer, as the server says; unknown: it
does not say; differs: it says another number."""


def worse(one: Spelling, other: Spelling) -> Spelling:
    """The less certain of two."""
    order: tuple[Spelling, ...] = get_args(Spelling)
    return one if order.index(one) >= order.index(other) else other


class TokenSequence(BaseModel):
    """Ids that the target read and wrote, in order. More than one per conversation only where a later prompt does not
    begin with the earlier text (see `template.Transcript`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: list[int]
    supervised: list[tuple[int, int]]
    """Spans [start, end) of token_ids that the target wrote, EOS included."""


class Response(BaseModel):
    """One line of a response file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    category: str
    split: Literal["train", "held-out"]
    messages: list[dict[str, Any]]
    """The conversation with the target's answers in place of any it came with."""
    tools: list[dict[str, Any]] = []
    truncated: bool
    """Whether an answer was cut by the token limit, or the conversation by the target's context."""
    spelling: Spelling = "written"
    """Of all answers, the least certain."""
    sequences: list[TokenSequence]


class Manifest(BaseModel):
    """What made the answers; a response file is continued only under an equal one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["draftsmith responses 1"] = "draftsmith responses 1"
    """Name and version of the file format."""
    target: dict[str, Any]
    """`Target.fingerprint()`; its name is informative and not compared. Of a target behind a server, what is known
    (`served.ServedTarget.fingerprint`): its `weights` are None."""
    dtype: str
    """Precision the target ran in; `served` behind a server."""
    template_hash: str
    """Chat template the prompts were written with."""
    sampling: dict[str, int | float]
    """Every setting of `SamplingParams`; each conversation's own seed follows from the seed and its id."""
    max_new_tokens: int
    """Limit of each answer."""
    request: dict[str, Any] = {}
    """What a server was asked for beyond that (`server.Server.body`)."""

    @classmethod
    def read(cls, responses: Path) -> Manifest:
        """The manifest beside `responses`; raises ValueError if it is missing or damaged."""
        path = manifest_path(responses)
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}); {responses} cannot be continued without it."
            ) from error

    def write(self, responses: Path) -> None:
        path = manifest_path(responses)
        scratch = path.with_name(path.name + ".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)

    def differences(self, other: Manifest) -> list[str]:
        """`field: ours, theirs` for every field in which two manifests differ, target name aside."""
        ours, theirs = _flat(self), _flat(other)
        return [
            f"{key}: {ours.get(key)!r} here, {theirs.get(key)!r} there"
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]


def manifest_path(responses: Path) -> Path:
    return responses.with_suffix(".manifest.json")


def read_responses(path: Path, *, split: str | None = None) -> list[Response]:
    """All finished lines; a torn last line is left out, with a note. Raises ValueError naming a damaged line."""
    return [response for response, _ in _scan(path) if split in (None, response.split)]


def _scan(path: Path) -> Iterator[tuple[Response, int]]:
    """Each finished line and where it ends, one at a time: a file of any length is continued in little memory."""
    seen, end = set(), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                print(f"responses: {path}: the last line is unfinished and left out", file=sys.stderr)
                return
            try:
                response = Response.model_validate_json(line)
            except ValidationError as error:
                raise ValueError(
                    f"{path}:{number}: not a response ({error.errors()[0]['msg']}). Remove the line or restore the file."
                ) from error
            if response.id in seen:
                raise ValueError(f"{path}:{number}: id {response.id!r} occurs twice. Remove one of the lines.")
            seen.add(response.id)
            end += len(line)
            yield response, end


@contextmanager
def open_to_append(path: Path, manifest: Manifest) -> Iterator[tuple[BinaryIO, set[str]]]:
    """The file open for appending by this process alone, and the ids it already holds.

    Writes the manifest if the file is new; drops a torn last line. Raises ValueError if the file was made under another
    manifest (saying what differs), has none, or is being written by another process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is being written by another process. Wait for it or name another file."
            ) from error
        if not path.stat().st_size:
            manifest.write(path)
        elif differ := manifest.differences(Manifest.read(path)):
            raise ValueError(
                f"{path} holds answers made under other settings: {'; '.join(differ)}. Name another file, or use those."
            )
        done, end = set[str](), 0
        for response, end in _scan(path):  # noqa: B007 (the last one's is needed)
            done.add(response.id)
        file.truncate(end)
        try:
            yield file, done
        finally:
            os.fsync(file.fileno())


def append(file: BinaryIO, response: Response) -> None:
    """Add one line. It has left the process when this returns, so a kill loses nothing; it is forced to the disk when the
    file is closed (doing that per line took a sixth of the whole run)."""
    file.write(response.model_dump_json().encode() + b"\n")
    file.flush()


def _flat(manifest: Manifest) -> dict[str, Any]:
    from ..infer.sampling import SamplingParams  # late: it brings torch

    fields: dict[str, Any] = json.loads(manifest.model_dump_json())
    target, sampling, request = (fields.pop(name) for name in ("target", "sampling", "request"))
    fields |= {f"target {key}": value for key, value in target.items() if key != "name"}
    off = asdict(SamplingParams())  # a setting that an older manifest does not know was off
    fields |= {f"sampling {key}": value for key, value in (off | sampling).items()}
    return fields | {f"request {key}": value for key, value in request.items()}
