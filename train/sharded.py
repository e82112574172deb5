"""A target that no single device holds: its decoder layers split over processes by transformers' tensor parallelism.

Neighbouring processes, those of one node for instance, form a group that holds the target once: each has a slice of
every matrix in the layers, and embedding and output head whole, as drafters read those directly. A forward is then a
common act: the processes of a group read the same tokens at the same time. In training each has rows of its own, so a
reading goes round: every process' rows are read by all of the group, and each keeps what belongs to its own. That costs
no more than reading alone would, as each does an equal share of every product.

So every process has to read equally often, which the loop sees to (`data.share`, `metrics.evaluate`). Where that is not
so, as in building a feature cache, one process of a group reads and the others read along (`lead`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..infer import embedded
from ..infer.pretrained import DTYPES
from ..infer.target import Reading, Target

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Asked = tuple[list[Any], tuple[int, ...]]
"""Tokens, positions and segments as lists, and the taps."""


class ShardedTarget(Target):
    """A target whose forward is a collective call of the processes that hold it together."""

    group: dist.ProcessGroup
    """The processes that hold it."""
    is_led: bool | None
    """True within `lead`, in the process that reads for itself; None after it: what was to be read lies on disk."""

    @classmethod
    def load_shards(cls, name: str, *, dtype: str, shards: int) -> ShardedTarget:
        """This process' part of the target called `name`, which `shards` neighbouring processes hold together; a collective
        call of all, after they have joined.

        Raises ValueError if the model cannot be found, loaded or split so.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder = embedded.resolve(name)
        try:
            architecture = AutoConfig.from_pretrained(folder)
            if reason := unsplittable(architecture, shards):
                raise ValueError(reason)
            with torch.device("meta"):
                whole = whole_modules(AutoModelForCausalLM.from_config(architecture))
            split = _groups_of(shards, dict.fromkeys(whole, "replicate"))
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], distributed_config=split)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"target {name!r} could not be split over {shards} processes: {error}\nSet target_shards to another number of "
                "processes, or target_sharding to none."
            ) from error
        target = cls(model, tokenizer, name=name)
        group: Any = dist.new_subgroups(group_size=shards)[0]
        target.group = group
        target.is_led = False
        return target

    def read_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, *, taps: tuple[int, ...] = ()
    ) -> Reading:
        """As `Target.read_packed`, for the rows of every process of the group in turn; within `lead`, for the leader's."""
        own: Asked = ([part.tolist() for part in (tokens, positions, segments)], taps)
        if self.is_led:
            dist.broadcast_object_list([own], group=self.group, group_src=0)
            return self._read(own)
        if self.is_led is None:
            raise ValueError(
                "the features on disk are damaged, and a target that is split over processes can write them anew at the start of a "
                "run only. Remove the file that was named and go on with --resume."
            )
        kept, done, everyones = None, list[Asked | None](), [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyones, own, group=self.group)
        for asked in everyones:
            if asked is not None and asked not in done:  # rows that several processes read alike are read once
                done.append(asked)
                found = self._read(asked)
                kept = found if asked == own else kept
        assert kept is not None, "what was gathered lacks the own rows"
        return kept

    def lead(self, work: Callable[[], object]) -> None:
        """Let the first process of each group do `work`, in which it reads whatever it likes; the others read along.

        Raises ValueError in all of them if that fails.
        """
        fault, asked = list[str | None]([None]), list[Asked | None]([None])
        if dist.get_rank(self.group) == 0:
            self.is_led = True
            try:
                work()
            except ValueError as error:
                fault = [str(error)]
            finally:
                dist.broadcast_object_list(asked, group=self.group, group_src=0)
        else:
            dist.broadcast_object_list(asked, group=self.group, group_src=0)
            while asked[0] is not None:
                self._read(asked[0])
                dist.broadcast_object_list(asked, group=self.group, group_src=0)
        self.is_led = None
        dist.broadcast_object_list(fault, group=self.group, group_src=0)
        if fault[0] is not None:
            raise ValueError(fault[0])

    def fingerprint(self) -> dict[str, Any]:
        """That of the whole target; a collective call."""
        path, part = next(self.layers[-1].named_parameters())  # the one that the fingerprint looks at
        owner, _, name = path.rpartition(".")
        module = self.layers[-1].get_submodule(owner)
        whole = part.data.full_tensor() if isinstance(part.data, DTensor) else part.data
        module.register_parameter(name, nn.Parameter(whole, requires_grad=False))
        try:
            return super().fingerprint()
        finally:
            module.register_parameter(name, part)

    def _read(self, asked: Asked) -> Reading:
        batch, taps = asked
        return super().read_packed(*(torch.tensor(part, device=self.device) for part in batch), taps=taps)


def whole_modules(model: PreTrainedModel) -> list[str]:
    """Names of the modules that no process has a part of only: embedding and output head."""
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in whole)]


def _groups_of(shards: int, exceptions: dict[str, str]) -> Any:
    """transformers' way of saying so: tensor parallelism in each group, and beside it nothing. Its own word for groups side
    by side would also wrap the model in FSDP, which is for weights that are trained."""
    from transformers.distributed import DistributedConfig

    class Groups(DistributedConfig):
        @property
        def dp_size(self) -> int:
            return 1

    return Groups(tp_size=shards, dp_replicate_size=dist.get_world_size() // shards, tp_plan=exceptions)


def unsplittable(architecture: PretrainedConfig, shards: int) -> str | None:
    """Why the layers of such a model cannot be split over so many processes; None if they can."""
    config = architecture.get_text_config(decoder=True)
    plan, settings = config.base_model_tp_plan, config.to_dict()
    if not plan:
        return f"transformers has no tensor-parallel plan for {config.model_type}"
    heads = settings.get("num_key_value_heads") or settings["num_attention_heads"]
    if any(rule.endswith(("k_proj", "qkv_proj")) for rule in plan) and heads % shards:
        return f"its {heads} key-value heads do not divide over {shards} processes"
    inner = settings.get("moe_intermediate_size") or settings.get("intermediate_size")
    if inner and inner % shards:
        return f"its inner width {inner} does not divide over {shards} processes"
    return None
