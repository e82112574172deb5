"""What drafters share that are causal language models themselves: where they begin, their modules, and their folder.

Letters: D draft hidden, V target vocabulary, W the part of it that the draft model has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from ..infer.draft_model import check_vocabulary
from ..infer.drafter import Drafter, NoDraft, Observation
from ..infer.recorded import recorded_like
from ..infer.sampling import Sampling
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from . import causal_lm
from .base import Binding, HeadConfig, TeacherBatch, TrainedDrafter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class LMConfig(HeadConfig):
    """Where the model begins. With none of checkpoint, keep_layers and architecture it is a pruned copy: the target's first
    three layers, a middle one and its last two (below 7 layers: the first and the last)."""

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
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of a static draft tree (see infer.tree.Topology); None drafts a chain."""

    @model_validator(mode="after")
    def _begins_once(self) -> Self:
        given = [name for name in ("checkpoint", "keep_layers", "architecture") if self.model_dump()[name] is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different beginnings; keep one of them.")
        return self


Config = TypeVar("Config", bound=LMConfig)


@dataclass
class Drafting:
    """One generation: how it drafts, fixed when it began, and what the model has read."""

    reader: Drafter
    state: Any


class LMDrafter(TrainedDrafter, ABC):
    """The model's own modules under their own names, so that `state_dict` is a transformers checkpoint's."""

    config: LMConfig

    def __init__(self, config: LMConfig, target: Target, model: PreTrainedModel) -> None:
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
        self.topology = Topology(config.tree) if config.tree else Topology.chain(config.num_steps)
        self.train()

    @property
    def token_matrices(self) -> list[Tensor]:
        return [*super().token_matrices, self.model_view.head.get_parameter("weight")]

    def use_tree(self, topology: Topology) -> None:
        self.topology = topology

    @cached_property
    def reading_view(self) -> Target:
        """The model as it drafts: its forwards are recorded where the target's are."""
        return recorded_like(self.model_view, self.target)

    @abstractmethod
    def reader(self) -> Drafter:
        """What drafts the present `topology`, which is not empty, with `reading_view`."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V): what the model lacks of the target's vocabulary cannot be proposed."""
        logits = self.model_view.logits(hidden)[..., : self.width]
        missing = self.target.vocab_size - self.width
        return pad(logits, (0, missing), value=-float("inf")) if missing else logits

    def known(self, tokens: Tensor) -> Tensor:
        """Tokens that the model has an embedding for; its last stands for padding ids of the target."""
        return tokens.clamp(max=self.model_view.vocab_size - 1)

    def check_length(self, teacher: TeacherBatch, *, beyond: int = 0) -> None:
        """Raise ValueError if a document, and `beyond` tokens more, do not fit the model's context."""
        longest, limit = int(teacher.positions.max()) + 1 + beyond, self.model_view.max_length
        if longest > limit:
            raise ValueError(
                f"a document of {longest - beyond} tokens exceeds the draft model's context of {limit}; lower data.max_length to "
                f"{limit - beyond}."
            )

    # Decoding -------------------------------------------------------------------------------------------------------

    def start(self, *, rows: int, capacity: int) -> Drafting:
        reader = self.reader() if self.topology.depth else NoDraft()
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, but rotary frequencies stay in the precision they were computed in: in bf16 they would be off
        by half a radian at a distance of a thousand."""
        kept = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            module.register_buffer(last, buffer.to(module.get_buffer(last).device), persistent=False)
        return self


def begin(config: Config, target: Target, architecture: PretrainedConfig | None) -> tuple[PreTrainedModel, Config]:
    """The model as `config` says it begins, and the config with the layers that were kept; or, with the architecture of a
    saved model, one whose weights are loaded next.

    Raises ValueError if it cannot begin so, or if the checkpoint's tokenizer is not the target's.
    """
    if architecture is not None:
        return causal_lm.build(architecture), config
    if config.checkpoint is not None:
        model, tokenizer = causal_lm.load_checkpoint(config.checkpoint)
        check_vocabulary(Target(model, tokenizer, name=config.checkpoint), target)
        return model, config
    if config.architecture is not None:
        return causal_lm.design(target, config.architecture), config
    last = target.num_layers - 1
    keep = config.keep_layers or ((0, 1, 2, last // 2, last - 1, last) if last >= 6 else tuple(sorted({0, last})))
    return causal_lm.prune(target, keep), config.model_copy(update={"keep_layers": keep})
