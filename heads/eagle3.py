"""EAGLE-3: one decoder layer that continues the target's features, token by token, over a vocabulary of its own.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv
2503.01840). The target's taps a_t are fused once, g0_t = fc(a_t). Step s at row t reads the token x and its own last
output g, and both scores the next token and goes on from what it computed:

    read = [norm(embed(x_{t+1+s})) ; norm(g_t)]       g_t  <-  g_t + attention(read), then + mlp
    p(x_{t+2+s}) = softmax(lm_head(norm(g_t)))        rotary position t + s

Training unrolls S steps over all rows at once (heads/unroll.py) with the text's own tokens; its loss is
sum_s 0.8^s objective_s. Worked example, "a b c d e", row t = 1 (the target has read "a b", the anchor is "c"): step 0
reads "c" with the features at "b" and proposes "d"; step 1 reads "d" with step 0's output and proposes "e".

In decoding the pairs (features at t, token t+1) are exactly the target's, the last one with the anchor; every draft node
reads its token and its parent's output. `state_dict` has the names that SGLang and vLLM load, `config.json` their keys.

Letters: B, T rows and positions; N tokens with keys, R rows that draft, S steps, D draft width, F features, V, W vocabulary
of target and draft, n frontier nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..infer.drafter import Observation
from ..infer.dynamic_tree import DynamicShape
from ..infer.sampling import Sampling
from ..infer.tapes import Tensors
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from .base import DynamicTree, HeadConfig, LossSums, Objective, TeacherBatch, TrainedDrafter
from .by_level import draft_by_level
from .compare import Drafts, find_ranks, loss_sums
from .from_target import layer_fields, own_shape, projected_embedding, special_tokens, start_at_last_tap, start_empty
from .layers import DecoderLayer, FusedLayer, LayerShape, Memory, RMSNorm, Rotation
from .offsets import keep_as_offsets
from .own_cache import OwnCache
from .unroll import Blocks, Unroll
from .vocabulary import DraftVocabulary


class Eagle3Config(HeadConfig):
    """Shape of the drafter. What is None follows from the target; a drafter's own `config` has no None left in it."""

    method: Literal["eagle3"] = "eagle3"
    num_steps: int = Field(7, ge=1)
    """S: steps unrolled in training, and tokens of a chain draft (paper: 7)."""
    step_decay: float = Field(0.8, gt=0)
    """Weight of step s in the loss is step_decay^s (paper: 0.8)."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers; serving engines load 1."""
    taps: tuple[int, ...] | None = Field(None, min_length=1)
    """Target layers read, as 0-based outputs. None: 1, L//2-1, L-4 of L layers (the paper's, which engines expect); below 7
    layers these are not three ascending ones, and the first, the middle and the last are read."""
    hidden_size: int | None = Field(None, ge=2)
    """D. None: the target's. Another width brings an embedding of its own, started as a projection of the target's."""
    intermediate_size: int | None = Field(None, ge=1)
    """Inner width of the MLP. None: the target's."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads. None: the target's."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads. None: the target's."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head. None: the target's."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies, plain and unscaled; it need not be the target's."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in every norm."""
    norm_before_residual: bool = False
    """Whether the residual stream carries norm(g) instead of g."""
    norm_before_fc: bool = False
    """Whether the concatenated taps are normalised before `fc`."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """W: size of a reduced draft vocabulary; None proposes from all of the target's tokens."""
    train_head: bool = True
    """False: `lm_head` stays the target's rows (speculators' way), a quarter less arithmetic; of the target's width only."""
    tree: tuple[tuple[int, ...], ...] | None = None
    """Rank paths of a static draft tree (see infer.tree.Topology); None and no dynamic_tree draft the top-1 chain."""
    dynamic_tree: DynamicTree | None = None
    """Draft a dynamic tree."""

    @model_validator(mode="after")
    def _agrees(self) -> Eagle3Config:
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps must be ascending and distinct, got {self.taps}. Sort them and drop repeats.")
        if self.tree is not None and self.dynamic_tree is not None:
            raise ValueError("tree and dynamic_tree exclude each other; remove one.")
        return self

    def resolve(self, target: Target) -> Eagle3Config:
        """The config with every None that the target decides replaced by its value. Raises ValueError if it cannot be."""
        own, layers = own_shape(target, eps=self.rms_norm_eps, heads=self.num_heads), target.num_layers
        default = (1, layers // 2 - 1, layers - 4) if layers >= 7 else tuple(sorted({0, (layers - 1) // 2, layers - 1}))
        taps, kv_heads, width = self.taps or default, self.num_kv_heads or own.kv_heads, self.head_dim or own.head_width
        if own.heads % kv_heads or width % 2 or not 0 <= taps[0] <= taps[-1] < layers:
            raise ValueError(
                f"num_heads ({own.heads}) must be a multiple of num_kv_heads ({kv_heads}), head_dim ({width}) even, and taps "
                f"{taps} layers of the target's {layers}. Set them in the recipe's head."
            )
        sizes = {
            "taps": taps,
            "hidden_size": self.hidden_size or target.hidden_size,
            "intermediate_size": self.intermediate_size or own.inner,
            "num_heads": own.heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
        }
        return self.model_copy(update=sizes)

    def public_fields(self, target: Target) -> dict[str, Any]:
        """Of a resolved config: what SGLang and vLLM read. They disagree whether `eagle_aux_hidden_state_layer_ids` names a
        layer's output or its input, so it is left out and they tap the default layers."""
        common = layer_fields(self.shape(), target, num_layers=self.num_layers, theta=self.rope_theta)
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": target.hidden_size,
            "target_layer_ids": list(self.taps or ()),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
        }
        return common | special_tokens(target) | own

    def shape(self) -> LayerShape:
        """Sizes of the layers, of a resolved config."""
        sizes = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim
        width, inner, heads, kv_heads, head_width = (size or 0 for size in sizes)
        assert min(width, inner, heads, kv_heads, head_width) > 0, "the config has not been resolved"
        return LayerShape(width, inner, heads, kv_heads, head_width, self.rms_norm_eps)


@dataclass
class Eagle3State:
    """One generation's own keys and values, and the output (rows, D) at each row's newest true pair."""

    cache: OwnCache
    hidden: Tensor


class Eagle3(TrainedDrafter):
    """A fused decoder layer over the target's features, run once per level of the draft."""

    config: Eagle3Config
    topology: Topology | DynamicShape

    def __init__(self, config: Eagle3Config, target: Target, *, token_map: Tensor | None = None) -> None:
        """token_map: (W,) int64 ascending target ids of a reduced draft vocabulary, which must hold every EOS id."""
        config = config.resolve(target)
        if token_map is not None and (lost := set(target.eos_ids) - set(token_map.tolist())):
            raise ValueError(
                f"the draft vocabulary lacks the target's EOS ids {sorted(lost)}, so no draft could end an answer. Choose it with "
                "distill.vocabulary.choose_vocabulary(..., always=target.eos_ids)."
            )
        super().__init__(config, target)
        shape, taps = config.shape(), config.taps or ()
        self.shape = shape
        read = len(taps) * target.hidden_size
        self.fc = nn.Linear(read, shape.width, bias=False)
        self.input_norm = RMSNorm(read, shape.eps) if config.norm_before_fc else None
        self.midlayer = FusedLayer(shape, layer=0, norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(shape, layer=i) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(shape.width, shape.eps)
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, target.vocab_size, token_map)
        self.lm_head = nn.Linear(shape.width, self.vocabulary.size, bias=False)
        self.embed_tokens = None if shape.width == target.hidden_size else projected_embedding(target, shape.width)
        if not config.train_head and self.embed_tokens is not None:
            raise ValueError(
                f"train_head: false needs hidden_size {target.hidden_size}, the target's; got {shape.width}."
            )
        self.lm_head.weight.requires_grad_(config.train_head)
        if self.embed_tokens is None:
            start_at_last_tap(self.fc, target)  # and so as the target stopped at that layer
            start_empty(self.norm, (self.midlayer, *self.layers.values()), target)
            self.lm_head.weight.data.copy_(self.vocabulary.select(target.head.weight.detach()))
        keep_as_offsets(self, self.vocabulary)
        self.use_tree(Topology.chain(config.num_steps) if config.tree is None else Topology(config.tree))
        if config.dynamic_tree is not None:
            self.topology = DynamicShape(**config.dynamic_tree.model_dump())

    def use_tree(self, topology: Topology) -> None:
        self.topology = topology

    def public_config(self) -> dict[str, Any]:
        named = dict.fromkeys(("dtype", "torch_dtype"), str(self.norm.weight.dtype).removeprefix("torch."))
        return self.config.public_fields(self.target) | named | {"draft_vocab_size": self.vocabulary.size}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps or ()

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    # The layers, shared by training and decoding --------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """g0: (..., F) -> (..., D)."""
        features = features.to(self.norm.weight.dtype)
        out: Tensor = self.fc(features if self.input_norm is None else self.input_norm(features))
        return out

    def advance(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory, ask: Tensor | None = None
    ) -> Tensor:
        """One step: tokens and positions (N,) int64, hidden (N, D) -> (N, D), or (R, D) of the tokens `ask` (R,)."""
        embedding = self.embed_tokens or self.target.embedding
        embedded = embedding(tokens).to(hidden.dtype)
        turn = Rotation.at(positions, width=self.shape.head_width, theta=self.config.rope_theta)
        last = self.config.num_layers - 1
        hidden = self.midlayer(embedded, hidden, turn, memory, None if last else ask)
        for number, layer in enumerate(self.layers.values(), start=1):
            hidden = layer(hidden, turn, memory, ask if number == last else None)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., W)."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    # Training -------------------------------------------------------------------------------------------------------

    def loss(self, teacher: TeacherBatch, objective: Objective) -> LossSums:
        weights = tuple(self.config.step_decay**step for step in range(self.num_steps))
        drafts, head = self._unroll(teacher), self.lm_head
        return loss_sums(drafts, teacher, objective, logits=head, vocabulary=self.vocabulary, weights=weights)

    @torch.no_grad()
    def ranks(self, teacher: TeacherBatch) -> Tensor:
        return find_ranks(self._unroll(teacher), teacher, logits=self.lm_head, vocabulary=self.vocabulary)

    def _unroll(self, teacher: TeacherBatch) -> Drafts:
        """Every step, normed, at every row at which some step counts. A row reads beyond its document only at steps that do not
        count, and nobody else sees what comes of it."""
        assert teacher.features is not None, "the features of the tapped layers were not read"
        counted = torch.stack([teacher.step_mask(step) for step in range(self.num_steps)])  # (S, B, T)
        blocks = Blocks.find(teacher.segments, counted.any(dim=0))
        memory, tokens, positions = Unroll(blocks), teacher.tokens.flatten(), teacher.positions.flatten()
        hidden = self.fuse(teacher.features.flatten(0, 1)[blocks.keys])  # (N, D)
        index, ask, states = blocks.keys, blocks.ask, []
        for step in range(self.num_steps):
            ahead = (index + step + 1).clamp(max=len(tokens) - 1)
            hidden = self.advance(tokens[ahead], hidden, positions[index] + step, memory, ask if step == 0 else None)
            index = blocks.rows
            states.append(self.norm(hidden))
        return Drafts(blocks.rows, torch.stack(states), counted.flatten(1)[:, blocks.rows])

    # Decoding -------------------------------------------------------------------------------------------------------

    def start(self, *, rows: int, capacity: int) -> Eagle3State:
        hidden = torch.zeros(rows, self.shape.width, dtype=self.norm.weight.dtype, device=self.target.device)
        return Eagle3State(OwnCache(rows=rows, capacity=capacity, tapes=self.tapes), hidden)

    def move(self, state: Eagle3State, source: int, target: int) -> None:
        state.cache.move(source, target)
        state.hidden[target] = state.hidden[source]

    def observe(self, state: Eagle3State, seen: Observation) -> None:
        """Pair each read token's features with the token after it (the newest with the anchor) and keep keys and values;
        what a draft wrote there is overwritten."""
        seen = seen.news()
        assert seen.features is not None, "the features of the tapped layers were not read"
        single = self.config.num_layers == 1  # then only the newest pair's output is ever used

        def pair(tokens: Tensor, features: Tensor, start: Tensor, count: Tensor) -> Tensors:
            batch, width = tokens.shape
            positions = start[:, None] + torch.arange(width, device=tokens.device)
            memory = state.cache.observe(self, seen.rows.start, start, count, width, last=single)
            last = torch.arange(batch, device=tokens.device) * width + count - 1  # the newest pairs in the flat order
            hidden = self.fuse(features).flatten(0, 1)
            hidden = self.advance(tokens.flatten(), hidden, positions.flatten(), memory, last if single else None)
            return (hidden if single else hidden[last],)

        (newest,) = state.cache.take(seen, pair, seen.next_tokens(), seen.features, seen.start, seen.count)
        state.hidden[seen.rows] = newest

    def draft(self, state: Eagle3State, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        hidden = state.hidden[: len(anchors)]
        return draft_by_level(self, self.topology, anchors, lengths, hidden, cache=state.cache, owner=self)

    def read_level(self, tokens: Tensor, above: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """`advance` of nodes (B, n), their parents' outputs (B, n, D) -> (B, n, D)."""
        return self.advance(tokens.flatten(), above.flatten(0, 1), positions.flatten(), memory).view_as(above)

    def candidates(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best tokens (B, n, width) int64, as target ids, and their log-probabilities, float32."""
        logits = self.logits(hidden).float()
        best = logits.topk(min(width, logits.shape[-1]), dim=-1)
        return self.vocabulary.to_target(best.indices), best.values - logits.logsumexp(dim=-1, keepdim=True)
