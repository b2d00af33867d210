"""How a command ends: in one line for what went wrong, which names the command's own flags; quietly if nobody reads."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

READER_IS_GONE = 141  # what a shell sees of a command that SIGPIPE ends
# Options of the Python side that the commands call otherwise.
_FLAGS = {"num_gpu_blocks_override": "num_blocks", "record_shapes": "record"}
_OF_A_FILE = re.compile(r", line \d+: ")  # its fields have the Python names


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command to its exit code. A reader that has seen enough (``| head``) ends it without a traceback."""
    code: str | int | None
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse's, too: --help is piped as well
            if isinstance(end.__context__, BrokenPipeError):  # rich's way of ending
                raise end.__context__ from None
            code = end.code
        except KeyboardInterrupt:
            code = 130
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = READER_IS_GONE
    sys.exit(code)


def report_error(command: str, error: Exception, options: argparse.Namespace | None = None, code: int = 2) -> int:
    """Prints one line on stderr; returns the exit code. That nobody reads stdout is no error of the command's.

    Args:
        options: as they were parsed; the Python names of these become flags.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    text = str(error) if options is None else with_flags(str(error), options)
    print(f"{command}: {text}", file=sys.stderr)
    return code


def positive(text: str) -> int:
    """For argparse: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"an integer of at least 1 is needed, got {text!r}")
    return value


def positives(text: str) -> list[int]:
    """For argparse: integers of at least 1 with commas between."""
    return [positive(part) for part in text.split(",")]


def output_file(text: str) -> Path:
    """For argparse: a file that can be written, as far as its folder shows; long work comes before the writing."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"a file in a folder that exists is needed, got {text!r}")
    return path


def with_flags(message: str, options: argparse.Namespace) -> str:
    """The message of an error with a command's flags in place of Python's names for them.

    A name of several words is replaced wherever it stands. One of a single word ("model") may mean just that, so only
    at the beginning, as in "trace must be ...". What is said of a line of a file is left alone.
    """
    if _OF_A_FILE.search(message):
        return message
    given = vars(options)
    flags = {name: name for name in given} | {name: flag for name, flag in _FLAGS.items() if flag in given}
    names = {name: f"--{flag.replace('_', '-')}" for name, flag in flags.items()}
    several = "|".join(sorted((re.escape(name) for name in names if "_" in name), key=len, reverse=True))
    if several:
        message = re.sub(rf"(?<![\w.'\"-])({several})(?![\w'\"])", lambda found: names[found[1]], message)
    first, _, rest = message.partition(" ")
    return f"{names[first]} {rest}" if first in names and rest.startswith("must ") else message
