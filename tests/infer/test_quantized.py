"""Targets in 8 and 4 bits: smaller, exact against themselves, and bound to the same drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedTokenizerFast

from draftsmith.heads import METHODS, Binding, load_drafter
from draftsmith.infer import quantized
from draftsmith.infer.draft_model import DraftModel
from draftsmith.infer.drafters import make_drafter
from draftsmith.infer.memory import num_bytes
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.target import Target

from . import architectures, drafting, encoder_decoders


@dataclass(frozen=True)
class Place:
    """A kind of quantisation where it runs."""

    kind: str
    device: str

    def load(self, folder: Path, **options: Any) -> Target:
        return Target.load(str(folder), device=self.device, quantize=self.kind, **options)


PLACES = [
    pytest.param(Place("int8", "cpu"), id="int8 on cpu"),
    pytest.param(Place("int8", "cuda"), marks=pytest.mark.gpu, id="int8 on cuda"),
    pytest.param(Place("int4", "cuda"), marks=pytest.mark.gpu, id="int4 on cuda"),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    library = quantized.LIBRARIES[found.kind].split(".")[0]
    pytest.importorskip(library, reason=f"needs {library}: {quantized.INSTALL}")
    return found


@pytest.fixture(scope="module", params=["llama", "gemma2", "t5", "bart"])
def folder(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    saved, name = tmp_path_factory.mktemp("whole") / request.param, request.param
    built = encoder_decoders.build(name) if name in encoder_decoders.ARCHITECTURES else architectures.build(name)
    built.save_pretrained(saved)
    tiny_tokenizer.save_pretrained(saved)
    return saved


def stock(folder: Path, place: Place) -> Any:
    """The model as transformers loads it, quantised and otherwise its own."""
    seq2seq = hf.AutoConfig.from_pretrained(folder).is_encoder_decoder
    auto: Any = hf.AutoModelForSeq2SeqLM if seq2seq else hf.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    quantized.quantize(model, place.kind, keep=[model.get_output_embeddings().weight], device=place.device)
    return model.to(place.device)


def opening(target: Target) -> list[int]:
    return list(target.opening) if isinstance(target, Seq2SeqTarget) else []


def asked(target: Target, count: int = 3) -> list[list[int]]:
    return [[*ids, *opening(target)] for ids in drafting.prompts(count, seed=4, vocab_size=120, longest=12)]


def test_plain_decoding_equals_stock_generate_of_the_quantised_model(folder: Path, place: Place) -> None:
    target, alone = place.load(folder), stock(folder, place)
    prompts, begun = asked(target), opening(target)
    for prompt, output in zip(prompts, drafting.decode(target, None, prompts, rows=2, new_tokens=12)):
        source = prompt[: len(prompt) - len(begun)]
        given = {"decoder_input_ids": torch.tensor([begun], device=target.device)} if begun else {}
        ids = torch.tensor([source], device=target.device)
        whole = alone.generate(ids, max_new_tokens=12, do_sample=False, **given)[0].tolist()
        assert output.tokens == whole[len(begun) or len(source) :]


def test_drafters_quantised_or_not_change_no_text(folder: Path, place: Place) -> None:
    target = place.load(folder)
    prompts = asked(target)
    plain = drafting.texts(drafting.decode(target, None, prompts, rows=1, new_tokens=20))
    small = make_drafter(f"draft:{folder}", target, quantize=place.kind)
    assert isinstance(small, DraftModel)
    assert small.model.quantization == target.quantization
    for drafter in (small, make_drafter(f"draft:{folder}", target), make_drafter("prompt-lookup", target)):
        outputs = drafting.decode(target, drafter, prompts, rows=3, new_tokens=20)
        assert drafting.texts(outputs) == plain
    own = DraftModel(small.model, target, length=3, min_confidence=0)
    for output in drafting.decode(target, own, prompts, new_tokens=17):
        assert output.stats.accepted == output.stats.drafted or output.finish == "eos"


def test_only_linear_layers_change_and_memory_is_saved(folder: Path, place: Place) -> None:
    whole, target = Target.load(str(folder), device=place.device), place.load(folder)
    assert torch.equal(target.head.weight, whole.head.weight)
    assert target.dtype == torch.float32
    saved = num_bytes(whole.model) - num_bytes(target.model)
    linear = sum(m.weight.nbytes for m in whole.model.modules() if type(m) is nn.Linear and m is not whole.head)
    assert 0.5 * linear < saved < linear
    prompt = asked(target, 1)[0]
    theirs, ours = (one.logits(one.replay(prompt, [])) for one in (whole, target))
    assert 0 < (ours - theirs).abs().max() < theirs.abs().max()


def test_the_fingerprint_says_so_and_drafters_stay_bound(folder: Path, place: Place) -> None:
    whole, target = Target.load(str(folder), device="cpu"), place.load(folder)
    assert target.fingerprint() == whole.fingerprint() | {"quantization": place.kind}
    assert "quantization" not in whole.fingerprint()


def test_a_trained_drafter_of_the_whole_target_drafts_for_the_quantised_one(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path, place: Place
) -> None:
    config, method = METHODS["medusa"]
    binding = Binding(target=tiny_target.fingerprint(), template_hash=tiny_target.template_hash)
    method(config(num_heads=2), tiny_target).save(tmp_path / "drafter", binding=binding)
    target = place.load(tiny_target_dir)
    drafter = load_drafter(tmp_path / "drafter", target)
    plain = drafting.decode(target, None, [[5, 6, 7]], new_tokens=8)
    assert drafting.texts(drafting.decode(target, drafter, [[5, 6, 7]], new_tokens=8)) == drafting.texts(plain)


def test_bfloat16_weights_are_quantised_and_not_packed(tiny_target_dir: Path, place: Place) -> None:
    target = place.load(tiny_target_dir, dtype="bfloat16")
    assert target.dtype == torch.bfloat16
    assert len(drafting.decode(target, None, [[5, 6, 7]], new_tokens=8)[0].tokens) == 8
    layer = [module for module in target.layers[0].modules() if isinstance(module, nn.Linear)]
    assert layer, "the layer's matrices were replaced by packed ones"
    assert all(type(module.weight) is not nn.Parameter for module in layer)


def test_what_cannot_be_quantised_is_refused(place: Place) -> None:
    model = architectures.build("gpt2")  # its layers are no linear layers
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers that could be quantised"):
        quantized.quantize(model, place.kind, keep=[model.get_output_embeddings().weight])


def test_four_bits_leave_alone_what_t5_looks_at() -> None:
    """The library's own layers, made on the CPU and not run there."""
    pytest.importorskip("bitsandbytes", reason=f"needs bitsandbytes: {quantized.INSTALL}")
    model = encoder_decoders.build("t5").requires_grad_(False)
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    before = num_bytes(model)
    count = quantized.quantize(model, "int4", keep=[model.get_output_embeddings().weight])
    left = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert left == {name for name in linear if name.endswith((".wo", "lm_head"))}
    assert count == len(linear - left)
    assert num_bytes(model) < before


def test_an_unknown_kind_is_answered_with_those_there_are(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="quantize must be one of int8, int4, got 'int3'"):
        Target.load(str(tiny_target_dir), quantize="int3")


def test_four_bits_need_cuda(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="int4 weights need a CUDA device, this one is cpu; quantise to int8 here"):
        Target.load(str(tiny_target_dir), device="cpu", quantize="int4")


@pytest.mark.parametrize(("kind", "library"), [("int8", "torchao"), ("int4", "bitsandbytes")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(module: str) -> None:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(quantized, "import_module", absent)
    with pytest.raises(
        ValueError, match=rf"needs {library}, which is not installed .*pip install 'draftsmith\[quantized\]'"
    ):
        quantized.check_kind(kind, "cuda")


@pytest.mark.parametrize("name", ["none", "prompt-lookup", "lookahead"])
def test_a_drafter_without_weights_is_not_quantised(name: str, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="has no weights to quantise"):
        make_drafter(name, tiny_target, quantize="int8")
