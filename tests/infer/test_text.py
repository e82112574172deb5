"""Text as it grows: nothing lost, nothing shown twice, never half a character, never what begins a stop string."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftsmith.infer.text import Piece, TextStream

same_tokenizer = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PARTS = ["the", " the", "he", "t", "h", "e", "\u00e9"]
"""Some of them one token of several letters, one a letter of several tokens."""
LETTERS = "ab \n\u00e9\u4e2d\U0001f600"


def ids_of(tokenizer: PreTrainedTokenizerFast, parts: list[str]) -> list[int]:
    """Each part tokenised alone, so that one text is cut into tokens in many ways."""
    return [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


def pieces(tokenizer: PreTrainedTokenizerFast, tokens: list[int], accepted: list[bool]) -> list[tuple[str, bool]]:
    stream = TextStream(tokenizer)
    found = [piece for token, flag in zip(tokens, accepted) for piece in stream.feed(token, accepted=flag)]
    return [*found, *stream.finish()]


@same_tokenizer
@given(text=st.text(alphabet=LETTERS, max_size=30))
def test_pieces_add_up_to_the_text_and_hold_whole_characters(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    tokens = ids_of(tiny_tokenizer, [text])
    found = pieces(tiny_tokenizer, tokens, [False] * len(tokens))
    assert "".join(piece for piece, _ in found) == text
    assert all("\ufffd" not in piece for piece, _ in found)


def test_a_piece_is_marked_only_if_all_its_tokens_were_drafted(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = ids_of(tiny_tokenizer, ["a\u00e9b"])
    assert len(tokens) == 4, "the accented letter takes two tokens"
    assert pieces(tiny_tokenizer, tokens, [True, True, True, False]) == [("a", True), ("\u00e9", True), ("b", False)]
    assert pieces(tiny_tokenizer, tokens, [True, True, False, True]) == [("a", True), ("\u00e9", False), ("b", True)]


def test_text_that_ends_inside_a_character_shows_that_it_does(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = ids_of(tiny_tokenizer, ["a\u00e9"])[:-1]
    assert pieces(tiny_tokenizer, tokens, [True, False]) == [("a", True), ("\ufffd", False)]


def test_special_tokens_are_not_shown(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = ids_of(tiny_tokenizer, ["hi<|im_end|>"])
    assert "".join(piece for piece, _ in pieces(tiny_tokenizer, tokens, [False] * len(tokens))) == "hi"


# Stop strings ----------------------------------------------------------------------------------------------------


def cut(text: str, stop: list[str]) -> str | None:
    """By the definition: read letter by letter until a stop string is complete; None if none ever is."""
    for end in range(1, len(text) + 1):
        complete = [one for one in stop if text[:end].endswith(one)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


def held(text: str, stop: list[str]) -> int:
    """By the definition: the longest end of `text` that could still become a stop string."""
    return max((n for one in stop for n in range(1, len(one)) if text.endswith(one[:n])), default=0)


@same_tokenizer
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    stop=st.lists(st.text(alphabet="the\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    tiny_tokenizer: PreTrainedTokenizerFast, parts: list[str], stop: list[str]
) -> None:
    """Whichever tokens the text came in."""
    stream, given = TextStream(tiny_tokenizer, stop), ""
    for token in ids_of(tiny_tokenizer, parts):
        given += "".join(piece.text for piece in stream.feed(token))
        assert stream.text == given
        if stream.is_stopped:
            break
    text = "".join(parts)
    expected = cut(text, stop)
    assert stream.is_stopped == (expected is not None)
    if expected is None:
        assert given == text[: len(text) - held(text, stop)]
        assert given + "".join(piece.text for piece in stream.finish()) == text
    else:
        assert given == expected
        assert stream.finish() == []


@same_tokenizer
@given(
    parts=st.lists(st.sampled_from([part for part in PARTS if part.isascii()]), min_size=1, max_size=8),
    stop=st.lists(st.text(alphabet="the ", min_size=2, max_size=4), min_size=1, max_size=3),
)
def test_it_stops_at_the_first_token_that_completes_a_stop_string(
    tiny_tokenizer: PreTrainedTokenizerFast, parts: list[str], stop: list[str]
) -> None:
    stream, read = TextStream(tiny_tokenizer, stop), ""
    for token in ids_of(tiny_tokenizer, parts):
        stream.feed(token)
        read += tiny_tokenizer.decode([token])
        expected = cut(read, stop)
        assert stream.is_stopped == (expected is not None)
        assert stream.text == (read[: len(read) - held(read, stop)] if expected is None else expected)
        if stream.is_stopped:
            return


def test_held_text_keeps_its_marks(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """What could have begun a stop string comes out later, each part as it was drafted or not."""
    stream = TextStream(tiny_tokenizer, ["abba"])
    a, b = ids_of(tiny_tokenizer, ["a", "b"])
    assert stream.feed(a, accepted=True) == []
    assert stream.feed(b, accepted=False) == []
    assert stream.feed(a, accepted=True) == [Piece("a", True), Piece("b", False)]
    assert stream.finish() == [Piece("a", True)]


def test_a_stop_string_is_seen_before_a_character_that_is_not_all_there(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """One token may end a stop string and begin a character of several bytes; the text stops there all the same."""

    class Joined:
        """The tokenizer with one more token: `b` and the first byte of an accented letter."""

        def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
            spelled = [byte for token in tokens for byte in ([b, first] if token == 300 else [token])]
            return str(tiny_tokenizer.decode(spelled, skip_special_tokens=skip_special_tokens))

    a, b, first, _ = ids_of(tiny_tokenizer, ["a", "b", "\u00e9"])
    stream = TextStream(Joined(), ["ab"])  # type: ignore[arg-type]
    stream.feed(a)
    assert stream.feed(300) == []
    assert stream.is_stopped
    assert stream.text == ""


def test_the_order_within_a_token_is_that_of_its_letters(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (token,) = ids_of(tiny_tokenizer, [" the"])
    stream = TextStream(tiny_tokenizer, ["the", "h"])
    assert stream.feed(token) == [Piece(" t", False)], "h is complete before the"


@pytest.mark.parametrize(("stop", "text"), [(["bc", "abcd"], "a"), (["abc", "bc"], ""), (["d", "bcd"], "a")])
def test_of_several_stop_strings_the_first_complete_and_then_the_longest_counts(
    tiny_tokenizer: PreTrainedTokenizerFast, stop: list[str], text: str
) -> None:
    for parts in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        stream = TextStream(tiny_tokenizer, stop)
        for token in ids_of(tiny_tokenizer, parts):
            if not stream.is_stopped:
                stream.feed(token)
        assert stream.text == text
