"""The front door: `draftsmith VERB`. One thin file per verb; nothing heavy is imported before a verb runs."""

from __future__ import annotations

import typer

from . import audit, bench, cache, calibrate, compare, demo, evaluate, generate, plan, preview, respond, step, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"draftsmith {version('draftsmith')}")
        raise typer.Exit


@app.callback()
def draftsmith(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Train small drafters for a frozen LLM and decode with them: the same text, sooner.

    Start with: draftsmith demo
    """


for verb in (
    demo.demo,
    respond.respond,
    preview.preview,
    cache.cache,
    plan.plan,
    train.train,
    calibrate.calibrate,
    evaluate.evaluate,
    generate.generate,
    compare.compare,
    audit.audit,
    bench.bench,
    step.step,
):
    app.command()(verb)


def main() -> None:
    """Entry point of the `draftsmith` command."""
    app()
