"""Laws of decoding in training: it is the real loop, on the drafter's file, and it agrees with the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.distill.packing import Row, pack
from draftsmith.distill.tokens import load_samples
from draftsmith.heads import load_drafter
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.request import Stats
from draftsmith.infer.target import Target
from draftsmith.train.decoding import FOLDER, held_out_prompts
from draftsmith.train.loop import train
from draftsmith.train.recipe import parse_recipe

from ..heads.laws import SMALL
from .conftest import Content, read_lines


def row(tokens: list[int], segments: list[int], supervised: list[int]) -> Row:
    return Row(torch.tensor(tokens), torch.tensor(segments), torch.arange(len(tokens)), torch.tensor(supervised).bool())


def test_prompts_are_what_stands_before_the_first_learned_token() -> None:
    rows = [
        row([5, 6, 7, 8, 9, 10, 0], [1, 1, 1, 2, 2, 2, 0], [0, 0, 1, 0, 1, 1, 0]),
        row([11, 12, 13, 14, 15, 16, 17], [1, 1, 2, 2, 3, 3, 3], [1, 1, 0, 0, 0, 0, 1]),
    ]
    assert held_out_prompts(rows, 10, longest=5) == [[5, 6], [8], [15, 16]], "none learned, none before: no prompt"
    assert held_out_prompts(rows, 10, longest=1) == [[8]]
    assert held_out_prompts(rows, 2, longest=5) == [[5, 6], [8]]
    assert held_out_prompts(rows, 0, longest=5) == []


@pytest.mark.parametrize("method", sorted(SMALL))
def test_real_tau_is_that_of_the_saved_drafter_on_the_same_prompts(
    method: str, content: Content, tiny_target: Target
) -> None:
    head = {"method": method} | SMALL[method]
    changes = {"head": head, "decode_prompts": 4, "decode_tokens": 12, "eval_every": None, "steps": 4}
    result = train(parse_recipe(content | changes, source="test"), resume=False)
    rows = pack(load_samples(content["data"]["held_out"], tiny_target, max_length=128), length=128)
    drafter = load_drafter(result.drafter, tiny_target)
    drafter.use_chain()
    engine, stats = Engine(tiny_target, drafter=drafter, rows=4), Stats()
    for number, prompt in enumerate(held_out_prompts(rows, 4, longest=100)):
        engine.add(Request(str(number), prompt, 12))
    for output in engine.run():
        stats.add(output.stats)
    last = read_lines(result.out / "metrics.jsonl")[-1]
    assert (last["held_out/rounds"], last["held_out/emitted"]) == (stats.rounds, stats.emitted)
    assert last["held_out/real_tau"] == result.measured["real_tau"] == stats.tau > 0
    assert not (result.out / FOLDER).exists()


@pytest.mark.slow
def test_real_and_predicted_tau_agree_where_the_text_is_the_targets_own(
    content: Content, tiny_target: Target, tmp_path: Path
) -> None:
    """The target's own answers, learned by heart: what is predicted on them is what decoding does."""
    from draftsmith.distill.prompts import Conversation
    from draftsmith.distill.respond import respond
    from draftsmith.infer.sampling import SamplingParams

    talks = [
        Conversation(f"t{number}", "writing", ({"role": "user", "content": f"say {number}"},), "train")
        for number in range(12)
    ]
    answers = tmp_path / "answers.jsonl"
    respond(tiny_target, talks, answers, sampling=SamplingParams(), max_new_tokens=40, rows=4, progress=False)
    data = {"responses": str(answers), "held_out": str(answers), "row_length": 256}
    changes = {"data": data, "steps": 150, "eval_every": None, "save_every": None, "optimiser": {"lr": 1e-2}}
    head = {"method": "medusa", "num_heads": 3, "num_layers": 1}
    decode = {"decode_prompts": 12, "decode_tokens": 40}
    result = train(parse_recipe(content | changes | {"head": head} | decode, source="test"), resume=False)
    assert result.measured["predicted_tau"] > 1.5, "there is something to agree on"
    assert result.measured["real_tau"] == pytest.approx(result.measured["predicted_tau"], rel=0.1)
