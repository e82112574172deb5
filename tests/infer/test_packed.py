"""Packing changes where a weight lies, never what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from draftsmith.infer import packed
from draftsmith.infer.packed import PackedLinear
from draftsmith.infer.target import Target

pytestmark = pytest.mark.skipif(
    not packed.is_packable(torch.zeros(1, dtype=torch.bfloat16)), reason="this CPU does not multiply bfloat16"
)


def linear(inputs: int = 96, outputs: int = 160, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def inputs(rows: int, width: int = 96) -> Tensor:
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 24, 64, 300])
def test_products_are_those_of_the_plain_layer(rows: int, bias: bool) -> None:
    plain = linear(bias=bias)
    result = PackedLinear(plain, keep_plain=False)(inputs(rows))
    torch.testing.assert_close(result, plain(inputs(rows)), rtol=2**-7, atol=2**-7)


def test_the_plain_weight_comes_back_bit_by_bit() -> None:
    plain = linear(97, 161, bias=True)
    layer = PackedLinear(plain, keep_plain=False)
    assert torch.equal(layer.weight, plain.weight)
    state = layer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_gradients_reach_the_inputs_and_autocast_works() -> None:
    plain = linear()
    layer = PackedLinear(plain, keep_plain=True)
    given, expected = (inputs(5).requires_grad_() for _ in range(2))
    layer(given).sum().backward()
    plain(expected).sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, expected.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(inputs(5).float()), plain(inputs(5)))


def test_copies_work_alone() -> None:
    layer = PackedLinear(linear(bias=True), keep_plain=False)
    expected = layer(inputs(3))
    assert torch.equal(copy.deepcopy(layer)(inputs(3)), expected)


def test_every_linear_layer_is_packed_and_an_embedding_stays_usable(build_target: Callable[..., Target]) -> None:
    model = copy.deepcopy(build_target(num_hidden_layers=2, tie_word_embeddings=True).model).bfloat16()
    tokens = torch.randint(0, 300, (1, 40))
    plain, state = Target(copy.deepcopy(model), None), model.state_dict()
    assert packed.pack(model) == 2 * 7 + 1
    target = Target(model, None)
    place = torch.arange(40)[None]
    read = [side.logits(side.read_packed(tokens, place, torch.ones_like(place)).hidden) for side in (plain, target)]
    torch.testing.assert_close(read[0], read[1], rtol=0.02, atol=0.02)
    assert target.fingerprint() == plain.fingerprint()
    assert target.head.weight is target.embedding.get_parameter("weight")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_float32_is_left_alone(build_target: Callable[..., Target]) -> None:
    assert packed.pack(copy.deepcopy(build_target(num_hidden_layers=2).model)) == 0
