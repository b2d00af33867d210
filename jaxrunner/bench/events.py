"""What happened in a run: events of requests and of steps, with times in seconds from the start of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestEvents:
    """One request's life.

    Attributes:
        arrival: when it came, by the arrival process (not when the engine got to it).
        outputs: (time, tokens committed then), for every step that gave it tokens.
        finished: when its last token came; None if it never ended in the run.
        num_cached_tokens: of its prompt, found in the prefix cache.
    """

    request_id: str
    num_prompt_tokens: int
    arrival: float
    outputs: list[tuple[float, int]] = field(default_factory=list)
    finished: float | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.outputs)


@dataclass(slots=True)
class StepEvent:
    """One step of the engine.

    Attributes:
        num_tokens, num_padded_tokens: in the stream; the bucket's size.
        num_waiting, num_running: requests in the queue, and that run on, when the step has ended.
        kv_usage: fraction of the blocks in use while it ran, with those of what ended with it.
        segments: seconds of update, prepare, dispatch, wait, record.
    """

    start: float
    end: float
    num_tokens: int
    num_padded_tokens: int
    num_waiting: int
    num_running: int
    kv_usage: float
    segments: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RunLog:
    """A whole run.

    Attributes:
        duration: seconds from the first arrival to the last token.
        num_draft_tokens, num_accepted_tokens: of speculation.
        num_compilations: programs compiled within the run: must be 0 for its times to mean anything.
    """

    requests: list[RequestEvents] = field(default_factory=list)
    steps: list[StepEvent] = field(default_factory=list)
    duration: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_compilations: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
