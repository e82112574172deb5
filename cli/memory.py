"""What quantising a target saves and costs: its evaluation beside that of the target as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def beside(quantized: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """What the document of the quantised target keeps of the whole one's, and how many of its texts are that one's too."""
    texts = {answer["id"]: answer["tokens"] for answer in whole["answers"]}
    same = sum(answer["tokens"] == texts[answer["id"]] for answer in quantized["answers"])
    return {"totals": whole["totals"], "memory": whole["memory"], "same_texts": same}


def memory_table(document: dict[str, Any]) -> Table:
    """Weights, cache, tau and speed of both targets."""
    from rich.table import Table

    settings, other = document["settings"], document["unquantized"]
    told = f"{other['same_texts']} of {document['totals']['prompts']} texts are those of the target as it was"
    columns = ("target", "weights MB", "cache MB", "peak MB", "tau", "plain tok/s", "tok/s")
    shown = Table(*columns, title=told, title_justify="left", pad_edge=False, box=None)
    for name, part in ((settings["fingerprint"]["quantization"], document), (settings["dtype"], other)):
        memory, totals = part["memory"], part["totals"]
        sizes = [memory["target_weights"], memory["cache"], memory["peak"]]
        shown.add_row(
            name,
            *("" if size is None else f"{size / 1e6:.1f}" for size in sizes),
            f"{totals['tau']:.2f}",
            f"{totals['tokens_per_s_plain']:.1f}",
            f"{totals['tokens_per_s']:.1f}",
        )
    return shown
