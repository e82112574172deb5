"""Rows come with the place they stand at, whatever they are stored in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.distill.prompts import load_conversations
from draftsmith.distill.sources import read_records

ROWS = [{"instruction": f"say {i}", "output": f"line\u2028end {i}"} for i in range(5)]


def test_json_array_rows_know_the_line_they_begin_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=2))
    records = list(read_records(path))
    assert [record.value for record in records] == ROWS
    assert [record.line for record in records] == [2, 6, 10, 14, 18]


def test_a_file_named_json_may_hold_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8-sig")
    assert [(record.line, record.value) for record in read_records(path)] == list(enumerate(ROWS, start=1))


def test_a_broken_array_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"a": 1},\n{"a": }\n]')
    with pytest.raises(ValueError, match=r"a\.json:3: broken JSON array"):
        list(read_records(path))
    path.write_text('[\n{"a": 1}\n')
    with pytest.raises(ValueError, match="broken JSON array"):
        list(read_records(path))


def test_lines_that_cannot_be_read_are_reported_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n{"a": "\xff"}\n{"a": 2}\n')
    records = list(read_records(path))
    assert [record.line for record in records] == [1, 3, 4, 5]
    assert [bool(record.error) for record in records] == [False, True, True, False]


def test_parquet_and_saved_data_sets_and_folders_are_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "both")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for source in ("a.parquet", "saved", "both", "plain"):
        assert [record.value for record in read_records(tmp_path / source)] == ROWS, source
        assert len(load_conversations(tmp_path / source)) == len(ROWS)


def test_messages_of_a_data_set_survive_its_columns(tmp_path: Path) -> None:
    """Columns give every message the union of all keys, None where it had none."""
    from datasets import Dataset

    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "tool_calls": None}]},
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    called, said = load_conversations(tmp_path / "saved")
    assert called.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert said.messages[1] == {"role": "assistant", "content": "yo"}


def test_a_data_set_without_a_train_split_asks_for_one(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    DatasetDict({"test": data, "validation": data}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="has the splits test, validation, not 'train'"):
        list(read_records(tmp_path / "both"))


def test_missing_and_unknown_sources_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        read_records(tmp_path / "absent.jsonl")
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(
        ValueError, match=r"unknown kind of file '\.csv'; expected \.json, \.jsonl, \.parquet or a folder"
    ):
        read_records(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="'nobody/nothing' could not be opened"):
        read_records("nobody/nothing")
