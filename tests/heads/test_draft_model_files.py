"""Laws of what a trained draft model begins from and how it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.heads import Binding, TeacherBatch, load_drafter
from draftsmith.heads.draft_model import DraftModelConfig, TrainedDraftModel
from draftsmith.infer.target import Target

from . import laws


def make(target: Target, **fields: object) -> TrainedDraftModel:
    torch.manual_seed(1)
    return TrainedDraftModel(DraftModelConfig.model_validate(fields), target)


@pytest.fixture(scope="module")
def text(tiny_target: Target) -> laws.Text:
    return laws.write_text(tiny_target, 6, seed=5)


@pytest.fixture(scope="module")
def teacher(tiny_target: Target, text: laws.Text) -> TeacherBatch:
    return laws.teach(tiny_target, text, taps=())


@pytest.fixture(scope="module")
def trained(tiny_target: Target, teacher: TeacherBatch) -> TrainedDraftModel:
    drafter = make(tiny_target, keep_layers=(0, 3), num_steps=4)
    laws.train(drafter, teacher, steps=60)
    return drafter


@pytest.fixture(scope="module")
def saved(trained: TrainedDraftModel, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "model"
    trained.save(folder, binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    return folder


# Files ---------------------------------------------------------------------------------------------------------------


def test_one_folder_serves_transformers_and_the_loader(
    trained: TrainedDraftModel, saved: Path, tiny_target: Target, teacher: TeacherBatch
) -> None:
    stock, loading = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    ids = teacher.tokens[:1, :20]
    reading = trained.model_view.read_packed(ids, torch.arange(20)[None], torch.ones_like(ids))
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, trained.model_view.logits(reading.hidden), atol=1e-4)
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == tiny_target.tokenizer.get_vocab()
    assert AutoTokenizer.from_pretrained(saved).chat_template == tiny_target.tokenizer.chat_template
    again = load_drafter(saved, tiny_target)
    assert torch.equal(again.ranks(teacher), trained.ranks(teacher))
    again.save(saved.with_name("again"), binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved, saved.with_name("again"))]
    assert configs[0] == configs[1]


def test_the_folder_is_a_draft_model_for_transformers_own_assisted_generation(
    saved: Path, tiny_target: Target, tiny_target_dir: Path, text: laws.Text
) -> None:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager") for folder in (tiny_target_dir, saved)
    )
    ids = torch.tensor([text.prompts[0]])
    out = target.generate(ids, assistant_model=draft, max_new_tokens=len(text.answers[0]), do_sample=False)
    assert out[0, ids.shape[1] :].tolist() == text.answers[0]


def test_a_tied_draft_model_is_saved_and_loaded_tied(build_target: Callable[..., Target], tmp_path: Path) -> None:
    target = build_target(tie_word_embeddings=True)
    drafter = make(target, keep_layers=(0, 3))
    assert len(list(drafter.parameters())) == len(drafter.state_dict())
    gathered = dict(drafter.named_parameters(remove_duplicate=False))  # as ZeRO-3 hands them over
    assert "lm_head.weight" in gathered
    for number, weights in enumerate((None, gathered)):
        folder = tmp_path / str(number)
        drafter.save(folder, binding=Binding(target.fingerprint(), target.template_hash), weights=weights)
        again = load_drafter(folder, target)
        assert isinstance(again, TrainedDraftModel)
        assert again.model_view.head.weight is again.model_view.embedding.weight
        assert torch.equal(again.model_view.head.weight, drafter.model_view.head.weight)
        stock = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(stock.lm_head.weight, drafter.model_view.head.weight)


def test_a_drafter_of_the_layout_before_is_still_read(saved: Path, tiny_target: Target, tmp_path: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    content |= content.pop("draftsmith") | {"format": 1}
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load_drafter(tmp_path, tiny_target).config == load_drafter(saved, tiny_target).config


def test_rotary_frequencies_stay_in_float32(tiny_target: Target) -> None:
    drafter = make(tiny_target, keep_layers=(0, 3))
    before = {name: buffer.clone() for name, buffer in drafter.named_buffers()}
    drafter.to(torch.bfloat16)
    assert drafter.model_view.dtype == torch.bfloat16
    assert any(name.endswith("inv_freq") for name in before)
    for name, buffer in drafter.named_buffers():
        assert torch.equal(buffer, before[name]), name


# Beginnings ----------------------------------------------------------------------------------------------------------


def test_without_a_beginning_layers_of_the_target_are_kept(tiny_target: Target) -> None:
    drafter = make(tiny_target)
    assert drafter.config.keep_layers == (0, 3)
    assert torch.equal(drafter.model_view.head.weight, tiny_target.head.weight)


def test_a_checkpoint_begins_with_its_own_weights(saved: Path, trained: TrainedDraftModel, tiny_target: Target) -> None:
    drafter = make(tiny_target, checkpoint=str(saved))
    assert torch.equal(drafter.model_view.head.weight, trained.model_view.head.weight)


def test_a_saved_drafter_needs_its_beginning_no_more(
    saved: Path, tiny_target: Target, teacher: TeacherBatch, tmp_path: Path
) -> None:
    begin = tmp_path / "begin"
    begin.mkdir()
    for file in saved.iterdir():
        (begin / file.name).write_bytes(file.read_bytes())
    drafter = make(tiny_target, checkpoint=str(begin))
    drafter.save(tmp_path / "saved", binding=Binding(tiny_target.fingerprint(), tiny_target.template_hash))
    (begin / "config.json").unlink()
    again = load_drafter(tmp_path / "saved", tiny_target)
    assert torch.equal(again.ranks(teacher), drafter.ranks(teacher))


def test_an_architecture_begins_with_random_weights_and_trains(tiny_target: Target, teacher: TeacherBatch) -> None:
    fields = {"num_hidden_layers": 1, "hidden_size": 32, "tie_word_embeddings": True}
    drafter = make(tiny_target, architecture=fields)
    losses = laws.train(drafter, teacher, steps=30)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoint": "a", "keep_layers": (0,)}, "checkpoint and keep_layers are different beginnings"),
        ({"min_confidence": 0.3, "tree": ((0,),)}, "a tree is no chain; remove one of min_confidence and tree"),
        ({"on_policy_temperature": 0.5}, "applies to on_policy above 0 only"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftModelConfig.model_validate(fields)


def test_a_checkpoint_of_another_tokenizer_is_refused(
    saved: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = tiny_tokenizer.convert_ids_to_tokens([20, 21])
    vocabulary[first], vocabulary[second] = 21, 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="their tokenizers differ in 2 of 300 shared ids"):
        make(tiny_target, checkpoint=str(tmp_path))
