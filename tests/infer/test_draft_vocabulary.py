"""Which vocabularies a draft model may have: the target's, padded or not, and no other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

from . import drafting


@pytest.fixture(scope="module")
def target(build_target: Callable[..., Target]) -> Target:
    return build_target(num_hidden_layers=2)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return drafting.prompts(4, seed=8, vocab_size=300)


@pytest.mark.parametrize("sizes", [(300, 320), (320, 300)], ids=["target padded", "draft padded"])
@pytest.mark.parametrize("settings", [SamplingParams(), SamplingParams(0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_padded_vocabularies_are_cut_or_filled(
    sizes: tuple[int, int], settings: SamplingParams, build_target: Callable[..., Target], prompts: list[list[int]]
) -> None:
    """Random models write their padding ids too, so each side must live with what the other cannot know."""
    small, large = min(sizes), max(sizes)
    draft, target = (build_target(num_hidden_layers=2, vocab_size=size, eos_token_id=[], seed=4) for size in sizes)
    source, copied = (draft, target) if sizes[0] == small else (target, draft)
    state, padded = copied.model.state_dict(), source.model.state_dict()
    for name, weight in state.items():
        weight[:small] = padded[name][:small] if weight.shape[0] == large else weight[:small]
        if weight.shape == padded[name].shape:
            weight.copy_(padded[name])
    plain = drafting.decode(target, None, prompts, sampling=settings)
    for name in drafting.MODELLED:
        outputs = drafting.decode(target, drafting.build(name, target, draft), prompts, sampling=settings)
        assert drafting.texts(outputs) == drafting.texts(plain)
        assert sum(output.stats.accepted for output in outputs) > 0
    if target.vocab_size == large:
        assert max(max(output.tokens) for output in plain) >= small, "no padding id was written"


def test_another_tokenizer_is_refused_with_an_example(target: Target, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    other = copy.deepcopy(tiny_tokenizer)
    swapped = {201: 202, 202: 201}
    other.get_vocab = lambda: {text: swapped.get(token, token) for text, token in tiny_tokenizer.get_vocab().items()}
    stranger = Target(copy.deepcopy(target.model), other, name="stranger")
    with pytest.raises(
        ValueError, match=r"'stranger' cannot draft for target 'tiny'.*tokenizers differ in 2 of 300 .*id 201 is"
    ):
        DraftModel(stranger, target)


def test_a_tokenizer_with_more_tokens_at_the_end_is_the_same(
    target: Target, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["<|tool|>"])
    DraftModel(Target(copy.deepcopy(target.model), longer), target)
