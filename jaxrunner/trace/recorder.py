"""Recording steps. The step thread copies the packed buffer and little else; another thread writes the lines."""

from __future__ import annotations

import json
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxrunner.batch import StepInputs
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.trace.encode import Encoder, Geometry, StepRecord
from jaxrunner.trace.format import FORMAT, VERSION, commit, versions
from jaxrunner.trace.plan_json import snapshot

_RESET, _END = object(), object()
_PAUSE = 0.02  # seconds between two looks at the queue: waking the writer at every step would cost the step thread more
MOST_WAITING = 2000  # steps: when the writer is so far behind, the step thread waits for it


class Recorder(ABC):
    """What a runner tells of its steps. A subclass says what becomes of a finished record."""

    _begun: StepRecord | None = None

    @abstractmethod
    def check(self) -> None:
        """To be called before a step changes anything. Raises RuntimeError if steps cannot be recorded any more."""

    def begin(self, scheduler_output: SchedulerOutput, inputs: StepInputs | None) -> StepRecord:
        """To be called when the upload is packed and before the step reads it. inputs: None if nothing is scheduled."""
        record = StepRecord(snapshot(scheduler_output))
        if inputs is not None:
            record.live = buffer = inputs.buffer
            record.buffer = buffer.tobytes()
            record.layout, record.shape = inputs.layout, inputs.shape
            record.req_ids, record.overflow = inputs.req_ids, inputs.overflow
        self._begun = record
        return record

    def finish(self, record: StepRecord, sampled: list[list[int]], segments: dict[str, float]) -> None:
        """To be called when the step's tokens are on the host."""
        if (live := record.live) is not None:
            record.intact, record.live = live.tobytes() == record.buffer, None
        self._begun = None
        record.sampled, record.segments = sampled, segments
        self._take(record)

    def fail(self, error: BaseException, scheduler_output: SchedulerOutput | None) -> None:
        """To be called when a step raises, wherever.

        Args:
            scheduler_output: its plan; None: it had begun, and its record has it.
        """
        record, self._begun = self._begun, None
        if record is None:
            if scheduler_output is None:
                return  # a second call of the same step's result
            record = StepRecord(scheduler_output)
            with suppress(Exception):  # what it raised may be that the plan can't be read
                record.plan = snapshot(scheduler_output)
        record.intact = record.live is None or record.live.tobytes() == record.buffer
        record.live = None  # the ring writes it again
        record.error = f"{type(error).__name__}: {error}"
        self._take(record)

    @abstractmethod
    def reset(self) -> None:
        """The runner forgot all requests."""

    @abstractmethod
    def _take(self, record: StepRecord) -> None: ...


class MemoryRecorder(Recorder):
    """Keeps the lines in ``lines``: for a replay, and for short runs."""

    def __init__(self, geometry: Geometry) -> None:
        self.lines: list[dict[str, Any]] = []
        self._encoder = Encoder(geometry)

    def check(self) -> None:
        pass

    def reset(self) -> None:
        self._encoder.reset()
        self.lines.append({"event": "reset"})

    def _take(self, record: StepRecord) -> None:
        self.lines.append(self._encoder.line(record))


class StepRecorder(Recorder):
    """Writes a trace of a runner's steps to a file, on a thread of its own.

    Args:
        path: the file; it is written anew.
        geometry: of the batch.
        about: more for the header: config, model, device.

    Attributes:
        close: ends the file, once all is written; may be called any number of times. Steps after it are not recorded.
            Raises RuntimeError if the file could not be written and nobody has been told.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, geometry: Geometry, about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        file = self.path.open("w", encoding="utf-8", buffering=1 << 16)
        header = {"format": FORMAT, "version": VERSION, "geometry": geometry.as_json(), "config": {}, "model": None}
        header |= {"device": None, **(about or {}), "versions": versions(), "commit": commit()}
        file.write(json.dumps(header) + "\n")
        self._queue: deque[Any] = deque()
        self._failure = _Failure(self.path)
        # A daemon, and no reference to self: a recorder that is dropped, or left open at exit, still ends its file.
        self._thread = threading.Thread(
            target=_write, args=(self._queue, Encoder(geometry), file, self._failure), name="trace", daemon=True
        )
        self._thread.start()
        self.close = weakref.finalize(self, _end, self._queue, self._thread, self._failure)

    def check(self) -> None:
        self._failure.tell()

    def reset(self) -> None:
        self._put(_RESET)

    def _take(self, record: StepRecord) -> None:
        self._put(record)

    def _put(self, item: Any) -> None:
        alive = self._thread.is_alive  # not once the file has ended, and nobody would take it from the queue
        while len(self._queue) >= MOST_WAITING and alive():
            time.sleep(_PAUSE)
        if alive():
            self._queue.append(item)


@dataclass(slots=True)
class _Failure:
    """Why the writer gave up, if it did, and whether the step thread knows."""

    path: Path
    error: BaseException | None = None
    told: bool = False

    def tell(self) -> None:
        if self.error is not None:
            self.told = True
            raise RuntimeError(f"the trace {self.path} could not be written: {self.error}") from self.error


def _write(records: deque[Any], encoder: Encoder, file: IO[str], failure: _Failure) -> None:
    try:
        with file:
            while True:
                if not records:
                    file.flush()
                    time.sleep(_PAUSE)
                    continue
                record = records.popleft()
                if record is _END:
                    return
                if record is _RESET:
                    encoder.reset()
                    line: dict[str, Any] = {"event": "reset"}
                else:
                    line = encoder.line(record)
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    except BaseException as error:  # a full disk, too: told to the step thread at its next step, or at the end
        failure.error = error
        records.clear()


def _end(records: deque[Any], thread: threading.Thread, failure: _Failure) -> None:
    records.append(_END)
    if thread is threading.current_thread():  # the garbage collector came by in the writer itself: it ends on its own
        return
    thread.join()
    if not failure.told:
        failure.tell()
