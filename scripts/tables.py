"""Tables that can be read wherever they are printed: on a wide terminal, a narrow one, or into a pipe or a file."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement

_NO_LIMIT = 100_000


def show_table(table: RenderableType, console: Console | None = None) -> None:
    """Prints ``table`` with every cell whole. rich takes a pipe for 80 columns and cuts cells to fit."""
    console = console or Console()
    whole = Measurement.get(console, console.options.update(max_width=_NO_LIMIT), table).maximum
    width = console.width
    console.width = max(width, whole)
    try:
        console.print(table, crop=False)
    finally:
        console.width = width
