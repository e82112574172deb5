"""Hydra beyond the laws: its variants, what each head reads, and how it begins."""

from __future__ import annotations

import pytest
import torch

from draftsmith.heads.hydra import Hydra, HydraConfig
from draftsmith.infer.drafter import Observation
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.target import Target
from draftsmith.infer.tree import Topology

from . import laws
from .test_laws import walk

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
VARIANTS: dict[str, dict[str, object]] = {
    "hydra": {"tree": TREE},
    "hydra++": {"prefix_layer": True, "num_layers": 4, "dropout": 0.2, "tree": TREE},
    "shared-head": {"own_lm_head": False, "tree": None},
    "reduced-vocabulary": {"draft_vocab_size": 150, "prefix_layer": True, "tree": TREE},
    "one-head": {"num_heads": 1, "tree": ((0,), (1,), (2,))},
}


def build(target: Target, **changes: object) -> Hydra:
    config = HydraConfig.model_validate({"num_heads": 3} | changes)
    size = config.draft_vocab_size
    # Every other id, so that half of what the tiny target writes cannot be proposed.
    token_map = None if size is None else torch.cat([torch.tensor([1, 2]), torch.arange(3, 300, 2)])[:size]
    torch.manual_seed(1)
    return Hydra(config, target, token_map=token_map)


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=5)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_is_lossless_and_its_chain_accepts_what_was_predicted(
    variant: str, tiny_target: Target, text: laws.Text
) -> None:
    drafter = build(tiny_target, **VARIANTS[variant])
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    laws.train(drafter, teacher, steps=12, lr=4e-3)
    plain = laws.decode(tiny_target, None, text.prompts)
    drafted = laws.decode(tiny_target, drafter, text.prompts, rows=3)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    accepted = sum(output.stats.accepted for output in drafted)
    assert 0 < accepted < sum(output.stats.drafted for output in drafted)
    drafter.use_chain()
    ranks, outputs = drafter.ranks(teacher), laws.decode(tiny_target, drafter, text.prompts, rows=3)
    for number, (prompt, answer, output) in enumerate(zip(text.prompts, text.answers, outputs)):
        start = int((teacher.segments[number // 2] == number % 2 + 1).nonzero()[0]) + len(prompt)
        accepted = walk(ranks[number // 2], start - 1, start + len(answer))
        assert (output.stats.rounds, output.stats.accepted) == (len(accepted), sum(accepted))


def test_head_k_reads_the_hidden_state_the_anchor_and_the_k_tokens_after_it(
    tiny_target: Target, text: laws.Text
) -> None:
    drafter = build(tiny_target)
    torch.nn.init.normal_(drafter.blocks[2][0].linear.weight, std=0.1)
    teacher = laws.teach(tiny_target, text, taps=())
    drafts = drafter._unroll(teacher)
    row = int(drafts.counted[2].nonzero()[0])
    at = int(drafts.rows[row])
    tokens = teacher.tokens.flatten()[at + 1 : at + 4]
    read = torch.cat([teacher.hidden.flatten(0, 1)[at], tiny_target.embedding(tokens).flatten()])
    torch.testing.assert_close(drafts.states[2, row, :-1], drafter.blocks[2](read))
    assert drafts.states[:, row, -1].tolist() == [0, 1, 2]


def test_a_child_depends_on_its_own_path_only(tiny_target: Target) -> None:
    """The same tree with another second candidate: nothing below the first one moves."""
    drafter = build(tiny_target, tree=((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)))
    for block in drafter.blocks:
        torch.nn.init.normal_(block[0].linear.weight, std=0.3)
    state = drafter.start(rows=1, capacity=64)
    state.hidden = torch.randn(1, 48)
    anchors, lengths, sampling = torch.tensor([7]), torch.tensor([5]), Sampling([SamplingParams()])
    before = drafter.draft(state, anchors, lengths, sampling).tokens[0].tolist()
    drafter.projections[0].bias.data[before[2]] = -1e9  # the second choice of the first head is gone
    after = drafter.draft(state, anchors, lengths, sampling).tokens[0].tolist()
    assert after[2] != before[2]
    assert [after[node] for node in (1, 3, 5)] == [before[node] for node in (1, 3, 5)]
    assert [after[node] for node in (4, 6)] != [before[node] for node in (4, 6)]


@pytest.mark.parametrize("prefix", [False, True])
def test_a_new_head_is_the_targets_own_head(tiny_target: Target, prefix: bool, text: laws.Text) -> None:
    """Blocks and prefix layer begin as the identity on the hidden state, projections as copies."""
    drafter = build(tiny_target, prefix_layer=prefix, num_layers=2)
    teacher = laws.teach(tiny_target, text, taps=())
    drafts = drafter._unroll(teacher)
    wanted = teacher.logits(teacher.hidden.flatten(0, 1)[drafts.rows])
    for states in drafts.states:
        torch.testing.assert_close(drafter._judged(states), wanted)


def test_dropout_acts_in_training_only(tiny_target: Target, text: laws.Text) -> None:
    drafter = build(tiny_target, dropout=0.5)
    teacher = laws.teach(tiny_target, text, taps=())

    def loss() -> float:
        return float(drafter(teacher, laws.HardCrossEntropy()).sums.detach().sum())

    drafter.train()
    assert loss() != loss()
    drafter.eval()
    assert loss() == loss()


def test_it_trains_under_autocast(tiny_target: Target, text: laws.Text) -> None:
    """bf16 activations over fp32 weights: gradients stay fp32 and finite, and every head is told apart."""
    drafter = build(tiny_target, prefix_layer=True)
    teacher = laws.teach(tiny_target, text, taps=())
    whole = drafter(teacher, laws.SoftCrossEntropy()).sums.detach()
    with torch.autocast("cpu", torch.bfloat16):
        sums = drafter(teacher, laws.SoftCrossEntropy()).sums
    sums.sum().backward()
    torch.testing.assert_close(sums.detach(), whole, rtol=2e-2, atol=0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    assert all(bool(p.grad.isfinite().all()) for p in drafter.parameters() if p.grad is not None)


def test_rejected_drafts_leave_nothing_behind(tiny_target: Target) -> None:
    """After rounds of re-reading, the prefix layer's state is that of having read the text in one go."""
    drafter = build(tiny_target, prefix_layer=True)
    assert drafter.prefix is not None
    torch.nn.init.normal_(drafter.prefix.self_attn.o_proj.weight, std=0.3)
    tokens = torch.randint(3, 300, (2, 20))
    hidden = torch.randn(2, 20, 48)
    once, rounds = drafter.start(rows=2, capacity=8), drafter.start(rows=2, capacity=8)

    def observe(state: object, start: list[int], count: list[int]) -> None:
        column = torch.tensor(start)[:, None] + torch.arange(max(count)).minimum(torch.tensor(count)[:, None] - 1)
        drafter.observe(
            state,
            Observation(
                rows=slice(0, 2),
                tokens=tokens.gather(1, column),
                count=torch.tensor(count),
                start=torch.tensor(start),
                hidden=hidden.gather(1, column[:, :, None].expand(-1, -1, 48)),
                features=None,
                anchor=tokens.gather(1, torch.tensor(start)[:, None] + torch.tensor(count)[:, None])[:, 0],
            ),
        )

    with torch.inference_mode():
        observe(once, [0, 0], [12, 15])
        start = [0, 0]
        for count in ([3, 5], [4, 1], [1, 4], [4, 5]):
            observe(rounds, start, count)
            start = [s + c for s, c in zip(start, count)]
    torch.testing.assert_close(rounds.hidden, once.hidden, rtol=1e-4, atol=1e-5)


def test_an_empty_tree_decodes_plainly(tiny_target: Target, text: laws.Text) -> None:
    drafter = build(tiny_target)
    drafter.use_tree(Topology(()))
    outputs = laws.decode(tiny_target, drafter, text.prompts)
    assert [output.tokens for output in outputs] == text.answers
    assert all(output.stats.drafted == 0 for output in outputs)


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="2 deep, but there are 1 heads"):
        HydraConfig(num_heads=1, tree=((0,), (0, 0)))


def test_tensors_are_named_and_shaped_as_documented(tiny_target: Target) -> None:
    drafter = build(tiny_target, num_heads=2, num_layers=2, prefix_layer=True, draft_vocab_size=150)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    own = {name: shape for name, shape in shapes.items() if not name.startswith("prefix.")}
    assert own == {
        "vocabulary.token_map": (150,),
        "blocks.0.0.linear.weight": (48, 96),
        "blocks.0.0.linear.bias": (48,),
        "blocks.0.0.skip.weight": (48, 96),
        "blocks.0.0.skip.bias": (48,),
        "blocks.0.1.linear.weight": (48, 48),
        "blocks.0.1.linear.bias": (48,),
        "blocks.1.0.linear.weight": (48, 144),
        "blocks.1.0.linear.bias": (48,),
        "blocks.1.0.skip.weight": (48, 144),
        "blocks.1.0.skip.bias": (48,),
        "blocks.1.1.linear.weight": (48, 48),
        "blocks.1.1.linear.bias": (48,),
        "projections.0.weight": (150, 48),
        "projections.0.bias": (150,),
        "projections.1.weight": (150, 48),
        "projections.1.bias": (150,),
    }
    assert shapes["prefix.self_attn.k_proj.weight"] == (24, 48)
    assert shapes["prefix.mlp.gate_proj.weight"] == (96, 48)
