"""`draftsmith respond`: the target answers prompts, here or on a server; a killed run goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import (
    DrafterName,
    Dtype,
    MaxNewTokens,
    Quantize,
    QuantizeDrafter,
    Rows,
    Seed,
    Temperature,
    TopK,
    TopP,
    Tree,
)
from .opening import open_drafter
from .report import reported

if TYPE_CHECKING:
    from ..distill.prompts import Conversation
    from ..distill.server import Server
    from ..distill.talks import RespondReport
    from ..infer.sampling import SamplingParams

TargetOrTokenizer = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="smollm2-135m (embedded, the default), a model folder, or a Hugging Face id; with --server, where its tokenizer "
        "is (default: --model).",
        metavar="NAME",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(help="File, folder or hub data set (alpaca, sharegpt, messages, ...); the shipped prompts if absent."),
]
Url = Annotated[str | None, typer.Option(help="OpenAI-compatible server that runs the target.", metavar="URL")]
Model = Annotated[str | None, typer.Option(help="The server's name for the target.", metavar="NAME")]
Concurrency = Annotated[int, typer.Option(help="Requests to the server at the same time.", min=1)]
ApiKeyEnv = Annotated[str | None, typer.Option(help="Environment variable that holds the server's key.", metavar="VAR")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for one answer of the server.", min=0.001)]
Attempts = Annotated[int, typer.Option(help="How often one question is asked before it is given up.", min=1)]
Body = Annotated[
    str | None, typer.Option(help='Further keys of the request, like {"return_token_ids": true}.', metavar="JSON")
]

EMBEDDED = "smollm2-135m"
HERE = ("drafter", "rows", "tree", "dtype", "quantize", "quantize_drafter")
THERE = ("model", "concurrency", "api_key_env", "timeout", "attempts", "body")
"""Options for a target that runs here, and for one behind a server."""


def respond(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="Response file to write or to continue (jsonl).")],
    target: TargetOrTokenizer = None,
    prompts: Prompts = None,
    split: Annotated[str | None, typer.Option(help="Only prompts of this split: train or held-out.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.", min=1)] = None,
    drafter: DrafterName = "none",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    rows: Rows = 32,
    tree: Tree = "fit",
    quantize: Quantize = None,
    quantize_drafter: QuantizeDrafter = None,
    dtype: Dtype = "auto",
    server: Url = None,
    model: Model = None,
    concurrency: Concurrency = 64,
    api_key_env: ApiKeyEnv = None,
    timeout: Timeout = 600.0,
    attempts: Attempts = 10,
    body: Body = None,
) -> None:
    """Let the target answer prompts, as training data for its drafter.

    Answers are appended one by one; the same command after an interruption answers what is missing.

    For a target behind a server: --server http://localhost:8000 --model NAME

    Example: draftsmith respond --out runs/responses.jsonl --limit 100 --max-new-tokens 128
    """
    with reported(f"finished answers are in {out}; the same command goes on from there."):
        from ..distill.prompts import load_conversations
        from ..infer.sampling import SamplingParams

        _refuse(context, HERE if server else THERE, because="with --server" if server else "without --server")
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if server is None:
            asked = load_conversations(prompts, split=split, limit=limit)
            settings_here = (max_new_tokens, drafter, rows, tree, dtype, quantize, quantize_drafter)
            _say(_here(target or EMBEDDED, asked, out, sampling, *settings_here))
        else:
            settings = _server(server, model, api_key_env, body, concurrency, timeout, attempts)
            asked = load_conversations(prompts, split=split, limit=limit)
            _say(_there(settings, target or settings.model, asked, out, sampling, max_new_tokens))


def _say(report: RespondReport) -> None:
    print(
        f"{report.path}: answered {report.answered} ({report.truncated} truncated), "
        f"kept {report.resumed} from before, refused {report.rejected}, failed {report.failed}; "
        f"{report.tokens} tokens, {report.tokens_per_s:.0f} tokens/s"
    )


def _refuse(context: typer.Context, names: Sequence[str], *, because: str) -> None:
    """Raises ValueError for an option that would do nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} means nothing {because}; leave it out.")


def _server(
    url: str,
    model: str | None,
    api_key_env: str | None,
    body: str | None,
    concurrency: int,
    timeout: float,
    attempts: int,
) -> Server:
    import json
    import os

    from ..distill.server import Server

    if model is None:
        raise ValueError("--server needs --model, the name under which the server knows the target.")
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise ValueError(f"--api-key-env names {api_key_env}, which is not set in the environment.")
    try:
        extra = json.loads(body or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--body is not JSON ({error}): {body!r}.") from error
    if not isinstance(extra, dict):
        raise ValueError(f"--body must be a JSON object, got {body!r}.")
    return Server(url, model, key, concurrency=concurrency, timeout_s=timeout, attempts=attempts, body=extra)


def _here(
    name: str,
    conversations: list[Conversation],
    out: Path,
    sampling: SamplingParams,
    max_new_tokens: int,
    drafter: str,
    rows: int,
    tree: str,
    dtype: str,
    quantize: str | None,
    quantize_drafter: str | None,
) -> RespondReport:
    from ..distill.respond import respond as let_target_respond
    from ..infer.target import Target

    target = Target.load(name, dtype=dtype, quantize=quantize)
    return let_target_respond(
        target,
        conversations,
        out,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        rows=rows,
        drafter=open_drafter(drafter, target, tree=tree, rows=rows, quantize=quantize_drafter),
    )


def _there(
    server: Server,
    name: str,
    conversations: list[Conversation],
    out: Path,
    sampling: SamplingParams,
    max_new_tokens: int,
) -> RespondReport:
    from ..distill.remote import respond_through
    from ..distill.served import ServedTarget

    target = ServedTarget.load(name)
    return respond_through(server, target, conversations, out, sampling=sampling, max_new_tokens=max_new_tokens)
