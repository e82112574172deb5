"""A small real run: conversations with something to learn, the tiny target on disk, a recipe that trains in a second.

`spawn` runs it in a process of its own that can be killed. The processes are forked from a server that has imported
everything, so that dozens of real kills cost seconds, not minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from .child import work

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "dog",
    "by",
    "door",
    "while",
    "rain",
    "fell",
    "roof",
    "of",
    "house",
    "to",
)

Content = dict[str, Any]
Spawn = Callable[..., multiprocessing.context.ForkServerProcess]


def write_conversations(path: Path, count: int, *, seed: int) -> Path:
    """`count` conversations as OpenAI messages: two words, and an answer that repeats them."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            first, second = draw.sample(WORDS, 2)
            answer = " ".join([first, second] * draw.randint(2, 8))
            messages = [{"role": "user", "content": f"{first} {second}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"{path.stem}-{number}", "messages": messages}) + "\n")
    return path


TARGETS = Path(__file__).resolve().parents[2] / "configs" / "targets"
"""Architectures of real targets."""


def small_experts() -> Content:
    """DeepSeek-V3's architecture, small: fields of its config."""
    whole: Content = json.loads((TARGETS / "deepseek_v3.json").read_text())
    return whole | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "vocab_size": 300,
        "eos_token_id": 1,
        "max_position_embeddings": 512,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a training and a held-out file."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "responses": str(write_conversations(folder / "train.jsonl", 60, seed=1)),
        "held_out": str(write_conversations(folder / "held.jsonl", 12, seed=2)),
    }


@pytest.fixture
def content(tiny_target_dir: Path, conversations: dict[str, str], tmp_path: Path) -> Content:
    """A whole recipe as a plain dict; tests change what they are about."""
    return {
        "target": str(tiny_target_dir),
        "head": {"method": "medusa", "num_heads": 3, "draft_vocab_size": 200},
        "objective": {"name": "cross_entropy"},
        "data": {**conversations, "row_length": 128},
        "optimiser": {"lr": 1e-3},
        "steps": 6,
        "rows_per_step": 4,
        "rows_per_forward": 2,
        "eval_every": 3,
        "save_every": 2,
        "decode_prompts": 0,
        "out": str(tmp_path / "run"),
        "wandb": {"mode": "disabled"},
    }


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[Content], Path]:
    """A recipe dict as a YAML file."""

    def write(content: Content) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def spawn() -> Spawn:
    """`spawn(path, overrides, resume=..., log=..., file_limit=...)`: a training process, started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.train.loop", "draftsmith.train.recipe"])

    def start(
        path: Path, overrides: Sequence[str] = (), *, resume: bool, log: Path, file_limit: int | None = None
    ) -> multiprocessing.context.ForkServerProcess:
        process = context.Process(target=work, args=(str(path), list(overrides), resume, str(log), file_limit))
        process.start()
        return process

    return start
