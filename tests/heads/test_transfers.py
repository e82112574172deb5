"""A greedy round waits for the device once: each further time would leave it idle until the host has answered itself. (Sampled
noise is looked up by position, for which the host has to know how many there are.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from draftsmith.infer.decode import Engine
from draftsmith.infer.drafter import Drafter, NoDraft
from draftsmith.infer.request import Request
from draftsmith.infer.target import Target

from . import laws

WAITING = {
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "numpy",
    "equal",
    "nonzero",
    "masked_select",
}


class Transfers(TorchFunctionMode):
    """Counts calls that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in WAITING:
            self.counts[name] += 1
        if name in ("__getitem__", "__setitem__"):  # lists are copied to the device, masks are counted
            chosen = args[1] if isinstance(args[1], tuple) else (args[1],)
            hidden = [part for part in chosen if isinstance(part, (list, range))]
            masks = [part for part in chosen if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
            self.counts[name] += len(hidden) + len(masks)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("none", {}),
        ("medusa", {}),
        ("hydra", {}),
        ("eagle3", {}),
        ("eagle3", {"tree": None, "dynamic_tree": {"nodes": 6, "width": 2, "depth": 3}}),
        ("dflash", {"best_first": None}),
    ],
)
def test_a_round_waits_for_the_device_once(method: str, changes: dict[str, Any], tiny_target: Target) -> None:
    drafter: Drafter = NoDraft() if method == "none" else laws.build(method, tiny_target, **changes).eval()
    engine = Engine(tiny_target, drafter=drafter, rows=3)
    for index, prompt in enumerate(laws.prompts(3, seed=4, vocab_size=tiny_target.vocab_size)):
        engine.add(Request(str(index), prompt, 30))
    while not engine.steps:
        engine.step()
    for _ in range(3):
        with Transfers() as found:
            engine.step()
        assert +found.counts == Counter(tolist=1)
