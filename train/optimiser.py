"""What moves the weights: AdamW, or Muon, which orthogonalises the momentum of every hidden matrix and leaves the rest to
AdamW.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable for LLM
Training" (arXiv 2502.16982), whose scale makes AdamW's learning rates and weight decay fit:

    M <- mu M + (1 - mu) G          G the gradient of a matrix (m, n)
    W <- W (1 - lr * decay) - lr * 0.2 sqrt(max(m, n)) * orthogonal(mu M + (1 - mu) G)

`torch.optim.Muon` is the same rule in bfloat16 alone, which processors without it multiply hundreds of times slower than
float32, and apart from AdamW, where engines and checkpoints want one optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..heads import TrainedDrafter
from ..infer.precision import has_bf16
from .recipe import Optimiser

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a X + b (X X') X + c (X X')^2 X: Jordan's quintic, steep at 0, which leaves singular values within about 0.7 to 1.2."""
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `"orthogonal": True`, of matrices only, follow Muon's rule instead."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every group."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("orthogonal")]
        try:
            loss: float | None = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("orthogonal"):
                self._move(group)
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(weight.grad)
                state["step"] = torch.tensor(0.0)  # AdamW looks for it when it is loaded
            momentum = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
            update = orthogonal(weight.grad.lerp(momentum, MOMENTUM))
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-0.2 * group["lr"] * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V' of a matrix (m, n) = U S V', by Newton-Schulz iterations, in float32 or, where the device multiplies it, in
    bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if has_bf16(matrix.device) else torch.float32)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def split(drafter: TrainedDrafter) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """A drafter's trained weights: the matrices of linear layers between hidden states, and all others (projections on
    tokens, embeddings, norms, biases)."""
    on_tokens = {id(weight) for weight in drafter.token_matrices}
    hidden = {
        id(layer.weight)
        for layer in drafter.modules()
        if isinstance(layer, nn.Linear) and layer.out_features > 1 and id(layer.weight) not in on_tokens
    }
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    return [weight for weight in trained if id(weight) in hidden], [
        weight for weight in trained if id(weight) not in hidden
    ]


def make_optimiser(
    settings: Optimiser, drafter: TrainedDrafter, *further: dict[str, Any], is_whole: bool
) -> torch.optim.AdamW:
    """The optimiser of a drafter's trained weights and of `further` parameter groups.

    is_whole: this process has every weight as it is, neither sharded nor flattened. Raises ValueError if Muon does not.
    """
    rule: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    fused = True if is_whole else None  # None: torch's or the engine's own choice
    if settings.name == "adamw":
        trained = [weight for weight in drafter.parameters() if weight.requires_grad]
        return torch.optim.AdamW([{"params": trained, "lr_share": 1.0}, *further], **rule, fused=fused)
    if not is_whole:
        raise ValueError(
            "optimiser.name muon needs whole matrices, which this launch shards or flattens. Train in one process or under "
            "configs/accelerate/ddp.yaml, or set optimiser.name to adamw."
        )
    hidden, others = split(drafter)
    if not hidden:
        raise ValueError("optimiser.name muon finds no linear layer between hidden states here; set it to adamw.")
    own = [{"params": hidden, "orthogonal": True}, {"params": others, "orthogonal": False}]
    groups = [group | {"lr_share": 1.0} for group in own if group["params"]]
    return Muon([*groups, *further], **rule, fused=fused)
