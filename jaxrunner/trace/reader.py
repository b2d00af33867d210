"""Reading a trace back, line by line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.format import FORMAT, VERSION
from jaxrunner.trace.line_shape import flaw

Line = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A trace on disk: its header, and its lines when they are asked for.

    Attributes:
        header: see ``jaxrunner.trace.format``.
        geometry: of the batch.
        on_cut: told, in words, of a last line that was cut off, as a crash leaves it; by default it is logged.
    """

    path: Path
    header: Line
    geometry: Geometry
    on_cut: Callable[[str], None] = logging.getLogger("jaxrunner").warning

    def lines(self) -> Iterator[Line]:
        """Every whole line after the header: steps, and events. A last line that was cut off is told to ``on_cut``.

        Raises:
            ValueError: a line is no JSON or lacks a part, or the only one was cut off; the message names it.
        """
        with self.path.open(encoding="utf-8", errors="replace") as file:  # a cut may go through a character
            next(file)
            for number, text in enumerate(file, 2):
                if not text.endswith("\n") and not _is_json(text):
                    if number == 2:
                        raise ValueError(f"{self.path}, line 2 was cut off, and nothing else follows the header")
                    self.on_cut(
                        f"{self.path}, line {number} was cut off: the {number - 2} steps and events before it count"
                    )
                    return
                line = _parse(self.path, number, text)
                if (what := flaw(line, len(self.geometry.block_sizes))) is not None:
                    raise ValueError(f"{self.path}, line {number} is no whole step: {what}")
                yield line

    def steps(self) -> Iterator[Line]:
        """The lines that are steps which did not fail."""
        return (line for line in self.lines() if "event" not in line)

    def step(self, number: int) -> Line:
        """The step of that number, also if it failed; ValueError if there is none."""
        last = -1
        for line in self.lines():
            last = line.get("step", last)
            if line.get("step") == number:
                return line
        raise ValueError(f"{self.path} has steps 0 to {last}, there is no step {number}")


def open_trace(path: str | Path, on_cut: Callable[[str], None] | None = None) -> Trace:
    """Opens a trace and reads its header.

    Args:
        on_cut: see ``Trace``.

    Raises:
        ValueError: the file is missing, empty, no trace, or of another version.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no trace {path}: record one with --trace {path}")
    with path.open(encoding="utf-8") as file:
        header = _parse(path, 1, file.readline())
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no trace: its first line must say format {FORMAT!r}, it says {header.get('format')!r}"
        )
    if header.get("version") != VERSION:
        raise ValueError(f"{path} is a trace of version {header.get('version')!r}, this reader takes {VERSION}")
    try:
        geometry = Geometry.from_json(header["geometry"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace: its first line has no geometry of a batch ({error!r})") from None
    return Trace(path, header, geometry) if on_cut is None else Trace(path, header, geometry, on_cut)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON ({error}): was the run that wrote it cut off?") from None
    if not isinstance(line, dict):
        raise ValueError(f"{path}, line {number} must be a JSON object, got {text[:60]!r}")
    return line
