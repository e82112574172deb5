"""The frozen LLM whose output must not change: any transformers causal LM behind one call, no modelling code copied.

Letters: B rows, N tokens per row, T packed positions, D hidden, M taps, V vocabulary.

Taps are numbered as 0-based decoder-layer outputs, here and everywhere: tap 0 is the residual stream after the first
layer, and the last layer's tap is taken before the final norm.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import attention, embedded
from .cache import Decode, KVCache, Packed, Plan
from .tree import TokenTree

if TYPE_CHECKING:  # transformers' modelling code takes seconds to load; nothing here needs it before a model does
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Reading:
    """What the target computed at the tokens it read."""

    hidden: Tensor
    """(B, N, D): last hidden state after the final norm, the vector its head reads."""
    features: Tensor | None
    """(B, N, M*D): taps concatenated in ascending order; None if nothing was tapped."""


class Target:
    """A frozen causal LM with its tokenizer.

    Build it with `Target.load`; `Target(model, tokenizer)` wraps a model already in memory (tests, custom loading).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name: str = "in-memory"
    ) -> None:
        _refuse_recurrent(model)
        attention.register()
        self.name = name
        self.model = model.eval().requires_grad_(False)
        model.config._attn_implementation = attention.NAME
        self._tokenizer = tokenizer
        self.text_config = model.config.get_text_config(decoder=True)
        self.num_layers: int = self.text_config.num_hidden_layers
        self.hidden_size: int = self.text_config.hidden_size
        self.head: nn.Linear = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size: int = self.head.weight.shape[0]
        self.max_length: int = self.text_config.max_position_embeddings
        self._layers = _decoder_layers(model, self.num_layers)
        settings = self.text_config.to_dict()
        self._softcap: float | None = settings.get("final_logit_softcapping")
        self._logit_scale: float = settings.get("logit_scale") or 1.0 / (settings.get("logits_scaling") or 1.0)
        self._check_rebuilt_logits()

    @classmethod
    def load(cls, name: str, *, dtype: str = "float32", device: str | None = None) -> Target:
        """The target called `name`: `smollm2-135m` (embedded), a local folder, or a Hugging Face model id.

        dtype: float32, bfloat16 or float16. device: cuda where there is one, else cpu. Raises ValueError if the model
        cannot be found or loaded, with the reason.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = embedded.resolve(name)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"target {name!r} could not be loaded: {error}\nExpected `{embedded.NAME}`, a folder with config.json and "
                "weights, or a Hugging Face id that this machine can reach."
            ) from error
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        module: nn.Module = model  # its `to` is wrapped in a way that type checkers misread
        module.to(device)
        return cls(model, tokenizer, name=name)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("this target was built without a tokenizer; pass one to Target(model, tokenizer).")
        return self._tokenizer

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the generation config's list, else the tokenizer's or the model config's one."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if ids is None:
            ids = self.text_config.eos_token_id
        return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (int(ids),)

    @cached_property
    def template_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the chat template; empty if there is no tokenizer or template."""
        template = self._tokenizer.chat_template if self._tokenizer is not None else None
        return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""

    def fingerprint(self) -> dict[str, Any]:
        """What a drafter's checkpoint is bound to. `weights` hashes a sample of the head and of the last layer, in fp32
        rounded to bf16 so that one model in two precisions has one fingerprint."""
        architecture = {
            key: value
            for key, value in self.text_config.to_dict().items()
            if key.startswith(
                ("num_", "hidden", "intermediate", "vocab", "rope", "head_dim", "model_type", "tie_", "rms")
            )
        }
        sample = [self.head.weight[:64, :64], next(iter(self._layers[-1].parameters())).flatten()[:4096]]
        digest = hashlib.sha256()
        for tensor in sample:
            digest.update(tensor.detach().float().bfloat16().contiguous().view(torch.int16).cpu().numpy().tobytes())
        return {
            "name": self.name,
            "config": hashlib.sha256(json.dumps(architecture, sort_keys=True, default=str).encode()).hexdigest()[:16],
            "weights": digest.hexdigest()[:16],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "tied": any(parameter is self.head.weight for parameter in self.embedding.parameters()),
        }

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The target's logits for rows of its last hidden state: (..., D) -> (..., V), soft-cap and scale included.

        vocabulary: (W,) int64; only these tokens' logits are computed, (..., W).
        """
        if vocabulary is None:
            logits: Tensor = self.head(hidden)
        else:
            bias = self.head.bias
            logits = F.linear(hidden, self.head.weight[vocabulary], None if bias is None else bias[vocabulary])
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def read_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, *, taps: tuple[int, ...] = ()
    ) -> Reading:
        """Read whole documents without a cache: tokens, positions, segments (B, T) int64 (see `cache.Packed`)."""
        return self._forward(tokens, positions, Packed(segments, positions), cache=None, taps=taps)

    @torch.no_grad()
    def prefill(self, prompts: list[Tensor], cache: KVCache, *, first_row: int, taps: tuple[int, ...] = ()) -> Reading:
        """Read one prompt (1-D int64) into each of rows first_row.. of the cache, packed side by side without padding.

        Returns hidden and features of shape (1, sum of lengths, ...), prompts in order.
        """
        device = self.device
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.cat(prompts).to(device)[None]
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]
        segments = torch.repeat_interleave(torch.arange(1, len(prompts) + 1), torch.tensor(lengths)).to(device)[None]
        cache.reserve(max(lengths))
        rows = first_row + segments[0] - 1
        cache.write_at(rows * cache.capacity + positions[0], read=None)
        return self._forward(tokens, positions, Packed(segments, positions), cache=cache, taps=taps)

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

        lengths: (B,) int64, tokens each row has read; `longest` is their maximum, known to the host. Nodes are written
        to slots length..length+N-1; the caller commits the accepted ones (`KVCache.commit`). The first `skip` nodes are
        left out: an earlier call with the same lengths has read them.
        """
        batch, count = tree.tokens.shape
        span = longest + count
        cache.reserve(span)
        rows = torch.arange(first_row, first_row + batch, device=lengths.device)
        slots = (rows * cache.capacity + lengths)[:, None] + torch.arange(skip, count, device=lengths.device)
        plan = Decode(lengths, tree.depths, tree.ancestors[:, skip:], span=span, read=tree.read)
        cache.write_at(plan.pack(slots).flatten(), read=(first_row, batch, span))
        # Draft nodes may stand beyond the context, whose positions may not exist; they can never reach the text.
        positions = (lengths[:, None] + tree.depths[:, skip:]).clamp(max=self.max_length - 1)
        return self._forward(plan.pack(tree.tokens[:, skip:]), plan.pack(positions), plan, cache=cache, taps=taps)

    def _forward(
        self, tokens: Tensor, positions: Tensor, plan: Plan, *, cache: KVCache | None, taps: tuple[int, ...]
    ) -> Reading:
        with _Tapping(self._layers, taps) as tapped:
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


class _Tapping:
    """Collects the outputs of some layers during one forward."""

    def __init__(self, layers: nn.ModuleList, taps: tuple[int, ...]) -> None:
        if list(taps) != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < len(layers)):
            raise ValueError(
                f"taps must be ascending 0-based layer outputs below {len(layers)}, got {taps}. Sort them and drop repeats."
            )
        self._modules = [layers[tap] for tap in taps]
        self.outputs: list[Tensor] = []

    def __enter__(self) -> _Tapping:
        self._handles = [module.register_forward_hook(self._keep) for module in self._modules]
        return self

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    found = [layers for layers in lists if len(layers) == count]
    if not found:
        raise ValueError(f"{type(model).__name__} is not supported: it has no list of {count} decoder layers.")
    return found[0]


_RECURRENT = [
    "mamba",
    "rwkv",
    "linear_attention",
    "recurrent",
    "conv",
    "jamba",
    "lfm2",
    "bamba",
    "falcon_h1",
    "griffin",
]


def _refuse_recurrent(model: PreTrainedModel) -> None:
    """Recurrent state cannot be rolled back to before a rejected token, so such targets are refused, by name."""
    config = model.config.get_text_config(decoder=True)
    kinds = {str(kind) for kind in config.to_dict().get("layer_types") or ()} | {str(config.model_type)}
    bad = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
    if bad:
        raise ValueError(
            f"{type(model).__name__} keeps recurrent state ({', '.join(bad)}), which cannot be rolled back when a draft is rejected. "
            "draftsmith supports attention-only targets for now."
        )


def model_folder(name: str) -> Path:
    """Where the files of target `name` are, for tools that need the folder itself."""
    return Path(embedded.resolve(name))
