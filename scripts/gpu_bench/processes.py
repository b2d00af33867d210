"""Work in processes of their own, each with a time limit: what one does to itself or to the GPU's state, the others
don't see.

A process imports all it needs before it is told what to do, so that the next one can start while another works.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.gpu_bench.tasks import Task

CHILD = Path(__file__).with_name("child.py")


class Died(Exception):
    """A process ended without having done its task.

    Attributes:
        exit_code: as `subprocess` gives it: a signal's number, negated, if one ended it.
        late: it was ended because its time was over.
    """

    def __init__(self, why: str, exit_code: int, late: bool = False) -> None:
        super().__init__(why)
        self.exit_code, self.late = exit_code, late


class _Child:
    """A process that waits for its task."""

    def __init__(self, module: str) -> None:
        # Python's standard error may be written to after the last row is read, so it is a file.
        self._stderr = tempfile.TemporaryFile()
        # PyTorch's side runs on the same GPU; without this JAX would have taken its memory.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            text=True,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def rows(self, task: Task, seconds: float) -> Iterator[dict[str, Any]]:
        end = time.perf_counter() + seconds
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it is dead already: its exit code says more
            pass
        try:
            while (line := self._lines.get(timeout=max(end - time.perf_counter(), 0.01))) is not None:
                yield json.loads(line)
            code = self._process.wait(timeout=10)
        except (queue.Empty, subprocess.TimeoutExpired):
            where = self._where()
            self.end()
            raise Died(f"not done after {seconds:.0f} s{where}", self._process.returncode, late=True) from None
        if code:
            raise Died(f"its process ended with {_named(code)}{self._said()}", code)

    def _where(self) -> str:
        """What it is doing, as it can say even where it waits for a hung kernel."""
        before = said = self._said()
        self._process.send_signal(signal.SIGUSR1)
        end = time.perf_counter() + 5
        while said == before and time.perf_counter() < end:
            time.sleep(0.5)
            said = self._said()
        return said

    def _said(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return f": {text[-1500:]}" if text else ""

    def end(self) -> None:
        """Ends it and what it has started, whatever they are doing."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._reader.join()
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                if file is not None:
                    file.close()


def _named(code: int) -> str:
    return f"{signal.Signals(-code).name} (exit code {code})" if code < 0 else f"exit code {code}"


class Processes:
    """Starts a process for each task. A context: leaving it ends the one that is waiting.

    Args:
        module: whose `rows(task)` yields what a task gives, dictionaries that JSON has.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._waiting: _Child | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        if self._waiting is not None:
            self._waiting.end()

    def rows(self, task: Task, seconds: float, is_last: bool = False) -> Iterator[dict[str, Any]]:
        """What the task gives, as it comes.

        Args:
            seconds: after which it is ended.
            is_last: no other will follow, so none is started ahead.

        Raises:
            Died: it did not end by itself, or not well.
        """
        child, self._waiting = self._waiting or _Child(self._module), None
        if not is_last:
            self._waiting = _Child(self._module)
        try:
            yield from child.rows(task, seconds)
        finally:
            child.end()
