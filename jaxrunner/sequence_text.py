"""The text of one sequence while it grows: decoding, stop strings, and what may be shown of it already."""

from __future__ import annotations

from jaxrunner.detokenizer import IncrementalDetokenizer, TextDecoder
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.stop_strings import find_stop, held_back


class SequenceText:
    """Takes a sequence's tokens, finds its stop strings, and hands out its text in pieces that stand.

    Args:
        tokenizer: None only with ``detokenize=False``.

    Attributes:
        text: all text so far; after a stop string only what is to be shown of it.
        stop_reason: the stop string that was found.
    """

    def __init__(self, tokenizer: TextDecoder | None, params: SamplingParams) -> None:
        self._params = params
        self._stop = tuple(params.stop or ())
        self._decoder = None
        if params.detokenize:
            if tokenizer is None:
                raise ValueError("the model has no tokenizer: use SamplingParams(detokenize=False)")
            self._decoder = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._num_tokens = 0
        self._searched = 0
        self._shown = 0
        self.text = ""
        self.stop_reason: str | None = None

    def append(self, token_ids: list[int], *, ends_with_stop_token: bool = False) -> int:
        """Takes the tokens of a step, up to the one that completes a stop string.

        Args:
            ends_with_stop_token: the last one is an end-of-sequence or stop token. As in vLLM its own text is left
                out, unless ``include_stop_str_in_output``.
        Returns:
            How many tokens were taken: fewer than given when ``stop_reason`` is set before the last.
        """
        if self._decoder is None:
            return len(token_ids)
        silent_last = ends_with_stop_token and not self._params.include_stop_str_in_output
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if silent_last and i == len(token_ids) - 1:
                continue
            self._decoder.append(token_id)
            self.text = self._decoder.text
            if self._found_stop():
                return i + 1
        return len(token_ids)

    @property
    def shown(self) -> str:
        """What ``take_delta`` has given out so far, in one."""
        return self.text[: self._shown]

    def take_delta(self, finished: bool) -> str:
        """New text that may be shown: nothing of an unfinished character or of what may become a stop string."""
        if self._decoder is None:
            return ""
        if finished:
            end = len(self.text)
        else:
            end = len(self._decoder.stable)
            end -= held_back(self._decoder.stable, self._stop)
        start, self._shown = self._shown, max(end, self._shown)
        return self.text[start:end]

    def _found_stop(self) -> bool:
        """Looks at provisional text too: if the sequence ends here, it stands. A half character is no text, though."""
        if not self._stop:
            return False
        text = self.text.rstrip("\N{REPLACEMENT CHARACTER}")
        if self._num_tokens <= self._params.min_tokens:
            self._searched = len(text)
            return False
        found = find_stop(text, self._stop, after=self._searched)
        if found is None:
            # What is provisional may still change: it is searched again.
            self._searched = max(self._searched, len(self._decoder.stable) if self._decoder else 0)
            return False
        self.stop_reason, start, end = found
        self.text = text[: end if self._params.include_stop_str_in_output else start]
        return True
