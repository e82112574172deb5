"""Packing changes where a weight lies, never what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from draftsmith.infer import packed
from draftsmith.infer.packed import PackedLinear
from draftsmith.infer.precision import has_bf16
from draftsmith.infer.target import Target

FAST, OTHER = (torch.bfloat16, torch.float32) if has_bf16("cpu") else (torch.float32, torch.bfloat16)
NEAR = {"rtol": 2**-7, "atol": 2**-7} if torch.bfloat16 == FAST else {"rtol": 1e-4, "atol": 1e-4}


def linear(inputs: int = 96, outputs: int = 160, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(FAST).requires_grad_(False)


def inputs(rows: int, width: int = 96) -> Tensor:
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(rows)).to(FAST)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 24, 64, 300])
def test_products_are_those_of_the_plain_layer(rows: int, bias: bool) -> None:
    plain = linear(bias=bias)
    result = PackedLinear(plain, keep_plain=False)(inputs(rows))
    torch.testing.assert_close(result, plain(inputs(rows)), **NEAR)


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
        assert torch.equal(layer(inputs(5).float()), plain(inputs(5).float()))


class Sides(nn.Module):
    """Three layers side by side, as in attention."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(outputs=width, bias=bias) for width in (160, 64, 32))

    def all(self, *read: Tensor) -> list[Tensor]:
        """What the three make of these tensors, or of one tensor all three."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [layer(tensor) for layer, tensor in zip(layers, read * 3 if len(read) == 1 else read)]


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_read_the_same_tensor_are_multiplied_as_one(bias: bool) -> None:
    plain, sides = Sides(bias=bias), Sides(bias=bias)
    assert packed.pack(sides) == 3
    other = inputs(5) * 2
    for read in ([inputs(5)], [inputs(5), other, other], [other, inputs(5), other], [inputs(5), inputs(5), inputs(5)]):
        for found, expected in zip(sides.all(*read), plain.all(*read)):
            torch.testing.assert_close(found, expected, **NEAR)
    sides.q_proj(other)  # asked alone, its neighbours' shares are dropped with the next tensor
    for found, expected in zip(sides.all(inputs(5)), plain.all(inputs(5))):
        torch.testing.assert_close(found, expected, **NEAR)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(sides.state_dict()[name], tensor)
    again = copy.deepcopy(sides)
    assert all(torch.equal(one, two) for one, two in zip(again.all(inputs(5)), sides.all(inputs(5))))


def test_one_product_serves_neighbours_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sides, calls = Sides(), []
    packed.pack(sides)
    matrix = sides.get_submodule("q_proj")._matrix
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *given: calls.append(1) or product(*given))
    read = inputs(5)
    sides.all(read)
    assert len(calls) == 1
    assert matrix._last is None, "held on to what it read"
    sides.all(read)
    assert len(calls) == 2, "a tensor read again may have other numbers in it"


def test_a_layer_that_asks_again_gets_what_the_tensor_holds_by_then() -> None:
    """As after a forward that an error cut short, where inputs live in a buffer that is filled anew."""
    plain, sides = Sides(), Sides()
    packed.pack(sides)
    buffer = inputs(5)
    sides.q_proj(buffer)
    buffer.copy_(inputs(5) * 3)
    for found, expected in zip(sides.all(buffer), plain.all(buffer)):
        torch.testing.assert_close(found, expected, **NEAR)


def test_layers_stay_apart_where_that_is_asked() -> None:
    sides = Sides()
    assert packed.pack(sides, together=False) == 3
    assert {part._matrix.num_layers for part in sides.children() if isinstance(part, PackedLinear)} == {1}


def test_copies_work_alone() -> None:
    layer = PackedLinear(linear(bias=True), keep_plain=False)
    expected = layer(inputs(3))
    assert torch.equal(copy.deepcopy(layer)(inputs(3)), expected)


def test_every_linear_layer_is_packed_and_an_embedding_stays_usable(build_target: Callable[..., Target]) -> None:
    model = copy.deepcopy(build_target(num_hidden_layers=2, tie_word_embeddings=True).model).to(FAST)
    tokens = torch.randint(0, 300, (1, 40))
    plain, state = Target(copy.deepcopy(model), None), model.state_dict()
    assert packed.pack(model) == 2 * 7 + 1
    target = Target(model, None)
    place = torch.arange(40)[None]
    read = [side.logits(side.read_packed(tokens, place, torch.ones_like(place)).hidden) for side in (plain, target)]
    torch.testing.assert_close(read[0], read[1], rtol=2.5 * NEAR["rtol"], atol=2.5 * NEAR["atol"])
    assert target.fingerprint() == plain.fingerprint()
    assert target.head.weight is target.embedding.get_parameter("weight")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_unpacked_again_it_is_the_model_that_it_was(build_target: Callable[..., Target]) -> None:
    whole = copy.deepcopy(build_target(num_hidden_layers=2, tie_word_embeddings=True).model).to(FAST)
    model = copy.deepcopy(whole)
    assert packed.pack(model) > 0
    packed.unpack(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in whole.modules()]
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), whole.state_dict().values()))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_slower_precision_is_left_alone(build_target: Callable[..., Target]) -> None:
    assert packed.pack(copy.deepcopy(build_target(num_hidden_layers=2).model).to(OTHER)) == 0
