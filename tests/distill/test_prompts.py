"""Laws of the shipped prompts, of reading anybody's data, and of the held-out split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.prompts import Conversation, load_conversations

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not beside the repository")


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def our_row(number: int, **changes: Any) -> dict[str, Any]:
    return {"id": f"a-{number}", "category": "writing", "split": "train", "turns": [f"say {number}"]} | changes


def test_shipped_prompts_cover_ten_categories_with_a_fixed_split() -> None:
    shipped = load_conversations(None)
    assert len(shipped) >= 800
    counts = Counter(conversation.category for conversation in shipped)
    assert len(counts) == 10
    assert min(counts.values()) >= 80
    held_out = Counter(conversation.category for conversation in shipped if conversation.split == "held-out")
    assert set(held_out) == set(counts)
    assert all(0.1 <= held_out[category] / counts[category] <= 0.15 for category in counts)


def test_shipped_prompts_do_not_repeat_each_other() -> None:
    openings = Counter(conversation.messages[0]["content"][:40].lower() for conversation in load_conversations(None))
    assert [opening for opening, count in openings.items() if count > 1] == []


def test_shipped_multi_turn_prompts_have_several_turns_and_all_others_one() -> None:
    for conversation in load_conversations(None):
        assert (len(conversation.messages) > 1) == (conversation.category == "multi-turn"), conversation.id


def test_any_first_part_of_the_shipped_prompts_is_spread_over_the_categories() -> None:
    assert len({conversation.category for conversation in load_conversations(None, limit=10)}) == 10


@needs_shared
@pytest.mark.parametrize(
    ("name", "format", "rows"),
    [
        ("train/alpaca_en_demo.json", "alpaca", 999),
        ("train/alpaca_zh_demo.json", "alpaca", 1000),
        ("train/glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("eval/mt_bench.jsonl", "questions", 80),
        ("eval/sum.jsonl", "questions", 80),
    ],
)
def test_real_files_are_detected_and_read_whole(
    name: str, format: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations = load_conversations(SHARED / name)
    assert len(conversations) == rows
    assert f"{format} (detected), {rows} conversations, 0 bad" in capsys.readouterr().err
    train = load_conversations(SHARED / name, split="train")
    held_out = load_conversations(SHARED / name, split="held-out")
    assert len(train) + len(held_out) == rows
    assert 0.02 <= len(held_out) / rows <= 0.2


@needs_shared
def test_tool_calls_of_real_data_become_calls_with_object_arguments() -> None:
    conversations = load_conversations(SHARED / "train/glaive_toolcall_en_demo.json")
    calls = [
        call["function"]
        for conversation in conversations
        for message in conversation.messages
        for call in message.get("tool_calls", ())
    ]
    assert len(calls) > 100
    assert all(isinstance(call["arguments"], dict) for call in calls)
    assert sum(bool(conversation.tools) for conversation in conversations) == 191


def test_split_follows_what_is_asked_not_the_order_of_rows(tmp_path: Path) -> None:
    rows = [{"instruction": f"question {i}", "output": "yes"} for i in range(2000)]
    forward = load_conversations(write_lines(tmp_path / "f.jsonl", rows), split="held-out")
    backward = load_conversations(write_lines(tmp_path / "b.jsonl", rows[::-1]), split="held-out")

    def asked(conversations: list[Conversation]) -> set[str]:
        return {conversation.messages[0]["content"] for conversation in conversations}

    assert asked(forward) == asked(backward)
    assert 150 <= len(forward) <= 250, "a tenth of 2000, give or take four standard deviations"


def test_equal_prompts_with_different_answers_never_straddle_the_split(tmp_path: Path) -> None:
    rows = [{"instruction": f"question {i % 50}", "output": f"answer {i}"} for i in range(400)]
    sides: dict[str, set[str]] = {}
    for conversation in load_conversations(write_lines(tmp_path / "a.jsonl", rows)):
        sides.setdefault(conversation.messages[0]["content"], set()).add(conversation.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {side for found in sides.values() for side in found} == {"train", "held-out"}


def test_bad_rows_are_listed_with_file_and_line_and_the_rest_is_kept(tmp_path: Path) -> None:
    rows: list[Any] = [{"conversations": [{"from": "human", "value": f"hi {i}"}]} for i in range(200)]
    rows[17] = {"conversations": [{"from": "martian", "value": "hi"}]}
    path = write_lines(tmp_path / "talk.jsonl", rows)
    rejects = tmp_path / "talk.rejects.jsonl"
    assert len(load_conversations(path, rejects=rejects)) == 199
    (listed,) = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert (listed["file"], listed["line"]) == (str(path), 18)
    assert "unknown role 'martian'" in listed["reason"]


def test_more_bad_rows_than_allowed_stop_and_name_the_first(tmp_path: Path) -> None:
    rows: list[Any] = [{"conversations": [{"from": "human", "value": f"hi {i}"}]} for i in range(100)]
    rows[30] = rows[60] = {"conversations": [{"from": "martian", "value": "hi"}]}
    path = write_lines(tmp_path / "talk.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"2 of 100 rows are bad, the first at .*talk\.jsonl:31: unknown role 'martian'"
    ):
        load_conversations(path, rejects=tmp_path / "r.jsonl")
    assert len(load_conversations(path, max_bad_share=0.02)) == 98


def test_a_clean_reading_removes_the_list_of_an_earlier_one(tmp_path: Path) -> None:
    rejects = tmp_path / "r.jsonl"
    rejects.write_text("old\n")
    load_conversations(write_lines(tmp_path / "a.jsonl", [our_row(1)]), rejects=rejects)
    assert not rejects.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": ["  "]}, "empty user message"),
        ({"split": "test"}, "split must be train or held-out, got 'test'"),
        ({"topic": "x"}, r"unknown \['topic'\]"),
        ({"id": 1.5}, "id must be text or a number"),
    ],
)
def test_our_own_format_is_strict(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", [our_row(i) for i in range(300)] + [our_row(300, **change)])
    with pytest.raises(ValueError, match=rf"p\.jsonl:301: .*{message}"):
        load_conversations(path)


def test_a_malformed_line_names_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [our_row(1), our_row(2)])
    path.write_text(path.read_text() + '{"id": "a-3", "turns"\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:3: not a JSON line"):
        load_conversations(path)


def test_repeated_ids_are_an_error_naming_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [our_row(1), our_row(2), our_row(1, turns=["other"])])
    with pytest.raises(ValueError, match=r"p\.jsonl:3: id 'a-1' was used before at .*p\.jsonl:1"):
        load_conversations(path)


def test_format_can_be_named_and_a_wrong_name_lists_the_known(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"instruction": "hi", "output": "yo", "text": "hi yo"}])
    assert load_conversations(path)[0].messages[0]["content"] == "hi"
    assert load_conversations(path, format="text")[0].text == "hi yo"
    with pytest.raises(ValueError, match="unknown format 'alpacca'; expected auto or one of draftsmith, questions"):
        load_conversations(path, format="alpacca")


def test_unknown_keys_and_empty_files_are_refused_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no known format \(rows have the keys \['answer', 'ask'\]\)"):
        load_conversations(write_lines(tmp_path / "x.jsonl", [{"ask": 1, "answer": 2}]))
    with pytest.raises(ValueError, match="it is empty"):
        load_conversations(write_lines(tmp_path / "e.jsonl", []))
    with pytest.raises(ValueError, match="no conversation in split held-out among 1 rows"):
        load_conversations(write_lines(tmp_path / "p.jsonl", [our_row(1)]), split="held-out")
    with pytest.raises(ValueError, match="split must be train or held-out, got 'test'"):
        load_conversations(None, split="test")


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [our_row(i) for i in range(50)])
    path.write_text(path.read_text() + "not json\n")
    assert [c.id for c in load_conversations(path, limit=3)] == ["a-0", "a-1", "a-2"]
