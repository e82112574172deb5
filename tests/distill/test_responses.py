"""Response files survive being cut anywhere, and are continued only under the settings that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.responses import Manifest, Response, append, open_to_append, read_responses


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "target": {"name": "tiny", "weights": "abc", "vocab_size": 300},
        "dtype": "float32",
        "template_hash": "0123",
        "sampling": {"temperature": 0.0, "seed": 2**62 + 1},
        "max_new_tokens": 8,
    }
    return Manifest.model_validate(fields | changes)


def response(id: str, split: str = "train") -> Response:
    return Response.model_validate(
        {
            "id": id,
            "category": "writing",
            "split": split,
            "messages": [{"role": "user", "content": "hi\n\u2028"}, {"role": "assistant", "content": "yo"}],
            "truncated": False,
            "sequences": [{"token_ids": [5, 6, 7, 2], "supervised": [(2, 4)]}],
        }
    )


def test_a_file_cut_at_any_byte_loses_only_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with open_to_append(path, manifest()) as (file, done):
        assert done == set()
        for id in ("a", "b", "c"):
            append(file, response(id))
    whole = path.read_bytes()
    lines = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    near = {line + step for line in lines for step in (-1, 0, 1)}
    for length in sorted(near | set(range(0, len(whole), 23))):
        path.write_bytes(whole[:length])
        kept = whole[:length].count(b"\n")
        assert [found.id for found in read_responses(path)] == ["a", "b", "c"][:kept]
        with open_to_append(path, manifest()) as (file, done):
            assert done == set(["a", "b", "c"][:kept])
            append(file, response("d"))
        assert [found.id for found in read_responses(path)] == [*["a", "b", "c"][:kept], "d"]


def test_lines_are_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with open_to_append(path, manifest()) as (file, _):
        append(file, response("a"))
        assert read_responses(path) == [response("a")]


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with open_to_append(path, manifest()) as (file, _):
        append(file, response("a"))
    moved = manifest(target={"name": "elsewhere", "weights": "abc", "vocab_size": 300})
    with open_to_append(path, moved) as (_, done):
        assert done == {"a"}, "the target's name says where it is, not what it is"
    other = manifest(max_new_tokens=9, sampling={"temperature": 0.5, "seed": 2**62 + 1})
    expected = "max_new_tokens: 9 here, 8 there; sampling temperature: 0.5 here, 0.0 there"
    with pytest.raises(ValueError, match=expected), open_to_append(path, other):
        pass
    with pytest.raises(ValueError, match="target weights: 'xyz' here, 'abc' there"):
        open_to_append(path, manifest(target={"weights": "xyz", "vocab_size": 300})).__enter__()


def test_settings_that_an_older_manifest_does_not_know_were_off(tmp_path: Path) -> None:
    path, known = tmp_path / "r.jsonl", manifest().sampling
    with open_to_append(path, manifest()) as (file, _):
        append(file, response("a"))
    with open_to_append(path, manifest(sampling=known | {"min_p": 0.0, "repetition_penalty": 1.0})) as (_, done):
        assert done == {"a"}
    with (
        pytest.raises(ValueError, match=r"sampling min_p: 0\.1 here, 0\.0 there"),
        open_to_append(path, manifest(sampling=known | {"min_p": 0.1})),
    ):
        pass


def test_a_file_without_its_manifest_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(response("a").model_dump_json() + "\n")
    with pytest.raises(ValueError, match=r"r\.manifest\.json is missing or damaged"), open_to_append(path, manifest()):
        pass
    assert read_responses(path), "and it is left as it was"


def test_two_writers_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with (
        open_to_append(path, manifest()),
        pytest.raises(ValueError, match="being written by another process"),
        open_to_append(path, manifest()),
    ):
        pass


def test_damaged_and_repeated_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    line = response("a").model_dump_json()
    path.write_text(f'{line}\n{{"id": 3}}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:2: not a response"):
        read_responses(path)
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:2: id 'a' occurs twice"):
        read_responses(path)


def test_readers_may_take_one_split(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(response(*row).model_dump_json() + "\n" for row in (("a", "train"), ("b", "held-out"))))
    assert [found.id for found in read_responses(path, split="held-out")] == ["b"]
