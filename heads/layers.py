"""The decoder layer that drafters are made of: Llama's shape, with the tensor names that serving engines load.

A layer does not know whether it trains or decodes. It projects queries, keys and values of the tokens it is given and
asks a `Memory` to attend: `unroll.Unroll` in training, `own_cache.Recall` in decoding. Rotary frequencies are computed
in fp32 from the positions on every call and are no tensor of the module, so nothing can cast them.

Letters: R tokens, Q of them that ask, D width, Hq query heads, H key-value heads, d head width, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer."""

    width: int
    """D."""
    inner: int
    """I."""
    heads: int
    """Hq."""
    kv_heads: int
    """H; divides Hq."""
    head_width: int
    """d; even."""
    eps: float
    """Added to the mean square in every norm."""


class Memory(Protocol):
    """Where keys and values are kept, and what a query may see of them."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the new keys and values (R, H, d) and answer the queries (Q, Hq, d) -> (Q, Hq, d)."""
        ...


@dataclass(frozen=True)
class Rotation:
    """Rotary angles of R tokens (Su et al. 2021), neox layout: dimension i is paired with i + d/2."""

    cos: Tensor
    """(R, 1, d/2) float32."""
    sin: Tensor
    """(R, 1, d/2) float32."""

    @classmethod
    def at(cls, positions: Tensor, *, width: int, theta: float) -> Rotation:
        """positions: (R,) int64; width: d."""
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles = positions[:, None, None].float() * theta**-exponents
        return cls(angles.cos(), angles.sin())

    def of(self, index: Tensor | None) -> Rotation:
        """The rotation of some of the tokens, all if None."""
        return self if index is None else Rotation(self.cos[index], self.sin[index])

    def apply(self, x: Tensor) -> Tensor:
        """Turn (R, heads, d), in fp32; the result has x's dtype."""
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start of training.

    Where it reads more than it writes, x is taken through a learned linear map, which starts as the first entries of x.
    """

    def __init__(self, width: int, *, reads: int | None = None) -> None:
        super().__init__()
        reads = width if reads is None else reads
        self.linear = nn.Linear(reads, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.skip = None if reads == width else nn.Linear(reads, width)
        if self.skip is not None:
            nn.init.eye_(self.skip.weight)
            nn.init.zeros_(self.skip.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., reads) -> (..., width)."""
        return (x if self.skip is None else self.skip(x)) + F.silu(self.linear(x))


class Attention(nn.Module):
    """Grouped-query attention whose keys, values and visibility belong to a memory."""

    def __init__(self, shape: LayerShape, *, layer: int, reads: int) -> None:
        """layer: its number in the memory; reads: width of its input."""
        super().__init__()
        self.layer, self.head_width = layer, shape.head_width
        self.q_proj = nn.Linear(reads, shape.heads * shape.head_width, bias=False)
        self.k_proj = nn.Linear(reads, shape.kv_heads * shape.head_width, bias=False)
        self.v_proj = nn.Linear(reads, shape.kv_heads * shape.head_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Rotation, memory: Memory, ask: Tensor | None) -> Tensor:
        """x: (R, reads); ask: (Q,) int64, tokens that need an answer, all if None. Returns (Q, D)."""
        asking = x if ask is None else x[ask]
        query = turn.of(ask).apply(self._split(self.q_proj(asking)))
        key, value = turn.apply(self._split(self.k_proj(x))), self._split(self.v_proj(x))
        out: Tensor = self.o_proj(memory.attend(self.layer, query, key, value).flatten(-2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_width, self.head_width)


class _Block(nn.Module):
    """What every decoder layer ends with: attention and MLP, each added to the residual stream."""

    def __init__(self, shape: LayerShape, *, layer: int, reads: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape, layer=layer, reads=reads)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp = MLP(shape)

    def finish(self, read: Tensor, residual: Tensor, turn: Rotation, memory: Memory, ask: Tensor | None) -> Tensor:
        """`read` (R, reads) is attended to, `residual` (R, D) carries on. Returns (Q, D)."""
        kept = residual if ask is None else residual[ask]
        kept = kept + self.self_attn(read, turn, memory, ask)
        out: Tensor = kept + self.mlp(self.post_attention_layernorm(kept))
        return out


class DecoderLayer(_Block):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, shape: LayerShape, *, layer: int) -> None:
        """layer: its number in the memory."""
        super().__init__(shape, layer=layer, reads=shape.width)

    def forward(self, x: Tensor, turn: Rotation, memory: Memory, ask: Tensor | None = None) -> Tensor:
        """x: (R, D), the residual stream; ask: (Q,) int64, tokens that need an answer, all if None. Returns (Q, D)."""
        return self.finish(self.input_layernorm(x), x, turn, memory, ask)


class FusedLayer(_Block):
    """A decoder layer that attends to two streams side by side, [norm(embedding); norm(hidden)]; `hidden` carries on."""

    def __init__(self, shape: LayerShape, *, layer: int, norm_before_residual: bool) -> None:
        """norm_before_residual: what carries on is the normalised hidden instead of the raw one."""
        super().__init__(shape, layer=layer, reads=2 * shape.width)
        self.hidden_norm = RMSNorm(shape.width, shape.eps)
        self.norm_before_residual = norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, turn: Rotation, memory: Memory, ask: Tensor | None = None
    ) -> Tensor:
        """embedded, hidden: (R, D); ask as in `DecoderLayer`. Returns (Q, D)."""
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # (R, 2D)
        return self.finish(read, normed if self.norm_before_residual else hidden, turn, memory, ask)
