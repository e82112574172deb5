"""A reduced draft vocabulary as serving engines load it: `d2t`, an OFFSET (target id = i + d2t[i]), and the mask `t2d`.

Absolute ids, arange and zeros have all been shipped under the name d2t; here both tensors are checked against each other
when they are loaded.

Letters: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from .base import TrainedDrafter
from .vocabulary import DraftVocabulary


def keep_as_offsets(drafter: TrainedDrafter, vocabulary: DraftVocabulary) -> None:
    """Save the vocabulary of `drafter` (its attribute `vocabulary`) as d2t (W,) int64 and t2d (V,) bool, nothing else of it.

    The identity, a vocabulary that is not reduced, is not saved at all.
    """
    token_map = vocabulary.token_map
    if token_map is None:
        return
    vocabulary.register_buffer("token_map", token_map, persistent=False)  # follows from d2t
    drafter.register_buffer("d2t", token_map - torch.arange(len(token_map)))
    is_drafted = torch.zeros(vocabulary.target_size, dtype=torch.bool)
    drafter.register_buffer("t2d", is_drafted.index_fill(0, token_map, True))
    drafter.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]


def _restore(drafter: nn.Module, incompatible: object) -> None:
    """The token map of the d2t that was loaded. Raises ValueError if d2t and t2d are not one map's."""
    d2t, t2d, vocabulary = drafter.get_buffer("d2t"), drafter.get_buffer("t2d"), drafter.get_submodule("vocabulary")
    assert isinstance(vocabulary, DraftVocabulary)
    token_map = d2t + torch.arange(len(d2t), device=d2t.device)
    vocabulary.check(token_map)
    if not torch.equal(t2d.nonzero()[:, 0], token_map):
        raise ValueError(
            "the tensors d2t and t2d describe different draft vocabularies; d2t holds offsets: target id = i + d2t[i]. "
            "Export the drafter again."
        )
    vocabulary.register_buffer("token_map", token_map, persistent=False)
