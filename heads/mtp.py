"""The target's own multi-token-prediction layer as its drafter: nothing to train, nothing to download.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and its kin, such as GLM-4.5, ship one more decoder layer behind their last, with
tensors enorm, hnorm, eh_proj and shared_head.norm around it. Embedding and head are the target's:

    g_t = norm(layer(eh_proj [enorm(E(x_{t+1})) ; hnorm(h_t)]))          h_t: the target's, after its final norm
    p(x_{t+2}) = softmax(head(g_t))

Worked example, "a b c d": from h at "b" and the token "c" the layer proposes "d". Drafting further, it takes its own g in
place of h, as EAGLE-3's layer does: what follows a draft token is a guess upon a guess, so acceptance falls with the depth.
Keys and values of accepted tokens are made of the target's true states.

transformers leaves these tensors in the folder when it loads the model, and reads them here. Of several such layers the
first drafts all tokens. Targets with recurrent layers ship them too (Qwen3-Next); `Target` refuses those by name.

Letters: B rows, A tokens just read, D hidden, V vocabulary, n nodes of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..infer import attention
from ..infer.drafter import Observation
from ..infer.recorded import tapes_like
from ..infer.sampling import Sampling
from ..infer.tapes import Tensors
from ..infer.target import Target
from ..infer.tree import TokenTree, Topology
from .by_level import draft_by_level
from .own_cache import OwnCache, Recall

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpModel


@dataclass
class MtpState:
    """One generation's own keys and values, and the layer's output (rows, D) at each row's newest token."""

    cache: OwnCache
    hidden: Tensor


class Mtp:
    """Drafts a fixed tree with the target's own extra layer, a chain of three tokens if no other is given."""

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, *, topology: Topology | None = None) -> None:
        """Raises ValueError if the target has no such layer, or one that attends within a window."""
        self.target, self.model = target, load_own_layers(target)
        self.topology = Topology.chain(3) if topology is None else topology
        self.tapes = tapes_like(target, self.model, name=f"the extra layer of {target.name}")

    @property
    def depth(self) -> int:
        return self.topology.depth

    def start(self, *, rows: int, capacity: int) -> MtpState:
        hidden = torch.zeros(rows, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        return MtpState(OwnCache(rows=rows, capacity=capacity, tapes=self.tapes), hidden)

    def move(self, state: MtpState, source: int, target: int) -> None:
        state.cache.move(source, target)
        state.hidden[target] = state.hidden[source]

    def observe(self, state: MtpState, seen: Observation) -> None:
        """Pair each token's hidden state with the token after it, the newest with the anchor; what a draft wrote there is
        overwritten."""
        seen = seen.news()

        def pair(tokens: Tensor, hidden: Tensor, start: Tensor, count: Tensor) -> Tensors:
            batch, width = tokens.shape
            positions = start[:, None] + torch.arange(width, device=start.device)
            memory = state.cache.observe(self.model, seen.rows.start, start, count, width, last=False)
            out = self.read_level(tokens, hidden, positions, memory)
            return (out[torch.arange(batch, device=start.device), count - 1],)

        (newest,) = state.cache.take(seen, pair, seen.next_tokens(), seen.hidden, seen.start, seen.count)
        state.hidden[seen.rows] = newest

    def draft(self, state: MtpState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        hidden = state.hidden[: len(anchors)]
        return draft_by_level(self, self.topology, anchors, lengths, hidden, cache=state.cache, owner=self.model)

    def read_level(self, tokens: Tensor, above: Tensor, positions: Tensor, memory: Recall) -> Tensor:
        """The layer on pairs at `positions`: tokens, positions (B, A) int64, hidden states `above` (B, A, D) -> (B, A, D)."""
        embedded = self.target.embedding(tokens)
        positions = positions + 1  # a pair turns as its token does, which is one further than its hidden state
        assert self.model.rotary_emb is not None, "refused when it was loaded"
        turn = self.model.rotary_emb(embedded, position_ids=positions)
        out: Tensor = self.model.layers[0](
            embedded,
            above,
            position_embeddings=turn,
            attention_mask=None,
            position_ids=positions,
            cache=memory.cache,
            plan=memory.plan,
        )
        return out

    def candidates(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best tokens (B, n, width) int64 and their log-probabilities, float32."""
        logits = self.target.logits(hidden).float()
        best = logits.topk(width, dim=-1)
        return best.indices, best.values - logits.logsumexp(dim=-1, keepdim=True)


def load_own_layers(target: Target) -> MtpModel:
    """The target's extra layers, in its precision, on its device, attending by plans. Raises ValueError as `Mtp`."""
    from transformers.modeling_layers import MtpModel

    settings, first = target.text_config.to_dict(), target.num_layers
    count = settings.get("num_nextn_predict_layers") or settings.get("num_mtp_layers") or 0
    if not count:
        raise ValueError(
            f"target {target.name!r} ships no multi-token-prediction layer (its config has no num_nextn_predict_layers). Use "
            "another drafter, or train one."
        )
    model = target.model
    known = model._keys_to_ignore_on_load_unexpected
    # transformers knows these layers by their number in the released models; this model may have another depth.
    numbers = [rf"(^|\.)layers\.{number}\." for number in range(first, first + count)]
    model._keys_to_ignore_on_load_unexpected = [*numbers, r"^(model\.)?mtp\."]
    try:
        loaded: MtpModel = MtpModel.from_pretrained(model, device_map={"": target.device})
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the multi-token-prediction layer of {target.name!r} could not be loaded: {error} Its folder must hold the tensors "
            f"of layer {first} in safetensors, as the model's publisher saved them; a copy saved by transformers lacks them."
        ) from error
    finally:
        model._keys_to_ignore_on_load_unexpected = known
    if loaded.rotary_emb is None:
        raise ValueError(
            f"the multi-token-prediction layer of {target.name!r} has no rotary positions, which is not supported."
        )
    kinds = set(loaded.config.to_dict().get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"the multi-token-prediction layer of {target.name!r} attends by {kinds}, which is not supported."
        )
    loaded.config._attn_implementation = attention.NAME
    loaded.eval().requires_grad_(False)
    return loaded
