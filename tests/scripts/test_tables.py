"""scripts/tables.py: no cell is cut, whatever the width."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from scripts import bench_host
from scripts.tables import show_table


@pytest.mark.parametrize("width", [20, 80, 400])
def test_every_cell_is_whole(width: int) -> None:
    table = Table(title="times")
    heads = [f"column {i} of many" for i in range(12)]
    for head in heads:
        table.add_column(head, no_wrap=True)
    table.add_row(*(f"{i}.{i:06d}/{i:09d}" for i in range(12)))
    out = io.StringIO()
    console = Console(file=out, width=width)
    show_table(table, console)
    printed = out.getvalue()
    assert "…" not in printed and all(head in printed for head in heads)
    assert all(f"{i}.{i:06d}/{i:09d}" in printed for i in range(12))
    assert console.width == width


def test_a_bench_that_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    bench_host.main(["--scenario", "steady", "--reqs", "8", "--steps", "10", "--warmup", "1"])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(word in printed for word in ("steady", "update", "prepare", "upload", "floor"))
