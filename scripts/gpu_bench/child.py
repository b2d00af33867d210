"""A process that does one task of `bench_gpu.py`, which it reads from stdin as a line of JSON; see `processes`.

Answers with its rows, a line of JSON each, on stdout. An error of Python's is a row as well.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_bench.tasks import Task


def main(module: str) -> None:
    # What libraries print to stdout must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    rows = importlib.import_module(module).rows
    line = sys.stdin.readline()
    if not line:  # it wasn't needed
        return
    task = Task(**json.loads(line))
    try:
        for row in rows(task):
            answers.write(json.dumps(row) + "\n")
    except Exception as error:
        answers.write(json.dumps(failure(error)) + "\n")
    answers.flush()
    os._exit(0)  # a GPU's libraries may hang at their end once a kernel has broken something


def failure(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    main(sys.argv[1])
