"""The frozen LLM whose output must not change: any transformers causal LM behind one call, no modelling code copied.

Encoder-decoder models are a kind of their own (seq2seq.py). Taps are numbered as in layers.py.

Letters: B rows, N tokens per row, T packed positions, D hidden, M taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import attention
from .cache import Decode, KVCache, Packed, Plan
from .fingerprint import config_hash, template_hash, weights_hash
from .layers import Tapping, decoder_layers, refuse_recurrent
from .pretrained import load_pretrained
from .quantized import Quantization
from .selection import Selection
from .tree import TokenTree

if TYPE_CHECKING:  # transformers' modelling code takes seconds to load; nothing here needs it before a model does
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFILL_MULTIPLE = 64
"""Prompts read together are filled up to a multiple of this: kernels and memory blocks of ever new sizes are costly."""


@dataclass(frozen=True)
class Reading:
    """What the target computed at the tokens it read."""

    hidden: Tensor
    """(B, N, D): last hidden state after the final norm, the vector its head reads."""
    features: Tensor | None
    """(B, N, M*D): taps concatenated in ascending order; None if nothing was tapped."""


class Target:
    """A frozen causal LM with its tokenizer: loaded with `Target.load`, or wrapped around a model in memory."""

    is_encoder_decoder = False

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str = "in-memory",
        quantization: Quantization | None = None,
    ) -> None:
        self.name, self.quantization, self._tokenizer = name, quantization, tokenizer
        self.model = model.eval().requires_grad_(False)
        self.text_config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.text_config.hidden_size
        head: Any = model.get_output_embeddings()
        self.head: nn.Linear = head
        self.embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size: int = self.head.weight.shape[0]
        self._selection = Selection()
        self._attach()

    def _attach(self) -> None:
        """Put our attention into the model, and check that what we compute with it is what the model computes."""
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(self.model).__name__} is an encoder-decoder model: load it with Target.load, or wrap it in Seq2SeqTarget."
            )
        refuse_recurrent(self.model)
        attention.register()
        self.model.config._attn_implementation = attention.NAME
        self.max_length: int = self.text_config.max_position_embeddings
        self.layers = decoder_layers(self.model)
        self.num_layers = len(self.layers)
        settings = self.text_config.to_dict()
        self._softcap: float | None = settings.get("final_logit_softcapping")
        self.logit_scale: float = settings.get("logit_scale") or 1.0 / (settings.get("logits_scaling") or 1.0)
        self._check_rebuilt_logits()

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "float32", device: str | None = None, quantize: str | None = None
    ) -> Target:
        """The target called `name`: `smollm2-135m` (embedded), a local folder, or a Hugging Face model id.

        dtype: float32, bfloat16, float16, or auto (precision.py). device: cuda where there is one, else cpu. quantize: int8 or
        int4 weights (quantized.py). Raises ValueError if the model cannot be found, loaded or quantised, with the reason.
        """
        found = load_pretrained(name, dtype=dtype, device=device, quantize=quantize)
        if found.model.config.is_encoder_decoder:
            from .seq2seq import Seq2SeqTarget

            return Seq2SeqTarget(found.model, found.tokenizer, name=name, quantization=found.quantization)
        return Target(found.model, found.tokenizer, name=name, quantization=found.quantization)

    @property
    def device(self) -> torch.device:
        return next(self.embedding.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That of the embedding and the head."""
        return next(self.embedding.parameters()).dtype

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is not None:
            return self._tokenizer
        raise ValueError("this target was built without a tokenizer; pass one to Target(model, tokenizer).")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the generation config's list, else the tokenizer's or the model config's one."""
        given = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.text_config.eos_token_id if given is None else given
        return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (int(ids),)

    @cached_property
    def template_hash(self) -> str:
        return template_hash(self._tokenizer)

    def fingerprint(self) -> dict[str, Any]:
        """What a drafter's checkpoint is bound to. A quantised target has the weights' hash of what it was before, and says
        so under `quantization`."""
        made = self.quantization
        told = {
            "name": self.name,
            "config": config_hash(self.text_config),
            "weights": weights_hash(self.head.weight, self.layers[-1]) if made is None else made.weights,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "tied": any(parameter is self.head.weight for parameter in self.embedding.parameters()),
        }
        return told if made is None else told | {"quantization": made.kind}

    def encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Ids of a conversation (role and content each), ready to be answered."""
        told: Any = [dict(message) for message in messages]
        ids: Any = self.tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def written(self, prompt: Sequence[int]) -> Sequence[int]:
        """What of a prompt is text that the answer goes on with, for penalties: all of it."""
        return prompt

    def check_room(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise ValueError if a prompt and that many new tokens do not fit the context."""
        if len(prompt) + max_new_tokens > self.max_length:
            need = f"{len(prompt)} prompt tokens + {max_new_tokens} new ones"
            raise ValueError(f"{need} exceed the target's context of {self.max_length}. Shorten one of them.")

    def check_draft(self, target: Target) -> None:
        """Raise ValueError if this one, as a draft model, cannot read what `target` reads."""
        if target.is_encoder_decoder:
            raise ValueError(
                f"target {target.name!r} is an encoder-decoder model, draft model {self.name!r} is not: use a smaller one of the "
                "target's family."
            )

    def new_cache(self, *, rows: int, capacity: int) -> KVCache:
        """An empty cache for what this target reads."""
        return KVCache(rows=rows, capacity=capacity)

    def give_up(self, cache: KVCache) -> None:
        """Memory ran out: this cache will not be used again, and nothing of it is to be kept."""

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The target's logits for rows of its last hidden state: (..., D) -> (..., V), soft-cap and scale included; with
        vocabulary (W,) int64, of these tokens alone, (..., W)."""
        logits: Tensor
        logits = self.head(hidden) if vocabulary is None else self._selection.linear(hidden, self.head, vocabulary)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def read_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, *, taps: tuple[int, ...] = ()
    ) -> Reading:
        """Read whole documents without a cache: tokens, positions, segments (B, T) int64 (see `cache.Packed`)."""
        return self._forward(tokens, positions, Packed(segments, positions), cache=None, taps=taps)

    def read_blank(self, cache: KVCache, *, rows: int, length: int) -> None:
        """Let rows stand where `length` tokens were read, whatever they say: for measuring what comes after."""
        cache.reserve(length)

    @torch.no_grad()
    def replay(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """(T+1, D): the states that score each of the T tokens of an answer and the token after, without a cache."""
        tokens = torch.tensor([[*prompt, *answer]], device=self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        return self.read_packed(tokens, positions, torch.ones_like(tokens)).hidden[0, len(prompt) - 1 :]

    @torch.no_grad()
    def read_prompts(
        self, prompts: list[Tensor], cache: KVCache, *, first_row: int, budget: int, taps: tuple[int, ...] = ()
    ) -> Reading:
        """As `prefill`, but a first prompt longer than `budget`, which then is the only one read, is read in chunks."""
        if len(prompts[0]) <= budget:
            return self.prefill(prompts, cache, first_row=first_row, taps=taps)
        parts = []
        for start in range(0, len(prompts[0]), budget):
            chunk = prompts[0][None, start : start + budget].to(self.device)
            read = torch.tensor([start], device=self.device)
            tree = TokenTree.chain(chunk[:, 0], chunk[:, 1:])
            parts.append(self.verify(tree, read, cache, longest=start, first_row=first_row, taps=taps))
        features = [part.features for part in parts if part.features is not None]
        hidden = torch.cat([part.hidden for part in parts], dim=1)
        return Reading(hidden, torch.cat(features, dim=1) if features else None)

    @torch.no_grad()
    def prefill(self, prompts: list[Tensor], cache: KVCache, *, first_row: int, taps: tuple[int, ...] = ()) -> Reading:
        """Read one prompt (1-D int64) into each of rows first_row.. of the cache, packed side by side without padding.

        Returns hidden and features of shape (1, sum of lengths, ...), prompts in order.
        """
        lengths = [len(prompt) for prompt in prompts]
        total = sum(lengths)
        spare = torch.zeros(-total % PREFILL_MULTIPLE, dtype=torch.int64)  # also their segment: no document
        segments = torch.cat([*(torch.full((n,), i) for i, n in enumerate(lengths, start=1)), spare]).to(self.device)[
            None
        ]
        positions = torch.cat([*(torch.arange(n) for n in lengths), spare]).to(self.device)[None]
        tokens = torch.cat([*prompts, spare.to(prompts[0].device)]).to(self.device)[None]
        cache.reserve(max(lengths) + 1)
        # The filling is written where the first prompt's next token will be, before anything reads that slot.
        slots = (first_row + segments[0] - 1) * cache.capacity + positions[0]
        slots[total:] = first_row * cache.capacity + lengths[0]
        cache.write_at(slots, read=None)
        reading = self._forward(tokens, positions, Packed(segments, positions), cache=cache, taps=taps)
        features = None if reading.features is None else reading.features[:, :total]
        return Reading(reading.hidden[:, :total], features)

    @torch.no_grad()
    def verify(
        self,
        tree: TokenTree,
        lengths: Tensor,
        cache: KVCache,
        *,
        longest: int,
        first_row: int = 0,
        skip: int = 0,
        taps: tuple[int, ...] = (),
    ) -> Reading:
        """Read the trees of B consecutive rows, from `first_row`, in one forward.

        lengths: (B,) int64, tokens each row has read, at most `longest`. Nodes are written to slots length..length+N-1; the
        caller commits the accepted ones (`KVCache.commit`). The first `skip` nodes were read by an earlier call.
        """
        plan = self._aim(tree, lengths, cache, longest=longest, first_row=first_row, skip=skip)
        # Draft nodes may stand beyond the context, whose positions may not exist; they can never reach the text.
        positions = (lengths[:, None] + tree.depths[:, skip:]).clamp(max=self.max_length - 1)
        return self._forward(plan.pack(tree.tokens[:, skip:]), plan.pack(positions), plan, cache=cache, taps=taps)

    def _aim(
        self, tree: TokenTree, lengths: Tensor, cache: KVCache, *, longest: int, first_row: int, skip: int
    ) -> Decode:
        """Aim the cache at the nodes' slots; the plan of the forward that follows."""
        batch, count = tree.tokens.shape
        span = longest + count
        cache.reserve(span)
        rows = torch.arange(first_row, first_row + batch, device=lengths.device)
        slots = (rows * cache.capacity + lengths)[:, None] + torch.arange(skip, count, device=lengths.device)
        plan = Decode(lengths, tree.depths, tree.ancestors[:, skip:], span=span, read=tree.read)
        cache.write_at(plan.pack(slots).flatten(), read=(first_row, batch, span))
        return plan

    def _forward(
        self, tokens: Tensor, positions: Tensor, plan: Plan, *, cache: KVCache | None, taps: tuple[int, ...]
    ) -> Reading:
        with Tapping(self.layers, taps) as tapped:
            out = self.model.base_model(
                input_ids=tokens, position_ids=positions, cache=cache, use_cache=cache is not None, plan=plan
            )
        features = plan.spread(torch.cat(tapped.outputs, dim=-1)) if taps else None
        return Reading(plan.spread(out.last_hidden_state), features)

    def _check_rebuilt_logits(self) -> None:
        """The head applied to the last hidden state must give the model's own logits (final norm, soft-cap, scale)."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        positions = torch.arange(4, device=self.device)[None]
        plan = Packed(torch.ones_like(tokens), positions)
        with torch.no_grad():
            own = self.model(input_ids=tokens, position_ids=positions, use_cache=False, plan=plan).logits.float()
            rebuilt = self.logits(self._forward(tokens, positions, plan, cache=None, taps=()).hidden).float()
        gap = float((own - rebuilt).abs().max())
        if not gap <= 1e-3 * max(1.0, float(own.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__}: its head applied to its last hidden state differs from its own logits by {gap:.3g}. "
                "It post-processes logits in a way draftsmith does not know; please report the architecture."
            )
