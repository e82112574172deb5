"""Laws of the heads that condition a slot on the token before it: their formulas, and what their gradients reach."""

from __future__ import annotations

import pytest
import torch

from draftsmith.heads.markov import ConfidenceHead, Kind, MarkovHead

RANK, WIDTH, VOCAB, DRAFTED = 4, 6, 20, 12


def build(kind: Kind) -> MarkovHead:
    torch.manual_seed(3)
    head = MarkovHead(kind, rank=RANK, width=WIDTH, vocab_size=VOCAB, drafted=DRAFTED)
    torch.nn.init.normal_(head.markov_w1.weight)
    return head


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """hidden (K, R, D) and previous tokens (K, R)."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(5, 3, WIDTH, generator=generator), torch.randint(VOCAB, (5, 3), generator=generator)


def test_vanilla_and_gated_codes_follow_their_formulas() -> None:
    hidden, previous = text()
    vanilla, gated = build("vanilla"), build("gated")
    torch.testing.assert_close(vanilla.codes(hidden, previous), vanilla.markov_w1.weight[previous])
    assert gated.gate_proj is not None
    embedded = gated.markov_w1.weight[previous]
    gate = torch.sigmoid(torch.cat([hidden, embedded], dim=-1) @ gated.gate_proj.weight.T + gated.gate_proj.bias)
    torch.testing.assert_close(gated.codes(hidden, previous), gate * embedded)


def test_rnn_codes_follow_their_formula() -> None:
    hidden, previous = text()
    head = build("rnn")
    assert head.joint_proj is not None
    state, found = torch.zeros(3, RANK), []
    for slot, tokens in zip(hidden, previous):
        read = torch.cat([state, head.markov_w1.weight[tokens], slot], dim=-1)
        mixed = read @ head.joint_proj.weight.T + head.joint_proj.bias
        gate, candidate, out = mixed[:, :RANK].sigmoid(), mixed[:, RANK : 2 * RANK].tanh(), mixed[:, 2 * RANK :].tanh()
        found.append(out)
        state = gate * state + (1 - gate) * candidate
    torch.testing.assert_close(head.codes(hidden, previous), torch.stack(found))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_code_depends_on_no_later_token(kind: Kind) -> None:
    hidden, previous = text()
    head, changed = build(kind), previous.clone()
    changed[3] = (changed[3] + 1) % VOCAB
    before, after = head.codes(hidden, previous), head.codes(hidden, changed)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])
    assert torch.equal(before[4], after[4]) == (kind != "rnn"), "only an rnn remembers more than one token"


def test_rescoring_candidates_equals_the_whole_bias() -> None:
    head = build("gated")
    code = torch.randn(2, 3, RANK)
    candidates = torch.tensor([[1, 5, 7, 0], [11, 2, 3, 4]])
    whole = head.markov_w2(code)  # (B, n, W)
    torch.testing.assert_close(head.rescore(code, candidates), whole.gather(2, candidates[:, None].expand(-1, 3, -1)))


def test_the_confidence_teaches_nothing_but_itself() -> None:
    head, sure = build("vanilla"), ConfidenceHead(WIDTH + RANK)
    hidden, previous = text()
    hidden.requires_grad_()
    sure(hidden, head, previous).sum().backward()
    assert sure.proj.weight.grad is not None
    assert bool((sure.proj.weight.grad != 0).any())
    assert hidden.grad is None
    assert all(parameter.grad is None for parameter in head.parameters())
