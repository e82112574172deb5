"""The tree a trained drafter drafts: as saved, a chain, or fitted to this machine; and copies grafted onto it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli.opening import open_drafter
from draftsmith.heads import METHODS, Binding, fit
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.grafted import Grafted
from draftsmith.infer.target import Target

from ..heads.laws import SMALL


def saved(target: Target, folder: Path, accuracy: list[list[float]]) -> str:
    """A Medusa drafter on disk that claims these rank accuracies."""
    config, method = METHODS["medusa"]
    binding = Binding(target=target.fingerprint(), template_hash="", measured={"rank_accuracy": accuracy})
    method(config(**SMALL["medusa"]), target).save(folder, binding=binding)
    return str(folder)


def test_fit_drafts_a_deep_tree_where_heads_are_right(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose verification time does not grow with the tree, whatever else this one is doing."""
    monkeypatch.setattr(fit, "verify_seconds", lambda target, *, rows: {1: 1.0, 8: 1.0})
    name = saved(tiny_target, tmp_path, [[0.99, 0.0]] * 3)
    drafter = open_drafter(name, tiny_target, tree="fit", rows=1)
    assert not isinstance(drafter, NoDraft)
    assert "depth 3, expected tau 3.9" in capsys.readouterr().err


def test_fit_decodes_plainly_where_heads_are_never_right(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = saved(tiny_target, tmp_path, [[0.0, 0.0]] * 3)
    assert isinstance(open_drafter(name, tiny_target, tree="fit", rows=1), NoDraft)
    assert "drafting does not pay" in capsys.readouterr().err


def test_without_measured_accuracies_the_saved_tree_is_kept_and_it_says_so(
    tiny_target: Target, drafter_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not isinstance(open_drafter(str(drafter_dir), tiny_target, tree="fit", rows=1), NoDraft)
    assert "tree: as saved" in capsys.readouterr().err


def test_saved_and_chain_measure_nothing(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = saved(tiny_target, tmp_path, [[0.0]])
    for tree in ("saved", "chain"):
        assert not isinstance(open_drafter(name, tiny_target, tree=tree, rows=1), NoDraft)
    assert capsys.readouterr().err == ""


def test_a_number_is_the_best_tree_of_that_size(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths are worth .6, .36 (below it), .2, .12 (below .6, second), .12 (below .2, first), .04."""
    name = saved(tiny_target, tmp_path, [[0.6, 0.2]] * 2)
    drafter: Any = open_drafter(name, tiny_target, tree="3", rows=1)
    assert set(drafter.topology.paths) == {(0,), (0, 0), (1,)}
    assert "tree: 3 nodes as asked, expected tau 2.16" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no tree of 7 nodes: the measured accuracies reach 6"):
        open_drafter(name, tiny_target, tree="7", rows=1)


def test_a_number_needs_measured_accuracies(tiny_target: Target, drafter_dir: Path) -> None:
    with pytest.raises(ValueError, match="carries no measured accuracies to choose a tree by"):
        open_drafter(str(drafter_dir), tiny_target, tree="3", rows=1)


def test_copies_are_grafted_whole_onto_a_tree_that_was_asked_for_and_by_cost_onto_a_fitted_one(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = saved(tiny_target, tmp_path, [[0.6, 0.2]] * 2) + "+prompt-lookup"
    whole = open_drafter(name, tiny_target, tree="3", rows=1)
    assert isinstance(whole, Grafted)
    assert whole.seconds is None
    fitted = open_drafter(name, tiny_target, tree="fit", rows=2)
    assert isinstance(fitted, Grafted)
    assert fitted.seconds is not None
    assert "copies: grafted as far as their own record says that it pays" in capsys.readouterr().err
