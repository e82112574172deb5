"""A small causal language model as the drafter, distilled from the target.

Leviathan et al. 2023 (arXiv 2211.17192) decode with one; DistillSpec (Zhou et al. 2023, arXiv 2310.08461) and GKD
(Agarwal et al. 2023, arXiv 2306.13649) train it against the target's distribution, on the target's own answers or on the
draft's. It reads tokens and nothing of the target, and is saved as a checkpoint that transformers loads. In decoding
(infer/draft_model.py) it writes a chain, or a fixed tree, one forward per depth.

The logits at position p score token p+1, whoever asks: draft step k at row t is the model's plain next-token prediction
at position t+1+k. Worked example, "a b c d e", row t = 1 (the target has read "a b", the anchor is "c"): step 0 reads
"c" (position 2) and scores "d"; step 1 reads "d" (position 3) and scores "e", which is also step 0 of row 2. So one
forward serves all steps, and the loss is step 0's alone: it has every position once (weights 1, 0, 0, ...).

Letters: B packed rows, T positions, K draft steps, P scored positions, D draft hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..infer.cache import Packed
from ..infer.draft_model import DraftModel
from ..infer.drafter import Drafter
from ..infer.target import Target
from ..infer.tree import Topology
from . import causal_lm
from .base import HeadConfig, LossSums, Objective, TeacherBatch
from .lm_drafter import LMConfig, LMDrafter, begin
from .next_token import Scored
from .on_policy import resample
from .rank_tree import RankTree
from .vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DraftModelConfig(LMConfig):
    """Where the model begins (see heads/lm_drafter.py), how it drafts and what it is trained on."""

    method: Literal["draft_model"] = "draft_model"
    min_confidence: float = Field(0.0, ge=0, lt=1)
    """A chain ends after the token at which the product of the draft's probabilities falls below this; 0 drafts K."""
    on_policy: float = Field(0.0, ge=0, le=1)
    """lambda: share of the training rows whose answers the draft model writes anew, for the target to score. Acceptance
    figures of training steps are then taken on such text too; held-out ones never are."""
    on_policy_temperature: float = Field(1.0, gt=0)
    """Temperature of that writing."""

    @model_validator(mode="after")
    def _agrees(self) -> DraftModelConfig:
        if self.tree is not None and self.min_confidence > 0:
            raise ValueError(
                "min_confidence ends chains and a tree is no chain; remove one of min_confidence and tree."
            )
        if self.on_policy == 0 and self.on_policy_temperature != 1:
            raise ValueError("on_policy_temperature applies to on_policy above 0 only; set that or remove this.")
        return self


class TrainedDraftModel(LMDrafter):
    """A language model that is trained as one and drafts as one."""

    config: DraftModelConfig

    def __init__(
        self, config: DraftModelConfig, target: Target, *, architecture: PretrainedConfig | None = None
    ) -> None:
        """architecture: of a saved model, whose weights are loaded next; None begins as `config` says. Raises ValueError if
        it cannot, or if the checkpoint's tokenizer is not the target's."""
        model, config = begin(config, target, architecture)
        super().__init__(config, target, model)
        self.min_confidence = config.min_confidence

    @classmethod
    def from_folder(cls, config: HeadConfig, target: Target, directory: Path) -> TrainedDraftModel:
        assert isinstance(config, DraftModelConfig), "the config of another method"
        return cls(config, target, architecture=causal_lm.read_architecture(directory))

    def use_tree(self, topology: Topology) -> None:
        super().use_tree(topology)
        self.min_confidence = 0.0

    def hidden(self, teacher: TeacherBatch) -> Tensor:
        """(B, T, D): the model's last hidden state, each document read alone."""
        self.check_length(teacher)
        out: Tensor = self.model_view.model.base_model(
            input_ids=self.known(teacher.tokens),
            position_ids=teacher.positions,
            use_cache=False,
            plan=Packed(teacher.segments, teacher.positions),
        ).last_hidden_state
        return out

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        if self.training and self.config.on_policy > 0:
            teacher = self._own_answers(teacher, objective)
        scored = Scored.find(teacher, self.num_steps)

        def judge(hidden: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return self._judge(hidden, at, teacher, objective)

        losses, right = scored.compute(judge, self.hidden(teacher), width=self.width)
        sums, survived, reached, alive = [], [], [], torch.ones_like(right)
        for step, rows in enumerate(scored.counted):
            sums.append((scored.of_step(losses, step) * rows).sum())
            alive = alive & rows
            reached.append(alive.sum())
            alive = alive & scored.of_step(right, step)
            survived.append(alive.sum())
        weights = (1.0, *[0.0] * (self.num_steps - 1))
        counts = scored.counted.sum(dim=(1, 2))
        return LossSums(torch.stack(sums), counts, weights, torch.stack(survived), torch.stack(reached))

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        scored = Scored.find(teacher, self.num_steps)
        vocabulary, tokens = DraftVocabulary(None, self.target.vocab_size, None), teacher.tokens.flatten()

        def rank(hidden: Tensor, at: Tensor) -> tuple[Tensor]:
            return (vocabulary.ranks(self.logits(hidden), tokens[at + 1]).clamp(max=self.width),)

        (ranks,) = scored.compute(rank, self.hidden(teacher), width=self.width)
        steps = [torch.where(rows, scored.of_step(ranks, k), -1) for k, rows in enumerate(scored.counted)]
        return torch.stack(steps, dim=-1)

    def _judge(self, hidden: Tensor, at: Tensor, teacher: TeacherBatch, objective: Objective) -> tuple[Tensor, Tensor]:
        """Objective (P,) float32 and whether the first choice is the text's (P,) bool."""
        draft, labels, target = self.logits(hidden)[:, : self.width], teacher.tokens.flatten()[at + 1], None
        known = labels < self.width
        labels = torch.where(known, labels, 0)
        if objective.uses_target:
            target = teacher.logits(teacher.hidden.flatten(0, 1)[at])[:, : self.width]
        return objective(draft, labels, target) * known, (draft.max(dim=-1).indices == labels) & known

    def _own_answers(self, teacher: TeacherBatch, objective: Objective) -> TeacherBatch:
        from torch.distributed.tensor import DTensor  # late: it takes most of a second to load

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

    def reader(self) -> Drafter:
        depth = self.topology.depth
        if self.topology == Topology.chain(depth):
            return DraftModel(self.reading_view, self.target, length=depth, min_confidence=self.min_confidence)
        return RankTree(self.reading_view, self.target, topology=self.topology)
