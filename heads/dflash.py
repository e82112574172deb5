"""DFlash, DSpark and JetSpec: a block of tokens drafted in one forward, from the target's features at every layer.

A block is the anchor and masks, read at once. The target's taps are fused once per token, c_t = norm(fc(taps_t)), and
every layer builds keys and values from [c_0..c_t ; block]; queries come from the block only (heads/blocks.py). The
target's own embedding and head, frozen, begin and end it. With b slots per block there are two layouts, which no file
of the field tells apart; `sample_from_anchor` is written to config.json and has no default:

    sample_from_anchor  slots     slot i proposes           drafts  worked example: read "a b", anchor "c", b = 3
    True                c M M     the token after it        b       slots propose d, e, f
    False               c M M     its own token, i > 0      b - 1   slots 1, 2 propose d, e

| method | sample_from_anchor | is_causal | markov_head | confidence | position_weights | objective | tree |
| --- | --- | --- | --- | --- | --- | --- | --- |
| DFlash (z-lab) | False, b = 16 | False | none | no | exponential, gamma 7 | cross entropy | chain |
| DFlash (DeepSpec) | True, b = 7 | False | none | no | exponential, gamma 4 | cross entropy | chain |
| DSpark | True, b = 7 | False | vanilla, rank 256 | yes | exponential, gamma 4 | 0.1 CE + 1.8 TV | chain |
| JetSpec (arXiv 2606.18394) | False, b = 16 | True | none | no | none | forward KL | best_first |

In decoding the context's keys and values are kept per layer and row; a block's own are overwritten. A Markov head (heads/markov.py)
makes each token depend on the one before; `ranks` condition it on the text, as an accepted chain is. `state_dict` has DeepSpec's names.

Letters: B rows, T positions, N tokens with keys, R anchors, b slots, K proposing slots, D width, r rank, F features,
V vocabulary, W draft vocabulary, C candidates per slot, n nodes of a level.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..infer.drafter import Observation
from ..infer.parallel_tree import best_first
from ..infer.sampling import Sampling
from ..infer.tapes import Tensors
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from .base import LossSums, Objective, TeacherBatch, TrainedDrafter
from .block_loss import BlockLoss, add_up, count_steps
from .blocks import BlockLayer, BlockMemory, sample_anchors, split_anchors
from .compare import Drafts, find_ranks
from .from_target import LayeredConfig, mask_token, start_as_last_layers, start_at_last_tap, start_norm
from .layers import Memory, RMSNorm, Rotation
from .markov import ConfidenceHead, MarkovHead
from .offsets import keep_as_offsets
from .own_cache import OwnCache
from .position_weights import PositionWeights
from .slots import BestFirst, Slots
from .unroll import Blocks
from .vocabulary import DraftVocabulary


class DFlashConfig(LayeredConfig):
    """Shape of the drafter."""

    method: Literal["dflash"] = "dflash"
    block_size: int = Field(ge=2)
    """b: slots of a block, the anchor's included (z-lab and JetSpec: 16, DeepSpec: 7)."""
    sample_from_anchor: bool
    """Whether the anchor's slot proposes too, each slot the token after it (b drafts), or masks propose their own (b - 1)."""
    is_causal: bool = False
    """Whether a slot sees only the slots before it in its block (JetSpec)."""
    num_layers: int = Field(5, ge=1)
    """Decoder layers (all papers: 5)."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding fills the masks. None: the first id of the target's vocabulary that its tokenizer never writes."""
    markov_head_type: Literal["none", "vanilla", "gated", "rnn"] = "none"
    """What makes a token depend on the one before it (DSpark: vanilla)."""
    markov_rank: int = Field(256, ge=1)
    """r: rank of that dependence (DSpark: 256)."""
    enable_confidence_head: bool = False
    """Whether P(accepted | those before accepted) is learned for every slot; it changes nothing that is drafted."""
    num_anchors: int = Field(512, ge=1)
    """Anchors drawn per packed row and step (DFlash, DSpark: 512, JetSpec: 256); in evaluation all take part."""
    position_weights: PositionWeights = PositionWeights()
    """How much each draft position counts in the loss."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """W: size of a reduced draft vocabulary, whose lm_head starts as the target's rows and is trained. None proposes from
    all of the target's tokens through the target's frozen head."""
    train_head: bool = True
    """False: that lm_head stays the target's rows (speculators' way), of which no logits are kept either."""
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of a static draft tree (see infer.tree.Topology); None and no best_first draft the top-1 chain."""
    best_first: BestFirst | None = None
    """Draft a best-first tree."""

    @model_validator(mode="after")
    def _agrees(self) -> DFlashConfig:
        if self.tree is not None and self.best_first is not None:
            raise ValueError("tree and best_first exclude each other; remove one.")
        return self

    @property
    def num_steps(self) -> int:
        """K: slots that propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def resolve(self, target: Target) -> DFlashConfig:
        mask = mask_token(target, self.mask_token_id)
        return super().resolve(target).model_copy(update={"mask_token_id": mask})


class DFlash(TrainedDrafter):
    """A stack of block layers between the target's own embedding and head."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, target: Target, *, token_map: Tensor | None = None) -> None:
        """token_map: (W,) int64 ascending target ids of a reduced draft vocabulary."""
        config = config.resolve(target)
        super().__init__(config, target)
        shape = config.shape(target)
        self.fc = nn.Linear(len(self.taps) * target.hidden_size, shape.width, bias=False)
        self.hidden_norm = RMSNorm(shape.width, shape.eps)
        self.layers = nn.ModuleList(BlockLayer(shape, layer=i) for i in range(config.num_layers))
        self.norm = RMSNorm(shape.width, shape.eps)
        if start_as_last_layers(
            list(self.layers), target
        ):  # and so reading the deepest tap, to be judged by the target's head
            start_at_last_tap(self.fc, target)
            start_norm(self.norm, target)
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, target.vocab_size, token_map)
        self.lm_head = None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(shape.width, self.vocabulary.size, bias=False)
            self.lm_head.weight.data.copy_(self.vocabulary.select(target.head.weight.detach()))
            self.lm_head.weight.requires_grad_(config.train_head)
        keep_as_offsets(self, self.vocabulary)
        self.markov_head, kind, reads = None, config.markov_head_type, shape.width
        if kind != "none":
            sizes = {"rank": config.markov_rank, "vocab_size": target.vocab_size, "drafted": self.vocabulary.size}
            self.markov_head, reads = MarkovHead(kind, width=shape.width, **sizes), shape.width + config.markov_rank
        self.confidence_head = ConfidenceHead(reads) if config.enable_confidence_head else None
        chosen = Topology(config.tree) if config.tree is not None else config.best_first
        self.topology: Topology | BestFirst = chosen or Topology.chain(self.num_steps)

    def use_tree(self, topology: Topology) -> None:
        self.topology = topology

    def public_config(self) -> dict[str, Any]:
        """DeepSpec's flat keys, and z-lab's nested ones. The flag `causal_head` alone tells a JetSpec file from DFlash's."""
        config = self.config
        is_plain = not config.sample_from_anchor and self.markov_head is None and self.confidence_head is None
        shared = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
        nested = {"target_layer_ids": list(self.taps), "num_target_layers": self.target.num_layers}
        nested |= {"causal": config.is_causal, "causal_head": config.is_causal, "use_swa": False}
        dtype = str(self.norm.weight.dtype).removeprefix("torch.")
        return config.public_fields(self.target) | {
            "architectures": ["DFlashDraftModel" if is_plain else "Qwen3DSparkModel"],
            "dtype": dtype,
            "torch_dtype": dtype,
            **shared,
            "num_anchors": config.num_anchors,
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": 0 if self.markov_head is None else config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head is not None and self.markov_head is not None,
            "draft_vocab_size": self.vocabulary.size,
            "dflash_config": {**shared, **nested, "sample_from_anchor": config.sample_from_anchor},
        }

    @property
    def indexed(self) -> tuple[Tensor, ...]:
        return () if self.markov_head is None else (self.markov_head.markov_w2.weight,)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps or ()

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    # The layers, shared by training and decoding --------------------------------------------------------------------

    def _turn(self, positions: Tensor) -> Rotation:
        return Rotation.at(positions, width=self.config.head_dim or 0, theta=self.config.rope_theta or 0.0)

    def _context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer the keys and values (N, H, d) of features (N, F) at positions (N,)."""
        fused = self.hidden_norm(self.fc(features.to(self.norm.weight.dtype)))
        turn = self._turn(positions)
        return [layer.self_attn.remember(fused, turn) for layer in self.layers if isinstance(layer, BlockLayer)]

    def _read(self, anchors: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Normalised output (R, K, D) of the proposing slots; anchors: (R,) int64 at positions (R,)."""
        slots = torch.arange(self.config.block_size, device=anchors.device)
        tokens = torch.where(slots == 0, anchors[:, None], self.config.mask_token_id or 0)  # (R, b)
        turn = self._turn((positions[:, None] + slots).flatten())
        hidden = self.target.embedding(tokens).flatten(0, 1).to(self.norm.weight.dtype)
        for layer in self.layers:
            hidden = layer(hidden, turn, memory)
        blocks: Tensor = self.norm(hidden).unflatten(0, tokens.shape)
        return blocks[:, self.config.block_size - self.num_steps :]

    def _base(self, hidden: Tensor) -> Tensor:
        """Logits that know nothing of a Markov head: (..., D) -> (..., W)."""
        if self.lm_head is None:
            return self.target.logits(hidden.to(self.target.dtype))
        logits: Tensor = self.lm_head(hidden)
        return logits

    def logits(self, states: Tensor) -> Tensor:
        """States (..., D), or (..., D + r) with the Markov head's code behind the hidden part -> (..., W)."""
        width = self.target.hidden_size
        base = self._base(states[..., :width])
        return base if self.markov_head is None else base + self.markov_head.markov_w2(states[..., width:]).to(base)

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        """In training a sample of the anchors stands for all of them; in evaluation they all take part."""
        counted = count_steps(teacher, self.num_steps)
        active = counted.any(dim=0)
        scale = torch.ones(len(active), device=active.device)
        passes = split_anchors(active, self.config.num_anchors * len(active))
        if self.training:
            chosen, scale = sample_anchors(active, self.config.num_anchors)
            passes = iter([chosen])
        is_frozen = (self.lm_head is None or not self.config.train_head) and self.markov_head is None
        judge = BlockLoss(teacher, objective, self.logits, is_frozen, self.vocabulary, self.config.position_weights)
        parts = []
        for anchors in passes:
            drafts, confidence = self._draft_blocks(teacher, anchors, counted)
            stands_for = scale[drafts.rows // active.shape[1]]
            parts.append(judge.sums(drafts, scale=stands_for, confidence=confidence))
        return add_up(parts, counts=counted.sum(dim=(1, 2)))

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        counted = count_steps(teacher, self.num_steps)
        ranks = torch.full((*teacher.tokens.shape, self.num_steps), -1, device=counted.device)
        for anchors in split_anchors(counted.any(dim=0), self.config.num_anchors * len(ranks)):
            drafts, _ = self._draft_blocks(teacher, anchors, counted)
            ranks = ranks.maximum(find_ranks(drafts, teacher, logits=self.logits, vocabulary=self.vocabulary))
        return ranks

    def _draft_blocks(self, teacher: TeacherBatch, anchors: Tensor, counted: Tensor) -> tuple[Drafts, Tensor | None]:
        """Drafts of the blocks at `anchors` (B, T) bool, which `counted` (K, B, T) bool says to judge, and confidence
        logits (K, R)."""
        assert teacher.features is not None, "the features of the tapped layers were not read"
        view = Blocks.find(teacher.segments, anchors)
        tokens, positions = teacher.tokens.flatten(), teacher.positions.flatten()
        memory = BlockMemory(view, size=self.config.block_size, is_causal=self.config.is_causal)
        context = self._context(teacher.features.flatten(0, 1)[view.keys], positions[view.keys])
        for layer, (keys, values) in enumerate(context):
            memory.keep(layer, keys, values)
        hidden = self._read(tokens[view.rows + 1], positions[view.rows] + 1, memory).transpose(0, 1)  # (K, R, D)
        steps = torch.arange(self.num_steps, device=tokens.device)[:, None]
        previous = tokens[(view.rows + 1 + steps).clamp(max=len(tokens) - 1)]  # (K, R)
        sure = None if self.confidence_head is None else self.confidence_head(hidden, self.markov_head, previous)
        if self.markov_head is not None:
            hidden = torch.cat([hidden, self.markov_head.codes(hidden, previous)], dim=-1)
        return Drafts(view.rows, hidden, counted.flatten(1)[:, view.rows]), sure

    # Decoding -------------------------------------------------------------------------------------------------------

    def start(self, *, rows: int, capacity: int) -> OwnCache:
        return OwnCache(rows=rows, capacity=capacity, tapes=self.tapes)

    def move(self, state: OwnCache, source: int, target: int) -> None:
        state.move(source, target)

    def observe(self, state: OwnCache, seen: Observation) -> None:
        """Keep keys and values of the features just read; what a block left there is overwritten."""
        seen = seen.news()
        assert seen.features is not None, "the features of the tapped layers were not read"

        def keep(features: Tensor, start: Tensor, count: Tensor) -> Tensors:
            positions = start[:, None] + torch.arange(features.shape[1], device=start.device)
            state.observe(self, seen.rows.start, start, count, features.shape[1], last=True)
            for layer, context in enumerate(self._context(features.flatten(0, 1), positions.flatten())):
                keys, values = (part.unflatten(0, positions.shape).transpose(1, 2) for part in context)  # (B, H, A, d)
                state.kv.update(keys, values, layer)
            return ()

        state.take(seen, keep, seen.features, seen.start, seen.count)

    def draft(self, state: OwnCache, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        shape, size, read = self.topology, self.config.block_size, partial(self._slots, state)
        if isinstance(shape, BestFirst):
            width = shape.width
            known = state.run("drafts", width, size, lambda *x: read(*x).candidates(width), anchors, lengths)
            return best_first(anchors, *known, nodes=shape.nodes)
        if shape.depth == 0:
            return TokenTree.root(anchors)
        return state.draft(shape, size, lambda *x: read(*x).static_tree(shape), anchors, lengths)

    def _slots(self, state: OwnCache, anchors: Tensor, lengths: Tensor) -> Slots:
        """One forward over the rows' blocks."""
        size = self.config.block_size
        seen = torch.ones(len(anchors), size, size, dtype=torch.bool, device=anchors.device)
        memory = state.grow(self, lengths, seen.tril() if self.config.is_causal else seen)
        drafted = self.topology.depth if isinstance(self.topology, Topology) else self.num_steps
        hidden = self._read(anchors, lengths, memory)[:, :drafted]  # (B, K, D)
        return Slots(anchors, hidden, self._base(hidden), self.vocabulary, self.markov_head, self.confidence_head)
