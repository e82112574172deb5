"""The target's decoder layers: which they are, how their outputs are tapped, and which kinds are refused.

Taps are numbered as 0-based decoder-layer outputs, here and everywhere: tap 0 is the residual stream after the first
layer, and the last layer's tap is taken before the final norm.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Tapping:
    """Collects the outputs of some layers during one forward of this thread; another one may run the same layers."""

    def __init__(self, layers: nn.ModuleList, taps: tuple[int, ...]) -> None:
        if list(taps) != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] < len(layers)):
            raise ValueError(
                f"taps must be ascending 0-based layer outputs below {len(layers)}, got {taps}. Sort them and drop repeats."
            )
        self._modules = [layers[tap] for tap in taps]
        self.outputs: list[Tensor] = []

    def __enter__(self) -> Tapping:
        self._thread = get_ident()
        self._handles = [module.register_forward_hook(self._keep) for module in self._modules]
        return self

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self.outputs.append(output[0] if isinstance(output, tuple) else output)

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's decoder layers. Raises ValueError if it has none that can be told from its other parts."""
    if model.config.is_encoder_decoder:
        found = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
        if len(found) != 1:
            raise ValueError(f"{type(model).__name__} is not supported: its decoder has {len(found)} lists of layers.")
        return found[0]
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    found = [layers for layers in lists if len(layers) == count]
    if not found:
        raise ValueError(f"{type(model).__name__} is not supported: it has no list of {count} decoder layers.")
    return found[0]


def final_scale(model: nn.Module, layers: nn.ModuleList, width: int) -> Tensor | None:
    """(D,) float32: what the norm after the last layer multiplies by; None if it has no weights. width: D."""
    body = next((module for module in model.modules() if any(child is layers for child in module.children())), None)
    children = list(body.named_children()) if body is not None else []
    place = next((place for place, (_, child) in enumerate(children) if child is layers), 0)
    before = [child for name, child in children[:place] if name.startswith("final")]  # OPT's
    after = [child for _, child in children[place + 1 :]]
    weights = [dict(child.named_parameters(recurse=False)).get("weight") for child in before + after]
    norms = [child for child, weight in zip(before + after, weights) if weight is not None and weight.shape == (width,)]
    return norm_scale(norms[-1], width) if norms else None


@torch.no_grad()
def norm_scale(norm: nn.Module, width: int) -> Tensor:
    """(D,) float32: what a norm over D entries multiplies by. width: D.

    Norms keep it in their own ways (Gemma as what is added to 1, a layer norm beside a shift), so it is read off what the
    norm makes of +1 and -1 in turn, whose mean is 0 and whose mean square is 1.
    """
    weight = norm.get_parameter("weight")
    signs = torch.ones(width, dtype=weight.dtype, device=weight.device)
    signs[1::2] = -1
    scale: Tensor = (norm(signs[None]) - norm(-signs[None]))[0] / 2 * signs
    return scale.float()


_RECURRENT = ("mamba", "rwkv", "linear_attention", "recurrent", "conv", "jamba", "lfm2", "bamba", "falcon_h1")


def refuse_recurrent(model: PreTrainedModel) -> None:
    """Recurrent state cannot be rolled back to before a rejected token, so such targets are refused, by name."""
    config = model.config.get_text_config(decoder=True)
    kinds = {str(kind) for kind in config.to_dict().get("layer_types") or ()} | {str(config.model_type)}
    bad = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
    if bad:
        raise ValueError(
            f"{type(model).__name__} keeps recurrent state ({', '.join(bad)}), which cannot be rolled back when a draft is rejected. "
            "draftsmith supports attention-only targets for now."
        )
