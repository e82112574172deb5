"""`draftsmith bench`: what decoding costs on this machine, beside transformers' own `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Dtype, TargetName
from .report import reported

if TYPE_CHECKING:
    from rich.table import Table

    from ..infer.target import Target
    from .stock import Speed


def bench(
    target: TargetName = "smollm2-135m",
    singles: Annotated[int, typer.Option(help="Prompts answered one at a time.", min=1)] = 4,
    prompts: Annotated[int, typer.Option(help="Prompts answered in batches of --rows.", min=1)] = 96,
    rows: Annotated[int, typer.Option("--rows", help="Batch size.", min=1)] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Limit of each answer.")] = 256,
    dtype: Dtype = "bfloat16",
) -> None:
    """Measure verification by tree size, and plain decoding against transformers.

    Both sides answer the same shipped prompts, greedily, with their real stops, in
    turn, in one run. The time to verify N nodes is what makes drafting pay.

    Example: draftsmith bench --prompts 32 --max-new-tokens 64
    """
    with reported("nothing was written."):
        from rich.console import Console

        from ..infer.cost import verify_seconds
        from ..infer.target import Target

        model = Target.load(target, dtype=dtype)
        console = Console(highlight=False)
        console.print(
            cost_table(verify_seconds(model), title=f"one target forward, {target}, {dtype}, 256 tokens read")
        )
        one = side_by_side(model, target, dtype=dtype, count=singles, rows=1, max_new_tokens=max_new_tokens)
        many = side_by_side(model, target, dtype=dtype, count=prompts, rows=rows, max_new_tokens=max_new_tokens)
        console.print(speed_table({f"{singles} prompts, one at a time": one, f"{prompts} prompts, {rows} rows": many}))


def side_by_side(
    target: Target, name: str, *, dtype: str, count: int, rows: int, max_new_tokens: int
) -> tuple[Speed, Speed]:
    """Plain decoding by our engine, with rows leaving and joining, and by stock `generate` in batches of `rows`."""
    from ..infer.decode import Engine
    from .evaluate import eval_prompts
    from .stock import Speed, load_stock, our_texts, stock_texts

    asked = [prompt.tokens for prompt in eval_prompts(target, None, split=None, limit=count)]
    stock = load_stock(name, dtype=dtype, device=str(target.device))
    engine = Engine(target, rows=rows)
    ours, theirs = Speed(), Speed()
    our_texts(engine, asked[:rows], max_new_tokens=4)
    stock_texts(stock, asked[:rows], max_new_tokens=4, eos_ids=target.eos_ids)
    ours.add(*our_texts(engine, asked, max_new_tokens=max_new_tokens))
    for start in range(0, len(asked), rows):
        batch = asked[start : start + rows]
        theirs.add(*stock_texts(stock, batch, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids))
    return ours, theirs


def cost_table(seconds: dict[int, float], *, title: str) -> Table:
    """Milliseconds of one verification by the number of tree nodes, and what tau must reach for it to pay."""
    from rich.table import Table

    table = Table("nodes", "ms", "pays above tau", title=title, title_justify="left")
    for size, taken in seconds.items():
        table.add_row(str(size), f"{1e3 * taken:.1f}", f"{taken / seconds[1]:.2f}")
    return table


def speed_table(measured: dict[str, tuple[Speed, Speed]]) -> Table:
    """Tokens per second of both sides."""
    from rich.table import Table

    table = Table("plain decoding", "tokens", "tokens/s", "stock tokens", "stock tokens/s", "ratio")
    for name, (ours, theirs) in measured.items():
        ratio = ours.rate / theirs.rate if theirs.rate else 0.0
        cells = (str(ours.tokens), f"{ours.rate:.1f}", str(theirs.tokens), f"{theirs.rate:.1f}", f"{ratio:.2f}x")
        table.add_row(name, *cells)
    return table
