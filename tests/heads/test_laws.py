"""The laws of every trained drafter, parametrised over the method dict: a new method inherits them all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import METHODS, Binding, TeacherBatch, TrainedDrafter, load_drafter
from draftsmith.infer.cost import draft_seconds
from draftsmith.infer.decode import Engine
from draftsmith.infer.grafted import Grafted
from draftsmith.infer.prompt_lookup import PromptLookup
from draftsmith.infer.request import Request
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.schedule import Scheduled
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree
from draftsmith.infer.tree_search import round_starts

from . import laws


@dataclass
class Trained:
    drafter: TrainedDrafter
    text: laws.Text
    teacher: TeacherBatch
    losses: list[float]


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 12, seed=5)


@pytest.fixture(scope="module", params=list(METHODS))
def trained(request: pytest.FixtureRequest, tiny_target: Target, text: laws.Text) -> Trained:
    """Each method overfitted to a little text, so that its drafts are sometimes right and sometimes wrong."""
    drafter = laws.build(request.param, tiny_target)
    teacher = laws.teach(tiny_target, text, taps=drafter.taps)
    losses = laws.train(drafter, teacher)
    return Trained(drafter, text, teacher, losses)


def test_every_method_has_laws() -> None:
    assert set(laws.SMALL) == set(METHODS)


def test_training_overfits_one_batch(trained: Trained) -> None:
    assert trained.losses[-1] < 0.7 * trained.losses[0]


def test_greedy_output_equals_plain_decoding(trained: Trained, tiny_target: Target) -> None:
    fresh = laws.prompts(6, seed=9, vocab_size=tiny_target.vocab_size)
    ids = trained.text.prompts + fresh
    plain = laws.decode(tiny_target, None, ids)
    drafted = laws.decode(tiny_target, trained.drafter, ids)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert sum(output.stats.accepted for output in drafted) > 0, "no draft was ever accepted: the law was not exercised"
    assert sum(output.stats.drafted - output.stats.accepted for output in drafted) > 0


def test_greedy_output_equals_stock_generate(trained: Trained, tiny_target: Target) -> None:
    """Against transformers itself, which shares none of our loop, cache or attention."""
    stock = copy.deepcopy(tiny_target.model)
    stock.config._attn_implementation = "eager"
    for output, prompt in zip(laws.decode(tiny_target, trained.drafter, trained.text.prompts), trained.text.prompts):
        ids = stock.generate(torch.tensor([prompt]), max_new_tokens=laws.NEW_TOKENS, do_sample=False)
        assert output.tokens == ids[0, len(prompt) :].tolist()


def test_sampled_output_is_the_same_with_and_without_the_drafter(trained: Trained, tiny_target: Target) -> None:
    """In one batch rows of every kind."""
    kinds = SamplingParams(1.0), SamplingParams(0.7, top_k=20), SamplingParams(1.3, top_p=0.8)
    plain = laws.decode(tiny_target, None, trained.text.prompts, sampling=kinds)
    drafted = laws.decode(tiny_target, trained.drafter, trained.text.prompts, sampling=kinds, rows=3)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_text_does_not_depend_on_the_batch(trained: Trained, tiny_target: Target) -> None:
    alone = laws.decode(tiny_target, trained.drafter, trained.text.prompts, rows=1)
    crowd = laws.decode(tiny_target, trained.drafter, trained.text.prompts, rows=5)
    assert [output.tokens for output in crowd] == [output.tokens for output in alone]
    assert [vars(output.stats) for output in crowd] == [vars(output.stats) for output in alone]


def test_teacher_forced_acceptance_equals_the_loops(trained: Trained, tiny_target: Target) -> None:
    """Walk the text by teacher-forced chain acceptance: rounds and accepted tokens equal the loop's, integer for integer."""
    chain = copy.deepcopy(trained.drafter)
    object.__setattr__(chain, "target", tiny_target)
    assert_chain(chain)
    ranks = chain.ranks(trained.teacher)
    outputs = laws.decode(tiny_target, chain, trained.text.prompts)
    for number, (prompt, answer, output) in enumerate(zip(trained.text.prompts, trained.text.answers, outputs)):
        row, document = divmod(number, 2)
        start = int((trained.teacher.segments[row] == document + 1).nonzero()[0])
        accepted = walk(ranks[row], start + len(prompt) - 1, start + len(prompt) + len(answer))
        assert (output.stats.rounds, output.stats.accepted) == (len(accepted), sum(accepted))
        begins = round_starts(ranks)[row, start : start + len(prompt) + len(answer)]
        assert int(begins.sum()) == len(accepted)


def test_what_is_taken_over_from_another_row_changes_no_draft(trained: Trained, tiny_target: Target) -> None:
    """Texts that begin alike, some of which end where others go on: what a drafter kept of them is as good as new."""
    whole = trained.text.prompts[0] + trained.text.answers[0]
    ids = [whole[:30], whole[:26], whole[:30], whole[:21], *(whole[:20] + other for other in trained.text.prompts[1:4])]
    found = []
    for shares in (True, False):
        engine = Engine(tiny_target, drafter=trained.drafter, rows=3)
        engine._prefixes.shares = shares
        outputs = laws.answers(engine, ids)
        found.append([(output.tokens, vars(output.stats)) for output in outputs])
        assert (engine._prefixes.reused > 100) == shares
    assert found[0] == found[1]
    assert sum(output.stats.accepted for output in outputs) > 0


def assert_chain(drafter: TrainedDrafter) -> None:
    """Make the copy draft its top-1 chain."""
    drafter.use_chain()


def test_a_chain_says_how_sure_it_is_and_can_be_scheduled(trained: Trained, tiny_target: Target) -> None:
    """Cut to what its confidence makes worth verifying, it drafts less and the text stays."""
    chain = copy.deepcopy(trained.drafter)
    object.__setattr__(chain, "target", tiny_target)
    assert_chain(chain)
    tree, seconds = draft_seconds(chain, tiny_target, rows=3, repeats=3)
    assert tree.confidence is not None
    assert tree.confidence.shape == tree.tokens.shape
    assert bool(((tree.confidence > 0) & (tree.confidence <= 1)).all())
    assert seconds > 0
    scheduled = Scheduled(chain, seconds={1: 1.0, 4: 1.1, 16: 2.1})
    ids = trained.text.prompts[:3] + laws.prompts(6, seed=9, vocab_size=tiny_target.vocab_size)
    plain, whole, short = (laws.decode(tiny_target, drafter, ids) for drafter in (None, chain, scheduled))
    assert [output.tokens for output in short] == [output.tokens for output in plain]
    drafted = [sum(output.stats.drafted for output in outputs) for outputs in (whole, short)]
    assert 0 < drafted[1] < drafted[0]


def test_copies_grafted_on_its_trees_change_no_text(trained: Trained, tiny_target: Target) -> None:
    """Rounds then accept more than the drafter proposed, or do not ask it at all; its own state must bear both."""
    ids = trained.text.prompts[:4] + [
        prompt * 3 for prompt in laws.prompts(4, seed=9, vocab_size=tiny_target.vocab_size)
    ]
    alone, plain = (laws.decode(tiny_target, drafter, ids, rows=3) for drafter in (trained.drafter, None))
    for seconds in (None, {1: 1.0, 8: 1.5, 128: 9.0}):
        grafted = Grafted(trained.drafter, PromptLookup(length=5), seconds=seconds, drafting=0.1, nodes=7)
        both = laws.decode(tiny_target, grafted, ids, rows=3)
        assert [output.tokens for output in both] == [output.tokens for output in plain]
        if seconds is None:
            rounds = [sum(output.stats.rounds for output in outputs) for outputs in (both, alone)]
            assert rounds[0] <= rounds[1], "with more on offer it took more rounds"


class Pausing:
    """A drafter that is not asked before some length, as one that does not pay; notes what it proposes at which length."""

    def __init__(self, drafter: TrainedDrafter, *, until: int) -> None:
        self.drafter, self.until, self.proposed = drafter, until, dict[int, list[int]]()
        self.taps, self.depth = drafter.taps, drafter.depth
        self.start, self.move, self.observe = drafter.start, drafter.move, drafter.observe

    def draft(self, state: Any, anchors: torch.Tensor, lengths: torch.Tensor, sampling: Sampling) -> TokenTree:
        if int(lengths.max()) < self.until:
            return TokenTree.root(anchors)
        tree = self.drafter.draft(state, anchors, lengths, sampling)
        self.proposed[int(lengths[0])] = tree.tokens[0].tolist()
        return tree


def test_after_a_pause_it_proposes_what_it_would_have(trained: Trained, tiny_target: Target) -> None:
    """Also a model that has to read more than a hundred tokens first, which it does in pieces."""
    prompt = trained.text.prompts[0]
    asked, paused = (Pausing(trained.drafter, until=until) for until in (0, len(prompt) + 130))
    for drafter in (asked, paused):
        engine = Engine(tiny_target, drafter=drafter, rows=1)
        engine.add(Request("0", prompt, 190))
        list(engine.run())
    common = asked.proposed.keys() & paused.proposed.keys()
    assert len(common) > 10
    assert all(asked.proposed[length] == paused.proposed[length] for length in common)


def walk(ranks: torch.Tensor, at: int, end: int) -> list[int]:
    """Accepted tokens of each round if decoding follows `ranks` (T, K): at row t the target has read t, emitted t+1."""
    rounds = []
    while at + 1 < end - 1:  # token end-1 not yet emitted
        run = 0
        while run < ranks.shape[1] and at + 2 + run < end and int(ranks[at, run]) == 0:
            run += 1
        rounds.append(run)
        at += run + 1
    return rounds


def test_loss_counts_what_ranks_count(trained: Trained) -> None:
    sums = trained.drafter(trained.teacher, laws.SoftCrossEntropy())
    ranks = trained.drafter.ranks(trained.teacher)
    alive = torch.ones_like(ranks[..., 0], dtype=torch.bool)
    for step in range(trained.drafter.num_steps):
        alive &= ranks[..., step] >= 0
        assert int(sums.reached[step]) == int(alive.sum())
        alive &= ranks[..., step] == 0
        assert int(sums.survived[step]) == int(alive.sum())
        assert int(sums.counts[step]) == int(trained.teacher.step_mask(step).sum())


def test_packed_neighbours_and_padding_do_not_change_a_document(trained: Trained, tiny_target: Target) -> None:
    """Ranks of a document alone equal its ranks in a packed row behind another document."""
    packed = trained.drafter.ranks(trained.teacher)
    text = trained.text
    alone = laws.Text([text.prompts[1]], [text.answers[1]])
    single = trained.drafter.ranks(laws.teach(tiny_target, alone, taps=trained.drafter.taps))
    before = len(text.prompts[0]) + len(text.answers[0])
    length = len(text.prompts[1]) + len(text.answers[1])
    assert torch.equal(single[0, :length], packed[0, before : before + length])


def test_gradient_reaches_trainable_weights_and_nothing_of_the_target(trained: Trained, tiny_target: Target) -> None:
    drafter = laws.build(trained.drafter.config.method, tiny_target)
    sums = drafter(trained.teacher, laws.SoftCrossEntropy())
    sums.sums.sum().backward()
    flat = [
        name
        for name, p in drafter.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all())
    ]
    assert flat == []
    assert all(p.grad is None and not p.requires_grad for p in tiny_target.model.parameters())
    names = {name for name, _ in drafter.named_parameters()} | set(drafter.state_dict())
    assert not any("target" in name for name in names), "the frozen target is registered in the drafter"


def test_save_and_load_are_bit_identical(trained: Trained, tiny_target: Target, tmp_path: Path) -> None:
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    trained.drafter.save(tmp_path, binding=binding)
    again = load_drafter(tmp_path, tiny_target)
    assert again.config == trained.drafter.config
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in trained.drafter.state_dict().items()
    }
    assert torch.equal(again.ranks(trained.teacher), trained.drafter.ranks(trained.teacher))


def test_another_target_is_refused_with_what_differs(
    trained: Trained, build_target: Callable[..., Target], tmp_path: Path
) -> None:
    other = build_target(seed=3)
    binding = Binding(target=other.fingerprint(), template_hash=other.template_hash)
    trained.drafter.save(tmp_path, binding=binding)
    with pytest.raises(ValueError, match=r"trained for target.*weights: drafter"):
        load_drafter(tmp_path, trained.drafter.target)


def test_another_chat_template_is_refused(trained: Trained, tiny_target: Target, tmp_path: Path) -> None:
    """Trained on another spelling of conversations, a drafter is only slower, which nobody would notice."""
    trained.drafter.save(tmp_path, binding=Binding(tiny_target.fingerprint(), "0123456789abcdef"))
    with pytest.raises(ValueError, match="chat template: drafter 0123456789abcdef"):
        load_drafter(tmp_path, tiny_target)


def test_no_two_weights_are_one(trained: Trained) -> None:
    """A list of layers multiplied is one layer many times."""
    places = [parameter.data_ptr() for parameter in trained.drafter.parameters() if parameter.requires_grad]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("damage", ["truncate", "rename", "nan", "no-config"])
def test_damaged_checkpoint_is_refused_with_the_reason(
    trained: Trained, tiny_target: Target, tmp_path: Path, damage: str
) -> None:
    from safetensors.torch import load_file, save_file

    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    trained.drafter.save(tmp_path, binding=binding)
    file = tmp_path / "model.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "no-config":
        (tmp_path / "config.json").unlink()
    else:
        tensors = load_file(file)
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
        tensor = tensors.pop(name)
        tensors["unknown" if damage == "rename" else name] = torch.full_like(tensor, torch.nan)
        save_file(tensors, file)
    reason = {"truncate": "damaged", "rename": "unknown", "nan": "NaN", "no-config": "config.json"}[damage]
    with pytest.raises(ValueError, match=reason):
        load_drafter(tmp_path, tiny_target)
