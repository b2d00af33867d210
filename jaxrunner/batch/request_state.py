"""The control view of a request: what is looked up by id. Its numbers are in the batch's columns, once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxrunner.sampling_params import SamplingParams

NO_INDEX = -1


@dataclass(slots=True)
class CachedRequestState:
    """A request the runner knows: running, merely unscheduled, or preempted.

    Attributes:
        request_index: its permanent index into the columns, block tables and device state; NO_INDEX while preempted.
        num_prompt_tokens: length of the user's prompt.
        record: its sampling parameters as the device keeps them, and the feature bits they set; made when it enters.
        preempted_token_ids: prompt and outputs while preempted; None while they lie in the batch's token table.
    """

    req_id: str
    sampling_params: SamplingParams
    num_prompt_tokens: int
    request_index: int = NO_INDEX
    record: tuple[bytes, int] | None = None
    preempted_token_ids: Int32[np.ndarray, "n"] | None = None
