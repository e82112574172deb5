"""d2t and t2d: the one layout of a reduced vocabulary that engines read right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.heads import Binding, TrainedDrafter, load_drafter
from draftsmith.infer.target import Target

from . import laws

MAP = torch.tensor([0, 2, 3, 7, 50, 299])


@pytest.fixture
def drafter(tiny_target: Target) -> TrainedDrafter:
    from draftsmith.heads.eagle3 import Eagle3, Eagle3Config

    return Eagle3(Eagle3Config(num_steps=2, draft_vocab_size=len(MAP)), tiny_target, token_map=MAP)


def test_d2t_is_an_offset_and_t2d_its_mask(drafter: TrainedDrafter) -> None:
    state = drafter.state_dict()
    assert state["d2t"].dtype == torch.int64
    assert (torch.arange(len(MAP)) + state["d2t"]).tolist() == MAP.tolist()
    assert state["t2d"].dtype == torch.bool
    assert state["t2d"].shape == (300,)
    assert state["t2d"].nonzero()[:, 0].tolist() == MAP.tolist()
    assert not any("vocabulary" in name for name in state)


def test_the_map_survives_saving_and_casting(drafter: TrainedDrafter, tiny_target: Target, tmp_path: Path) -> None:
    drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    again = load_drafter(tmp_path, tiny_target).to(torch.bfloat16)
    assert again.vocabulary.to_target(torch.arange(len(MAP))).tolist() == MAP.tolist()
    assert again.state_dict()["d2t"].dtype == torch.int64


def test_a_full_vocabulary_is_not_saved(tiny_target: Target) -> None:
    assert not {"d2t", "t2d"} & set(laws.build("eagle3", tiny_target).state_dict())


@pytest.mark.parametrize("fault", ["absolute", "zeros", "arange", "descending", "mask"])
def test_other_readings_of_d2t_are_refused(drafter: TrainedDrafter, fault: str) -> None:
    state = drafter.state_dict()
    ids = torch.arange(len(MAP))
    wrong = {
        "absolute": MAP,
        "zeros": torch.zeros_like(MAP),
        "arange": ids,
        "descending": MAP.flip(0) - ids,
        "mask": state["d2t"],
    }
    if fault == "mask":
        state["t2d"] = ~state["t2d"]
    with pytest.raises(ValueError, match=r"offset|token map"):
        drafter.load_state_dict(state | {"d2t": wrong[fault]})


def test_a_vocabulary_without_eos_is_refused(tiny_target: Target) -> None:
    from draftsmith.heads.eagle3 import Eagle3, Eagle3Config

    lacking = torch.tensor([0, 3, 7])
    assert not set(tiny_target.eos_ids) & set(lacking.tolist())
    with pytest.raises(ValueError, match="lacks the target's EOS"):
        Eagle3(Eagle3Config(draft_vocab_size=3), tiny_target, token_map=lacking)
