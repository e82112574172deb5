"""Files of outputs that `draftsmith audit` can replay, and what each says of how its outputs were made.

--run JSON     an evaluation document or what `generate --json` wrote: {"answers": [{"id", "prompt", "tokens",
               "finish"}], "settings": {"target", "dtype", "sampling", "max_new_tokens"}}
--text FILE    JSON lines. Either a response file of `draftsmith respond`, or one output per line:
               what was asked: "prompt" (text), "messages" (role, content), or "prompt_tokens" (ids);
               what came out: "tokens" (ids), "response" (text), or a last message of role assistant;
               and, where known: "id", "sampling" ({"temperature", "seed", ...}; greedy if absent), "finish" (eos or
               length), "max_new_tokens"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..infer.sampling import SamplingParams

Messages = Sequence[dict[str, Any]]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Claim:
    """One output, said to be the target's own."""

    id: str
    prompt: Sequence[int] | Messages
    """Token ids, or messages for the target's chat template."""
    answer: Sequence[int] | str
    """Token ids, or text."""
    sampling: SamplingParams
    finish: str = ""
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Outputs:
    """What a file holds."""

    claims: list[Claim]
    target: str | None = None
    """Name of the target that wrote them, if the file says so; likewise the others."""
    dtype: str | None = None
    weights: str | None = None
    """`weights` of its fingerprint."""
    quantize: str | None = None
    """`quantization` of its fingerprint."""


def read_run(path: Path) -> Outputs:
    """The answers of an evaluation document or of `generate --json`. Raises ValueError if it is neither."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        settings, answers = document["settings"], document["answers"]
        sampling, limit = _sampling(settings["sampling"]), settings["max_new_tokens"]
        _check_replayable(settings, sampling)
        claims = [Claim(a["id"], a["prompt"], a["tokens"], sampling, a["finish"], limit) for a in answers]
        made = settings["fingerprint"]
        return Outputs(claims, settings["target"], settings["dtype"], made["weights"], made.get("quantization"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no outputs to audit ({type(error).__name__}: {error}). Expected what `draftsmith evaluate --json` or "
            "`draftsmith generate --json` writes; for other files use --text."
        ) from error


def read_text(path: Path) -> Outputs:
    """JSON lines, see above. Raises ValueError naming the first line that is not as expected."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [_at(f"{path}:{number}", _object, line) for number, line in enumerate(lines, 1)]
    if not rows:
        raise ValueError(f"{path} is empty; expected one output per line.")
    if "sequences" in rows[0]:
        return _responses(path)
    return Outputs([_at(f"{path}:{number}", _claim, row, str(number)) for number, row in enumerate(rows, 1)])


def _at(place: str, read: Callable[..., Found], *given: Any) -> Found:
    """What `read` makes of a line; raises its errors with the line's place."""
    try:
        return read(*given)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}.")
    return found


def _claim(row: dict[str, Any], number: str) -> Claim:
    messages = list(row.get("messages") or ())
    answered = "tokens" not in row and "response" not in row and messages and messages[-1]["role"] == "assistant"
    spoken = messages.pop()["content"] if answered else None
    if "prompt" in row:
        messages = [{"role": "user", "content": str(row["prompt"])}]
    prompt, answer = row.get("prompt_tokens") or messages, row.get("tokens", row.get("response", spoken))
    if not prompt:
        raise ValueError(
            f"it does not say what was asked (prompt, messages or prompt_tokens); it has {', '.join(row)}."
        )
    if not isinstance(answer, str | list):
        raise ValueError(
            "it does not say what came out (tokens, response, or a last message of role assistant); "
            f"it has {', '.join(row)}."
        )
    loose = {field.name for field in fields(_settings_class())} & row.keys()
    if loose:
        raise ValueError(f'{", ".join(sorted(loose))} must stand in "sampling": {{...}} to count.')
    for ids in (prompt if "prompt_tokens" in row else (), answer if isinstance(answer, list) else ()):
        if not all(isinstance(token, int) for token in ids):
            raise ValueError("tokens and prompt_tokens are lists of token ids (integers).")
    finish, limit = str(row.get("finish") or ""), row.get("max_new_tokens")
    return Claim(str(row.get("id", number)), prompt, answer, _sampling(row.get("sampling") or {}), finish, limit)


def _responses(path: Path) -> Outputs:
    """Every answer of a response file, each with its conversation's seed."""
    from ..distill.responses import Manifest, read_responses
    from ..distill.talks import conversation_seed

    manifest, claims = Manifest.read(path), []
    is_served = manifest.dtype == "served"
    if is_served and manifest.sampling["temperature"] > 0:
        raise ValueError(
            f"{path}: these answers were sampled by a server, with noise of its own, so nothing can replay them. Greedy ones "
            "can be audited."
        )
    for response in read_responses(path):
        seed = conversation_seed(int(manifest.sampling["seed"]), response.id)
        sampling = _sampling(manifest.sampling | {"seed": seed})
        spans = [(found.token_ids, span) for found in response.sequences for span in found.supervised]
        for turn, (ids, (start, end)) in enumerate(spans, 1):
            name = response.id if len(spans) == 1 else f"{response.id} turn {turn}"
            finish = "length" if response.truncated else "eos"
            claims.append(Claim(name, ids[:start], ids[start:end], sampling, finish))
    made = manifest.target
    dtype = None if is_served else manifest.dtype
    return Outputs(claims, made["name"], dtype, made["weights"], made.get("quantization"))


def _sampling(settings: dict[str, Any]) -> SamplingParams:
    return _settings_class()(**settings)


def _settings_class() -> type[SamplingParams]:
    from ..infer.sampling import SamplingParams

    return SamplingParams


def _check_replayable(settings: dict[str, Any], sampling: SamplingParams) -> None:
    from ..infer.verifiers import verifier_named

    name = settings.get("verifier", "sample-match")
    rule = verifier_named(name)
    if sampling.temperature > 0 and not rule.keeps_text(sampling.temperature):
        raise ValueError(f"they were sampled under --verifier {name}, {rule.meaning}, so a seed does not replay them")
