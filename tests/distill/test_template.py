"""An answer's ids follow its prompt's ids exactly as decoding reads and writes them, or the template is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.template import ChatTemplate, TemplateFault, Transcript, template_hash
from draftsmith.infer.target import Target

HELLO = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def chat(tokenizer: PreTrainedTokenizerFast, template: str | None = None) -> ChatTemplate:
    changed = copy.deepcopy(tokenizer)
    if template is not None:
        changed.chat_template = template
    return ChatTemplate(changed, (tokenizer.eos_token_id,))


def test_answer_ends_with_eos_and_leaves_the_template_s_line_end_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, answer = chat(tiny_tokenizer).answer(HELLO)
    assert tiny_tokenizer.decode(prompt).endswith("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n")
    assert tiny_tokenizer.decode(answer) == "sat<|im_end|>"
    assert answer[-1] == tiny_tokenizer.eos_token_id


def test_prompt_is_what_the_tokenizer_s_own_chat_call_gives(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    own = tiny_tokenizer.apply_chat_template(HELLO[:1], add_generation_prompt=True, return_dict=False)
    assert chat(tiny_tokenizer).prompt(HELLO[:1]) == own


def test_hash_equals_the_target_s(tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert template_hash(tiny_tokenizer) == tiny_target.template_hash != ""


def test_a_template_that_breaks_its_generation_prompt_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Some reasoning templates open a thinking block for generation that finished answers do not have."""
    opens = tiny_tokenizer.chat_template.replace("assistant\\n", "assistant\\n<think>").replace(
        "assistant\n", "assistant\n<think>"
    )
    with pytest.raises(TemplateFault, match="does not continue its own generation prompt"):
        chat(tiny_tokenizer, opens).answer(HELLO)


def test_a_template_that_raises_is_a_fault_with_its_words(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateFault, match="refuses the conversation: no system please"):
        chat(tiny_tokenizer, "{{ raise_exception('no system please') }}").prompt(HELLO[:1])


def test_no_template_is_an_error_that_says_what_to_do(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        chat(tiny_tokenizer, "")


def test_without_tools_in_the_template_calls_results_and_tools_are_text(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    prompt, answer = chat(tiny_tokenizer).answer(messages, TOOLS)
    text = tiny_tokenizer.decode(prompt)
    assert 'be kind\n\nYou can call these tools:\n{"name": "add"}<|im_end|>' in text
    assert 'assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in text
    assert "user\n<tool_response>3</tool_response><|im_end|>" in text
    assert tiny_tokenizer.decode(answer) == "three<|im_end|>"


def test_tools_reach_a_template_that_has_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for tool in tools or [] %}T:{{ tool.function.name }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    prompt, answer = chat(tiny_tokenizer, template).answer(messages, TOOLS)
    assert tiny_tokenizer.decode(prompt) == "T:add\nuser:the cat<|im_end|>assistant:"
    assert tiny_tokenizer.decode(answer) == '{"a": 1}<|im_end|>'


def test_transcript_continues_while_prompts_continue_and_branches_where_history_is_rewritten() -> None:
    transcript = Transcript()
    transcript.add([1, 2], [3, 4])
    transcript.add([1, 2, 3, 4, 5], [6])
    transcript.add([1, 2, 4, 5, 6, 7], [8, 9])  # the thinking token 3 was taken out of the history
    assert transcript.sequences == [
        ([1, 2, 3, 4, 5, 6], [(2, 4), (5, 6)]),
        ([1, 2, 4, 5, 6, 7, 8, 9], [(6, 8)]),
    ]
