"""What a drafter's config takes from its target where the recipe leaves it open: sizes, rotary base, taps, a mask token.

Every one of these has been guessed differently by trainer and engine somewhere; here each is resolved once, checked, and
written to config.json.
"""

from __future__ import annotations

from typing import TypedDict

from ..infer.target import Target


class Sizes(TypedDict):
    """Sizes of a drafter's decoder layers."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def layer_sizes(
    target: Target, intermediate_size: int | None, num_heads: int | None, num_kv_heads: int | None, head_dim: int | None
) -> Sizes:
    """The given sizes, the target's for None. Raises ValueError if they do not fit each other."""
    settings, own_heads = target.text_config.to_dict(), target.text_config.num_attention_heads
    heads = num_heads or own_heads
    kv_heads = num_kv_heads or settings.get("num_key_value_heads") or heads
    width = head_dim or settings.get("head_dim") or target.hidden_size // own_heads
    if heads % kv_heads or width % 2:
        raise ValueError(
            f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads}) and head_dim ({width}) even. Set them in "
            "the recipe's head."
        )
    inner = intermediate_size or settings.get("intermediate_size") or 4 * target.hidden_size
    return Sizes(intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads, head_dim=width)


def rotary_base(target: Target) -> float:
    """The target's rope_theta, of its full-attention layers where it has several; both spellings of transformers."""
    settings = target.text_config.to_dict()
    rope = settings.get("rope_parameters") or settings
    return float(rope.get("full_attention", rope).get("rope_theta") or 10000.0)


def spread_taps(count: int, target: Target) -> tuple[int, ...]:
    """z-lab's rule: `count` layers evenly from 1 to L-3 of L, a single one L//2; fewer where they coincide."""
    layers = target.num_layers
    if count == 1 or layers < 5:
        return (min(layers // 2, max(0, layers - 2)),)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))


def check_taps(taps: tuple[int, ...], target: Target) -> None:
    """Raise ValueError unless the taps are ascending layers of the target below its last: engines disagree whether that one
    is read before or after the final norm."""
    last = max(1, target.num_layers - 1)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < last:
        raise ValueError(
            f"taps {taps} must be 0-based layer outputs below {last}, the target's last. Choose earlier ones."
        )


def mask_token(target: Target, given: int | None) -> int:
    """The id given, or for None the first that the target's padded vocabulary has and its tokenizer does not. Raises
    ValueError if there is none, or the target does not have the id."""
    token = len(target.tokenizer) if given is None else given
    if token >= target.vocab_size:
        why = f"the tokenizer uses all of the target's {target.vocab_size} tokens, so none is free to be the mask"
        if given is not None:
            why = f"mask_token_id {given} is not among the target's {target.vocab_size} tokens"
        raise ValueError(
            f"{why}. Set mask_token_id to a token that answers never hold, such as a reserved special one."
        )
    return token
