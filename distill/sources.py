"""Rows of any file, folder or data set, each with the place it came from: json, jsonl, parquet, HF data sets.

Nothing is interpreted here: a row that cannot even be read becomes a `Record` with an `error`, so that the caller can
count it and name its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Record:
    """One row: its file (or data set), its 1-based line (or row number), and its value or why there is none."""

    file: str
    line: int
    value: Any = None
    error: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_records(source: Path | str) -> Iterator[Record]:
    """Rows of a .json, .jsonl or .parquet file, of a folder (a saved or plain data set), or of a hub data set.

    A hub data set is named `org/name`, or `org/name#split`; it is streamed. Raises ValueError if the source does not
    exist or has a kind that is not known.
    """
    path = Path(source)
    if path.is_dir():
        return _dataset_records(str(path), _open_folder(path))
    if path.is_file():
        if path.suffix == ".parquet":
            from datasets import Dataset

            return _dataset_records(str(path), Dataset.from_parquet(str(path)))
        if path.suffix in SUFFIXES:
            return _array_records(path) if _first_character(path) == "[" else _line_records(path)
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; expected {', '.join(SUFFIXES)} or a folder.")
    name, _, split = str(source).partition("#")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).suffix in SUFFIXES:
        raise ValueError(
            f"{source}: no such file or folder. Name a {', '.join(SUFFIXES)} file, a data set folder, or a hub id "
            "like org/name."
        )
    return _dataset_records(str(source), _open_hub(name, split))


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        for line in file:
            if text := line.decode("utf-8-sig", errors="replace").strip():
                return text[0]
    return ""


def _line_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:  # bytes, split at \n only: U+2028 inside a JSON string is not a line end
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield Record(str(path), number, json.loads(text))
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                yield Record(str(path), number, error=f"not a JSON line ({error})")


def _array_records(path: Path) -> Iterator[Record]:
    """The objects of one JSON array, with the line each begins on. A broken array cannot be read past its fault."""
    text = path.read_text(encoding="utf-8-sig")
    decoder, position, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        while position < len(text) and (text[position].isspace() or text[position] == ","):
            position += 1
        if text[position : position + 1] == "]":
            return
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{error.lineno}: broken JSON array ({error.msg}). Repair the file or save it as jsonl."
            ) from error
        yield Record(str(path), line, value)


def _dataset_records(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield Record(name, number, {key: value for key, value in row.items() if value is not None})


def _open_folder(path: Path) -> Iterable[Any]:
    from datasets import load_dataset, load_from_disk

    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return _one_split(str(path), load_from_disk(str(path)), "")
    return _one_split(str(path), load_dataset(str(path)), "")


def _open_hub(name: str, split: str) -> Iterable[Any]:
    from datasets import load_dataset

    try:
        return _one_split(name, load_dataset(name, streaming=True), split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data set {name!r} could not be opened: {error}\nExpected a file, a folder or a reachable hub id."
        ) from error


def _one_split(name: str, data: Any, split: str) -> Iterable[Any]:
    """The split asked for, `train`, or the only one there is."""
    from datasets import DatasetDict, IterableDatasetDict

    rows: Iterable[Any] = data
    if isinstance(data, DatasetDict | IterableDatasetDict):
        wanted = split or ("train" if "train" in data else next(iter(data)) if len(data) == 1 else "")
        if wanted not in data:
            raise ValueError(
                f"data set {name!r} has the splits {', '.join(str(key) for key in data)}, not {wanted or 'train'!r}. Write {name}#SPLIT."
            )
        rows = data[wanted]
    return rows
