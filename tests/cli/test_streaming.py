"""Text as it grows: nothing lost, nothing shown twice, never half a character."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftsmith.cli.streaming import TextStream

same_tokenizer = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pieces(tokenizer: PreTrainedTokenizerFast, tokens: list[int], accepted: list[bool]) -> list[tuple[str, bool]]:
    stream = TextStream(tokenizer)
    found = [stream.feed(token, accepted=flag) for token, flag in zip(tokens, accepted)]
    return [piece for piece in [*found, stream.finish()] if piece is not None]


@same_tokenizer
@given(text=st.text(alphabet="ab \n\u00e9\u4e2d\U0001f600", max_size=30))
def test_pieces_add_up_to_the_text_and_hold_whole_characters(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    tokens = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tiny_tokenizer, tokens, [False] * len(tokens))
    assert "".join(piece for piece, _ in found) == text
    assert all("\ufffd" not in piece for piece, _ in found)


def test_a_piece_is_marked_only_if_all_its_tokens_were_drafted(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tiny_tokenizer("a\u00e9b", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 4, "the accented letter takes two tokens"
    assert pieces(tiny_tokenizer, tokens, [True, True, True, False]) == [("a", True), ("\u00e9", True), ("b", False)]
    assert pieces(tiny_tokenizer, tokens, [True, True, False, True]) == [("a", True), ("\u00e9", False), ("b", True)]


def test_text_that_ends_inside_a_character_shows_that_it_does(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tiny_tokenizer("a\u00e9", add_special_tokens=False)["input_ids"][:-1]
    assert pieces(tiny_tokenizer, tokens, [True, False]) == [("a", True), ("\ufffd", False)]


def test_special_tokens_are_not_shown(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tiny_tokenizer("hi<|im_end|>", add_special_tokens=False)["input_ids"]
    assert "".join(piece for piece, _ in pieces(tiny_tokenizer, tokens, [False] * len(tokens))) == "hi"
