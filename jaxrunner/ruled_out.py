"""Requests that rule out every token: refused where it shows at once, ended with the reason where it shows later.

The sampler adds minus infinity to tokens that a request forbids. Where nothing is left it takes token 0, which is
forbidden like all others; so a forbidden token in an output says that there was no other.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Forbidden:
    """What one sequence may not say: the tokens outside ``allowed_token_ids``, and the ends of its bad words."""

    def __init__(self, params: SamplingParams) -> None:
        allowed = None if params.structured_outputs is not None else params.allowed_token_ids
        self._allowed = None if allowed is None else frozenset(allowed)
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words_token_ids or ():
            self._words.setdefault(word[-1], []).append(tuple(word))

    @classmethod
    def of(cls, params: SamplingParams) -> Forbidden | None:
        """None for parameters that forbid nothing."""
        return cls(params) if params.allowed_token_ids is not None or params.bad_words_token_ids else None

    def found_in(self, output_token_ids: Sequence[int]) -> str | None:
        """What is wrong if the last token of an output is forbidden; None if it isn't."""
        token = output_token_ids[-1]
        bad = (tuple(output_token_ids[-len(word) :]) == word for word in self._words.get(token, ()))
        if any(bad) or (self._allowed is not None and token not in self._allowed):
            return "no token is left to sample: allowed_token_ids and bad_words rule out all there are"
        return None
