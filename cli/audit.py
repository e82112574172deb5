"""`draftsmith audit`: are these texts the target's own? Replays every output and looks for its first foreign token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .report import reported

if TYPE_CHECKING:
    from rich.table import Table

    from ..infer.audit import Audit
    from ..infer.target import Target
    from .outputs import Claim, Outputs

WRONG = 1


def audit(
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            help='Outputs as JSON lines: {"prompt" or "messages" or "prompt_tokens": ..., "response" or "tokens": ...}, '
            "or a response file of `draftsmith respond`.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="What `evaluate --json` or `generate --json` wrote.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Whose texts they should be; what the file says, else smollm2-135m.", metavar="NAME"),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision to replay in; what the file says, else float32.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="int8 or int4 weights; as the file says, else none.", metavar="int8|int4"),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the findings here too.")] = None,
) -> None:
    """Replay outputs through the target and judge each: exact, near-tie, or wrong.

    Says where the first token stands that the target would not have chosen, and
    the gap between its two best logits there. Sampled outputs are replayed with
    their seed. The exit code is 1 if any output is wrong.

    Example: draftsmith audit --run runs/evaluation.json
    """
    with reported("the outputs judged so far are in the table above; nothing was written."):
        from rich.console import Console

        from ..infer.target import Target
        from .evaluate import write_json

        outputs = _read(text, run)
        model = Target.load(
            target or outputs.target or "smollm2-135m",
            dtype=dtype or outputs.dtype or "float32",
            quantize=quantize or outputs.quantize,
        )
        if outputs.weights and outputs.weights != model.fingerprint()["weights"]:
            print(
                f"audit: the outputs were written by a target with other weights ({outputs.target}), not by {model.name}",
                file=sys.stderr,
            )
        findings: list[tuple[Claim, int, Audit]] = []
        try:
            for found in judge(model, outputs.claims):
                findings.append(found)
        finally:
            if findings:
                Console(highlight=False).print(table(findings, model))
        print(summary(findings, model))
        if json_out:
            write_json(report(findings, model), json_out)
        if any(finding.verdict == "wrong" for _, _, finding in findings):
            raise typer.Exit(WRONG)


def judge(target: Target, claims: Sequence[Claim]) -> Iterator[tuple[Claim, int, Audit]]:
    """Each output with the number of its tokens and the finding. Raises ValueError naming an output that cannot be
    replayed."""
    from tqdm import tqdm

    from ..infer.audit import audit as replay
    from ..infer.spelling import spell
    from .prompts import encode

    wrong = 0
    with tqdm(claims, desc="audit", unit="output") as bar:
        for claim in bar:
            try:
                prompt = encode(target, claim.prompt)
                answer = claim.answer
                if isinstance(answer, str):
                    answer = spell(target, prompt, answer, sampling=claim.sampling)
                finding = replay(
                    target,
                    prompt,
                    answer,
                    sampling=claim.sampling,
                    finish=claim.finish,
                    max_new_tokens=claim.max_new_tokens,
                )
            except ValueError as error:
                raise ValueError(f"output {claim.id!r}: {error}") from error
            wrong += finding.verdict == "wrong"
            bar.set_postfix_str(f"{wrong} wrong")
            yield claim, len(answer), finding


def table(findings: Sequence[tuple[Claim, int, Audit]], target: Target) -> Table:
    """One line per output."""
    from rich.table import Table

    columns = ("output", "tokens", "verdict", "at", "emitted", "target's choice", "gap", "top-2 gap", "tolerance")
    shown = Table(*columns, box=None, pad_edge=False)
    for claim, tokens, finding in findings:
        style = {"exact": None, "near-tie": "yellow", "wrong": "bold red"}[finding.verdict]
        cells = [claim.id, str(tokens), finding.verdict]
        if finding.position is not None:
            cells += [str(finding.position), _token(target, finding.emitted, "(ends)")]
            cells += [_token(target, finding.choice, "(has ended)")]
            cells += ["" if gap is None else f"{gap:.3g}" for gap in (finding.gap, finding.top2, finding.tolerance)]
        shown.add_row(*cells, style=style)
    return shown


def summary(findings: Sequence[tuple[Claim, int, Audit]], target: Target) -> str:
    counts = Counter(finding.verdict for _, _, finding in findings)
    open_ends = sum(not finding.end_checked for _, _, finding in findings)
    told = f"{len(findings)} outputs: {counts['exact']} exact, {counts['near-tie']} near-ties, {counts['wrong']} wrong"
    told += f" ({target.name}, {_dtype(target)})"
    return told + (f"; of {open_ends} nothing says why they end where they do" if open_ends else "")


def report(findings: Sequence[tuple[Claim, int, Audit]], target: Target) -> dict[str, Any]:
    counts = Counter(finding.verdict for _, _, finding in findings)
    return {
        "format": 1,
        "totals": {name: counts[name] for name in ("exact", "near-tie", "wrong")},
        "outputs": [{"id": claim.id, "tokens": tokens} | asdict(finding) for claim, tokens, finding in findings],
        "settings": {"target": target.name, "dtype": _dtype(target), "fingerprint": target.fingerprint()},
    }


def _read(text: Path | None, run: Path | None) -> Outputs:
    from .outputs import read_run, read_text

    if (text is None) == (run is None):
        raise ValueError("name one file of outputs: --run JSON (written by evaluate or generate) or --text FILE.")
    return read_run(run) if run else read_text(text or Path())


def _token(target: Target, token: int | None, absent: str) -> str:
    return absent if token is None else repr(target.tokenizer.decode([token]))


def _dtype(target: Target) -> str:
    quantized = f"{target.quantization.kind}, " if target.quantization else ""
    return quantized + str(target.dtype).removeprefix("torch.")
