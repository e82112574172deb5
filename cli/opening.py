"""Targets and drafters as the options of a command ask for them, and what is said on stderr about how they were set up."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..heads import TrainedDrafter
    from ..infer.drafter import Drafter
    from ..infer.target import Target


def open_target(name: str, *, dtype: str, quantize: str | None = None, forwards: str = "eager") -> Target:
    """`Target.load`, its forwards as asked (see `Forwards`). Raises ValueError if that cannot be done, with the reason."""
    if forwards not in ("eager", "compiled", "graphs"):
        raise ValueError(f"--forwards must be eager, compiled or graphs, got {forwards!r}.")
    from ..infer.target import Target

    target = Target.load(name, dtype=dtype, quantize=quantize)
    if forwards == "eager":
        return target
    from ..infer.compiled import Compiled
    from ..infer.recorded import CudaGraphs, RecordedTarget

    recorder = Compiled() if forwards == "compiled" else CudaGraphs()
    return RecordedTarget(target, recorder, say=partial(print, file=sys.stderr))


def check_tree(tree: str) -> None:
    """Raise ValueError unless `tree` is one that `open_drafter` takes."""
    if tree not in ("fit", "chain", "saved") and not (tree.isdecimal() and int(tree) > 0):
        raise ValueError(f"--tree must be fit, chain, saved or a number of nodes, got {tree!r}.")


def open_drafter(
    name: str,
    target: Target,
    *,
    tree: str,
    rows: int,
    verifier: str = "sample-match",
    schedule: str = "none",
    quantize: str | None = None,
) -> Drafter:
    """The drafter called `name` (see `infer.drafters`), drafting what `verifier` judges.

    tree: which static tree a trained one drafts (see `Tree`); `rows` is the batch size that `fit` and a schedule optimise
    for. schedule: see `ScheduleRule`; other than none it has a trained drafter draft its chain. quantize: int8 or int4
    weights. Raises ValueError if there is no such drafter, or it fits neither the target nor the verifier.
    """
    check_tree(tree)
    from ..infer.drafters import COPIES

    if name.endswith(COPIES):
        return _grafted(name, target, tree=tree, rows=rows, verifier=verifier, schedule=schedule, quantize=quantize)
    if schedule not in ("none", "early-stop", "budget"):
        raise ValueError(f"--schedule must be none, early-stop or budget, got {schedule!r}.")
    from ..infer.drafters import make_drafter
    from ..infer.verifiers import verifier_named

    draws, schedule = verifier_named(verifier).draws, schedule_for(name, schedule)
    if draws and name != "none" and not name.startswith("draft:"):
        raise ValueError(
            f"--verifier {verifier} judges drafts by the probabilities they were drawn with, and {name} gives none. Use "
            "--verifier sample-match, which is exact for every drafter, or --drafter draft:MODEL (a draft model that "
            "draftsmith trained is a model folder too)."
        )

    if schedule != "none" and name.startswith("draft:") and target.is_encoder_decoder:
        raise ValueError("--schedule does not know encoder-decoder draft models yet; leave it out.")
    measured: dict[str, Any] = {}

    def load_trained(folder: Path, target: Target) -> Drafter:
        from ..heads import load_drafter

        drafter = load_drafter(folder, target, is_packed=quantize is None)
        if quantize is not None:
            _quantize(drafter, quantize, target)
        measured.update(drafter.measured)
        if tree == "chain" or schedule != "none":
            drafter.use_chain()
            return drafter
        if tree.isdecimal():
            return _sized(drafter, int(tree))
        return _fitted(drafter, target, rows=rows) if tree == "fit" else drafter

    shape: Literal["", "chain", "tree"] = "chain" if draws and tree == "chain" else draws
    if name.partition(":")[0] == "mtp":
        drafter = _own_layer(name, target, quantize=quantize)
    else:
        drafter = make_drafter(name, target, load_trained, draws=shape, quantize=quantize)
    if schedule != "none":
        return _scheduled(drafter, target, rule=schedule, rows=rows, measured=measured)
    return _standing_by(drafter, target, rows=rows) if name == "lookahead" else drafter


def _grafted(name: str, target: Target, *, tree: str, rows: int, verifier: str, **options: Any) -> Drafter:
    """The drafter before the plus sign with copies grafted on: whole, or as far as that pays where the tree is fitted to this
    machine too. Lookahead, whose draft is large and often in vain, is always weighed."""
    from ..infer.drafters import COPIES, check_graft, copier, make_drafter
    from ..infer.grafted import Grafted
    from ..infer.verifiers import verifier_named

    check_graft(name, draws=verifier_named(verifier).draws)
    inner_name = name.removesuffix(COPIES)
    if inner_name == "lookahead" and options["schedule"] == "none":
        inner = make_drafter(inner_name, target, quantize=options["quantize"])
    else:
        inner = open_drafter(inner_name, target, tree=tree, rows=rows, verifier=verifier, **options)
        needs_prompt = target.is_encoder_decoder and inner_name.startswith("draft:")  # to be timed, and a real one
        if tree != "fit" or needs_prompt:
            return Grafted(inner, copier(target))
    grafted = Grafted.measure(inner, copier(target), target, rows=rows)
    print("copies: grafted as far as their own record says that it pays", file=sys.stderr)
    return grafted


def schedule_for(name: str, asked: str) -> str:
    """The rule by which drafts are cut. Prompt lookup's cost nothing to make, so how far to verify them is all there is to
    decide; being a function of the text, they may be cut by the best rule there is."""
    return "best" if name == "prompt-lookup" and asked == "none" else asked


def _quantize(drafter: TrainedDrafter, kind: str, target: Target) -> None:
    from ..infer import quantized

    if kind != "int8":
        raise ValueError(f"a trained drafter can be quantised to int8, got {kind!r}; draft:MODEL to int4 too.")
    quantized.check_kind(kind, target.device)
    quantized.quantize(drafter, kind, keep=[target.head.weight, *drafter.indexed], device=target.device)


def _own_layer(name: str, target: Target, *, quantize: str | None) -> Drafter:
    """`mtp`, or `mtp:K` for chains of K tokens."""
    if quantize is not None:
        raise ValueError("--quantize-drafter: mtp drafts with a layer of the target itself; leave the option out.")
    from ..heads.mtp import Mtp
    from ..infer.tree import Topology

    length = name.partition(":")[2] if ":" in name else "3"
    if not length.isdecimal() or int(length) < 1:
        raise ValueError(f"--drafter mtp:K drafts K tokens, 1 or more, got {name!r}; mtp alone drafts 3.")
    return Mtp(target, topology=Topology.chain(int(length)))


def _scheduled(drafter: Drafter, target: Target, *, rule: str, rows: int, measured: dict[str, Any]) -> Drafter:
    """The drafter, its chains cut by `rule`; says by what, on stderr."""
    from ..infer.calibration import Calibration
    from ..infer.schedule import Scheduled

    known = measured.get("confidence")
    calibration = None if known is None else Calibration.from_dict(known)
    scheduled = Scheduled.measure(drafter, target, rows=rows, rule=rule, calibration=calibration)
    times = ", ".join(f"{count}: {1e3 * seconds:.0f}" for count, seconds in sorted(scheduled.seconds.items()))
    if rule == "best":
        source = "copies are verified as far as their own record says that it pays"
    elif calibration is None:
        source = "confidences as the drafter gives them (draftsmith calibrate measures what they are worth)"
    else:
        source = f"confidences calibrated on {calibration.rounds} rounds at temperature {calibration.temperature:g}"
    print(f"schedule: {rule}, {source}; ms of a step by tokens verified: {times}", file=sys.stderr)
    return scheduled


def _standing_by(drafter: Drafter, target: Target, *, rows: int) -> Drafter:
    """The drafter, silent while it does not pay; says at what tau it does, on stderr."""
    from ..infer.standby import Standby

    standby = Standby.measure(drafter, target, rows=rows)
    print(
        f"lookahead: drafts of {standby.nodes} nodes pay above tau {standby.needs(1):.2f}"
        + (f" alone and {standby.needs(rows):.2f} with {rows} rows" if rows > 1 else "")
        + "; rounds are plain while their record is below",
        file=sys.stderr,
    )
    return standby


def _sized(drafter: TrainedDrafter, num_nodes: int) -> Drafter:
    """The drafter with the tree of so many nodes that is expected to keep most; says what that is, on stderr."""
    from ..heads.fit import size_tree

    tau = size_tree(drafter, num_nodes)
    print(f"tree: {num_nodes} nodes as asked, expected tau {tau:.2f} (from held-out accuracies)", file=sys.stderr)
    return drafter


def _fitted(drafter: TrainedDrafter, target: Target, *, rows: int) -> Drafter:
    """The drafter with the tree that is fastest here, or none where drafting does not pay; says which, on stderr."""
    from ..heads.fit import fit_tree
    from ..infer.drafter import NoDraft

    fit = fit_tree(drafter, target, rows=rows)
    if fit is None:
        print("tree: as saved; the drafter carries no measured accuracies to fit one to", file=sys.stderr)
        return drafter
    if not fit.topology.paths:
        print("tree: none; drafting does not pay on this machine, decoding plainly", file=sys.stderr)
        return NoDraft()
    print(
        f"tree: {len(fit.topology.paths)} nodes, depth {fit.topology.depth}, expected tau {fit.expected_tau:.2f} "
        "(from held-out accuracies and this machine's verification times)",
        file=sys.stderr,
    )
    return drafter
