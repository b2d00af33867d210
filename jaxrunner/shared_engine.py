"""One engine for any number of threads: whoever waits for outputs drives it, one at a time, for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxrunner.engine import Engine, EngineDeadError, check_priority
from jaxrunner.outputs import Prompt, RequestOutput
from jaxrunner.sampling_params import RequestOutputKind


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way to the engine; the fields are ``Engine.add_request``'s."""

    request_id: str
    prompt: Prompt
    priority: int = 0
    output_kind: RequestOutputKind | None = None


@dataclass(slots=True, eq=False)
class Inbox:
    """Where a caller's outputs arrive. Only one thread takes out of it.

    Attributes:
        outputs: not taken out yet; an exception ends all requests of this inbox.
        unfinished: ids of requests that more is to come of.
        num_tokens: sampled for this caller so far.
        on_arrival: called by the driving thread after each ``put``.
    """

    outputs: deque[RequestOutput | BaseException] = field(default_factory=deque)
    unfinished: set[str] = field(default_factory=set)
    num_tokens: int = 0
    on_arrival: Callable[[], None] | None = None
    _num_taken: int = 0

    def has_news(self) -> bool:
        """Whether ``take`` would give anything: outputs, or tokens that no output shows yet."""
        return bool(self.outputs) or self.num_tokens > self._num_taken

    def take(self) -> tuple[list[RequestOutput | BaseException], int]:
        """The outputs that came since the last time, and how many tokens were sampled."""
        outputs = [self.outputs.popleft() for _ in range(len(self.outputs))]
        before, self._num_taken = self._num_taken, self.num_tokens
        return outputs, self._num_taken - before

    def put(self, output: RequestOutput | BaseException) -> None:
        if isinstance(output, RequestOutput):
            if output.finished:
                self.unfinished.discard(output.request_id)
        else:
            self.unfinished.clear()
        self.outputs.append(output)
        if self.on_arrival is not None:
            self.on_arrival()


def checked_output(output: RequestOutput | BaseException) -> RequestOutput:
    """The output that came.

    Raises:
        RuntimeError: an exception came, of a step that ended all requests; it is the cause. A ValueError is of the
            request itself, and is raised as it is; so is that the engine is dead.
    """
    if isinstance(output, RequestOutput):
        return output
    if isinstance(output, ValueError | EngineDeadError):
        raise output
    raise RuntimeError("a step failed while another caller ran it; all requests are lost") from output


class SharedEngine:
    """Requests, aborts and other calls of all threads go to the engine between its steps, in the order they came.

    A thread that waits for something (``drive``) runs steps itself until it is there, unless another one is at it.
    So a single caller pays for no second thread, and a step serves the requests of all callers. Callers that can't
    wait, such as an event loop, have a thread drive in the background; it ends when there is nothing to do.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._state = threading.Condition()  # guards all below; never held while the engine works
        self._driven = False
        self._calls: deque[Callable[[], None]] = deque()
        self._inboxes: dict[str, Inbox] = {}
        self._background: threading.Thread | None = None

    def is_taken(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._inboxes

    def submit(self, submissions: Iterable[Submission], inbox: Inbox) -> None:
        """Queues requests; their outputs go to ``inbox``.

        Raises:
            ValueError: an id is taken, or a priority without the policy that looks at it; nothing is queued then.
        """
        submissions = list(submissions)
        for submission in submissions:
            check_priority(submission.priority, self.engine.scheduling_policy)
        with self._state:
            for submission in submissions:
                if submission.request_id in self._inboxes:
                    raise ValueError(f"request id {submission.request_id!r} is taken by an unfinished request")
            for submission in submissions:
                self._inboxes[submission.request_id] = inbox
                inbox.unfinished.add(submission.request_id)
            self._calls.append(lambda: self._add(submissions, inbox))
            self._state.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests: at once, or if a step is being run right after it, without waiting for that. Ids of no
        unfinished request are passed over.
        """
        ids = list(request_ids)
        with self._state:
            self._calls.append(lambda: self._abort(ids))
        self._call_if_nobody_drives()

    def call(self, function: Callable[[], Any]) -> Any:
        """The function's result, called between two steps."""
        result: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(function())
            except BaseException as error:
                failure.append(error)

        with self._state:
            self._calls.append(run)
        self.drive(lambda: bool(result or failure))
        if failure:
            raise failure[0]
        return result[0]

    def drive(self, until: Callable[[], bool]) -> None:
        """Runs steps, or waits for those that another thread runs, until ``until()``.

        Raises:
            RuntimeError: there is nothing to run, and still not ``until()``.
        """
        driving = False
        try:
            while True:
                try:
                    with self._state:
                        while self._driven and not until():
                            self._state.wait()
                        if until():
                            return
                        self._driven = driving = True
                    self._work(until)
                finally:
                    if driving:
                        with self._state:
                            self._driven = driving = False
                            self._state.notify_all()
        finally:
            self._call_if_nobody_drives()  # what came during the last step

    def drive_in_background(self) -> None:
        """Has a thread of its own drive, as long as there are requests."""
        with self._state:
            if self._background is None:
                self._background = threading.Thread(target=self._run_background, name="jaxrunner engine")
                self._background.start()

    def shutdown(self) -> None:
        """Aborts all requests, and returns when no thread drives any more."""
        with self._state:
            self._calls.append(lambda: self._abort(list(self._inboxes)))
        self.drive(self._is_idle)
        if (thread := self._background) is not None:
            thread.join()

    def _run_background(self) -> None:
        while True:
            with suppress(BaseException):  # those whose requests it ended have been told
                self.drive(self._is_idle)
            with self._state:
                if self._is_idle():
                    self._background = None  # whoever submits from here on starts a new one
                    return

    def _is_idle(self) -> bool:
        return not self._inboxes and not self._calls

    def _call_if_nobody_drives(self) -> None:
        with self._state:
            if self._driven or not self._calls:
                return  # whoever drives looks for calls when it is done
            self._driven = True
        try:
            self._work(lambda: True)
        finally:
            with self._state:
                self._driven = False
                self._state.notify_all()

    def _work(self, until: Callable[[], bool]) -> None:
        """All calls, and a step unless ``until()``. Whatever that raises ends all requests, and every caller is told:
        nobody waits for outputs that will never come.
        """
        try:
            self._make_calls()
            if not until():
                self._step()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with self._state:
            inboxes = set(self._inboxes.values())
            self._inboxes.clear()
        for inbox in inboxes:
            with suppress(Exception):  # whoever can't be told: the others can
                inbox.put(error)
        if self.engine.has_unfinished_requests():
            self.engine.reset()

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _abort(self, request_ids: Iterable[str]) -> None:
        self._deliver(self.engine.abort(request_ids))

    def _step(self) -> None:
        if not self.engine.has_unfinished_requests():
            raise RuntimeError("nothing is left to run, and what was waited for has not come")
        result = self.engine.step()
        for delta in result.deltas:
            if (caller := self._inboxes.get(delta.request_id)) is not None:
                caller.num_tokens += len(delta.token_ids)
        self._deliver(result.outputs)

    def _add(self, submissions: list[Submission], inbox: Inbox) -> None:
        for s in submissions:
            if self._inboxes.get(s.request_id) is not inbox:
                continue  # a step has failed since it was queued, and its caller was told
            try:
                self.engine.add_request(s.request_id, s.prompt, s.priority, s.output_kind)
            except (ValueError, EngineDeadError) as error:
                self._inboxes.pop(s.request_id).put(error)
            except Exception as error:  # a fault of ours: this request's all the same, and nobody else's
                reason = ValueError(f"request {s.request_id!r} could not be queued: {type(error).__name__}: {error}")
                reason.__cause__ = error
                self._inboxes.pop(s.request_id).put(reason)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is None:
                continue  # given to the engine itself, not through here
            if output.finished:
                del self._inboxes[output.request_id]
            inbox.put(output)
