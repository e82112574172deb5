"""Conversations from the shipped prompt set or from any data: detected, checked, split, and never dropped in silence.

The shipped set, `prompts.jsonl` beside this file, was written for draftsmith: ten categories, a fixed split. For other
data the split is by conversation: a keyed hash of what the user says puts a tenth of it aside, so repeated prompts
fall on one side and the split survives reordering and growth of the file.

    draftsmith respond --prompts data.json        # prints: prompts: data.json: sharegpt (detected), 300 conversations
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .formats import FORMATS, BadRow, Message, Parsed, detect, parse
from .sources import Record, read_records

Split = Literal["train", "held-out"]
SHIPPED = Path(__file__).with_name("prompts.jsonl")
HELD_OUT_SHARE = 0.10
_SPLIT_KEY = "draftsmith split 1"
_DETECTION_ROWS = 20


@dataclass(frozen=True)
class Conversation:
    """A prompt, or several turns of one, with or without answers."""

    id: str
    category: str
    messages: tuple[Message, ...]
    """OpenAI style: `role` (system, user, assistant, tool), `content` (text), `tool_calls`. Answers may be absent."""
    split: Split
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    """Plain text without a chat; then `messages` is empty."""


def load_conversations(
    path: Path | str | None,
    *,
    split: str | None = None,
    format: str = "auto",
    max_bad_share: float = 0.01,
    rejects: Path | None = None,
    limit: int | None = None,
) -> list[Conversation]:
    """All conversations of a source in its order; None is the shipped prompt set.

    split: `train` or `held-out` only. format: a name of `formats.FORMATS`, else detected. limit: stop reading after
    this many conversations of the split. Bad rows are counted and listed in `rejects` (a new temporary file if None,
    whose name is printed); in our own format the first one is an error.

    Raises ValueError naming file and line if more than `max_bad_share` of the rows are bad, on a repeated id, on an
    unknown format, and if nothing is left.
    """
    source = SHIPPED if path is None else path
    if split not in (None, "train", "held-out"):
        raise ValueError(f"split must be train or held-out, got {split!r}.")
    stem = "prompts" if path is None else Path(str(source).partition("#")[0]).stem
    chosen, records = _settle_format(source, format)
    reading = _Reading(chosen, stem)
    kept = []
    for found in reading.conversations(records):
        if split in (None, found.split):
            kept.append(found)
        if limit is not None and len(kept) >= limit:
            break
    reading.account_for_bad_rows(rejects, max_bad_share)
    which = f" in split {split}" if split else ""
    if not kept:
        raise ValueError(f"{source}: no conversation{which} among {reading.total} rows.")
    how = " (detected)" if format == "auto" else ""
    print(
        f"prompts: {source}: {chosen}{how}, {len(kept)} conversations{which}, {len(reading.bad)} bad", file=sys.stderr
    )
    return kept


def held_out(key: str) -> bool:
    """Whether the conversation with this key is put aside: a keyed hash below the held-out share."""
    digest = hashlib.sha256(f"{_SPLIT_KEY}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


class _Reading:
    """One pass over the rows of a source, and what was wrong with them."""

    def __init__(self, format: str, stem: str) -> None:
        self.format, self.stem = format, stem
        self.total = 0
        self.bad: list[tuple[Record, str]] = []

    def conversations(self, records: Iterator[Record]) -> Iterator[Conversation]:
        places: dict[str, str] = {}
        for record in records:
            self.total += 1
            try:
                found = _conversation(record, self.format, self.stem)
            except BadRow as error:
                if self.format == "draftsmith":
                    raise ValueError(f"{record.place}: {error}. Correct the line.") from error
                self.bad.append((record, str(error)))
                continue
            if found.id in places:
                raise ValueError(
                    f"{record.place}: id {found.id!r} was used before at {places[found.id]}. Ids must be distinct."
                )
            places[found.id] = record.place
            yield found

    def account_for_bad_rows(self, rejects: Path | None, max_share: float) -> None:
        """List bad rows in the rejects file; raise if they are too many."""
        if not self.bad:
            if rejects is not None:
                rejects.unlink(missing_ok=True)  # an earlier run's list would be a false one
            return
        if rejects is None:
            handle, name = tempfile.mkstemp(prefix=f"{self.stem}-", suffix=".rejects.jsonl")
            os.close(handle)
            rejects = Path(name)
        lines = [
            json.dumps({"file": record.file, "line": record.line, "reason": reason, "row": f"{record.value!r:.300}"})
            for record, reason in self.bad
        ]
        scratch = rejects.with_name(rejects.name + ".tmp")
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(scratch, rejects)
        record, reason = self.bad[0]
        summary = f"{len(self.bad)} of {self.total} rows are bad, the first at {record.place}: {reason}. See {rejects}"
        if len(self.bad) > max_share * self.total:
            raise ValueError(f"{summary}. At most {max_share:.1%} may be; correct them or name the format.")
        print(f"prompts: {summary}", file=sys.stderr)


def _settle_format(source: Path | str, format: str) -> tuple[str, Iterator[Record]]:
    records = read_records(source)
    if format != "auto":
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; expected auto or one of {', '.join(FORMATS)}.")
        return format, records
    first = list(itertools.islice(records, _DETECTION_ROWS))
    seen = Counter(name for record in first if (name := detect(record.value)))
    if not seen:
        shown = next((sorted(record.value) for record in first if isinstance(record.value, dict)), None)
        reason = f"rows have the keys {shown}" if shown else first[0].error if first else "it is empty"
        raise ValueError(
            f"{source}: no known format ({reason}). Expected one of {', '.join(FORMATS)}; see `formats.py`."
        )
    return seen.most_common(1)[0][0], itertools.chain(first, records)


def _conversation(record: Record, format: str, stem: str) -> Conversation:
    if record.error:
        raise BadRow(record.error)
    parsed = parse(record.value, format)
    row: dict[str, Any] = record.value
    given = row.get("question_id" if format == "questions" else "id")
    if given is not None and not isinstance(given, str | int):
        raise BadRow(f"id must be text or a number, got {given!r:.80}")
    category = row.get("category") or ("text" if format == "text" else "general")
    if not isinstance(category, str):
        raise BadRow(f"category must be text, got {category!r:.80}")
    return Conversation(
        id=f"{stem}-{record.line}" if given is None else str(given),
        category=category,
        messages=parsed.messages,
        split=_split_of(row, parsed),
        tools=parsed.tools,
        text=parsed.text,
    )


def _split_of(row: dict[str, Any], parsed: Parsed) -> Split:
    given = row.get("split")
    if given is None:
        asked = [message["content"] for message in parsed.messages if message["role"] in ("system", "user")]
        return "held-out" if held_out("\0".join(asked) or parsed.text) else "train"
    if given == "train":
        return "train"
    if given == "held-out":
        return "held-out"
    raise BadRow(f"split must be train or held-out, got {given!r:.80}")
