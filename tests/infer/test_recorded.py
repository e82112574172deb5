"""Laws of recorded forwards: played back, they write what the target writes, for every drafter, as rows come and go.

Without CUDA the recorder is a trace: the very tensor operations of one forward, with their shapes and buffers, run again
with no Python between them. What a CUDA graph would freeze, the trace freezes too, and it refuses what waits for the device.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from draftsmith.infer.cache import KVCache
from draftsmith.infer.compiled import Compiled
from draftsmith.infer.decode import Engine
from draftsmith.infer.drafter import NoDraft
from draftsmith.infer.recorded import CudaGraphs, RecordedTarget
from draftsmith.infer.sampling import SamplingParams
from draftsmith.infer.seq2seq import Seq2SeqTarget
from draftsmith.infer.tapes import IDLE, Tensors
from draftsmith.infer.target import Reading, Target
from draftsmith.infer.tree import TokenTree

from . import architectures, drafting, encoder_decoders
from .tracing import Trace

HOT = SamplingParams(temperature=0.9, top_p=0.95)


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def recorded(target: Target, trace: Trace) -> RecordedTarget:
    return RecordedTarget(target, trace)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [(name, SamplingParams()) for name in ("none", *drafting.NAMES)]
    + [("drawn draft model", HOT), ("draft tree", HOT)],
)
def test_played_back_the_text_is_the_targets(
    name: str,
    sampling: SamplingParams,
    target: Target,
    draft: Target,
    recorded: RecordedTarget,
    trace: Trace,
    prompts: list[list[int]],
) -> None:
    """Six requests over three rows: they join, advance and leave at different times."""
    expected = drafting.texts(drafting.decode(target, None, prompts, rows=3, sampling=sampling))
    drafts = Trace()
    drafter = NoDraft() if name == "none" else drafting.build(name, recorded, RecordedTarget(draft, drafts))
    outputs = drafting.decode(recorded, drafter, prompts, rows=3, sampling=sampling)
    assert drafting.texts(outputs) == expected
    assert recorded.tapes.fault is None
    assert trace.played > 3 * trace.recorded > 0
    assert drafts.played > 0 or name not in drafting.MODELLED or name in ("draft beams", "draft tree")


@pytest.mark.parametrize("kind", list(architectures.ARCHITECTURES))
def test_every_architecture_plays_back_or_says_why_not(kind: str, prompts: list[list[int]]) -> None:
    target, trace = Target(architectures.build(kind), None), Trace(most=1)
    asked = [[token % architectures.VOCAB for token in prompt] for prompt in prompts]
    expected = drafting.texts(drafting.decode(target, None, asked, rows=2))
    recorded = RecordedTarget(target, trace)
    drafter = drafting.build("prompt-lookup", target, target)
    found = drafting.texts(drafting.decode(recorded, drafter, asked, rows=2))
    assert found == expected
    assert (trace.played > 0) == (recorded.tapes.fault is None)
    assert recorded.tapes.fault is None or kind in ("mixtral", "qwen3-moe")


def reading_of(
    target: Target, cache: KVCache, tree: TokenTree, lengths: torch.Tensor, taps: tuple[int, ...]
) -> Reading:
    return target.verify(tree, lengths, cache, longest=int(lengths.max()), taps=taps)


def test_readings_are_the_targets_in_every_row_and_tap(target: Target, recorded: RecordedTarget, trace: Trace) -> None:
    """Trees, lengths and the number of rows change; what was returned before is left alone."""
    torch.manual_seed(0)
    caches = [owner.new_cache(rows=4, capacity=64) for owner in (target, recorded)]
    prompts = [torch.randint(3, target.vocab_size, (count,)) for count in (9, 2, 14, 5)]
    for owner, cache in zip((target, recorded), caches):
        owner.prefill(prompts, cache, first_row=0)
    kept: list[tuple[Reading, Reading]] = []
    for turn in range(4 * Trace.seen):
        rows = 3 + turn % 2
        parents = torch.tensor([[-1, 0, 0, 1, turn % 4], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 0, 2, 1]])[:rows]
        tokens = torch.randint(3, target.vocab_size, (rows, 5))
        tree = TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
        lengths = torch.tensor([9, 2 + turn % 4, 14, 5])[:rows]
        expected = reading_of(target, caches[0], tree, lengths, (0, 1))
        kept.append((expected, reading_of(recorded, caches[1], tree, lengths, (0, 1))))
    assert (trace.recorded, trace.played) == (2, 2 * Trace.seen)  # one of three rows, one of four
    for expected, found in kept:
        assert found.features is not None
        assert expected.features is not None
        torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.features, expected.features, rtol=1e-5, atol=1e-5)


def test_a_cache_that_grows_is_recorded_anew(target: Target) -> None:
    trace = Trace(step=64)
    said: list[str] = []
    recorded = RecordedTarget(target, trace, say=said.append)
    expected = drafting.texts(drafting.decode(target, None, [[5, 6, 7, 8]], new_tokens=300))
    engine = Engine(recorded, rows=1)
    engine.add(drafting.Request("0", [5, 6, 7, 8], 300))
    assert [output.tokens for output in engine.run()] == expected
    assert engine.cache.capacity > 256
    assert trace.recorded > recorded.tapes.num_recordings(engine.cache) > 0
    assert len(said) == trace.recorded
    assert said[0] == "recording forwards of 1 x 1 nodes over up to 64 tokens, at once"


def test_recordings_pass_from_one_engine_to_the_next(
    target: Target, recorded: RecordedTarget, trace: Trace, prompts: list[list[int]]
) -> None:
    """And what the cache held before is not read."""
    expected = drafting.texts(drafting.decode(target, None, prompts, rows=1))
    for _ in range(2):
        assert drafting.texts(drafting.decode(recorded, None, prompts, rows=1)) == expected
        gc.collect()
        assert trace.recorded == 1
    together = [Engine(recorded, rows=1) for _ in range(IDLE + 2)]
    assert len({id(engine.cache.keys) for engine in together}) == IDLE + 2
    for engine in together:
        engine.add(drafting.Request("0", prompts[0], 4))
        list(engine.run())
    del engine, together
    gc.collect()
    assert len(recorded.tapes._idle[1]) == IDLE
    assert drafting.texts(drafting.decode(recorded, None, prompts, rows=1)) == expected


def test_what_waits_for_the_device_is_not_recorded_and_still_right(
    target: Target, prompts: list[list[int]], trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drafting.texts(drafting.decode(target, None, prompts))
    recorded = RecordedTarget(target, trace)
    read = Target._forward

    def waiting(self: Target, tokens: torch.Tensor, *args: object, **options: object) -> Reading:
        assert bool((tokens >= 0).all())
        return read(self, tokens, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "_forward", waiting)
    with pytest.warns(UserWarning, match="forwards run as ever, they cannot be recorded: "):
        found = drafting.texts(drafting.decode(recorded, None, prompts))
    assert found == expected
    assert recorded.tapes.fault
    assert not trace.played


def test_buffers_that_are_passed_on_are_clean_and_of_no_mode(target: Target, recorded: RecordedTarget) -> None:
    """A number that is none would survive its mask, and tensors of inference mode can only be written to within it."""
    expected = drafting.texts(drafting.decode(target, None, [[5, 6, 7]], rows=1))
    engine = Engine(recorded, rows=1)
    engine.add(drafting.Request("0", [5, 6, 7], 4))
    list(engine.run())
    with torch.inference_mode():
        for buffer in (*engine.cache.keys, *engine.cache.values):
            buffer.fill_(torch.nan)
    del engine
    gc.collect()
    cache = recorded.new_cache(rows=1, capacity=32)
    recorded.prefill([torch.tensor([5, 6, 7])], cache, first_row=0)  # outside of inference mode
    del cache
    gc.collect()
    assert drafting.texts(drafting.decode(recorded, None, [[5, 6, 7]], rows=1)) == expected


def test_buffers_that_memory_ran_out_on_are_given_up(target: Target, trace: Trace, prompts: list[list[int]]) -> None:
    """Some had grown and some had not; and what recordings hold is free for the requests that go on."""
    expected = drafting.texts(drafting.decode(target, None, prompts, rows=2, new_tokens=24))
    recorded = RecordedTarget(target, trace)
    engine = Engine(recorded, rows=2)
    for index, prompt in enumerate(prompts):
        engine.add(drafting.Request(str(index), prompt, 24))
    grow, broken = KVCache.reserve, list[KVCache]()

    def reserve(cache: KVCache, length: int) -> None:
        if engine.steps == 12 and cache.keys and not broken:
            broken.append(cache)
            cache.keys[0] = cache.keys[0][:, : 2 * 8]
            torch.empty(1 << 60)  # the allocator's own error
        grow(cache, length)

    with patch.object(KVCache, "reserve", reserve):
        outputs = {output.id: output for output in engine.run()}
    assert len(broken) == 1
    finished = [index for index in range(len(prompts)) if outputs[str(index)].finish != "error"]
    assert len(finished) == len(prompts) - 1
    assert all(outputs[str(index)].tokens == expected[index] for index in finished)
    broken.clear()
    gc.collect()
    assert all(tape.is_whole for idle in recorded.tapes._idle.values() for tape in idle)


def test_where_memory_runs_out_while_recording_forwards_run_as_ever(target: Target) -> None:
    class Full(Trace):
        def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    recorded = RecordedTarget(target, Full())
    with pytest.warns(UserWarning, match="Tried to allocate 2 GiB"):
        (output,) = drafting.decode(recorded, None, [[5, 6, 7]])
    assert output.tokens == drafting.decode(target, None, [[5, 6, 7]])[0].tokens


def test_graphs_are_refused_where_there_are_none(target: Target) -> None:
    with pytest.raises(ValueError, match=r"graphs are CUDA graphs, and 'tiny' is on cpu\. Compile its forwards"):
        RecordedTarget(target, CudaGraphs())
    with pytest.raises(ValueError, match=r"it is a Seq2SeqTarget, not a plain Target"):
        RecordedTarget(Seq2SeqTarget(encoder_decoders.build("t5"), None), Trace())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="compiling takes a C++ compiler")
def test_compiled_forwards_write_what_the_target_writes(tiny_target_dir: Path, prompts: list[list[int]]) -> None:
    """With weights in oneDNN's layout, which the compiler is not shown."""
    target = Target.load(str(tiny_target_dir))
    expected = drafting.texts(drafting.decode(target, None, prompts, rows=1, new_tokens=80))
    recorded = RecordedTarget(target, Compiled())
    engine = Engine(recorded, rows=1, drafter=drafting.build("prompt-lookup", recorded, recorded))
    for index, prompt in enumerate(prompts):
        engine.add(drafting.Request(str(index), prompt, 80))
    began = time.perf_counter()
    outputs = {output.id: output.tokens for output in engine.run()}
    assert [outputs[str(index)] for index in range(len(prompts))] == expected
    assert recorded.tapes.fault is None
    assert recorded.tapes.num_recordings(engine.cache) > 0
    assert engine.clock.total() < time.perf_counter() - began - 1, "compiling is no part of a round"


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", *drafting.NAMES])
def test_cuda_graphs_write_what_the_target_writes(
    name: str, sampling: SamplingParams, build_target: Callable[..., Target], prompts: list[list[int]]
) -> None:
    target = drafting.repeating(build_target(num_hidden_layers=2))
    draft = drafting.perturbed(target, build_target(num_hidden_layers=2))
    for each in (target, draft):
        torch.nn.Module.to(each.model, "cuda")
    expected = drafting.texts(drafting.decode(target, None, prompts, rows=3, sampling=sampling))
    recorded, drafts = (RecordedTarget(each, CudaGraphs()) for each in (target, draft))
    drafter = NoDraft() if name == "none" else drafting.build(name, recorded, drafts)
    assert drafting.texts(drafting.decode(recorded, drafter, prompts, rows=3, sampling=sampling)) == expected
    assert recorded.tapes.fault is None
    assert drafts.tapes.fault is None
