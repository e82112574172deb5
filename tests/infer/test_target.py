"""The target adapter: every architecture, every plan, against the model's own forward."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import Tensor

from draftsmith.infer.attention import _together
from draftsmith.infer.cache import Decode, KVCache, Packed
from draftsmith.infer.decode import Engine, Request
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.sampling import Sampling
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree, Topology
from draftsmith.infer.verify import score

from .architectures import ARCHITECTURES, VOCAB, build

PATHS = Topology(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)))


@pytest.fixture(params=list(ARCHITECTURES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def own_logits(model: hf.PreTrainedModel, ids: list[int]) -> Tensor:
    """(V,): the unwrapped model's logits after `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def stock(name: str) -> hf.PreTrainedModel:
    model = build(name)
    model.config._attn_implementation = "eager"
    return model


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_tree_node_gets_the_logits_of_its_own_path(name: str) -> None:
    """Rows of different lengths, longer than any sliding window, side by side in one forward."""
    target, alone = Target(build(name), None), stock(name)
    cache = KVCache(rows=3, capacity=64)
    prompts = [random_ids(count, seed=count) for count in (14, 5, 21)]
    target.prefill([torch.tensor(ids) for ids in prompts], cache, first_row=0)
    anchors = torch.tensor([7, 8, 9])
    candidates = torch.randint(3, VOCAB, (3, 3, 3), generator=torch.Generator().manual_seed(1))
    tree = PATHS.fill(anchors, candidates)
    lengths = torch.tensor([len(ids) for ids in prompts])
    logits = target.logits(target.verify(tree, lengths, cache, longest=21).hidden)
    for row, ids in enumerate(prompts):
        for node in range(tree.num_nodes):
            path = [tree.tokens[row, j].item() for j in range(node + 1) if tree.ancestors[row, node, j]]
            torch.testing.assert_close(logits[row, node], own_logits(alone, ids + path), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("drafted", "num_pieces"), [((2, 0, 4), 1), ((0, 0, 4), 2)], ids=["at once", "in pieces"])
def test_nodes_that_are_not_read_cost_nothing_and_change_nothing(
    drafted: tuple[int, ...], num_pieces: int, name: str
) -> None:
    """Drafts of different lengths side by side: the others' logits stay, and the model never sees what was left out."""
    target = Target(build(name), None)
    prompts = [random_ids(count, seed=count) for count in (14, 5, 21)]
    tree = TokenTree.chain(torch.tensor([7, 8, 9]), torch.tensor([random_ids(4, seed=seed) for seed in (1, 2, 3)]))
    read = torch.arange(5) <= torch.tensor(drafted)[:, None]
    plan = Decode(torch.tensor([14, 5, 21]), tree.depths, tree.ancestors, span=26, read=read)
    assert len(plan.pieces) == num_pieces
    results, widths = [], []
    hook = target.model.base_model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].numel()), with_kwargs=True
    )
    for part in (tree, replace(tree, valid=read, read=read)):
        cache = KVCache(rows=3, capacity=64)
        target.prefill([torch.tensor(ids) for ids in prompts], cache, first_row=0)
        reading = target.verify(part, torch.tensor([14, 5, 21]), cache, longest=21, taps=(0, 2))
        results.append((score(target, part, reading.hidden), reading))
    hook.remove()
    assert widths == [64, 15, 64, 3 + sum(drafted)]
    (whole, everything), (part, some) = results
    torch.testing.assert_close(part[read], whole[read], atol=2e-4, rtol=1e-4)
    assert bool((part[~read] == 0).all())
    assert everything.features is not None
    assert some.features is not None
    torch.testing.assert_close(some.features[read], everything.features[read], atol=2e-4, rtol=1e-4)


def test_a_root_that_is_read_alone() -> None:
    """Everything that a drafter proposed was left out, but the tree still has its nodes."""
    target = Target(build("llama"), None)
    tree = TokenTree.chain(torch.tensor([7, 8]), torch.tensor([random_ids(5, seed=seed) for seed in (1, 2)]))
    read = (torch.arange(6) == 0).expand(2, -1)
    states = []
    for part in (replace(tree, valid=read, read=read), TokenTree.root(tree.tokens[:, 0])):
        cache = KVCache(rows=2, capacity=64)
        target.prefill([torch.tensor(random_ids(9, seed=3))] * 2, cache, first_row=0)
        states.append(target.verify(part, torch.tensor([9, 9]), cache, longest=9).hidden[:, 0])
    torch.testing.assert_close(*states)


def test_short_rows_are_not_read_as_far_as_long_ones() -> None:
    """The first eight rows end long before the last does: what lies in their slots behind counts for nothing, not even
    if it is no number."""
    target, lengths = Target(build("llama"), None), torch.tensor([3, 9] * 4 + [40, 20])
    prompts = [torch.tensor(random_ids(count, seed=count)) for count in lengths.tolist()]
    tree = TokenTree.chain(torch.full((10,), 7), torch.full((10, 2), 8))
    plan = Decode(lengths, tree.depths, tree.ancestors, span=64)
    assert plan.reach is not None
    assert _together(plan.reach.tolist()) == [(slice(0, 8), 12), (slice(8, 10), 43)]
    found = []
    for junk in (0.0, torch.nan):
        cache = KVCache(rows=10, capacity=64)
        target.prefill(prompts, cache, first_row=0)
        for buffer in (*cache.keys, *cache.values):
            buffer.view(buffer.shape[0], 10, 64, -1)[:, :8, 12:] = junk
        found.append(target.verify(tree, lengths, cache, longest=40).hidden)
    assert found[1].isfinite().all()
    assert torch.equal(*found)
    alone = target.verify(
        replace(tree, tokens=tree.tokens[:1], parents=tree.parents[:1], valid=tree.valid[:1]),
        lengths[:1],
        cache,
        longest=3,
    )
    torch.testing.assert_close(alone.hidden, found[0][:1], atol=2e-4, rtol=1e-4)


def test_documents_side_by_side_attend_one_by_one_where_they_are_short() -> None:
    segments = torch.tensor([[1] * 5 + [2] * 3 + [0] * 2, [3] * 4 + [4] * 6])
    positions = torch.tensor([[*range(5), *range(3), 0, 0], [*range(4), *range(6)]])
    nodes = [(0, 0, 5), (0, 5, 8), (1, 0, 4), (1, 4, 10)]
    assert Packed(segments, positions).pieces == tuple(
        (slice(row, row + 1), slice(start, end), slice(start, end)) for row, start, end in nodes
    )
    assert len(Packed(segments[1:], positions[1:]).pieces) == 1, "16 + 36 of 100 scores are not worth two calls"


def test_packed_documents_do_not_see_each_other(name: str) -> None:
    target, alone = Target(build(name), None), stock(name)
    documents = [random_ids(count, seed=count) for count in (11, 17)]
    tokens = torch.tensor([documents[0] + documents[1] + [0, 0]])
    segments = torch.tensor([[1] * 11 + [2] * 17 + [0] * 2])
    positions = torch.tensor([[*range(11), *range(17), 0, 0]])
    logits = target.logits(target.read_packed(tokens, positions, segments).hidden)
    torch.testing.assert_close(logits[0, 10], own_logits(alone, documents[0]), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0, 27], own_logits(alone, documents[1]), atol=2e-4, rtol=1e-4)
    assert logits.isfinite().all()


def test_plain_decoding_equals_stock_generate(name: str) -> None:
    """Rows join and leave (2 at a time), prompts and answers run past the sliding window."""
    engine, alone = Engine(Target(build(name), None), rows=2), stock(name)
    prompts = [random_ids(count, seed=count) for count in (3, 12, 7, 20, 5)]
    for index, ids in enumerate(prompts):
        engine.add(Request(str(index), ids, 10 + 5 * index))
    outputs = {int(output.id): output for output in engine.run()}
    for index, ids in enumerate(prompts):
        expected = alone.generate(torch.tensor([ids]), max_new_tokens=10 + 5 * index, do_sample=False)[0, len(ids) :]
        assert outputs[index].tokens == expected.tolist()


def test_taps_are_zero_based_layer_outputs(name: str) -> None:
    target, alone = Target(build(name), None), stock(name)
    ids = random_ids(9, seed=3)
    tokens, positions = torch.tensor([ids]), torch.arange(9)[None]
    reading = target.read_packed(tokens, positions, torch.ones_like(tokens), taps=(0, 2))
    with torch.no_grad():
        states = alone(tokens, output_hidden_states=True).hidden_states  # index 0 is the embedding
    assert reading.features is not None
    torch.testing.assert_close(reading.features, torch.cat([states[1], states[3]], dim=-1), atol=2e-4, rtol=1e-4)


def test_taps_must_ascend_and_exist() -> None:
    target = Target(build("llama"), None)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    for taps in ((2, 1), (1, 1), (0, 4), (-1, 2)):
        with pytest.raises(ValueError, match="ascending 0-based"):
            target.read_packed(tokens, torch.arange(3)[None], tokens, taps=taps)


def test_a_prompt_longer_than_one_prefill_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.infer import decode

    target = Target(build("llama"), None)
    ids = random_ids(50, seed=4)
    texts = []
    for budget in (2048, 16):
        monkeypatch.setattr(decode, "PREFILL_TOKENS", budget)
        engine = Engine(target, rows=2)
        engine.add(Request("long", ids, 12))
        engine.add(Request("other", ids[:9], 12))
        texts.append({output.id: output.tokens for output in engine.run()})
    assert texts[0] == texts[1]


def test_recurrent_targets_are_refused_by_name() -> None:
    config = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps recurrent state \(mamba\)"):
        Target(hf.MambaForCausalLM(config), None)


def test_cache_growth_keeps_what_was_written() -> None:
    model = build("llama")
    texts = []
    for capacity in (8, 200):
        target = Target(copy.deepcopy(model), None)
        engine = Engine(target, rows=2)
        engine.cache = KVCache(rows=2, capacity=capacity)
        for index in range(3):
            engine.add(Request(str(index), random_ids(6, seed=index), 60))
        texts.append({output.id: output.tokens for output in engine.run()})
    assert texts[0] == texts[1]


def test_no_draft_is_plain_decoding() -> None:
    tree = NoDraft().draft(None, torch.tensor([3, 4]), torch.tensor([5, 6]), Sampling([]))
    assert tree.tokens.tolist() == [[3], [4]]
    assert isinstance(tree, TokenTree)
