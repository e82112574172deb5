"""What the tests share: one thread for the fast suite, fixed seeds, and a tiny chat model that is real in every part.

The tokenizer is a byte-level BPE of 300 ids with SmolLM2's special tokens and chat template; the target is a random
fp32 Llama of four layers, drawn wide enough that its greedy text is not one token repeated.
"""

from __future__ import annotations

import os

# Slow tests use the threads asked for, else all cores; fast ones, and all that have other workers beside them, use one: on a
# busy machine waiting for a second thread costs dearly.
os.environ["SLOW_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["SLOW_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for a hub is a wrong test

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.infer.target import Target

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 300

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
    "the cat sat on the mat and the dog sat by the door while the rain fell on the roof of the house",
    "to write a function that returns the sum of two numbers, add the first number to the second number",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, whatever file they are in; CUDA tests skip themselves where there is no CUDA."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fixed_conditions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One seed everywhere; one thread for fast tests, all cores for slow ones; no global state left changed."""
    threads = int(os.environ["SLOW_THREADS"]) if request.node.get_closest_marker("slow") else 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled(), "a test left gradients switched off"
    assert torch.get_default_dtype() == torch.float32, "a test left another default dtype behind"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, 300 ids: any text round-trips; `<|im_end|>` ends an answer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE, f"the tiny tokenizer has {len(tokenizer)} ids"
    return tokenizer


def tiny_model(*, eos_token_id: int | list[int], seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random fp32 Llama; `overrides` go to its config."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "eos_token_id": eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**settings | overrides)).float().eval()


@pytest.fixture(scope="session")
def build_target(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Target]:
    """`build_target(seed=1, num_hidden_layers=2, ...)`: another tiny target over the same tokenizer."""

    def build(**options: Any) -> Target:
        model = tiny_model(**{"eos_token_id": tiny_tokenizer.eos_token_id} | options)
        return Target(model, tiny_tokenizer, name="tiny")

    return build


@pytest.fixture(scope="session")
def tiny_target(build_target: Callable[..., Target]) -> Target:
    """The tiny target; frozen, so one serves the whole session."""
    return build_target()


@pytest.fixture(scope="session")
def tiny_target_dir(
    tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`tiny_target` on disk with its tokenizer, as a user would name it."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    tiny_target.model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
