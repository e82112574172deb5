"""Encoder-decoder targets: every architecture against the model's own forward and its own generate."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.infer.audit import audit
from draftsmith.infer.cost import verify_seconds
from draftsmith.infer.decode import Engine
from draftsmith.infer.request import Request
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.target import Target
from draftsmith.infer.tree import TokenTree, Topology

from . import architectures
from .encoder_decoders import ARCHITECTURES, CONTEXT, VOCAB, build

PATHS = Topology(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)))


@pytest.fixture(params=list(ARCHITECTURES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def own_logits(model: hf.PreTrainedModel, source: list[int], begun: list[int]) -> Tensor:
    """(V,): the unwrapped model's logits after `begun`."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([begun])).logits[0, -1]


def test_every_tree_node_gets_the_logits_of_its_own_path(name: str) -> None:
    """Sources and answers of different lengths side by side, farther than the relative bias tells apart; in float64, so
    that nothing but rounding in the norms is forgiven."""
    target, alone = Seq2SeqTarget(build(name).double(), None), build(name).double()
    sources = [random_ids(count, seed=count) for count in (14, 5, 21)]
    begun = [[*target.opening, *random_ids(count, seed=count + 1)] for count in (17, 2, 9)]
    cache = target.new_cache(rows=3, capacity=24)
    prompts = [torch.tensor(source + start) for source, start in zip(sources, begun)]
    target.prefill(prompts, cache, first_row=0)
    candidates = torch.randint(3, VOCAB, (3, 3, 3), generator=torch.Generator().manual_seed(1))
    tree = PATHS.fill(torch.tensor([7, 8, 9]), candidates)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    logits = target.logits(target.verify(tree, lengths, cache, longest=int(lengths.max())).hidden)
    tail = target.logits(target.verify(tree, lengths, cache, longest=int(lengths.max()), skip=4).hidden)
    torch.testing.assert_close(tail, logits[:, 4:], atol=1e-3, rtol=1e-4)
    for row, (source, start) in enumerate(zip(sources, begun)):
        for node in range(tree.num_nodes):
            path = [tree.tokens[row, j].item() for j in range(node + 1) if tree.ancestors[row, node, j]]
            expected = own_logits(alone, source, start + path)
            torch.testing.assert_close(logits[row, node], expected, atol=1e-5, rtol=1e-6)


def test_prefill_gives_the_logits_after_every_prompt(name: str) -> None:
    """In float64: T5 does not scale its scores, so that float32 is off by 2e-3 on some processors."""
    target, alone = Seq2SeqTarget(build(name).double(), None), build(name).double()
    sources = [random_ids(count, seed=count) for count in (9, 2, 13)]
    prompts = [torch.tensor([*source, *target.opening]) for source in sources]
    reading = target.prefill(prompts, target.new_cache(rows=4, capacity=8), first_row=1)
    assert reading.hidden.shape[1] == sum(map(len, prompts))
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    for source, logits in zip(sources, target.logits(reading.hidden[0, ends])):
        torch.testing.assert_close(logits, own_logits(alone, source, list(target.opening)), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_penalties_look_at_the_answer_and_not_at_the_source_as_stock_generate_does(kind: str) -> None:
    target, alone, source = Seq2SeqTarget(build(kind), None), build(kind), random_ids(12, seed=4)
    texts = []
    for penalty in (1.0, 1.5):
        engine = Engine(target, rows=1)
        sampling = SamplingParams(repetition_penalty=penalty)
        engine.add(Request("a", [*source, *target.opening], 20, sampling))
        (output,) = engine.run()
        settings = {"max_new_tokens": 20 + len(target.opening) - 1, "do_sample": False, "repetition_penalty": penalty}
        expected = alone.generate(torch.tensor([source]), **settings)[0, len(target.opening) :].tolist()
        assert output.tokens == expected
        assert audit(target, [*source, *target.opening], output.tokens, sampling=sampling).verdict == "exact"
        texts.append(output.tokens)
    assert texts[0] != texts[1]


def test_plain_decoding_equals_stock_generate(name: str) -> None:
    """Rows join and leave, 2 at a time; answers run past the farthest distance of the relative bias."""
    target, alone = Seq2SeqTarget(build(name), None), build(name)
    engine, sources = Engine(target, rows=2), [random_ids(count, seed=count) for count in (3, 12, 7, 20, 5)]
    for index, source in enumerate(sources):
        engine.add(Request(str(index), [*source, *target.opening], 8 + 5 * index))
    outputs = {int(output.id): output for output in engine.run()}
    for index, source in enumerate(sources):
        forced = len(target.opening) - 1
        limit = 8 + 5 * index + forced
        expected = alone.generate(torch.tensor([source]), max_new_tokens=limit, do_sample=False)[0, 1 + forced :]
        assert outputs[index].tokens == expected.tolist()


def test_an_answers_beginning_may_be_given(name: str) -> None:
    """As generate does with decoder_input_ids: a language token, or the first words."""
    target, alone = Seq2SeqTarget(build(name), None), build(name)
    source, begun = random_ids(8, seed=1), [target.opening[0], *random_ids(5, seed=2)]
    engine = Engine(target, rows=1)
    engine.add(Request("x", source + begun, 10))
    alone.generation_config.forced_bos_token_id = None
    expected = alone.generate(
        torch.tensor([source]), decoder_input_ids=torch.tensor([begun]), max_new_tokens=10, do_sample=False
    )
    assert next(engine.run()).tokens == expected[0, len(begun) :].tolist()


def test_the_context_may_be_filled_to_its_end() -> None:
    """Draft nodes beyond the last position have none; they are read and never reach the text."""
    model = build("bart")
    model.generation_config.eos_token_id = []
    target, alone = Seq2SeqTarget(model, None), build("bart")
    source, new = random_ids(CONTEXT, seed=3), CONTEXT - len(target.opening)
    prompt = [*source, *target.opening]
    target.check_room(prompt, new)
    with pytest.raises(ValueError, match=f"{CONTEXT} source tokens, and 2 \\+ 63 tokens of the answer, exceed"):
        target.check_room(prompt, new + 1)
    with pytest.raises(ValueError, match="exceed the target's context of 64 each"):
        target.check_room([5, *prompt], 1)
    cache = target.new_cache(rows=1, capacity=8)
    target.prefill([torch.tensor([*prompt, *random_ids(new - 1, seed=4)])], cache, first_row=0)
    lengths = torch.tensor([2 * CONTEXT - 1])
    tree = TokenTree.chain(torch.tensor([9]), torch.tensor([[8, 7, 6]]))
    logits = target.logits(target.verify(tree, lengths, cache, longest=2 * CONTEXT - 1).hidden)
    begun = [*target.opening, *random_ids(new - 1, seed=4), 9]
    torch.testing.assert_close(logits[0, 0], own_logits(alone, source, begun), atol=1e-3, rtol=1e-4)
    assert logits.isfinite().all()


def test_the_audit_replays_an_answer_and_finds_a_planted_token(name: str) -> None:
    target = Seq2SeqTarget(build(name), None)
    prompt = [*random_ids(11, seed=5), *target.opening]
    engine = Engine(target, rows=1)
    engine.add(Request("x", prompt, 20))
    output = next(engine.run())
    tokens = output.tokens
    assert audit(target, prompt, tokens, finish=output.finish, max_new_tokens=20).verdict == "exact"
    at = len(tokens) // 2
    tokens[at] = (tokens[at] + 1) % VOCAB
    found = audit(target, prompt, tokens)
    assert (found.verdict, found.position) == ("wrong", at)


def test_prompts_are_checked() -> None:
    target = Seq2SeqTarget(build("bart"), None)
    engine = Engine(target, rows=1)
    engine.add(Request("x", [5, 6, 7], 4))
    (output,) = engine.run()
    assert "request 'x': the prompt of an encoder-decoder target is its source followed by" in output.error
    with pytest.raises(ValueError, match="which is missing"):
        target.split([target.opening[0], 5])
    assert target.split([5, 2, 6, 2, 0, 9]) == ([5, 2, 6], [2, 0, 9])


def test_text_is_the_source_and_a_conversation_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    target = Seq2SeqTarget(build("t5"), tiny_tokenizer)
    prompt = target.encode([{"role": "user", "content": "the cat"}])
    assert prompt == [*tiny_tokenizer("the cat")["input_ids"], 0]
    with pytest.raises(ValueError, match="reads one source text and no conversation; got messages of user, assistant"):
        target.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_what_reads_a_targets_layers_is_refused() -> None:
    target = Seq2SeqTarget(build("t5"), None)
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="which drafters cannot be trained for"):
        target.read_packed(ids, ids, ids)
    with pytest.raises(ValueError, match="are for causal targets"):
        target.prefill([torch.tensor([4, 0])], target.new_cache(rows=1, capacity=4), first_row=0, taps=(0,))


def test_models_of_the_other_kind_are_refused_with_the_way_to_load_them() -> None:
    with pytest.raises(
        ValueError, match=r"T5ForConditionalGeneration is an encoder-decoder model: load it with Target\.load"
    ):
        Target(build("t5"), None)
    with pytest.raises(ValueError, match="LlamaForCausalLM is no encoder-decoder model"):
        Seq2SeqTarget(architectures.build("llama"), None)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("LongT5", "its parts do not take"), ("LED", "takes no position_ids"), ("M2M100", "takes no position_ids")],
)
def test_an_architecture_that_is_built_otherwise_is_refused_when_it_is_loaded(kind: str, why: str) -> None:
    sizes = {
        "vocab_size": 50,
        "d_model": 16,
        "decoder_start_token_id": 2,
        "pad_token_id": 1,
        "max_position_embeddings": 64,
    }
    layers = {"encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    config = getattr(hf, f"{kind}Config")(**sizes | layers)
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config).eval()
    with pytest.raises(ValueError, match=f"{kind}ForConditionalGeneration is not supported: .*{why}"):
        Seq2SeqTarget(model, None)


def test_wrong_positions_would_be_noticed_when_a_target_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: with a bias by distance that is off by one, or positions that are, no target can be made."""
    from draftsmith.infer import seq2seq

    tables = seq2seq.bias_tables
    monkeypatch.setattr(
        seq2seq, "bias_tables", lambda layers: [t if t is None else t.roll(1, 1) for t in tables(layers)]
    )
    with pytest.raises(ValueError, match="its logits differ from ours"):
        Seq2SeqTarget(build("t5"), None)
    placed = seq2seq.Placed
    monkeypatch.setattr(seq2seq, "Placed", lambda module, positions: placed(module, positions + 1))
    with pytest.raises(ValueError, match="its logits differ from ours"):
        Seq2SeqTarget(build("bart"), None)


def test_a_saved_model_is_loaded_as_what_it_is(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    build("t5").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="bfloat16", device="cpu")
    assert isinstance(target, Seq2SeqTarget)
    assert target.dtype == torch.bfloat16
    other = Seq2SeqTarget(build("t5", seed=1), tiny_tokenizer)
    same = Target.load(str(tmp_path), device="cpu")
    assert target.fingerprint()["weights"] == same.fingerprint()["weights"] != other.fingerprint()["weights"]
    assert target.fingerprint()["config"] == other.fingerprint()["config"]
    assert target.fingerprint()["num_layers"] == 2


def test_the_cost_of_verification_is_measured_on_it_too() -> None:
    seconds = verify_seconds(Seq2SeqTarget(build("t5"), None), sizes=(1, 4), rows=2, context=12, repeats=1)
    assert list(seconds) == [1, 4]


def test_rows_that_move_take_their_source_along() -> None:
    target = Seq2SeqTarget(build("bart"), None)
    prompts = [[*random_ids(count, seed=count), *target.opening] for count in (4, 9)]
    cache = target.new_cache(rows=2, capacity=8)
    target.prefill([torch.tensor(prompt) for prompt in prompts], cache, first_row=0)
    anchors, lengths = torch.tensor([7, 8]), torch.tensor([len(prompt) for prompt in prompts])
    before = target.verify(TokenTree.root(anchors), lengths, cache, longest=11).hidden[1]
    cache.move(1, 0, length=11)
    after = target.verify(TokenTree.root(anchors[1:]), lengths[1:], cache, longest=11).hidden[0]
    torch.testing.assert_close(after, before)


def test_a_copy_of_a_wrapped_model_still_generates_by_itself() -> None:
    """Nothing of ours stays behind in the decoder: hooks are of one forward."""
    target = Seq2SeqTarget(build("bart"), None)
    target.prefill([torch.tensor([5, 6, *target.opening])], target.new_cache(rows=1, capacity=8), first_row=0)
    model = copy.deepcopy(target.model)
    for part in (model, model.get_encoder(), model.get_decoder()):
        part.config._attn_implementation = "eager"
    source = torch.tensor([[5, 6]])
    expected = build("bart").generate(source, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(source, max_new_tokens=6, do_sample=False), expected)
