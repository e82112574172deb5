"""What each answer reads first, and what remains of a conversation that is cut short."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.prompts import Conversation
from draftsmith.distill.talks import Refused, Talk, questions
from draftsmith.distill.template import ChatTemplate


@pytest.mark.parametrize(
    ("roles", "groups"),
    [
        ("u", ["u"]),
        ("uuu", ["u", "u", "u"]),
        ("suau", ["su", "u"]),
        ("uatau", ["u", "t", "u"]),
        ("utta", ["utt"]),
        ("uaau", ["u", "u"]),
        ("usu", ["u", "su"]),
        ("", []),
    ],
)
def test_questions_are_what_each_answer_reads_first(roles: str, groups: list[str]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    asked = questions([{"role": names[role], "content": "x"} for role in roles])
    assert ["".join(message["role"][0] for message in group) for group in asked] == groups


def begun(tokenizer: PreTrainedTokenizerFast, *turns: str) -> tuple[Talk, ChatTemplate]:
    template = ChatTemplate(tokenizer, (2,))
    source = Conversation("a", "general", tuple({"role": "user", "content": turn} for turn in turns), "train")
    return Talk.begin(source, template, 512), template


def test_a_conversation_is_as_certain_as_its_least_certain_answer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    talk, template = begun(tiny_tokenizer, "one", "two", "three")
    for spelling, seen in (("counted", "counted"), ("differs", "differs"), ("written", "differs")):
        talk.take({"role": "assistant", "content": "x"}, [5, 2], truncated=False, spelling=spelling)  # type: ignore[arg-type]
        assert talk.response().spelling == seen
        assert talk.ask(template, 512) == (spelling != "written")


def test_a_cut_conversation_keeps_what_was_answered_and_nothing_asked_after_it(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    talk, template = begun(tiny_tokenizer, "one", "two")
    assert not talk.cut(), "nothing was answered"
    talk, template = begun(tiny_tokenizer, "one", "two")
    talk.take({"role": "assistant", "content": "x"}, [5, 2], truncated=False)
    assert talk.ask(template, 512)
    assert talk.cut()
    response = talk.response()
    assert [message["content"] for message in response.messages] == ["one", "x"]
    assert response.truncated
    assert [part.token_ids[-2:] for part in response.sequences] == [[5, 2]]


def test_what_cannot_be_asked_is_refused_with_the_reason(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    template = ChatTemplate(tiny_tokenizer, (2,))
    with pytest.raises(Refused, match="plain text holds no question"):
        Talk.begin(Conversation("a", "text", (), "train", text="once"), template, 512)
    with pytest.raises(Refused, match=r"prompt of \d+ tokens leaves no room in the target's context of 20"):
        Talk.begin(Conversation("a", "general", ({"role": "user", "content": "hi"},), "train"), template, 20)
