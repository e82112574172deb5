"""What the laws need: text that the tiny target wrote itself, a teacher batch of it, and each method trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads import METHODS, TeacherBatch, TrainedDrafter
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.request import Output
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target

GREEDY = SamplingParams()
NEW_TOKENS = 40

SMALL: dict[str, dict[str, object]] = {
    "medusa": {"num_heads": 3, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))},
    "hydra": {
        "num_heads": 3,
        "num_layers": 2,
        "prefix_layer": True,
        "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)),
    },
    "eagle3": {"num_steps": 3, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1))},
    "dflash": {
        "block_size": 4,
        "sample_from_anchor": True,
        "num_layers": 2,
        "mask_token_id": 0,
        "num_anchors": 16,
        "markov_head_type": "vanilla",
        "markov_rank": 16,
        "enable_confidence_head": True,
        "best_first": {"nodes": 8, "width": 3},
    },
    "pard": {
        "keep_layers": (0, 3),
        "num_steps": 3,
        "mask_token_id": 0,
        "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)),
    },
    "draft_model": {"keep_layers": (0, 3), "num_steps": 3, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))},
}
"""A small config of each method; every method of the dict must have one (see test_every_method_has_laws)."""


class SoftCrossEntropy:
    """Forward KL up to the target's entropy: enough of an objective to train by."""

    uses_target = True

    def __call__(
        self, draft_logits: Tensor, labels: Tensor, target_logits: Tensor | None, which: Tensor | None = None
    ) -> Tensor:
        assert target_logits is not None
        target_logits = target_logits if which is None else target_logits[which]
        return -(target_logits.float().softmax(-1) * draft_logits.float().log_softmax(-1)).sum(-1)


class HardCrossEntropy:
    uses_target = False

    def __call__(
        self, draft_logits: Tensor, labels: Tensor, target_logits: Tensor | None, which: Tensor | None = None
    ) -> Tensor:
        return F.cross_entropy(draft_logits.float(), labels, reduction="none")


@dataclass(frozen=True)
class Text:
    """Prompts and the target's greedy answers to them."""

    prompts: list[list[int]]
    answers: list[list[int]]


def prompts(count: int, *, seed: int, vocab_size: int, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[list[int]],
    *,
    rows: int = 4,
    new_tokens: int = NEW_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[Output]:
    """Outputs in the order of the prompts; request i samples with seed i, and by the i-th of several settings."""
    engine = Engine(target, drafter=drafter, rows=rows)
    return answers(engine, prompt_ids, new_tokens=new_tokens, sampling=sampling)


def answers(
    engine: Engine,
    prompt_ids: list[list[int]],
    *,
    new_tokens: int = NEW_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[Output]:
    """The same from an engine that is there already."""
    for index, ids in enumerate(prompt_ids):
        chosen = sampling if isinstance(sampling, SamplingParams) else sampling[index % len(sampling)]
        engine.add(Request(str(index), ids, new_tokens, replace(chosen, seed=index)))
    outputs = {output.id: output for output in engine.run()}
    return [outputs[str(index)] for index in range(len(prompt_ids))]


def write_text(target: Target, count: int, *, seed: int) -> Text:
    ids = prompts(count, seed=seed, vocab_size=target.vocab_size)
    return Text(ids, [output.tokens for output in decode(target, None, ids)])


def teach(target: Target, text: Text, *, taps: tuple[int, ...]) -> TeacherBatch:
    """Two documents to a packed row, padded at the end: every mask of the contract is in play."""
    pairs = [list(zip(text.prompts, text.answers))[i : i + 2] for i in range(0, len(text.prompts), 2)]
    length = max(sum(len(p) + len(a) for p, a in pair) for pair in pairs) + 1
    shape = (len(pairs), length)
    tokens, segments, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    supervised = torch.zeros(shape, dtype=torch.bool)
    for row, pair in enumerate(pairs):
        at = 0
        for number, (prompt, answer) in enumerate(pair, start=1):
            end = at + len(prompt) + len(answer)
            tokens[row, at:end] = torch.tensor(prompt + answer)
            segments[row, at:end] = number
            positions[row, at:end] = torch.arange(end - at)
            supervised[row, at + len(prompt) : end] = True
            at = end
    reading = target.read_packed(tokens, positions, segments, taps=taps)
    return TeacherBatch(tokens, segments, positions, supervised, reading.hidden, reading.features, target.logits)


def build(method: str, target: Target, **changes: object) -> TrainedDrafter:
    config_class, drafter_class = METHODS[method]
    torch.manual_seed(1)
    return drafter_class(config_class.model_validate({"method": method, **SMALL[method], **changes}), target)


def disturb(drafter: TrainedDrafter) -> None:
    """Draw the weights that start at zero: they hide whatever they are multiplied by, right or wrong."""
    for weight in drafter.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight.data, std=0.1)


def train(drafter: TrainedDrafter, teacher: TeacherBatch, *, steps: int = 120, lr: float = 3e-3) -> list[float]:
    """Plain AdamW on one batch; returns the loss of each step."""
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        sums = drafter(teacher, HardCrossEntropy())
        loss = (torch.tensor(sums.weights) * sums.sums / sums.counts.clamp(min=1)).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    drafter.eval()
    return losses
