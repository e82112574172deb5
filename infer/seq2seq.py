"""Encoder-decoder targets: T5, BART and their kin, in the same loop as causal ones, no modelling code copied.

A prompt is the source's ids followed by the decoder's first ids, the last start token in it being where the decoder
begins: "translate: ... </s> <pad>" for T5, whose start token is <pad>. `encode` makes such prompts. A longer beginning
(a forced language token, the first words of the answer) is read like the start token. Source and answer make one text
for drafters, so prompt lookup copies from the source, and a smaller model of the family drafts as it would alone.

The decoder is entered through its public pieces: its attention through the registry, its cache (source_cache.py), its
position embedding, where it has one, through hooks that hand it our positions. Whether all that gives the model's own
logits is checked when a target is made.

Letters: B rows, N tokens per row, L source tokens, D hidden, V vocabulary, T answer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from . import source_cache
from .cache import KVCache
from .decoder_positions import Placed, bias_tables
from .layers import decoder_layers
from .source_cache import DecoderPlan, EncoderPlan, SourceCache, Sources
from .target import Reading, Target
from .tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = 2**30
"""Positions of a model that counts distances only."""


class Seq2SeqTarget(Target):
    """A frozen encoder-decoder LM with its tokenizer; see the module docstring for what its prompts are."""

    is_encoder_decoder = True

    def _attach(self) -> None:
        if not self.model.config.is_encoder_decoder:
            raise ValueError(f"{type(self.model).__name__} is no encoder-decoder model: wrap it in Target.")
        self.encoder: PreTrainedModel = self.model.get_encoder()
        self.decoder: PreTrainedModel = self.model.get_decoder()
        self.layers = decoder_layers(self.model)
        self.num_layers = len(self.layers)
        self._places: nn.Module | None = dict(self.decoder.named_children()).get("embed_positions")
        self._limit = UNLIMITED if self._places is None else int(self.text_config.max_position_embeddings)
        self.max_length = 2 * self._limit
        buffers, settings = dict(self.model.named_buffers()), self.text_config.to_dict()
        self._logits_bias: Tensor | None = buffers.get("final_logits_bias")
        self._scale = self.hidden_size**-0.5 if settings.get("scale_decoder_outputs") else 1.0
        self._softcap, self.logit_scale = None, 1.0
        probes = [self._probe(length) for length in (5, 3)]
        with torch.no_grad():
            own = [self._own_logits(*probe) for probe in probes]
        source_cache.register()
        for part in (self.model, self.encoder, self.decoder):
            part.config._attn_implementation = source_cache.NAME
        self._tables = bias_tables(self.layers)
        self._check(probes, own)

    # Prompts --------------------------------------------------------------------------------------------------------

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The decoder's first ids: its start token, and the token that the model is configured to be forced to next."""
        start, forced = self._setting("decoder_start_token_id"), self._setting("forced_bos_token_id")
        if start is None:
            start = self._setting("bos_token_id")
        if start is None:
            raise ValueError(f"{type(self.model).__name__}: its config names no decoder_start_token_id; set it.")
        return (start,) if forced is None else (start, forced)

    def _setting(self, name: str) -> int | None:
        for config in (self.model.generation_config, self.model.config):
            value = config.to_dict().get(name) if config is not None else None
            if value is not None:
                return int(value)
        return None

    def encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The source's ids as its tokenizer writes them, then the decoder's first ids. There is no chat template: one
        message, of role user, is the source. Raises ValueError for anything else."""
        if len(messages) != 1 or messages[0].get("role") != "user":
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise ValueError(
                f"{type(self.model).__name__} reads one source text and no conversation; got messages of {roles}. Give the "
                "text alone."
            )
        ids = self.tokenizer(str(messages[0]["content"]), verbose=False)["input_ids"]
        return [*ids, *self.opening]

    def split(self, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        """The source and the decoder's beginning. Raises ValueError if there is no start token, or nothing before it."""
        ids = list(prompt)
        start = self.opening[0]
        if start not in ids[1:]:
            raise ValueError(
                f"the prompt of an encoder-decoder target is its source followed by the decoder's start token, {start}, which is "
                "missing. Make prompts with Target.encode."
            )
        where = len(ids) - 1 - ids[::-1].index(start)
        return ids[:where], ids[where:]

    def written(self, prompt: Sequence[int]) -> Sequence[int]:
        """The decoder's beginning, as transformers has it: a word of the source is not repeated by being translated."""
        return self.split(prompt)[1]

    def check_room(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        source, begun = self.split(prompt)
        if len(source) > self._limit or len(begun) + max_new_tokens > self._limit:
            raise ValueError(
                f"{len(source)} source tokens, and {len(begun)} + {max_new_tokens} tokens of the answer, exceed the target's "
                f"context of {self._limit} each. Shorten the prompt or lower max_new_tokens."
            )

    def check_draft(self, target: Target) -> None:
        if not isinstance(target, Seq2SeqTarget):
            raise ValueError(f"draft model {self.name!r} reads a source, and target {target.name!r} has none.")
        if self.opening[0] != target.opening[0] or self._limit < target._limit:
            raise ValueError(
                f"draft model {self.name!r} starts with token {self.opening[0]} and reads {self._limit} positions, target "
                f"{target.name!r} {target.opening[0]} and {target._limit}: it cannot read the same prompts."
            )

    # Reading --------------------------------------------------------------------------------------------------------

    def new_cache(self, *, rows: int, capacity: int) -> SourceCache:
        return SourceCache(rows=rows, capacity=capacity, device=self.device)

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden if self._scale == 1.0 else hidden * self._scale, vocabulary)
        if self._logits_bias is None:
            return logits
        bias = self._logits_bias[0]
        return logits + (bias if vocabulary is None else bias[vocabulary])

    def read_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, *, taps: tuple[int, ...] = ()
    ) -> Reading:
        raise ValueError(
            f"{type(self.model).__name__} is an encoder-decoder model, which drafters cannot be trained for. Draft with "
            "prompt-lookup, lookahead, or a smaller model of its family (draft:MODEL)."
        )

    def read_blank(self, cache: KVCache, *, rows: int, length: int) -> None:
        """All but the decoder's first ids are source, as in a translation or a summary that has just begun."""
        source, _ = self._probe(1)
        prompt = torch.tensor([*source * (length - len(self.opening)), *self.opening])
        self.prefill([prompt] * rows, cache, first_row=0)

    @torch.no_grad()
    def replay(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        source, begun = self.split(prompt)
        cache = self.new_cache(rows=1, capacity=len(source) + len(begun) + len(answer))
        _, hidden = self._begin([source], [[*begun, *answer]], cache, first_row=0)
        return hidden[0, len(begun) - 1 :]

    def read_prompts(
        self, prompts: list[Tensor], cache: KVCache, *, first_row: int, budget: int, taps: tuple[int, ...] = ()
    ) -> Reading:
        return self.prefill(prompts, cache, first_row=first_row, taps=taps)

    @torch.no_grad()
    def prefill(self, prompts: list[Tensor], cache: KVCache, *, first_row: int, taps: tuple[int, ...] = ()) -> Reading:
        """As for a causal target; the hidden states of source tokens are the encoder's."""
        _refuse(taps)
        parts = [self.split(prompt.tolist()) for prompt in prompts]
        sources, begun = [source for source, _ in parts], [start for _, start in parts]
        encoded, hidden = self._begin(sources, begun, cache, first_row=first_row)
        pieces = []
        for row, (source, start) in enumerate(parts):
            pieces += [encoded[row, : len(source)], hidden[row, : len(start)]]
        return Reading(torch.cat(pieces)[None], None)

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
        _refuse(taps)
        hidden = self._read(tree, lengths, cache, longest=longest, first_row=first_row, skip=skip, encoded=None)
        return Reading(hidden, None)

    def _begin(
        self, sources: list[list[int]], begun: list[list[int]], cache: KVCache, *, first_row: int
    ) -> tuple[Tensor, Tensor]:
        """Encode sources and read the beginnings of their answers: (B, L, D) and (B, N, D), both right-padded."""
        assert isinstance(cache, SourceCache), "the cache was not made by new_cache"
        lengths = [len(source) for source in sources]
        cache.begin(first_row, lengths)
        origins, tokens = cache.origins[first_row : first_row + len(sources)], _padded(begun, self.device)
        encoded: Tensor = self.encoder(
            input_ids=_padded(sources, self.device), plan=EncoderPlan(origins, max(lengths))
        ).last_hidden_state
        tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
        read = {"longest": max(lengths), "first_row": first_row}
        return encoded, self._read(tree, origins, cache, **read, skip=0, encoded=encoded)

    def _read(
        self,
        tree: TokenTree,
        lengths: Tensor,
        cache: KVCache,
        *,
        longest: int,
        first_row: int,
        skip: int,
        encoded: Tensor | None,
    ) -> Tensor:
        """(B, N, D): the decoder over trees; `encoded` (B, L, D) where the sources are new."""
        assert isinstance(cache, SourceCache), "the cache was not made by new_cache"
        tree = replace(tree, read=None)  # all nodes are read; those left out are invalid in any case
        decode = self._aim(tree, lengths, cache, longest=longest, first_row=first_row, skip=skip)
        rows = slice(first_row, first_row + len(lengths))
        origins, sources = cache.origins[rows], cache.sources[rows]
        # Draft nodes may stand beyond the context, whose positions may not exist; they can never reach the text.
        positions = ((lengths - origins)[:, None] + tree.depths[:, skip:]).clamp(max=self._limit - 1)
        plan = DecoderPlan(decode, origins, shortest=min(sources), longest=max(sources), tables=self._tables)
        crossed = Sources(cache, first_row=first_row, count=len(sources), is_new=encoded is not None)
        absent = torch.zeros(len(sources), 0, self.hidden_size, dtype=self.dtype, device=self.device)
        with Placed(self._places, positions):
            out = self.decoder(
                input_ids=tree.tokens[:, skip:],
                encoder_hidden_states=absent if encoded is None else encoded,
                cache=EncoderDecoderCache(cache, crossed),
                use_cache=True,
                plan=plan,
            )
        hidden: Tensor = out.last_hidden_state
        return hidden

    # Checks ---------------------------------------------------------------------------------------------------------

    def _probe(self, length: int) -> tuple[list[int], list[int]]:
        """A source and an answer's beginning to compare logits on."""
        known = [token for token in range(self.vocab_size) if token != self.opening[0]][: length + 3]
        return known[:length], [self.opening[0], *known[length:]]

    def _own_logits(self, source: list[int], begun: list[int]) -> Tensor:
        """(N, V) float32: what the model makes of a probe in its own way."""
        ids, begun_ids = (torch.tensor([tokens], device=self.device) for tokens in (source, begun))
        out = self.model(input_ids=ids, decoder_input_ids=begun_ids, use_cache=False)
        logits: Tensor = out.logits[0].float()
        return logits

    def _check(self, probes: list[tuple[list[int], list[int]]], own: list[Tensor]) -> None:
        """Rows of different lengths, read in two steps, must give the model's own logits: positions, bias, cross-attention,
        head."""
        cache = self.new_cache(rows=2, capacity=16)
        prompts = [torch.tensor([*source, *begun[:1]]) for source, begun in probes]
        rest = torch.tensor([begun[1:] for _, begun in probes], device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        try:
            self.prefill(prompts, cache, first_row=0)
            tree = TokenTree.chain(rest[:, 0], rest[:, 1:])
            mine = self.logits(self.verify(tree, lengths, cache, longest=int(lengths.max())).hidden).float()
        except TypeError as error:
            raise _unsupported(self.model, f"its parts do not take what ours give them ({error})") from error
        theirs = torch.stack(own)[:, 1:]
        gap, scale = float((mine - theirs).abs().max()), max(1.0, float(theirs.abs().max()))
        if not gap <= max(1e-3, 16 * torch.finfo(self.dtype).eps) * scale:
            raise _unsupported(self.model, f"its logits differ from ours by {gap:.3g}")


def _padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """(B, N) int64, right-padded with each row's last id; what stands there is seen by nothing real."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=device)


def _refuse(taps: tuple[int, ...]) -> None:
    if taps:
        raise ValueError(
            "drafters that read a target's layers are for causal targets; use prompt-lookup or draft:MODEL."
        )


def _unsupported(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} is not supported: {why}. T5, BART and encoder-decoder models built like them are; please report "
        "the architecture."
    )
