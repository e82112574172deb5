"""What a drafter with decoder layers of its own takes from its target: sizes, rotary base, taps, a mask token.

Every one of these has been guessed differently by trainer and engine somewhere; here each is resolved once, checked, and
written to config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ..infer.layers import final_scale, norm_scale
from ..infer.target import Target
from .base import HeadConfig
from .layers import LayerShape, RMSNorm


class LayeredConfig(HeadConfig):
    """Decoder layers as wide as the target. What is None follows from it; a drafter's own `config` has no such None left."""

    num_layers: int = Field(ge=1)
    """Decoder layers."""
    taps: tuple[int, ...] | None = Field(None, min_length=1)
    """Target layers read, as 0-based outputs, never the last. None: num_layers of them, evenly from 1 to L-3 of L."""
    intermediate_size: int | None = Field(None, ge=1)
    """Inner width of the MLP. None: the target's."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads. None: the target's."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads. None: the target's."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head. None: the target's."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies, plain and unscaled. None: the target's."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in every norm (Qwen3: 1e-6)."""

    def resolve(self, target: Target) -> Self:
        """The config with every None that the target decides replaced by its value. Raises ValueError if it cannot be."""
        own = own_shape(target, eps=self.rms_norm_eps, heads=self.num_heads)
        taps = self.taps or spread_taps(self.num_layers, target)
        check_taps(taps, target)
        heads, kv_heads, width = own.heads, self.num_kv_heads or own.kv_heads, self.head_dim or own.head_width
        if heads % kv_heads or width % 2:
            raise ValueError(
                f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads}) and head_dim ({width}) even. Set them in "
                "the recipe's head."
            )
        sizes = {
            "taps": taps,
            "intermediate_size": self.intermediate_size or own.inner,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "rope_theta": self.rope_theta or rotary_base(target),
        }
        return self.model_copy(update=sizes)

    def shape(self, target: Target) -> LayerShape:
        """Sizes of the layers, of a resolved config."""
        sizes = self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim
        inner, heads, kv_heads, head_width = (size or 0 for size in sizes)
        assert min(inner, heads, kv_heads, head_width) > 0, "the config has not been resolved"
        return LayerShape(target.hidden_size, inner, heads, kv_heads, head_width, self.rms_norm_eps)

    def public_fields(self, target: Target) -> dict[str, Any]:
        """Of a resolved config: what transformers and serving engines read of the layers, every default written out, the
        rotary base in the spellings of transformers 5 and 4."""
        theta = self.rope_theta or 0.0
        assert theta > 0, "the config has not been resolved"
        common = layer_fields(self.shape(target), target, num_layers=self.num_layers, theta=theta)
        return common | {"model_type": "qwen3", "target_layer_ids": list(self.taps or ())}


def layer_fields(shape: LayerShape, target: Target, *, num_layers: int, theta: float) -> dict[str, Any]:
    """What transformers and serving engines read of decoder layers, every default written out, the rotary base in the
    spellings of transformers 5 and 4."""
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * num_layers,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_length,
        "num_target_layers": target.num_layers,
    }


def special_tokens(target: Target) -> dict[str, Any]:
    """The target's, as config.json names them; every id that ends an answer."""
    found = target.text_config.to_dict()
    beginning, padding = found.get("bos_token_id"), found.get("pad_token_id")
    return {"bos_token_id": beginning, "eos_token_id": list(target.eos_ids), "pad_token_id": padding}


def own_shape(target: Target, *, eps: float, heads: int | None = None) -> LayerShape:
    """Sizes of a decoder layer like the target's own; `eps` where its config names none. heads: query heads, the target's
    if None."""
    settings = target.text_config.to_dict()
    own_heads: int = target.text_config.num_attention_heads
    heads = heads or own_heads
    return LayerShape(
        width=target.hidden_size,
        inner=settings.get("intermediate_size") or 4 * target.hidden_size,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_width=settings.get("head_dim") or target.hidden_size // own_heads,
        eps=settings.get("rms_norm_eps") or eps,
    )


def rotary_base(target: Target) -> float:
    """The target's rope_theta, of its full-attention layers where it has several; both spellings of transformers."""
    settings = target.text_config.to_dict()
    rope = settings.get("rope_parameters") or settings
    return float(rope.get("full_attention", rope).get("rope_theta") or 10000.0)


def spread_taps(count: int, target: Target) -> tuple[int, ...]:
    """z-lab's rule: `count` layers evenly from 1 to L-3 of L, a single one L//2; fewer where they coincide."""
    layers = target.num_layers
    if count == 1 or layers < 5:
        return (min(layers // 2, max(0, layers - 2)),)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))


def check_taps(taps: tuple[int, ...], target: Target) -> None:
    """Raise ValueError unless the taps are ascending layers of the target below its last: engines disagree whether that one
    is read before or after the final norm."""
    last = max(1, target.num_layers - 1)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < last:
        raise ValueError(
            f"taps must be ascending, distinct 0-based layer outputs below {last}, the target's last; got {taps}. Sort them, drop "
            "repeats and choose earlier ones."
        )


def mask_token(target: Target, given: int | None) -> int:
    """The id given, or for None the first that the target's padded vocabulary has and its tokenizer does not. Raises
    ValueError if there is none, or the target does not have the id."""
    token = len(target.tokenizer) if given is None else given
    if token >= target.vocab_size:
        why = f"the tokenizer uses all of the target's {target.vocab_size} tokens, so none is free to be the mask"
        if given is not None:
            why = f"mask_token_id {given} is not among the target's {target.vocab_size} tokens"
        raise ValueError(
            f"{why}. Set mask_token_id to a token that answers never hold, such as a reserved special one."
        )
    return token


@torch.no_grad()
def start_empty(norm: RMSNorm, layers: Iterable[nn.Module], target: Target) -> None:
    """Start with layers that add nothing yet, and with the target's final norm (`start_norm`)."""
    for layer in layers:
        layer.get_parameter("self_attn.o_proj.weight").zero_()
        layer.get_parameter("mlp.down_proj.weight").zero_()
    start_norm(norm, target)


@torch.no_grad()
def start_norm(norm: RMSNorm, target: Target) -> None:
    """Start with the scale of the target's own final norm, which its head was trained behind, and of its logits."""
    scale = final_scale(target.model, target.layers, target.hidden_size)
    if scale is not None:
        norm.weight.copy_(scale * target.logit_scale)


@torch.no_grad()
def start_at_last_tap(fc: nn.Linear, target: Target) -> None:
    """Start with the deepest tap passed on as it is, the others at a tenth of the usual random weights. fc: (D, taps * D)."""
    fc.weight.mul_(0.1)
    fc.weight[:, -target.hidden_size :].diagonal().add_(1)


@torch.no_grad()
def start_as_last_layers(layers: Sequence[nn.Module], target: Target) -> bool:
    """Start as copies of the target's last layers; False, and nothing done, unless those are made of the very same parts.

    Biases are left out, and norms may be kept in the target's own way (see `norm_scale`). Parts that the target lacks, such
    as norms of queries and keys, stay as they are.
    """
    sources = list(target.layers)[-len(layers) :]
    if len(sources) < len(layers):
        return False
    found = []
    for own, source in zip(layers, sources):
        mine = {name: weight.shape for name, weight in own.named_parameters()}
        parts = source.state_dict()  # of packed layers too
        theirs = {name: _whole(weight) for name, weight in parts.items() if not name.endswith(".bias")}
        optional = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        if any(type(weight) is not Tensor for weight in theirs.values()):  # quantised
            return False
        if mine.keys() - theirs.keys() - optional or any(mine.get(name) != w.shape for name, w in theirs.items()):
            return False
        found += [(own, source, name, weight) for name, weight in theirs.items()]
    for own, source, name, weight in found:
        if weight.dim() == 1:
            weight = norm_scale(source.get_submodule(name.removesuffix(".weight")), len(weight))
        own.get_parameter(name).copy_(weight)
    return True


def _whole(weight: Tensor) -> Tensor:
    """Of a matrix that is split over processes all of it, which is a common act of theirs."""
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def projected_embedding(target: Target, width: int) -> nn.Embedding:
    """An embedding (V, width) that starts as a random orthogonal projection of the target's."""
    source = target.embedding.get_parameter("weight").detach().float()
    basis = nn.init.orthogonal_(torch.empty(source.shape[1], width))
    embedding = nn.Embedding(len(source), width)
    embedding.weight.data.copy_(source @ basis.to(source.device))
    return embedding
