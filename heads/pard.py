"""PARD: a small language model that drafts K tokens in one forward, with mask tokens behind the anchor.

An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (arXiv 2504.18583). The
model reads what was accepted, the anchor, and K-1 masks; the anchor's logits propose token 0 of the draft, mask k's
token k. A draft token does not know the draft tokens before it, so the candidates of a step are the same below every
parent, and a tree costs no forward more than a chain.

Training lays chains of masks behind the text (heads/mask_chains.py). Conditional drop: a row keeps its steps 0..j with
P(step k kept) = max(0.7^k, 0.2), nested, which makes a batch about three times cheaper. The sum of each step is divided
by that probability, so it estimates the sum over all rows; the same numbers are the steps' weights, which makes the loss
the plain sum over kept steps, as in the paper.

Letters: B packed rows, T positions, K draft steps, R rows that draft, D draft hidden, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..infer.draft_model import DraftReader, DraftState
from ..infer.drafter import Drafter
from ..infer.sampling import Sampling
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from . import causal_lm
from .base import HeadConfig, LossSums, Objective, TeacherBatch
from .compare import Drafts, find_ranks, loss_sums
from .from_target import mask_token
from .lm_drafter import LMConfig, LMDrafter, begin
from .mask_chains import MaskChains
from .vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PardConfig(LMConfig):
    """Where the model begins (see heads/lm_drafter.py) and how many tokens it drafts at once."""

    method: Literal["pard"] = "pard"
    num_steps: int = Field(8, ge=1)
    """K: tokens drafted by one forward (paper: 8 in training)."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token that stands for what is not known yet. None: the first id of the target's vocabulary that its tokenizer never
    writes."""
    keep_ratio: float = Field(0.7, gt=0, le=1)
    """P(step k kept) is keep_ratio^k, but not below `min_keep_ratio` (paper: 0.7); 1 keeps all."""
    min_keep_ratio: float = Field(0.2, gt=0, le=1)
    """Paper: 0.2."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """(K,): P(step k kept)."""
        return tuple(max(self.keep_ratio**step, self.min_keep_ratio) if step else 1.0 for step in range(self.num_steps))


class Pard(LMDrafter):
    """A language model that reads masks as well as tokens."""

    config: PardConfig

    def __init__(self, config: PardConfig, target: Target, *, architecture: PretrainedConfig | None = None) -> None:
        """architecture: of a saved model, whose weights are loaded next; None begins as `config` says. Raises ValueError if
        it cannot, if the checkpoint's tokenizer is not the target's, or if there is no token to be the mask."""
        model, config = begin(config, target, architecture)
        config = config.model_copy(update={"mask_token_id": mask_token(target, config.mask_token_id)})
        super().__init__(config, target, model)
        if self.mask >= self.width:
            raise ValueError(
                f"mask_token_id {self.mask} is not among the draft model's {self.model_view.vocab_size} tokens. Set it to a token "
                "that answers never hold, such as a reserved special one."
            )

    @classmethod
    def from_folder(cls, config: HeadConfig, target: Target, directory: Path) -> Pard:
        assert isinstance(config, PardConfig), "the config of another method"
        return cls(config, target, architecture=causal_lm.read_architecture(directory))

    @property
    def mask(self) -> int:
        assert self.config.mask_token_id is not None, "the config has not been resolved"
        return self.config.mask_token_id

    def public_config(self) -> dict[str, Any]:
        """With the two keys by which vLLM and the authors' code know such a model."""
        return super().public_config() | {"pard_token": self.mask, "spd_type": "pard"}

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        counted = self._counted(teacher)
        ratios, kept = torch.ones(self.num_steps, device=counted.device), counted
        if self.training:
            ratios = torch.tensor(self.config.ratios, device=counted.device)
            draws = torch.rand(teacher.tokens.shape, device=counted.device)
            kept = counted & (draws < ratios[:, None, None])  # one draw per row, so that what is kept is nested
        found = loss_sums(
            self._drafts(teacher, kept),
            teacher,
            objective,
            logits=self._known_logits,
            vocabulary=self._vocabulary(),
            weights=self.config.ratios,
        )
        return replace(found, sums=found.sums / ratios, counts=counted.sum(dim=(1, 2)))

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        drafts = self._drafts(teacher, self._counted(teacher))
        return find_ranks(drafts, teacher, logits=self._known_logits, vocabulary=self._vocabulary())

    def _drafts(self, teacher: TeacherBatch, kept: Tensor) -> Drafts:
        """The model's states at the steps kept (K, B, T) bool."""
        self.check_length(teacher)
        read = MaskChains.lay_out(teacher, kept, mask_token=self.mask)
        hidden: Tensor = self.model_view.model.base_model(
            input_ids=self.known(read.tokens), position_ids=read.positions, use_cache=False, plan=read.plan
        ).last_hidden_state
        batch, width = read.tokens.shape
        at = read.scored + torch.arange(batch, device=kept.device)[:, None] * width  # (K, B, T), flat entries
        rows = kept.any(dim=0).flatten().nonzero()[:, 0]  # (R,)
        return Drafts(rows, hidden.flatten(0, 1)[at.flatten(1)[:, rows]], kept.flatten(1)[:, rows])

    def _counted(self, teacher: TeacherBatch) -> Tensor:
        return torch.stack([teacher.step_mask(step) for step in range(self.num_steps)])

    def _known_logits(self, hidden: Tensor) -> Tensor:
        """Over the tokens that both vocabularies have."""
        return self.model_view.logits(hidden)[..., : self.width]

    def _vocabulary(self) -> DraftVocabulary:
        size = self.target.vocab_size
        if self.width == size:
            return DraftVocabulary(None, size, None)
        return DraftVocabulary(self.width, size, torch.arange(self.width)).to(self.target.device)

    # Decoding -------------------------------------------------------------------------------------------------------

    def reader(self) -> Drafter:
        return MaskReader(self.reading_view, self.target, topology=self.topology, mask=self.mask)


class MaskReader(DraftReader):
    """Drafts with one forward over what is unread, the anchor, and masks."""

    def __init__(self, model: Target, target: Target, *, topology: Topology, mask: int) -> None:
        super().__init__(model, target, depth=topology.depth)
        self.topology, self.mask = topology, mask

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        rows, steps = (torch.arange(n, device=anchors.device) for n in (len(anchors), self.depth))
        left = self._unread(state, anchors, lengths)
        if left is None:
            return TokenTree.root(anchors)
        at, read = left.at, left.read
        slots = read[:, None] + torch.arange(left.count + self.depth, device=rows.device)  # masks fill the shorter rows
        text = self._known(state.text[rows[:, None], slots.minimum(at[:, None])])
        tokens = torch.where(slots <= at[:, None], text, self.mask)
        chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
        hidden = self.model.verify(chain, read, state.cache, longest=left.read_by_any).hidden
        state.read[: len(anchors)] = at + 1  # the masks behind are overwritten by what is read next
        logits = self._logits(hidden[rows[:, None], (at - read)[:, None] + steps])  # (B, K, V)
        scores = [self._scores(logits[:, k : k + 1], at + 1 + k, sampling)[:, 0] for k in range(self.depth)]
        every = torch.stack(scores, dim=1)
        best = every.topk(self.topology.width, dim=-1)
        tree = self.topology.fill(anchors, best.indices, best.values - every.logsumexp(dim=-1, keepdim=True))
        return replace(tree, valid=tree.valid & ((lengths <= self._limit)[:, None] | (tree.parents < 0)))
