"""A small causal LM to train as a drafter: where its weights come from, and how its folder looks to other engines.

Three beginnings: a checkpoint of the target's family, a copy of some of the target's own layers between its embedding,
final norm and head, or an architecture like the target's at another size with random weights. All are built in float32
on the CPU. The embedding and the head are tied where the target's are.
"""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..infer.embedded import resolve
from ..infer.target import Target

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_checkpoint(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer called `name`: a local folder or a Hugging Face model id. Raises ValueError if there is
    none that can be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the checkpoint {name!r} to start from could not be loaded: {error}\nExpected a folder with config.json, weights and "
            "tokenizer, or a Hugging Face id that this machine can reach."
        ) from error


def prune(target: Target, keep: tuple[int, ...]) -> PreTrainedModel:
    """A copy of the target that has only the layers `keep`, 0-based and ascending. Raises ValueError where these are not
    layers of the target or do not stand on their own."""
    if not keep or list(keep) != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < target.num_layers:
        raise ValueError(
            f"keep_layers must be ascending distinct layers below {target.num_layers}, got {keep}. Sort them and drop repeats."
        )
    from torch.distributed.tensor import DTensor

    model = build(_with_layers(target.text_config, keep))
    (owner, layers), (new_owner, _) = (_stack(target.model, target.num_layers), _stack(model, len(keep)))
    body = {}
    for name, tensor in target.model.get_submodule(owner).state_dict().items():
        first, _, rest = name.partition(".")
        if first == layers:
            number, _, rest = rest.partition(".")
            if int(number) not in keep:
                continue
            name = f"{layers}.{keep.index(int(number))}.{rest}"
        body[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # of a target that is split up
    try:
        model.get_submodule(new_owner).load_state_dict(body)
        head = model.get_output_embeddings()
        assert head is not None, "a causal LM has an output embedding"
        head.load_state_dict(target.head.state_dict())
    except RuntimeError as error:
        raise ValueError(
            f"layers {keep} of {target.name!r} do not make a {type(model).__name__}, as its layers differ in kind: {error} "
            "Keep other layers, or start from a checkpoint."
        ) from error
    return model


def design(target: Target, fields: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights: the target's config with `fields` of it changed. Raises ValueError for a field that the
    config does not have or that may not differ."""
    known = sorted(target.text_config.to_dict())
    for field in fields:
        if field in ("vocab_size", "model_type"):
            raise ValueError(
                f"architecture.{field} is the target's; remove it. To begin with another architecture, save a model of it "
                "with transformers and name its folder as checkpoint."
            )
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            raise ValueError(
                f"architecture.{field} is no field of {type(target.text_config).__name__}; "
                + (f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}.")
            )
    count = fields.get("num_hidden_layers", target.num_layers)
    kept = tuple(layer % target.num_layers for layer in range(count))  # where layers differ in kind, in the same order
    config = _with_layers(target.text_config, kept)
    for field, value in fields.items():
        setattr(config, field, value)
    sizes = config.to_dict()
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}); set both in architecture."
        )
    return build(config)


def read_architecture(directory: Path) -> PretrainedConfig:
    """The config of a saved model. Raises ValueError if transformers cannot read it."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory} is not a model that transformers can read: {error} Save it again.") from error
    return config


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def keep_tied_once(model: nn.Module) -> dict[str, str]:
    """Leave the second name of every parameter that has two out of `model.state_dict()`, as transformers does on disk.

    Returns second name -> first name.
    """
    first: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        first.setdefault(id(parameter), name)
    tied = {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        for name in tied:
            state.pop(prefix + name, None)

    def restore(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for name, source in tied.items():
            if prefix + source in state:
                state[prefix + name] = state[prefix + source]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_pre_hook(restore)
    return tied


def public_config(model: PreTrainedModel) -> dict[str, Any]:
    """Content of config.json, every field written out.

    Rotary settings stand there in the spelling of transformers 5 and in that of 4, which would otherwise fall back to a
    base of 10000 without a word; so does the precision.
    """
    fields: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for foreign in ("_name_or_path", "draftsmith"):
        fields.pop(foreign, None)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    fields |= {"architectures": [type(model).__name__], "dtype": dtype, "torch_dtype": dtype}
    rope = fields.get("rope_parameters")
    if rope and "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        is_plain = scaling.get("rope_type", "default") == "default"
        fields |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if is_plain else scaling}
    return fields


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the tokenizer's files, each under a temporary name first. Raises ValueError on a full disk."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory, prefix=".tokenizer-") as work:
            tokenizer.save_pretrained(work)
            for file in sorted(Path(work).iterdir()):
                file.replace(directory / file.name)
    except OSError as error:
        raise ValueError(
            f"the tokenizer could not be saved to {directory}: {error}. Free some disk space or choose another folder."
        ) from error


def _with_layers(config: PretrainedConfig, keep: tuple[int, ...]) -> PretrainedConfig:
    """The config with these layers only; lists with one entry per layer (`layer_types`) are cut alike."""
    pruned, count = copy.deepcopy(config), config.num_hidden_layers
    pruned.num_hidden_layers = len(keep)
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(pruned, key, [value[layer] for layer in keep])
    return pruned


def _stack(model: PreTrainedModel, count: int) -> tuple[str, str]:
    """Where the decoder layers are: the name of the module that owns their list, and the list's name in it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            owner, _, layers = name.rpartition(".")
            return owner, layers
    raise AssertionError(
        f"{type(model).__name__} has no list of {count} decoder layers, yet it was accepted as a target"
    )
