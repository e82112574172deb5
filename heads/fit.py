"""Fits a drafter's static tree to this machine: measured rank accuracies against the measured cost of verification."""

from __future__ import annotations

from dataclasses import dataclass

from ..infer.cost import draft_seconds, verify_seconds
from ..infer.target import Target
from ..infer.tree import Topology
from ..infer.tree_search import choose_tree, grow
from .base import TrainedDrafter


@dataclass(frozen=True)
class Fit:
    """The chosen tree and why."""

    topology: Topology
    expected_tau: float
    seconds: dict[int, float]
    """Measured seconds of a target forward by tree size."""
    draft_seconds: float


def fit_tree(drafter: TrainedDrafter, target: Target, *, rows: int = 1, host_seconds: float = 1e-3) -> Fit | None:
    """Choose the tree with the most expected tokens per second and make the drafter use it.

    None, with the drafter unchanged, if its checkpoint carries no rank accuracies. rows: batch size to optimise for.
    Takes a few seconds. An empty tree means that drafting does not pay here: the loop then decodes plainly.
    """
    accuracy = drafter.measured.get("rank_accuracy")
    if not accuracy:
        return None
    seconds = verify_seconds(target, rows=rows)
    drafter.use_chain()
    _, draft = draft_seconds(drafter, target, rows=rows)
    topology, tau = choose_tree(accuracy, seconds=seconds, overhead=draft + host_seconds)
    drafter.use_tree(topology)
    return Fit(topology, tau, seconds, draft)


def size_tree(drafter: TrainedDrafter, num_nodes: int) -> float:
    """Make the drafter use the best tree of `num_nodes` draft tokens, whatever it costs; returns its expected tau.

    Raises ValueError if the checkpoint carries no rank accuracies or they reach no so large tree.
    """
    accuracy = drafter.measured.get("rank_accuracy")
    if not accuracy:
        raise ValueError(
            "the drafter carries no measured accuracies to choose a tree by; use its saved tree or a chain."
        )
    ranked = grow(accuracy, num_nodes=num_nodes)
    if len(ranked) < num_nodes:
        raise ValueError(f"no tree of {num_nodes} nodes: the measured accuracies reach {len(ranked)}. Ask for fewer.")
    drafter.use_tree(Topology(tuple(path for path, _ in ranked)))
    return 1.0 + sum(value for _, value in ranked)
