"""EAGLE-3's training against its equations, retold row by row, and against its neighbours in a packed row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.distill.objectives import ObjectiveConfig, make_objective
from draftsmith.heads import TeacherBatch
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.infer.target import Target

from . import laws
from .test_eagle3 import build


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=5)


class Retold:
    """One chain at one row as decoding would run it, written from the equations with the drafter's tensors."""

    def __init__(self, drafter: Eagle3) -> None:
        self.w, self.config, self.embedding = drafter.state_dict(), drafter.config, drafter.target.embedding

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[name + ".weight"]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = position * self.config.rope_theta ** -(torch.arange(half) / half)
        return torch.cat(
            [
                x[..., :half] * angle.cos() - x[..., half:] * angle.sin(),
                x[..., half:] * angle.cos() + x[..., :half] * angle.sin(),
            ],
            dim=-1,
        )

    def project(self, read: Tensor, kind: str, position: int) -> Tensor:
        x = (self.w[f"midlayer.self_attn.{kind}_proj.weight"] @ read).view(-1, self.config.head_dim or 0)
        return x if kind == "v" else self.rotate(x, position)

    def chain(self, features: Tensor, tokens: Tensor, row: int) -> list[Tensor]:
        """Logits of each step at `row` of one document: features (T, F), tokens (T,)."""
        keys, values, out = [], [], []
        for t in range(row + 1):
            hidden = self.w["fc.weight"] @ features[t]
            read = self.read(tokens[t + 1], hidden)
            keys.append(self.project(read, "k", t))
            values.append(self.project(read, "v", t))
        for step in range(self.config.num_steps):
            if row + 1 + step >= len(tokens):
                break
            read = self.read(tokens[row + 1 + step], hidden)
            if step:
                keys.append(self.project(read, "k", row + step))
                values.append(self.project(read, "v", row + step))
            hidden = self.layer(read, hidden, torch.stack(keys), torch.stack(values), row + step)
            out.append(self.w["lm_head.weight"] @ self.norm(hidden, "norm"))
        return out

    def read(self, token: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.norm(self.embedding(token), "midlayer.input_layernorm")
        return torch.cat([embedded, self.norm(hidden, "midlayer.hidden_norm")])

    def layer(self, read: Tensor, hidden: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
        query = self.project(read, "q", position)
        groups = len(query) // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        weights = (torch.einsum("hd,khd->hk", query, keys) * query.shape[-1] ** -0.5).softmax(-1)
        attended = torch.einsum("hk,khd->hd", weights, values).flatten()
        hidden = hidden + self.w["midlayer.self_attn.o_proj.weight"] @ attended
        x = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (self.w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + down @ (F.silu(gate @ x) * (up @ x))


def test_training_computes_what_the_equations_say(tiny_target: Target, text: laws.Text) -> None:
    drafter = build(tiny_target)
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    assert teacher.features is not None
    retold, drafts = Retold(drafter), drafter._unroll(teacher)
    logits = drafter.lm_head(drafts.states)  # (S, R, V)
    checked = 0
    for index in range(0, len(drafts.rows), 7):
        row, place = divmod(int(drafts.rows[index]), teacher.tokens.shape[1])
        document = (teacher.segments[row] == teacher.segments[row, place]).nonzero()[:, 0]
        first, last = int(document[0]), int(document[-1]) + 1
        expected = retold.chain(teacher.features[row, first:last], teacher.tokens[row, first:last], place - first)
        for step, wanted in enumerate(expected):
            if bool(drafts.counted[step, index]):
                torch.testing.assert_close(logits[step, index], wanted, rtol=1e-3, atol=1e-3)
                checked += 1
    assert checked > 50


def fully_supervised(target: Target, drafter: Eagle3, documents: list[Tensor], learn: int) -> TeacherBatch:
    """Documents in one row without a prompt between them; only document `learn` is supervised."""
    tokens = torch.cat(documents)[None]
    segments = torch.cat([torch.full_like(d, i + 1) for i, d in enumerate(documents)])[None]
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    reading = target.read_packed(tokens, positions, segments, taps=drafter.taps)
    return TeacherBatch(
        tokens, segments, positions, segments == learn + 1, reading.hidden, reading.features, target.logits
    )


@pytest.mark.parametrize("learn", [0, 1])
def test_no_step_reads_across_packed_documents(tiny_target: Target, learn: int) -> None:
    """Every token is supervised to the document's very edge, where later steps would run into the neighbour."""
    drafter, losses, grads = build(tiny_target), [], []
    for other in (3, 250):
        documents = [torch.arange(40, 52), torch.arange(90, 103)]
        documents[1 - learn] = torch.full((9,), other)
        sums = drafter(fully_supervised(tiny_target, drafter, documents, learn), laws.SoftCrossEntropy())
        drafter.zero_grad()
        sums.sums.sum().backward()
        losses.append(sums.sums.detach())
        grads.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_a_batch_without_supervision_trains_nothing_and_breaks_nothing(tiny_target: Target) -> None:
    drafter = build(tiny_target)
    sums = drafter(fully_supervised(tiny_target, drafter, [torch.arange(9)], learn=5), laws.SoftCrossEntropy())
    sums.sums.sum().backward()
    assert sums.counts.tolist() == [0, 0, 0]
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in drafter.parameters())


def test_autocast_training_stays_near_full_precision(tiny_target: Target, text: laws.Text) -> None:
    drafter = build(tiny_target)
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    full = drafter(teacher, laws.SoftCrossEntropy())
    with torch.autocast("cpu", torch.bfloat16):
        half = drafter(teacher, laws.SoftCrossEntropy())
    (half.sums.sum() / half.counts.sum()).backward()
    assert half.sums.dtype == torch.float32
    torch.testing.assert_close(half.sums, full.sums, rtol=0.03, atol=0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    assert all(bool(p.grad.isfinite().all()) for p in drafter.parameters() if p.grad is not None)


def test_a_frozen_head_gives_the_layers_the_same_gradient_and_is_not_trained(
    tiny_target: Target, text: laws.Text
) -> None:
    """Its gradients are taken in the forward pass; a trained one's by autograd."""
    made = [build(tiny_target, train_head=train_head) for train_head in (True, False)]
    made[1].load_state_dict(made[0].state_dict())
    teacher, found = laws.teach(tiny_target, text, taps=made[0].taps), []
    for drafter in made:
        out = drafter.loss(teacher, make_objective(ObjectiveConfig(name="lk")))
        (out.sums * torch.tensor(out.weights)).sum().backward()
        layers = (weight.grad for name, weight in drafter.named_parameters() if name != "lm_head.weight")
        found.append([out.sums.detach(), out.survived, out.reached, *layers])
    torch.testing.assert_close(*found)
    assert made[0].lm_head.weight.grad is not None
    assert made[1].lm_head.weight.grad is None
    with pytest.raises(ValueError, match=r"train_head: false needs hidden_size 48, .* got 32"):
        build(tiny_target, train_head=False, hidden_size=32)
