"""What a step brought, read out of the runner's output."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrunner.protocol import ModelRunnerOutput
from jaxrunner.request import Request, RequestStatus
from jaxrunner.scheduler.plan import StepPlan


@dataclass(slots=True)
class RequestUpdate:
    """What a step brought a request.

    Attributes:
        new_token_ids: sampled tokens that count, a stopping one included.
        finish_reason: "stop", "length" or "repetition" when this ended it, else None.
        stop_reason: the id out of ``stop_token_ids`` that ended it, or "repetition_detected", else None.
    """

    req_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def checked_rows(plan: StepPlan, runner_output: ModelRunnerOutput) -> list[tuple[Request, int, list[int]]]:
    """(request, scheduled tokens, sampled tokens) of every request of the step that is still alive.

    Raises:
        ValueError: rows missing, empty or filled where they must not be.
    """
    index, sampled = runner_output.req_id_to_index, runner_output.sampled_token_ids
    try:
        rows = [
            (request, count, sampled[index[request.request_id]])
            for request, count in zip(plan.requests, plan.counts, strict=True)
            # Of the object, not of the id: an id may have been aborted and given to another request since.
            if request.status is RequestStatus.RUNNING
        ]
    except KeyError as error:
        raise ValueError(f"the runner's output lacks request {error}, which was scheduled") from None
    for request, count, tokens in rows:
        missing = len(request.all_token_ids) - request.num_computed_tokens - count
        if (missing > 0) is not (not tokens):
            raise ValueError(
                f"the runner gave request {request.request_id!r} the tokens {tokens} in a step that left {missing} "
                f"of its {request.num_tokens} tokens to compute: exactly a step that leaves none gives some"
            )
    return rows
