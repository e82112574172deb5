"""What a user asks -> the token ids that decoding starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..infer.target import Target

Messages = Sequence[dict[str, Any]]


def encode(target: Target, prompt: str | Sequence[int] | Messages, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Ids of a user's message, or of a conversation, in the target's chat template, ready to be answered; an
    encoder-decoder target reads the message as it is. Ids are returned as they are.

    Raises ValueError if there is nothing to answer or the target cannot read it.
    """
    from ..distill.template import ChatTemplate

    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty; expected some text to answer.")
        prompt = [{"role": "user", "content": prompt}]
    ids = [token for token in prompt if isinstance(token, int)]
    messages = [message for message in prompt if not isinstance(message, int)]
    if ids and messages:
        raise ValueError("a prompt is token ids or messages, not both.")
    if ids:
        return ids
    if target.is_encoder_decoder:
        return target.encode(messages)
    return ChatTemplate(target.tokenizer, target.eos_ids).prompt(messages, tools)
