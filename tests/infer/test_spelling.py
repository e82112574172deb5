"""From text back to the tokens that the target wrote it with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.infer.audit import audit
from draftsmith.infer.spelling import spell
from draftsmith.infer.target import Target

PROMPT = [5, 6, 7]


def written_by(tokens: list[int], target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target choose `tokens` after PROMPT, in this order, if what was read before them is theirs."""

    def choose(prompt: list[int], answer: list[int]) -> Tensor:
        return torch.arange(len(answer) + 1, dtype=torch.float32)[:, None]

    def logits(hidden: Tensor) -> Tensor:
        rows = hidden[..., 0].long().clamp(max=len(tokens) - 1)
        return torch.nn.functional.one_hot(torch.tensor(tokens)[rows], target.vocab_size).float()

    monkeypatch.setattr(target, "replay", choose)
    monkeypatch.setattr(target, "logits", logits)


@pytest.fixture
def letters(tiny_tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """ "the cat sat" spelled in single letters, which the tokenizer would never do."""
    return [tiny_tokenizer.convert_tokens_to_ids(letter) for letter in "the\u0120cat\u0120sat"]


def test_the_spelling_of_the_target_is_found_and_not_the_tokenizers(
    tiny_target: Target, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tiny_target.tokenizer.decode(letters)
    assert text == "the cat sat"
    assert tiny_target.tokenizer.encode(text) != letters
    written_by(letters, tiny_target, monkeypatch)
    assert spell(tiny_target, PROMPT, text) == letters


def test_a_text_that_the_target_did_not_write_keeps_the_tokenizers_spelling(
    tiny_target: Target, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by(letters, tiny_target, monkeypatch)
    canonical = tiny_target.tokenizer.encode("dog")
    assert spell(tiny_target, PROMPT, "dog") == canonical


def test_a_spelled_text_passes_the_audit(tiny_target: Target) -> None:
    """A text that one token spells: whatever the target chooses first, if it can be spelled at all."""
    tokenizer = tiny_target.tokenizer
    choice = int(tiny_target.logits(tiny_target.replay(PROMPT, [])[0]).argmax())
    text = tokenizer.decode([choice])
    assert text
    assert "\ufffd" not in text
    tokens = spell(tiny_target, PROMPT, text)
    assert tokens == [choice]
    assert audit(tiny_target, PROMPT, tokens).verdict == "exact"


def test_a_text_that_cannot_be_spelled_is_refused(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="cannot spell this text exactly"):
        spell(tiny_target, PROMPT, "a special token <|im_end|> is not text")


def test_an_empty_text_has_no_tokens(tiny_target: Target) -> None:
    assert spell(tiny_target, PROMPT, "") == []
