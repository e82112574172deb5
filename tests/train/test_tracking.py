"""Laws of tracking: the files hold everything that a curve needs, and Weights & Biases holds the same."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.train.loop import train
from draftsmith.train.recipe import parse_recipe
from draftsmith.train.tracking import _wandb_mode

from .conftest import Content, read_lines


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):
            return  # still being written
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record


def test_metrics_hold_a_line_per_step_and_per_evaluation(content: Content) -> None:
    result = train(parse_recipe(content, source="test"), resume=False)
    lines = read_lines(result.out / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "held_out/loss" in line] == [3, 6]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/acceptance@3", "train/predicted_tau"} <= lines[0].keys()
    last = lines[-1]
    assert last["held_out/predicted_tau"] == result.measured["predicted_tau"]
    assert last["held_out/acceptance@1"] == last["held_out/survived"][0] / last["held_out/reached"][0]
    timing = read_lines(result.out / "timing.jsonl")
    assert [line["step"] for line in timing] == [1, 2, 3, 4, 5, 6]
    assert timing[-1]["tokens"] > timing[0]["tokens"] > 0
    assert 0 < timing[0]["waited"] <= timing[-1]["waited"] < timing[-1]["seconds"]
    assert not any("seconds" in line for line in lines), "metrics.jsonl holds nothing that depends on the clock"


def test_run_json_holds_the_resolved_recipe_and_where_it_came_from(content: Content) -> None:
    result = train(parse_recipe(content, source="test"), resume=False)
    run = json.loads((result.out / "run.json").read_text())
    assert parse_recipe(run["recipe"], source="run.json") == parse_recipe(content, source="test")
    assert run["derived"]["steps"] == "6 (as given)"
    assert run["versions"]["torch"]
    assert run["measured"] == result.measured


def finished_records(file: Path, seconds: float = 60.0) -> list[Any]:
    """All records, once wandb's own process has written the last one: it may do so a moment after `finish` returns."""
    deadline = time.monotonic() + seconds
    while True:
        records = list(wandb_records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.1)


def test_offline_run_of_wandb_holds_config_curves_and_summary(
    content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    changes = {"wandb": {"mode": "offline", "name": "try"}, "decode_prompts": 4, "decode_tokens": 8}
    result = train(parse_recipe(content | changes, source="test"), resume=False)
    [file] = (result.out / "wandb").glob("offline-run-*/run-*.wandb")
    records = finished_records(file)
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("draftsmith", "try")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["recipe"]["optimiser"]["lr"] == 1e-3

    curves: dict[int, dict[str, float]] = {}
    summary: dict[str, float] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            curves[int(values["_step"])] = values
        if record.WhichOneof("record_type") == "summary":
            summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    for line in read_lines(result.out / "metrics.jsonl"):
        numbers = {name: value for name, value in line.items() if not isinstance(value, list) and name != "step"}
        assert {name: curves[line["step"]][name] for name in numbers} == numbers
    assert summary["held_out/predicted_tau"] == result.measured["predicted_tau"]
    assert summary["held_out/real_tau"] == result.measured["real_tau"] >= 1.0
    assert [step for step in sorted(curves) if "held_out/real_tau" in curves[step]] == [3, 6]


def test_wandb_is_offline_unless_a_key_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert _wandb_mode("auto") == "online"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert _wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _wandb_mode("auto") == "disabled"
    assert _wandb_mode("offline") == "offline", "the recipe goes before the environment"
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match="WANDB_MODE is 'sometimes'"):
        _wandb_mode("auto")
