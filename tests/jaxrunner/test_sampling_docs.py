"""The table of docs/sampling.md says of every field whether it works: what it says is so."""

import dataclasses
import re
from pathlib import Path

import pytest

from jaxrunner.refusals import refuse_sampling_params
from jaxrunner.request_tables import TableSizes
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| (\w+) \| (works|refused) \|", PAGE, re.MULTILINE))
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
# A value of each that isn't its default.
USES = {
    **dict.fromkeys(["presence_penalty", "frequency_penalty", "min_p", "top_p", "temperature"], 0.5),
    **dict.fromkeys(["repetition_penalty"], 1.5),
    **dict.fromkeys(["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"], 2),
    **dict.fromkeys(["truncate_prompt_tokens", "thinking_token_budget"], 2),
    **dict.fromkeys(["prompt_logprob_start", "stream_interval", "routed_experts_prompt_start"], 2),
    **dict.fromkeys(["prompt_logprob_token_ids", "trace_decode_token_ids"], [3]),
    **dict.fromkeys(["ignore_eos", "include_stop_str_in_output", "flat_logprobs", "skip_reading_prefix_cache"], True),
    **dict.fromkeys(["detokenize", "skip_special_tokens", "spaces_between_special_tokens"], False),
    **dict.fromkeys(["stop_token_ids", "allowed_token_ids", "logprob_token_ids"], [3]),
    "stop": ["x"],
    "bad_words": ["x"],
    "bad_words_token_ids": [[3]],
    "logit_bias": {3: 1.0},
    "structured_outputs": {"choice": ["x"]},
    "logits_processors": [lambda ids, logits: logits],
    "extra_args": {"x": 1},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "output_kind": RequestOutputKind.DELTA,
}


def test_the_table_has_every_field_and_no_other():
    assert sorted(TABLE) == sorted(FIELDS) == sorted(USES)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_works_or_is_refused_by_name(field):
    params = SamplingParams(**{field: USES[field]})
    if TABLE[field] == "works":
        refuse_sampling_params(params)
    else:
        with pytest.raises(ValueError, match=rf"\['{field}'\] are not served"):
            refuse_sampling_params(params)


def test_the_sizes_it_names():
    for reqs, length, vocab, megabytes in [(64, 8192, 49152, 3.6), (1024, 8192, 128256, 67)]:
        assert f"{megabytes:g} MB" in PAGE
        assert TableSizes(reqs, length, vocab).bytes / 1e6 == pytest.approx(megabytes, rel=0.02)
