"""The five-line front: what goes in, what comes out, and that the documented examples run."""

from __future__ import annotations

import copy
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import METHODS, Binding
from draftsmith.infer import decoder as module
from draftsmith.infer.decoder import Answer, SpeculativeDecoder
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.recorded import RecordedTarget
from draftsmith.infer.request import Stats
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

from ..heads.laws import SMALL
from .tracing import Trace

HOT = SamplingParams(temperature=0.8, min_p=0.02, frequency_penalty=0.3, seed=4)


@pytest.fixture
def decoder(tiny_target: Target) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_target, PromptLookup(), rows=2)


def test_text_ids_and_messages_are_one_prompt(decoder: SpeculativeDecoder, tiny_target: Target) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    answer = decoder.generate("the cat", max_new_tokens=20)
    assert decoder.generate(messages, max_new_tokens=20) == answer
    assert decoder.generate(decoder.encode("the cat"), max_new_tokens=20) == answer
    assert decoder.generate_batch(["the dog", messages], max_new_tokens=20)[1] == answer
    assert answer.text == tiny_target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert isinstance(answer.stats, Stats)
    assert answer.stats.emitted == len(answer.tokens) - 1
    assert all(isinstance(value, int) for value in (answer.stats.rounds, answer.stats.drafted, answer.stats.accepted))


@pytest.mark.parametrize("sampling", [None, HOT])
def test_what_is_streamed_is_what_is_returned(decoder: SpeculativeDecoder, sampling: SamplingParams | None) -> None:
    answer = decoder.generate("the cat", max_new_tokens=40, sampling=sampling)
    assert "".join(decoder.stream("the cat", max_new_tokens=40, sampling=sampling)) == answer.text
    assert answer == decoder.generate("the cat", max_new_tokens=40, sampling=sampling)
    letters = [at for at, letter in enumerate(answer.text) if letter.isascii() and at > 5]
    stop = [answer.text[letters[len(letters) // 2]]]
    ended = decoder.generate("the cat", max_new_tokens=40, sampling=sampling, stop=stop)
    assert (ended.text, ended.finish) == (answer.text[: answer.text.index(stop[0])], "stop")
    assert "".join(decoder.stream("the cat", max_new_tokens=40, sampling=sampling, stop=stop)) == ended.text


def test_the_drafter_changes_no_text(decoder: SpeculativeDecoder, tiny_target: Target) -> None:
    plain = SpeculativeDecoder(tiny_target)
    for sampling in (None, HOT):
        answer = decoder.generate("the cat the cat", max_new_tokens=40, sampling=sampling)
        assert answer.tokens == plain.generate("the cat the cat", max_new_tokens=40, sampling=sampling).tokens


def test_the_next_turn_of_a_conversation_costs_its_new_text(decoder: SpeculativeDecoder, tiny_target: Target) -> None:
    """Also after a stream that was left, and with two that take turns; and no text depends on it."""
    read: list[int] = []
    hook = tiny_target.model.base_model.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    messages, texts = list[dict[str, str]](), list[str]()
    for turn in range(3):
        messages.append({"role": "user", "content": f"the cat sat on the mat {turn}"})
        read.clear()
        texts.append(decoder.generate(messages, max_new_tokens=1).text)
        if turn > 0:
            assert sum(read) < len(decoder.encode(messages)) / 2
        messages.append({"role": "assistant", "content": texts[-1]})
    hook.remove()
    assert texts == [
        SpeculativeDecoder(tiny_target).generate(messages[: 2 * turn + 1], max_new_tokens=1).text for turn in range(3)
    ]
    expected = [decoder.generate(prompt, max_new_tokens=20).text for prompt in ("the cat", "the dog")]
    left = decoder.stream("the cat", max_new_tokens=20)
    next(left)
    del left
    pieces = zip_longest(
        *(decoder.stream(prompt, max_new_tokens=20) for prompt in ("the cat", "the dog")), fillvalue=""
    )
    assert ["".join(column) for column in zip(*pieces)] == expected
    assert [decoder.generate(prompt, max_new_tokens=20).text for prompt in ("the cat", "the dog")] == expected


@pytest.mark.parametrize("way", ["in place", "replaced", "unnoticed"])
def test_other_weights_read_nothing_on(tiny_target: Target, way: str) -> None:
    """And play no recording that reads the old ones."""
    model = copy.deepcopy(tiny_target.model)
    decoder = SpeculativeDecoder(RecordedTarget(Target(model, tiny_target.tokenizer), Trace(most=50)), rows=1)
    prompt = decoder.encode("the cat sat on the mat and the dog sat by the door")
    before = decoder.generate(prompt, max_new_tokens=40)
    generator = torch.Generator().manual_seed(3)
    new = {
        name: each + 0.3 * each.std() * torch.randn(each.shape, generator=generator)
        for name, each in model.state_dict().items()
    }
    if way == "unnoticed":
        for name, weight in model.named_parameters():
            weight.data.copy_(new[name])
        decoder.forget()
    else:
        model.load_state_dict(new, assign=way == "replaced")
    fresh = SpeculativeDecoder(Target(model, tiny_target.tokenizer), rows=1)
    for tokens in (prompt, [*prompt, 7], list(range(20, 60))):
        assert decoder.generate(tokens, max_new_tokens=20).tokens == fresh.generate(tokens, max_new_tokens=20).tokens
    assert fresh.generate(prompt, max_new_tokens=40).tokens != before.tokens


def test_updates_are_the_answers_piece_by_piece(decoder: SpeculativeDecoder) -> None:
    """Requests join while others run; a cancelled one ends with what it has; leaving the loop loses nothing."""
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"max_new_tokens": 30},
        "hot": {"max_new_tokens": 25, "sampling": HOT},
        "late": {"max_new_tokens": 12},
        "dropped": {"max_new_tokens": 60},
    }
    expected = {name: decoder.generate(name, **options) for name, options in settings.items()}
    for name in ("greedy", "hot", "dropped"):
        decoder.add(name, name, **settings[name])
    texts, tokens, answers = dict.fromkeys(settings, ""), {name: list[int]() for name in settings}, dict[str, Answer]()
    for turn in range(10_000):
        update = next(decoder.updates(), None)
        if update is None:
            break
        assert update.id not in answers
        texts[update.id] += update.text
        tokens[update.id] += update.tokens
        if update.answer is not None:
            answers[update.id] = update.answer
        if turn == 5:
            decoder.add("late", "late", **settings["late"])
        if len(tokens["dropped"]) > 10 and "dropped" not in answers:
            decoder.cancel("dropped")
    assert texts == {name: answers[name].text for name in settings}
    assert tokens == {name: answers[name].tokens for name in settings}
    assert answers["dropped"].finish == "cancelled"
    count = len(answers["dropped"].tokens)
    assert 10 < count < 60
    assert answers["dropped"].tokens == expected["dropped"].tokens[:count]
    assert {name: answers[name] for name in ("greedy", "hot", "late")} == {
        name: expected[name] for name in ("greedy", "hot", "late")
    }


def test_a_bad_request_of_a_batch_says_why_and_of_one_raises(decoder: SpeculativeDecoder) -> None:
    good, bad = decoder.generate_batch(["the cat", [1] * 600], max_new_tokens=8)
    assert good == decoder.generate("the cat", max_new_tokens=8)
    assert (bad.finish, bad.text, bad.tokens) == ("error", "", [])
    assert "exceed the target's context of 512" in bad.error
    with pytest.raises(ValueError, match="exceed the target's context"):
        decoder.generate([1] * 600, max_new_tokens=8)
    with pytest.raises(ValueError, match="empty prompt"):
        list(decoder.stream([], max_new_tokens=8))


@pytest.mark.parametrize("prompt", [[1.5], [None], [1, {"role": "user", "content": "x"}], [["a"]]])
def test_what_is_no_prompt_is_refused(decoder: SpeculativeDecoder, prompt: Any) -> None:
    with pytest.raises(ValueError, match="a prompt is"):
        decoder.generate(prompt)


def test_a_target_without_a_tokenizer_is_refused_at_once(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="built without a tokenizer"):
        SpeculativeDecoder(Target(tiny_target.model, None))


def test_an_unknown_verifier_is_answered_with_those_that_exist(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match=r"no verifier 'best'; expected sample-match, .*typical \(LOSSY\)"):
        SpeculativeDecoder(tiny_target, verifier="best")


def examples(repo_root: Path) -> list[str]:
    assert module.__doc__
    blocks = module.__doc__.split("\n\nMany at a time")
    first = "from draftsmith" + blocks[0].split("from draftsmith", 1)[1]
    second = "decoder = " + blocks[1].split("decoder = ", 1)[1]
    readme = re.findall(r"```python\n(.*?)```", (repo_root / "README.md").read_text(), re.DOTALL)
    assert len(readme) == 1
    return [
        first,
        f"{first}\ndrafter = decoder.drafter\nfrom draftsmith.infer import SamplingParams\n{second}",
        *readme,
    ]


@pytest.mark.parametrize("number", range(3))
def test_the_documented_examples_run(
    number: int,
    repo_root: Path,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As they stand, but for the names of the target and of the drafter's folder, and their context."""
    config, method = METHODS["medusa"]
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    method(config(**SMALL["medusa"]), tiny_target).save(tmp_path / "drafter", binding=binding)
    code = examples(repo_root)[number].replace("smollm2-135m", str(tiny_target_dir))
    code = re.sub(r"runs/[\w/]*drafter", str(tmp_path / "drafter"), code).replace("bfloat16", "float32")
    exec(compile(code, "example", "exec"), {})
    assert len(capsys.readouterr().out) > 20
