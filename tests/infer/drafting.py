"""What the laws of the drafters share: a target that repeats itself, its small draft models, and decoding with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftsmith.infer.candidates import DraftBeams, DraftTree
from draftsmith.infer.decode import Engine
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafter import Drafter
from draftsmith.infer.grafted import Grafted
from draftsmith.infer.lookahead import Lookahead
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.request import Output, Request
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import Topology
from draftsmith.infer.verify import Verifier, sample_match

NEW_TOKENS = 36

SHAPE = Topology(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def repeating(target: Target, *, attention: float = 0.02) -> Target:
    """The target with its attention turned down: mostly the current token decides, so its text soon runs in a loop."""
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if name.endswith("o_proj.weight"):
                weight *= attention
    return target


def perturbed(target: Target, fresh: Target, *, noise: float = 0.02, seed: int = 1) -> Target:
    """A draft model that often agrees with the target: `fresh`, made its copy and then disturbed."""
    fresh.model.load_state_dict(target.model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in fresh.model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return fresh


FREE: dict[str, Callable[[Target], Drafter]] = {
    "prompt-lookup": lambda target: PromptLookup(length=6, stop_ids=target.eos_ids),
    "lookahead": lambda target: Lookahead(window=4, ngram=4, guesses=3),
    "lookahead and copies": lambda target: Grafted(
        Lookahead(window=4, ngram=4, guesses=3),
        PromptLookup(length=6, stop_ids=target.eos_ids),
    ),
}
"""Drafters that need nothing but the target."""

MODELLED: dict[str, Callable[[Target, Target], Drafter]] = {
    "draft model": lambda draft, target: DraftModel(draft, target, length=4),
    "draft model of fixed length": lambda draft, target: DraftModel(draft, target, length=4, min_confidence=0),
    "drawn draft model": lambda draft, target: DraftModel(draft, target, length=3, is_drawn=True),
    "draft beams": lambda draft, target: DraftBeams(draft, target, beams=3, length=3, nodes=9),
    "draft beams and copies": lambda draft, target: Grafted(
        DraftBeams(draft, target, beams=3, length=3, nodes=9), PromptLookup(length=6, stop_ids=target.eos_ids)
    ),
    "draft tree": lambda draft, target: DraftTree(draft, target, shape=SHAPE),
}
"""Drafters over a draft model. All are exact under sample-match, the drawn ones too: their noise is independent of it."""

NAMES = [*FREE, *MODELLED]


def build(name: str, target: Target, draft: Target) -> Drafter:
    return FREE[name](target) if name in FREE else MODELLED[name](draft, target)


def prompts(count: int, *, seed: int, vocab_size: int, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[Sequence[int]],
    *,
    rows: int = 4,
    new_tokens: int | Sequence[int] = NEW_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verifier: Verifier = sample_match,
) -> list[Output]:
    """Outputs in the order of the prompts; with one setting for all, request i samples with seed i."""
    engine = Engine(target, drafter=drafter, rows=rows, verifier=verifier)
    for index, ids in enumerate(prompt_ids):
        limit = new_tokens if isinstance(new_tokens, int) else new_tokens[index]
        if isinstance(sampling, SamplingParams):
            chosen = SamplingParams(**vars(sampling) | {"seed": index})
        else:
            chosen = SamplingParams() if sampling is None else sampling[index]
        engine.add(Request(str(index), ids, limit, chosen))
    outputs = {output.id: output for output in engine.run()}
    return [outputs[str(index)] for index in range(len(prompt_ids))]


def texts(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]
