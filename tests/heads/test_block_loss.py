"""Laws of the block loss: plain it is the loss every drafter has, chunks and shortcuts change nothing, and its labels are
what acceptance is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads import LossSums, TeacherBatch, compare
from draftsmith.heads.block_loss import BlockLoss, add_up, count_steps, overlap
from draftsmith.heads.compare import Drafts
from draftsmith.heads.position_weights import PositionWeights
from draftsmith.heads.vocabulary import DraftVocabulary

from .laws import HardCrossEntropy, SoftCrossEntropy

STEPS, WIDTH, VOCAB = 3, 5, 11


@dataclass(frozen=True)
class Setting:
    teacher: TeacherBatch
    drafts: Drafts
    scale: Tensor
    confidence: Tensor
    head: Tensor
    """(V, D), of draft and target."""
    vocabulary: DraftVocabulary

    def loss(self, positions: PositionWeights, *, sure: bool = False, frozen: bool = False) -> LossSums:
        kept = self.vocabulary.select(self.head)
        judge = BlockLoss(
            self.teacher, SoftCrossEntropy(), lambda states: states @ kept.T, frozen, self.vocabulary, positions
        )
        return judge.sums(self.drafts, scale=self.scale, confidence=self.confidence if sure else None)


def build(*, drafted: Tensor | None = None) -> Setting:
    generator = torch.Generator().manual_seed(0)
    segments = torch.tensor([[1] * 8 + [2] * 6 + [0] * 2, [1] * 15 + [0]])
    supervised = (segments > 0) & (torch.rand(segments.shape, generator=generator) < 0.8)
    head = torch.randn(VOCAB, WIDTH, generator=generator)

    def logits(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        return hidden @ (head if vocabulary is None else head[vocabulary]).T

    tokens = torch.randint(VOCAB, segments.shape, generator=generator)
    hidden = torch.randn(*segments.shape, WIDTH, generator=generator)
    teacher = TeacherBatch(tokens, segments, torch.zeros_like(tokens), supervised, hidden, None, logits)
    counted = count_steps(teacher, STEPS)
    rows = counted.any(dim=0).flatten().nonzero()[:, 0]
    states = torch.randn(STEPS, len(rows), WIDTH, generator=generator, requires_grad=True)
    vocabulary = DraftVocabulary(None if drafted is None else len(drafted), VOCAB, drafted)
    confidence = torch.randn(STEPS, len(rows), generator=generator, requires_grad=True)
    scale = 1 + torch.rand(len(rows), generator=generator)
    return Setting(teacher, Drafts(rows, states, counted.flatten(1)[:, rows]), scale, confidence, head, vocabulary)


REDUCED = torch.tensor([0, 2, 3, 6, 7, 10])


@pytest.mark.parametrize("drafted", [None, REDUCED])
def test_without_weights_and_confidence_it_is_the_plain_loss(drafted: Tensor | None) -> None:
    setting = build(drafted=drafted)
    plain = compare.loss_sums(
        setting.drafts,
        setting.teacher,
        SoftCrossEntropy(),
        logits=lambda states: states @ setting.vocabulary.select(setting.head).T,
        vocabulary=setting.vocabulary,
        weights=(1.0,) * STEPS,
    )
    setting.scale.fill_(1.0)
    found = setting.loss(PositionWeights())
    torch.testing.assert_close(found.sums, plain.sums)
    for name in ("counts", "survived", "reached"):
        assert torch.equal(vars(found)[name], vars(plain)[name])
    assert found.weights == (1 / STEPS,) * STEPS


@pytest.mark.parametrize("kind", ["none", "d_pace", "cat"])
@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("drafted", [None, REDUCED])
def test_chunks_and_gradients_taken_at_once_change_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, sure: bool, drafted: Tensor | None
) -> None:
    setting, results = build(drafted=drafted), []
    positions = PositionWeights.model_validate({"kind": kind})
    learned = [setting.drafts.states, setting.confidence][: 1 + sure]
    for pairs, frozen in ((512, False), (6, False), (512, True), (6, True)):
        monkeypatch.setattr(compare, "PAIRS", pairs)
        monkeypatch.setattr(compare, "LOGITS", 0)
        out = setting.loss(positions, sure=sure, frozen=frozen)
        upstream = torch.tensor([0.3, 1.0, 2.0])  # a loop weighs every slot differently
        gradients = torch.autograd.grad((out.sums * upstream).sum(), learned)
        results.append([out.sums.detach(), out.survived, out.reached, *out.extra.values(), *gradients])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_weights_and_scale_multiply_each_pair() -> None:
    setting = build()
    steps, which = setting.drafts.counted.nonzero(as_tuple=True)
    tokens = setting.drafts.rows[which] + steps + 2
    labels = setting.teacher.tokens.flatten()[tokens]
    draft = setting.drafts.states[steps, which] @ setting.head.T
    target = setting.teacher.hidden.flatten(0, 1)[tokens - 1] @ setting.head.T
    for kind, source in (("d_pace", draft), ("cat", target)):
        probs = torch.zeros(setting.drafts.counted.shape)
        probs[steps, which] = source.softmax(-1).gather(1, labels[:, None])[:, 0].detach()
        positions = PositionWeights.model_validate({"kind": kind})
        weights = positions.of(probs, setting.drafts.counted)[steps, which] * setting.scale[which]
        losses = SoftCrossEntropy()(draft, labels, target) * weights
        truth = torch.zeros(STEPS).index_add(0, steps, losses)
        torch.testing.assert_close(setting.loss(positions).sums, truth)


def test_the_confidence_learns_one_minus_total_variation() -> None:
    setting = build()
    steps, which = setting.drafts.counted.nonzero(as_tuple=True)
    scoring = setting.drafts.rows[which] + steps + 1
    q = (setting.drafts.states[steps, which] @ setting.head.T).softmax(-1).detach()
    p = (setting.teacher.hidden.flatten(0, 1)[scoring] @ setting.head.T).softmax(-1)
    label = 1 - 0.5 * (p - q).abs().sum(-1)
    given = setting.confidence[steps, which]
    entropy = F.binary_cross_entropy_with_logits(given, label, reduction="none")
    out = setting.loss(PositionWeights(), sure=True)
    pairs = torch.tensor(float(len(steps)))
    torch.testing.assert_close(out.extra["confidence_loss"], torch.stack([entropy.sum(), pairs]).detach())
    error = (given.sigmoid() - label).abs().sum().detach()
    torch.testing.assert_close(out.extra["confidence_error"], torch.stack([error, pairs]))
    added = torch.zeros(STEPS).index_add(0, steps, entropy * setting.scale[which])
    torch.testing.assert_close(out.sums - setting.loss(PositionWeights()).sums, added)


def test_acceptance_of_a_reduced_vocabulary_counts_the_mass_outside_as_lost() -> None:
    p = torch.tensor([[0.5, 0.1, 0.4]])
    draft = torch.tensor([[0.6, 0.4]]).log()  # over tokens 0 and 1
    torch.testing.assert_close(overlap(p.log()[:, :2], draft), torch.tensor([0.5 + 0.1]))


def test_no_gradient_flows_from_labels_to_the_draft() -> None:
    """With a divergence of constant zero only the confidence learns."""
    setting = build()
    setting.scale.fill_(1.0)
    both = setting.loss(PositionWeights(), sure=True).sums.sum() - setting.loss(PositionWeights()).sums.sum()
    states, confidence = torch.autograd.grad(both, [setting.drafts.states, setting.confidence])
    torch.testing.assert_close(states, torch.zeros_like(states))
    assert bool((confidence != 0).any())


def test_shares_add_up() -> None:
    setting = build()
    whole = setting.loss(PositionWeights(), sure=True)
    halves = []
    for half in (slice(0, 7), slice(7, None)):
        part = Drafts(setting.drafts.rows[half], setting.drafts.states[:, half], setting.drafts.counted[:, half])
        judge = BlockLoss(
            setting.teacher,
            SoftCrossEntropy(),
            lambda states: states @ setting.head.T,
            False,
            setting.vocabulary,
            PositionWeights(),
        )
        halves.append(judge.sums(part, scale=setting.scale[half], confidence=setting.confidence[:, half]))
    found = add_up(halves, counts=whole.counts)
    torch.testing.assert_close(found.sums, whole.sums)
    torch.testing.assert_close(found.extra, whole.extra)
    assert torch.equal(found.survived, whole.survived)
    assert torch.equal(found.reached, whole.reached)


def test_an_objective_that_needs_no_target_asks_for_none() -> None:
    setting = build()

    def refuse(hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        raise AssertionError("the target's head was used for nothing")

    teacher = TeacherBatch(**vars(setting.teacher) | {"logits": refuse})
    judge = BlockLoss(
        teacher,
        HardCrossEntropy(),
        lambda states: states @ setting.head.T,
        False,
        setting.vocabulary,
        PositionWeights(kind="d_pace"),
    )
    assert bool(judge.sums(setting.drafts, scale=setting.scale, confidence=None).sums.isfinite().all())
