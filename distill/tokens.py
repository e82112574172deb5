"""Conversations and responses -> token samples with an assistant-only mask, and a preview a person can read.

Response files carry the very ids the target read and wrote, and these are used as they are. Other conversations go
through the chat template; the mask comes from token prefixes (`template.py`), never from a pattern in the text.

    draftsmith preview responses.jsonl        # one sample: learned tokens green, context dim
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..infer.target import Target
from .prompts import Conversation, load_conversations
from .responses import Manifest, Response, manifest_path, read_responses
from .template import ChatTemplate, TemplateFault, Transcript, template_hash

Spans = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Sample:
    """One token sequence. `supervised[i]`: token i belongs to an answer and is learned."""

    id: str
    tokens: list[int]
    supervised: list[bool]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.supervised), f"sample {self.id}: mask and tokens differ in length"


def load_samples(
    path: Path | str,
    target: Target | PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    max_length: int,
    max_samples: int | None = None,
    format: str = "auto",
    max_bad_share: float = 0.01,
) -> list[Sample]:
    """Samples of a response file, or of any conversations with answers, ordered by id.

    Samples longer than `max_length` are cut, and counted. `max_samples` takes a choice by hash of the id, so it does
    not depend on the order in which answers were finished. A line on stderr says how many samples and tokens there
    are and what was cut or left out. Raises ValueError if no token at all is supervised, with the reason, and if the
    chat template refuses more than `max_bad_share` of the conversations.
    """
    tokenizer = target.tokenizer if isinstance(target, Target) else target
    responses = read_responses(Path(path), split=split) if manifest_path(Path(path)).is_file() else None
    if responses is not None and _ids_are_usable(Path(path), target, tokenizer):
        found = [sample for response in responses for sample in _response_samples(response)]
    else:
        talks = load_conversations(path, split=split, format=format, max_bad_share=max_bad_share)
        talks = _without_cut_answers(talks, responses or [])
        found = _conversation_samples(talks, tokenizer, _eos_ids(target), str(path), max_bad_share)
    whole = sorted(found, key=lambda sample: sample.id)
    if max_samples is not None and len(whole) > max_samples:
        chosen = sorted(whole, key=lambda sample: hashlib.sha256(sample.id.encode()).digest())[:max_samples]
        whole = sorted(chosen, key=lambda sample: sample.id)
    cut = [Sample(s.id, s.tokens[:max_length], s.supervised[:max_length]) for s in whole]
    samples = [sample for sample in cut if any(sample.supervised)]
    _account(str(path), whole, samples, max_length)
    return samples


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The sample's text: learned tokens green, context dim."""
    text = Text()
    for learned, run in groupby(zip(sample.supervised, sample.tokens), key=lambda pair: pair[0]):
        text.append(str(tokenizer.decode([token for _, token in run])), style="green" if learned else "dim")
    return text


def _eos_ids(target: Target | PreTrainedTokenizerBase) -> tuple[int, ...]:
    if isinstance(target, Target):
        return target.eos_ids
    if not isinstance(target.eos_token_id, int):
        raise ValueError("the tokenizer has no EOS token, so no answer would have an end. Set tokenizer.eos_token.")
    return (target.eos_token_id,)


def _ids_are_usable(path: Path, target: Target | PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids in a response file are this target's; if not, say so: the text will be tokenised anew."""
    manifest = Manifest.read(path)
    name = manifest.target.get("served as", manifest.target["name"])
    theirs, ours = {"chat template": manifest.template_hash}, {"chat template": template_hash(tokenizer)}
    if isinstance(target, Target):
        theirs["vocabulary size"], ours["vocabulary size"] = manifest.target["vocab_size"], str(target.vocab_size)
        if manifest.target["weights"] is None:
            print(f"samples: {path} was answered through a server, by what it calls {name}", file=sys.stderr)
        elif manifest.target["weights"] != target.fingerprint()["weights"]:
            print(f"samples: {path} was answered by {name}: it is not this target's own text", file=sys.stderr)
    differ = [f"{key} {theirs[key]} there, {ours[key]} here" for key in ours if str(theirs[key]) != ours[key]]
    if differ:
        print(
            f"samples: the token ids of {path}, from {name}, are not used ({'; '.join(differ)}); its text is tokenised anew",
            file=sys.stderr,
        )
    return not differ


def _without_cut_answers(talks: list[Conversation], responses: list[Response]) -> list[Conversation]:
    """Tokenised anew, a cut answer would be given the end that its writer never wrote; so those are left out."""
    cut = {response.id for response in responses if response.truncated}
    if cut:
        print(f"samples: {len(cut)} conversations with cut answers are left out", file=sys.stderr)
    return [talk for talk in talks if talk.id not in cut]


def _response_samples(response: Response) -> list[Sample]:
    return _samples(response.id, [(part.token_ids, part.supervised) for part in response.sequences])


def _samples(id: str, sequences: Iterable[tuple[list[int], Spans]]) -> list[Sample]:
    """One sample per sequence; the second and later ones are called id#2, id#3."""
    samples = []
    for number, (tokens, spans) in enumerate(sequences, start=1):
        mask = [False] * len(tokens)
        for start, end in spans:
            mask[start:end] = [True] * (end - start)
        samples.append(Sample(id if number == 1 else f"{id}#{number}", tokens, mask))
    return samples


def _conversation_samples(
    talks: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: tuple[int, ...],
    source: str,
    max_bad_share: float,
) -> list[Sample]:
    template = None if all(talk.text for talk in talks) else ChatTemplate(tokenizer, eos_ids)
    if template and not template.has_tools and any(_uses_tools(talk) for talk in talks):
        print("samples: the chat template has no tools; calls and results are written as text in tags", file=sys.stderr)
    samples: list[Sample] = []
    faults: list[tuple[str, TemplateFault]] = []
    for talk in talks:
        try:
            samples += _samples(talk.id, _sequences(talk, template) if template else [_plain(talk, tokenizer, eos_ids)])
        except TemplateFault as fault:
            faults.append((talk.id, fault))
    if faults:
        summary = (
            f"{len(faults)} of {len(talks)} conversations of {source} cannot be used, the first is {faults[0][0]!r}: "
            f"{faults[0][1]}."
        )
        if len(faults) > max_bad_share * len(talks):
            raise ValueError(
                f"{summary} Use a target whose template keeps this form, or regenerate the answers with the target."
            )
        print(f"samples: {summary}", file=sys.stderr)
    return samples


def _uses_tools(talk: Conversation) -> bool:
    return bool(talk.tools) or any("tool_calls" in message for message in talk.messages)


def _sequences(talk: Conversation, template: ChatTemplate) -> list[tuple[list[int], list[tuple[int, int]]]]:
    transcript = Transcript()
    for index, message in enumerate(talk.messages):
        if message["role"] == "assistant":
            transcript.add(*template.answer(talk.messages[: index + 1], talk.tools))
    return transcript.sequences


def _plain(talk: Conversation, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> tuple[list[int], Spans]:
    """Plain text: everything is learned, the end included; the first token has nothing before it to follow from."""
    ids = [*tokenizer(talk.text, verbose=False)["input_ids"], *eos_ids[:1]]
    return ids, [(1, len(ids))]


def _account(source: str, whole: list[Sample], samples: list[Sample], max_length: int) -> None:
    tokens = sum(len(sample.tokens) for sample in samples)
    supervised = sum(sum(sample.supervised) for sample in samples)
    num_cut = sum(len(sample.tokens) > max_length for sample in whole)
    num_lost = len(whole) - len(samples)
    if supervised == 0:
        if not whole:
            reason = "no conversation in it holds an answer. Let the target answer first: `draftsmith respond`"
        elif num_cut:
            reason = f"{num_cut} of {len(whole)} samples have {max_length} tokens before any answer. Raise the length"
        else:
            reason = f"all {len(whole)} samples have empty answers"
        raise ValueError(f"{source}: no supervised token, nothing would be trained: {reason}.")
    print(
        f"samples: {source}: {len(samples)} samples, {tokens} tokens, {supervised} supervised "
        f"({supervised / tokens:.1%}); {num_cut} cut at {max_length}, {num_lost} of them left without an answer",
        file=sys.stderr,
    )
