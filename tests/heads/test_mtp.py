"""A target's own extra layer: read from the publisher's folder, drafting what its formula says, losslessly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads.mtp import Mtp
from draftsmith.infer.cache import Packed
from draftsmith.infer.drafter import Observation
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.schedule import Scheduled
from draftsmith.infer.target import Target
from draftsmith.infer.tree import Topology

from . import laws

LAYERS, WIDTH = 3, 48
SHARED = {
    "vocab_size": 300,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
}
KINDS: dict[str, Callable[[int], hf.PreTrainedModel]] = {
    "deepseek-v3": lambda layers: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**SHARED, **LATENT, v_head_dim=16, n_group=2, topk_group=1, num_hidden_layers=layers)
    ),
    "glm4-moe": lambda layers: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(**SHARED, num_key_value_heads=2, head_dim=16, num_hidden_layers=layers)
    ),
}


def publish(kind: str, folder: Path, tokenizer: hf.PreTrainedTokenizerBase) -> Path:
    """A model as its publisher ships it: the layer behind the last one carries the extra tensors."""
    torch.manual_seed(3)
    KINDS[kind](LAYERS + 1).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors, extra = _split_experts(load_file(folder / "model.safetensors")), f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{extra}{name}.weight"] = 1 + 0.3 * torch.rand(WIDTH)
    tensors[f"{extra}eh_proj.weight"] = 0.2 * torch.randn(WIDTH, 2 * WIDTH)
    tensors[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per expert, as in the released files."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind if owner else "", ())
        for number, expert in enumerate(tensor if parts else ()):
            for part, matrix in zip(parts, expert.chunk(len(parts))):
                found[f"{owner}.experts.{number}.{part}.weight"] = matrix.contiguous()
        if not parts:
            found[name] = tensor
    return found


@pytest.fixture(scope="module", params=list(KINDS))
def folder(
    request: pytest.FixtureRequest, tiny_tokenizer: hf.PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return publish(request.param, tmp_path_factory.mktemp("published") / request.param, tiny_tokenizer)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Mtp:
    return Mtp(target)


def expected(target: Target, folder: Path, tokens: list[int], *, guesses: int) -> list[int]:
    """The chain after `tokens`, the last of them the anchor, from the published tensors and the layer's own formula.

    Nothing is cached: the layer reads all pairs again for every token. It is one of a stock model of one layer more.
    """
    tensors, extra = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    deeper = (
        type(target.model).from_pretrained(folder, num_hidden_layers=LAYERS + 1, attn_implementation="eager").eval()
    )
    layer = deeper.model.layers[LAYERS]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), tensors[f"{extra}{name}.weight"], target.text_config.rms_norm_eps)

    text = torch.tensor([tokens])
    where = torch.arange(len(tokens) - 1)[None]
    hidden = target.read_packed(text[:, :-1], where, torch.ones_like(where)).hidden
    found: list[int] = []
    while len(found) < guesses:
        after = torch.tensor([tokens[1:] + found])
        both = torch.cat([norm("enorm", target.embedding(after)), norm("hnorm", hidden)], dim=-1)
        count = after.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turn = deeper.model.rotary_emb(both, position_ids=1 + torch.arange(count)[None])
        out = layer(both @ tensors[f"{extra}eh_proj.weight"].T, attention_mask=mask, position_embeddings=turn)
        out = norm("shared_head.norm", out)
        found.append(int((out[0, -1] @ tensors["lm_head.weight"].T).argmax()))
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return found


def read(target: Target, tokens: list[int]) -> Observation:
    """A prompt whose last token is the anchor."""
    ids, where = torch.tensor([tokens[:-1]]), torch.arange(len(tokens) - 1)[None]
    hidden = target.read_packed(ids, where, torch.ones_like(ids)).hidden
    count = torch.tensor([len(tokens) - 1])
    return Observation(slice(0, 1), ids, count, torch.zeros_like(count), hidden, None, torch.tensor([tokens[-1]]))


def chain(drafter: Mtp, state: object, length: int, anchor: int) -> list[int]:
    tree = drafter.draft(state, torch.tensor([anchor]), torch.tensor([length]), Sampling([SamplingParams()]))  # type: ignore[arg-type]
    return tree.tokens[0, 1:].tolist()


@torch.no_grad()
def test_it_drafts_what_the_published_layer_predicts(target: Target, folder: Path, drafter: Mtp) -> None:
    for seed in range(4):
        tokens = laws.prompts(1, seed=seed, vocab_size=300)[0]
        state = drafter.start(rows=1, capacity=8)
        drafter.observe(state, read(target, tokens))
        assert chain(drafter, state, len(tokens) - 1, tokens[-1]) == expected(target, folder, tokens, guesses=3)


def learn(drafter: Mtp, target: Target, text: laws.Text) -> None:
    """Teach the layer a little text, so that its drafts are sometimes right: step 0 only, as such layers are trained."""
    teacher = laws.teach(target, text, taps=())
    layer, steps = drafter.model.layers[0], teacher.step_mask(0)
    after, labels = torch.roll(teacher.tokens, -1, dims=1), teacher.step_labels(0)
    positions, plan = teacher.positions + 1, Packed(teacher.segments, teacher.positions)
    turn = drafter.model.rotary_emb(teacher.hidden, position_ids=positions)
    learned = list(layer.requires_grad_(True).parameters())
    optimiser = torch.optim.AdamW(learned, lr=5e-3)
    for _ in range(60):
        out = layer(
            target.embedding(after),
            teacher.hidden,
            position_embeddings=turn,
            attention_mask=None,
            position_ids=positions,
            cache=None,
            plan=plan,
        )
        loss = F.cross_entropy(target.logits(out[steps]), labels[steps])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    layer.requires_grad_(False)


@pytest.fixture(scope="module")
def text(target: Target) -> laws.Text:
    return laws.write_text(target, 6, seed=5)


@pytest.fixture(scope="module")
def able(target: Target, text: laws.Text) -> Mtp:
    drafter = Mtp(target, topology=Topology(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))))
    learn(drafter, target, text)
    return drafter


@pytest.mark.parametrize("settings", [SamplingParams(), SamplingParams(0.1, top_k=30)])
def test_text_equals_plain_decoding(target: Target, able: Mtp, text: laws.Text, settings: SamplingParams) -> None:
    ids = text.prompts[:4] + laws.prompts(2, seed=9, vocab_size=300)
    plain = laws.decode(target, None, ids, sampling=settings, new_tokens=20)
    for rows in (1, 4):
        drafted = laws.decode(target, able, ids, sampling=settings, rows=rows, new_tokens=20)
        assert [output.tokens for output in drafted] == [output.tokens for output in plain]
        accepted = sum(output.stats.accepted for output in drafted)
        assert 0 < accepted < sum(output.stats.drafted for output in drafted)


def test_its_chains_can_be_scheduled(target: Target, able: Mtp, text: laws.Text) -> None:
    able.topology, tree = Topology.chain(3), able.topology
    outputs = laws.decode(target, Scheduled(able, seconds={1: 1.0, 64: 9.0}), text.prompts)
    able.topology = tree
    assert [output.tokens for output in outputs] == text.answers
    assert 0 < sum(output.stats.drafted for output in outputs) < 3 * sum(output.stats.rounds for output in outputs)


@torch.no_grad()
def test_rejected_drafts_leave_nothing_behind(target: Target, drafter: Mtp) -> None:
    """Drafting between observations, and reading in pieces, end where reading at once does."""
    tokens = laws.prompts(1, seed=4, vocab_size=300, longest=40)[0] * 2
    once, rounds = drafter.start(rows=1, capacity=8), drafter.start(rows=1, capacity=8)
    whole = read(target, tokens)
    drafter.observe(once, whole)
    start = 0
    for end in (3, 4, 9, len(tokens) - 1):
        part = slice(start, end)
        count = torch.tensor([end - start])
        at = torch.tensor([start])
        seen = Observation(
            slice(0, 1), whole.tokens[:, part], count, at, whole.hidden[:, part], None, torch.tensor([tokens[end]])
        )
        drafter.observe(rounds, seen)
        last = chain(drafter, rounds, end, tokens[end])
        start = end
    torch.testing.assert_close(rounds.hidden, once.hidden, rtol=1e-4, atol=1e-5)
    assert last == chain(drafter, once, len(tokens) - 1, tokens[-1])


def test_no_tree_is_no_draft(target: Target) -> None:
    drafter = Mtp(target, topology=Topology(()))
    state = drafter.start(rows=1, capacity=8)
    assert chain(drafter, state, 3, 7) == []


# Refusals ----------------------------------------------------------------------------------------------------------


def test_a_target_without_such_a_layer_is_refused(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match=r"ships no multi-token-prediction layer.*Use another drafter"):
        Mtp(tiny_target)


def test_a_copy_that_lost_the_layer_is_refused(target: Target, tmp_path: Path) -> None:
    """transformers does not save what it did not load."""
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"could not be loaded.*must hold the tensors of layer 3"):
        Mtp(Target.load(str(tmp_path)))


def test_loading_leaves_the_target_as_it_was(folder: Path) -> None:
    target = Target.load(str(folder))
    before = (target.model._keys_to_ignore_on_load_unexpected, set(target.model.state_dict()))
    Mtp(target)
    assert (target.model._keys_to_ignore_on_load_unexpected, set(target.model.state_dict())) == before


def test_recurrent_targets_that_ship_one_are_refused_by_name() -> None:
    config = hf.Qwen3NextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, intermediate_size=16, num_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM keeps recurrent state \(linear_attention"):
        Target(hf.Qwen3NextForCausalLM(config), None)


# The command line --------------------------------------------------------------------------------------------------


def test_generate_drafts_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith.cli.opening import open_drafter

    target = Target.load(str(folder))
    drafter = open_drafter("mtp:2", target, tree="fit", rows=1)
    assert isinstance(drafter, Mtp)
    assert drafter.topology == Topology.chain(2)
    with pytest.raises(ValueError, match="mtp:K drafts K tokens, 1 or more, got 'mtp:none'"):
        open_drafter("mtp:none", target, tree="fit", rows=1)
    scheduled = open_drafter("mtp", target, tree="fit", rows=1, schedule="early-stop")
    assert isinstance(scheduled, Scheduled)
    assert "schedule: early-stop, confidences as the drafter gives them" in capsys.readouterr().err
