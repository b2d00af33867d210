"""Requests that rule out every token: refused where it shows at once, ended with the reason where it shows later.

The sampler adds minus infinity to tokens that a request forbids, and a logits processor may do so too. Where nothing is
left it gives NO_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrunner.sampling_columns import NO_TOKEN
from jaxrunner.sampling_params import SamplingParams


def check_something_is_left(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if ``bad_words`` of one token rule out all that may be sampled, in whatever text.

    (A structured output may end even so; whether it can go on shows when it is compiled, and later.)
    """
    bad = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if not bad or params.structured_outputs is not None:
        return
    allowed = params.allowed_token_ids
    if bad.issuperset(range(vocab_size) if allowed is None else allowed):
        among = "of the vocabulary" if allowed is None else f"of allowed_token_ids {list(allowed)!r:.100}"
        raise ValueError(f"bad_words rule out every token {among}: no token could ever be sampled")


def nothing_left(params: SamplingParams, new_token_ids: Sequence[int]) -> str | None:
    """What is wrong if a step found no token that could be sampled; None if it did."""
    if not new_token_ids or new_token_ids[-1] != NO_TOKEN:
        return None
    who = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    who += ["bad_words"] if params.bad_words_token_ids else []
    who += ["a logits processor"]
    if params.structured_outputs is None:
        return f"no token is left to sample: all there are are ruled out by {' or '.join(who)}"
    return f"its structured output can't go on: all that would fit is ruled out by {' or '.join(who)}"
