"""A small causal language model as the drafter, distilled from the target.

Leviathan et al. 2023 (arXiv 2211.17192) decode with one; DistillSpec (Zhou et al. 2023, arXiv 2310.08461) and GKD
(Agarwal et al. 2023, arXiv 2306.13649) train it against the target's distribution, on the target's own answers or on the
draft's. It reads tokens and nothing of the target, and is saved as a checkpoint that transformers loads. In decoding
(infer/draft_model.py) it writes a chain, or a fixed tree, one forward per depth.

The logits at position p score token p+1, whoever asks: draft step k at row t is the model's plain next-token prediction
at position t+1+k. Worked example, "a b c d e", row t = 1 (the target has read "a b", the anchor is "c"): step 0 reads
"c" (position 2) and scores "d"; step 1 reads "d" (position 3) and scores "e", which is also step 0 of row 2. So one
forward serves all steps, and the loss is step 0's alone: it has every position once (weights 1, 0, 0, ...).

Letters: B packed rows, T positions, K draft steps, P scored positions, D draft hidden, D' target hidden, V target
vocabulary, W the part of it that the draft model has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from ..infer.cache import Packed
from ..infer.draft_model import DraftModel, check_vocabulary
from ..infer.drafter import Drafter, NoDraft, Observation
from ..infer.sampling import Sampling
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from . import causal_lm
from .base import Binding, HeadConfig, LossSums, Objective, TeacherBatch, TrainedDrafter
from .on_policy import resample
from .rank_tree import RankTree
from .vocabulary import DraftVocabulary

POSITIONS = 512
"""Rows of logits (POSITIONS, V) held at once, in fp32, a few times over."""


class DraftModelConfig(HeadConfig):
    """Where the model begins and how it drafts. With none of checkpoint, keep_layers and architecture it is a pruned
    copy: the target's first three layers, a middle one and its last two (below 7 layers: the first and the last)."""

    method: Literal["draft_model"] = "draft_model"
    checkpoint: str | None = None
    """Begin from this model, a folder or a Hugging Face id, whose tokenizer is the target's."""
    keep_layers: tuple[int, ...] | None = Field(None, min_length=1)
    """Begin from these layers of the target, 0-based and ascending, and its embedding, final norm and head."""
    architecture: dict[str, Any] | None = None
    """Begin from random weights: the target's transformers config with these fields changed."""
    train_embedding: bool = True
    """Whether embedding and head are trained too; of a pruned copy they are the target's own, and most of its weights."""
    num_steps: int = Field(5, ge=1)
    """K: tokens of a chain draft; no weights depend on it."""
    min_confidence: float = Field(0.0, ge=0, lt=1)
    """A chain ends after the token at which the product of the draft's probabilities falls below this; 0 drafts K."""
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of a static draft tree (see infer.tree.Topology); None drafts a chain."""
    on_policy: float = Field(0.0, ge=0, le=1)
    """lambda: share of the training rows whose answers the draft model writes anew, for the target to score."""
    on_policy_temperature: float = Field(1.0, gt=0)
    """Temperature of that writing."""

    @model_validator(mode="after")
    def _agrees(self) -> DraftModelConfig:
        given = [name for name in ("checkpoint", "keep_layers", "architecture") if self.model_dump()[name] is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different beginnings; keep one of them.")
        if self.tree is not None and self.min_confidence > 0:
            raise ValueError(
                "min_confidence ends chains and a tree is no chain; remove one of min_confidence and tree."
            )
        if self.on_policy == 0 and self.on_policy_temperature != 1:
            raise ValueError("on_policy_temperature applies to on_policy above 0 only; set that or remove this.")
        return self


@dataclass
class Drafting:
    """One generation: how it drafts, fixed when it began, and what the draft model has read."""

    reader: Drafter
    state: Any


class TrainedDraftModel(TrainedDrafter):
    """The model's own modules under their own names, so that `state_dict` is a transformers checkpoint's."""

    config: DraftModelConfig

    def __init__(
        self, config: DraftModelConfig, target: Target, *, architecture: PretrainedConfig | None = None
    ) -> None:
        """architecture: of a saved model, whose weights are loaded next; None begins as `config` says. Raises ValueError if
        it cannot, or if the checkpoint's tokenizer is not the target's."""
        model, config = _begin(config, target) if architecture is None else (causal_lm.build(architecture), config)
        super().__init__(config, target)
        self.model_view = Target(model, target.tokenizer, name="draft model")  # reads and decodes; holds no weights
        model.requires_grad_(True)
        for name, module in model.named_children():
            self.add_module(name, module)
        assert set(dict(model.named_parameters())) == set(dict(self.named_parameters())), "weights outside of modules"
        if not config.train_embedding:
            self.model_view.embedding.requires_grad_(False)
            self.model_view.head.requires_grad_(False)
        self.width = min(self.model_view.vocab_size, target.vocab_size)
        self.tied = causal_lm.keep_tied_once(self)
        self.train()
        self.use_chain()
        self.min_confidence = config.min_confidence
        if config.tree is not None:
            self.use_tree(Topology(config.tree))

    @classmethod
    def from_folder(cls, config: HeadConfig, target: Target, directory: Path) -> TrainedDraftModel:
        assert isinstance(config, DraftModelConfig), "the config of another method"
        return cls(config, target, architecture=causal_lm.read_architecture(directory))

    def use_tree(self, topology: Topology) -> None:
        self.topology, self.min_confidence = topology, 0.0

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    def hidden(self, teacher: TeacherBatch) -> Tensor:
        """(B, T, D): the model's last hidden state, each document read alone."""
        model, plan = self.model_view, Packed(teacher.segments, teacher.positions)
        if int(teacher.positions.max()) >= model.max_length:
            raise ValueError(
                f"a document of {int(teacher.positions.max()) + 1} tokens exceeds the draft model's context of {model.max_length}; "
                "lower data.max_length to that."
            )
        tokens = teacher.tokens.clamp(max=model.vocab_size - 1)  # padding ids of the target have no embedding here
        body = model.model.base_model
        out: Tensor = body(
            input_ids=tokens, position_ids=teacher.positions, use_cache=False, plan=plan
        ).last_hidden_state
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V): what the model lacks of the target's vocabulary cannot be proposed."""
        logits = self.model_view.logits(hidden)[..., : self.width]
        missing = self.target.vocab_size - self.width
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        if self.training and self.config.on_policy > 0:
            teacher = self._own_answers(teacher, objective)
        counted, scored = self._scored(teacher)

        def judge(hidden: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return self._judge(hidden, at, teacher, objective)

        found = self._by_chunk(judge, self.hidden(teacher), scored)
        losses, right = (_placed(values, scored) for values in found)  # (B, T)
        sums, survived, reached, alive = [], [], [], torch.ones_like(scored)
        for step, rows in enumerate(counted):
            sums.append((torch.roll(losses, -(step + 1), dims=1) * rows).sum())
            alive = alive & rows
            reached.append(alive.sum())
            alive = alive & torch.roll(right, -(step + 1), dims=1)
            survived.append(alive.sum())
        weights = (1.0, *[0.0] * (self.num_steps - 1))
        counts = counted.sum(dim=(1, 2))
        return LossSums(torch.stack(sums), counts, weights, torch.stack(survived), torch.stack(reached))

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        counted, scored = self._scored(teacher)
        vocabulary, tokens = DraftVocabulary(None, self.target.vocab_size, None), teacher.tokens.flatten()

        def rank(hidden: Tensor, at: Tensor) -> tuple[Tensor]:
            return (vocabulary.ranks(self.logits(hidden), tokens[at + 1]).clamp(max=self.width),)

        (found,) = self._by_chunk(rank, self.hidden(teacher), scored)
        ranks = _placed(found, scored)
        steps = [torch.where(rows, torch.roll(ranks, -(k + 1), dims=1), -1) for k, rows in enumerate(counted)]
        return torch.stack(steps, dim=-1)

    def _scored(self, teacher: TeacherBatch) -> tuple[Tensor, Tensor]:
        """Rows t that count, per step (K, B, T) bool, and positions t+1+k whose logits they ask for (B, T) bool."""
        counted = torch.stack([teacher.step_mask(step) for step in range(self.num_steps)])
        asked = [torch.roll(rows, step + 1, dims=1) for step, rows in enumerate(counted)]
        return counted, torch.stack(asked).any(dim=0)

    def _by_chunk(
        self, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, scored: Tensor
    ) -> tuple[Tensor, ...]:
        """`function` of the states (P, D) at scored positions and of these positions (P,), as flat indices, POSITIONS at a
        time; its logits are computed again in the backward pass instead of kept."""
        at = scored.flatten().nonzero()[:, 0]
        parts = [
            checkpoint(function, hidden.flatten(0, 1)[part], part, use_reentrant=False, preserve_rng_state=False)
            for part in at.split(POSITIONS)
        ]
        return tuple(torch.cat(values) for values in zip(*parts))

    def _judge(self, hidden: Tensor, at: Tensor, teacher: TeacherBatch, objective: Objective) -> tuple[Tensor, Tensor]:
        """Objective (P,) float32 and whether the first choice is the text's (P,) bool."""
        draft, labels, target = self.logits(hidden)[:, : self.width], teacher.tokens.flatten()[at + 1], None
        known = labels < self.width
        labels = torch.where(known, labels, 0)
        if objective.uses_target:
            target = teacher.logits(teacher.hidden.flatten(0, 1)[at])[:, : self.width]
        return objective(draft, labels, target) * known, (draft.argmax(dim=-1) == labels) & known

    def _own_answers(self, teacher: TeacherBatch, objective: Objective) -> TeacherBatch:
        if not objective.uses_target:
            raise ValueError(
                "head.on_policy needs an objective that asks the target, or the draft would learn from itself."
            )
        if any(parameter.numel() == 0 or isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise ValueError(
                "head.on_policy writes as many tokens in each process as its own answers have, which weights shared out over "
                "processes (ZeRO-3, FSDP) cannot follow. Launch with ddp, zero1 or zero2, or set head.on_policy=0."
            )
        rows = torch.rand(len(teacher.tokens)) < self.config.on_policy
        return resample(
            teacher,
            rows.to(teacher.tokens.device),
            model=self.model_view,
            logits=self.logits,
            target=self.target,
            temperature=self.config.on_policy_temperature,
        )

    # Decoding -------------------------------------------------------------------------------------------------------

    def start(self, *, rows: int, capacity: int) -> Drafting:
        depth = self.topology.depth
        reader: Drafter = NoDraft()
        if depth and self.topology == Topology.chain(depth):
            reader = DraftModel(self.model_view, self.target, length=depth, min_confidence=self.min_confidence)
        elif depth:
            reader = RankTree(self.model_view, self.target, topology=self.topology)
        return Drafting(reader, reader.start(rows=rows, capacity=capacity))

    def move(self, state: Drafting, source: int, target: int) -> None:
        state.reader.move(state.state, source, target)

    def observe(self, state: Drafting, seen: Observation) -> None:
        state.reader.observe(state.state, seen)

    def draft(self, state: Drafting, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        return state.reader.draft(state.state, anchors, lengths, sampling)

    # Files ----------------------------------------------------------------------------------------------------------

    def public_config(self) -> dict[str, Any]:
        return causal_lm.public_config(self.model_view.model)

    def save(self, directory: Path, *, binding: Binding, weights: dict[str, Tensor] | None = None) -> None:
        """A transformers checkpoint with the target's tokenizer, and our own keys in its config.json."""
        causal_lm.save_tokenizer(self.target.tokenizer, directory)
        if weights is not None:
            weights = {name: tensor for name, tensor in weights.items() if name not in self.tied}
        super().save(directory, binding=binding, weights=weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainedDraftModel:
        """As in nn.Module, but rotary frequencies stay in the precision they were computed in: in bf16 they would be off
        by half a radian at a distance of a thousand."""
        kept = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            module.register_buffer(last, buffer.to(module.get_buffer(last).device), persistent=False)
        return self


def _begin(config: DraftModelConfig, target: Target) -> tuple[PreTrainedModel, DraftModelConfig]:
    """The model as training begins, and the config that says how."""
    if config.checkpoint is not None:
        model, tokenizer = causal_lm.load_checkpoint(config.checkpoint)
        check_vocabulary(Target(model, tokenizer, name=config.checkpoint), target)
        return model, config
    if config.architecture is not None:
        return causal_lm.design(target, config.architecture), config
    last = target.num_layers - 1
    keep = config.keep_layers or ((0, 1, 2, last // 2, last - 1, last) if last >= 6 else tuple(sorted({0, last})))
    return causal_lm.prune(target, keep), config.model_copy(update={"keep_layers": keep})


def _placed(values: Tensor, scored: Tensor) -> Tensor:
    """Values (P,) of the scored positions at their places in (B, T), zeros elsewhere."""
    return values.new_zeros(scored.numel()).masked_scatter(scored.flatten(), values).view_as(scored)
