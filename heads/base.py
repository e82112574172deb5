"""What every trained drafter is: a module that learns from a teacher batch and drafts for the verified loop.

Letters: B packed rows, T positions, D target hidden, F features, V vocabulary, K draft steps.

Positions, once and for all. At row t the target has read tokens 0..t and has itself chosen token t+1 (the anchor of
decoding). Draft step k (0-based) therefore proposes token t+2+k. Worked example for the text "a b c d e":

    row t = 1 (the target has read "a b", the anchor is "c")
    step 0 proposes "d" (token 3), step 1 proposes "e" (token 4)

A step counts only where the proposed token is supervised and lies in the same document as row t; and row t itself
counts only where its anchor (token t+1) is supervised, because decoding never starts anywhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..infer.drafter import Observation
from ..infer.recorded import tapes_like
from ..infer.sampling import Sampling
from ..infer.tapes import Tapes
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology


class DynamicTree(BaseModel):
    """EAGLE-2's tree: grown by the draft's own confidence, anew in every round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(59, ge=1)
    """Draft nodes that are verified (EAGLE-2: 60 with the anchor)."""
    width: int = Field(10, ge=1)
    """Nodes expanded per level (EAGLE-2: 10)."""
    depth: int = Field(6, ge=1)
    """Levels (EAGLE-2: 6)."""


class HeadConfig(BaseModel):
    """What a method needs to be built; every field is written to config.json, defaults included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    """Which entry of `heads.METHODS` this is; each method narrows it to a literal."""


class TeacherLogits(Protocol):
    """The frozen target's head."""

    def __call__(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """hidden (..., D) -> (..., V), or (..., W) for the W tokens of `vocabulary` (W,) int64."""
        ...


@dataclass(frozen=True)
class TeacherBatch:
    """What a head learns from: packed documents and what the target computed on them."""

    tokens: Tensor
    """(B, T) int64."""
    segments: Tensor
    """(B, T) int64: 0 is padding; equal numbers in a row are one document, contiguous, in reading order."""
    positions: Tensor
    """(B, T) int64: restart at 0 in each document."""
    supervised: Tensor
    """(B, T) bool: the token belongs to an answer of the target and is learned."""
    hidden: Tensor
    """(B, T, D): the target's last hidden state, after its final norm."""
    features: Tensor | None
    """(B, T, F): taps concatenated in ascending order, or None."""
    logits: TeacherLogits
    """The frozen target's logits for rows of its last hidden state. No gradient flows into it."""

    def step_mask(self, step: int) -> Tensor:
        """(B, T) bool: rows t at which draft step `step` counts (see the module docstring)."""
        ahead = step + 2
        same = torch.zeros_like(self.supervised)
        length = self.tokens.shape[1]
        if ahead >= length:
            return same
        anchors = self.supervised[:, 1 : length - ahead + 1]  # token t+1
        proposed = self.supervised[:, ahead:]  # token t+2+step
        together = self.segments[:, : length - ahead] == self.segments[:, ahead:]
        same[:, : length - ahead] = anchors & proposed & together & (self.segments[:, ahead:] > 0)
        return same

    def step_labels(self, step: int) -> Tensor:
        """(B, T) int64: token t+2+step at row t; 0 where there is none (see `step_mask`)."""
        ahead = step + 2
        labels = torch.zeros_like(self.tokens)
        labels[:, : self.tokens.shape[1] - ahead] = self.tokens[:, ahead:]
        return labels


class Objective(Protocol):
    """How two distributions are compared at each row; `distill.objectives` has them by name."""

    uses_target: bool
    """Whether `target_logits` is needed (else it may be None and nothing is computed for it)."""

    def __call__(
        self, draft_logits: Tensor, labels: Tensor, target_logits: Tensor | None, which: Tensor | None = None
    ) -> Tensor:
        """Divergence per row, float32 (R,).

        draft_logits: (R, W) over the draft vocabulary; labels: (R,) int64 indices *into the draft vocabulary*;
        target_logits: (U, W) the target's logits restricted to the same vocabulary; which: (R,) int64, the one of them that
        each row is compared with. None: U = R, each with its own.
        """
        ...


@dataclass(frozen=True)
class LossSums:
    """Sums and counts, never means: the loop divides by counts that are global over ranks, micro-steps and rows.

    The loss that is minimised is sum_k weights[k] * sums[k] / global_counts[k].
    """

    sums: Tensor
    """(K,) float32, with gradient: objective summed over the rows of each step."""
    counts: Tensor
    """(K,) int64: rows that count, `teacher.step_mask(k).sum()`. Rows whose token lies outside a reduced draft vocabulary
    add nothing to the sum but are counted, so a loss is comparable across vocabularies and counts need no model."""
    weights: tuple[float, ...]
    """(K,): the method's own weight of each step."""
    survived: Tensor
    """(K,) int64: rows at which steps 0..k were all right (greedy, teacher-forced)."""
    reached: Tensor
    """(K,) int64: rows at which steps 0..k-1 were all right and step k counts."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further sums worth logging; a name maps to a (2,) float tensor of numerator and denominator."""


@dataclass(frozen=True)
class Binding:
    """What a checkpoint depends on; compared when it is loaded and written into config.json."""

    target: dict[str, Any]
    """`Target.fingerprint()`: config hash, vocabulary size, hidden size, layers, tied or not, name."""
    template_hash: str
    """`Target.template_hash`: the chat template used in training."""
    objective: str = ""
    data_hash: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    """What held-out evaluation found: `rank_accuracy` (K, R), from which trees are built (infer.tree_search)."""


class TrainedDrafter(nn.Module, ABC):
    """A drafter with weights. The layers that train are the layers that decode.

    Frozen parts of the target (its head, its embedding) are reached through `self.target`, which is held outside the
    module's registry: never trained, never saved, never moved, never tracked by an optimiser.
    """

    config: HeadConfig

    def __init__(self, config: HeadConfig, target: Target) -> None:
        super().__init__()
        self.config = config
        self.measured: dict[str, Any] = {}
        object.__setattr__(self, "target", target)  # past nn.Module's registry: not a child of this module

    target: Target

    @classmethod
    def from_folder(cls, config: HeadConfig, target: Target, directory: Path) -> TrainedDrafter:
        """The drafter of a saved config, before its weights are read from `directory`."""
        return cls(config, target)

    def public_config(self) -> dict[str, Any]:
        """What other engines read in config.json; our own fields stand there under the key `draftsmith`."""
        return {}

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target layers read, 0-based layer outputs, ascending."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """K: tokens a chain draft has."""

    @property
    def depth(self) -> int:
        """Tokens of the longest chain that it drafts."""
        return self.num_steps

    @cached_property
    def tapes(self) -> Tapes | None:
        """What is recorded of its drafting, where the target's forwards are recorded."""
        return tapes_like(self.target, self, name=self.config.method)

    @property
    def token_matrices(self) -> list[Tensor]:
        """Weights with a row per token: embeddings, and projections on a vocabulary, which are layers of these names."""
        names = {"lm_head", "projections", "markov_w2"}
        return [
            module.get_parameter("weight")
            for path, module in self.named_modules()
            if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and names & set(path.split(".")))
        ]

    @property
    def indexed(self) -> tuple[Tensor, ...]:
        """Matrices of linear layers whose rows are looked up too, not only multiplied by: they are not quantised."""
        return ()

    @abstractmethod
    def use_tree(self, topology: Topology) -> None:
        """Draft this static tree from now on, whatever the config asks for; its depth is at most `num_steps`."""

    def use_chain(self) -> None:
        """Draft the top-1 chain of `num_steps` tokens from now on."""
        self.use_tree(Topology.chain(self.num_steps))

    def forward(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        """`loss`, under the name that DDP and DeepSpeed wrap."""
        return self.loss(teacher, objective)

    @abstractmethod
    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        """Training sums of one packed batch."""

    @abstractmethod
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        """(B, T, K) int64: the rank of token t+2+k in step k's own list at row t, teacher-forced.

        0 is the drafter's first choice; -1 where the step does not count; a token outside the draft vocabulary gets the
        draft vocabulary's size. No gradient. Acceptance, predicted tau and trees all follow from it.
        """

    @abstractmethod
    def start(self, *, rows: int, capacity: int) -> Any: ...

    @abstractmethod
    def move(self, state: Any, source: int, target: int) -> None: ...

    @abstractmethod
    def observe(self, state: Any, seen: Observation) -> None: ...

    @abstractmethod
    def draft(self, state: Any, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree: ...

    def save(self, directory: Path, *, binding: Binding, weights: dict[str, Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors` (atomically). `weights` replaces `state_dict()` where an engine
        holds the real ones (gathered ZeRO-3 shards)."""
        from .files import save_drafter

        save_drafter(self, directory, binding=binding, weights=weights)
