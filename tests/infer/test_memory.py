"""Bytes of a model's weights: tied matrices once, packed ones as packed."""

from __future__ import annotations

import torch
from torch import nn

from draftsmith.infer import packed
from draftsmith.infer.memory import num_bytes
from draftsmith.infer.precision import has_bf16


def test_every_tensor_counts_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    assert num_bytes(model) == 4 * (40 + 8)
    assert num_bytes(model.half()) == 2 * (40 + 8)
    model.register_buffer("more", torch.zeros(3, dtype=torch.int64))
    assert num_bytes(model) == 2 * (40 + 8) + 24


def test_packing_changes_no_sum_but_that_of_shared_matrices() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Embedding(16, 32), nn.Linear(32, 16, bias=False))
    model.to(torch.bfloat16 if has_bf16("cpu") else torch.float32)
    model[2].weight = model[1].weight
    before = num_bytes(model.requires_grad_(False))
    assert packed.pack(model) == 2
    assert num_bytes(model) == before + model[2].weight.nbytes
