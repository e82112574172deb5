"""Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1): LOSSY. The text is not a sample from the target.

A drafted token is kept where the target finds it likely enough for how unsure it is there:

    p(x) > min(epsilon, delta * exp(-H(p)))        H in nats, p after temperature, top-k and top-p

No randomness is spent on the draft, so likely drafted tokens come out more often than the target would draw them. The
longest accepted path wins; of equally long ones, the likelier. Unlike the original, whose first token is always the
argmax, the token that ends a round is drawn from the target properly, with its position's own noise: a round that
accepts nothing is plain sampling. Greedy rows (temperature 0) are exact: p is a point mass, so only its token passes.

Letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import Sampling
from .tree import TokenTree
from .verify import Verdict, trace


def typical_lossy(
    tree: TokenTree,
    logits: Tensor,
    lengths: Tensor,
    sampling: Sampling,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Keep what is typical. LOSSY. Arguments as every verifier; epsilon and delta default to the paper's values."""
    log_p = sampling.log_probs(logits)
    last = longest_typical(tree, log_p, epsilon=epsilon, delta=delta)
    rows = torch.arange(len(last), device=last.device)
    positions = (lengths + tree.depths[rows, last] + 1)[:, None]
    bonus = sampling.choose(logits[rows, last][:, None], positions)[:, 0]
    return trace(tree, last, bonus)


def longest_typical(tree: TokenTree, log_p: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """The last node (B,) int64 of the longest typical path. log_p: (B, N, V) float32 at the nodes."""
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=-1e4)).sum(dim=-1)  # (B, N); clamped so that 0 * -inf is 0
    threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    parents = tree.parents.clamp(min=0)
    rows = torch.arange(len(parents), device=parents.device)[:, None]
    log_x = log_p[rows, parents, tree.tokens].masked_fill(tree.parents < 0, 0.0)  # (B, N)
    passes = (log_x.exp() > threshold.gather(1, parents)) & tree.valid
    passes[:, 0] = True
    broken = (tree.ancestors & ~passes[:, None, :]).any(dim=-1)
    score = (tree.ancestors * log_x.clamp(min=-1e4)[:, None, :]).sum(dim=-1)  # (B, N): log-probability of the path
    deepest = torch.where(broken, -1, tree.depths)
    best = deepest == deepest.max(dim=1, keepdim=True).values
    return torch.where(best, score, -torch.inf).argmax(dim=1)
