import json
import math

import numpy as np
import pytest

from jaxrunner.arrival_trace import Arrival
from jaxrunner.bench import arrival_times, random_requests
from jaxrunner.bench.arrivals import trace_times
from jaxrunner.bench.workload import sharegpt_requests, traced_requests


def test_arrival_processes():
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
    assert arrival_times(3, 4.0, "fixed") == [0.0, 0.25, 0.5]
    assert arrival_times(5, 2.0, "bursts", burst_size=2) == [0.0, 0.0, 1.0, 1.0, 2.0]
    times = arrival_times(20_000, 5.0, "poisson", seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() == pytest.approx(0.2, rel=0.05)
    burstier = np.diff(arrival_times(20_000, 5.0, burstiness=0.25))
    assert burstier.mean() == pytest.approx(0.2, rel=0.05) and burstier.std() == pytest.approx(0.4, rel=0.1)
    assert arrival_times(4, 5.0, seed=3) == arrival_times(4, 5.0, seed=3) != arrival_times(4, 5.0, seed=4)
    assert trace_times([Arrival(0.0, 1, 1), Arrival(5.0, 1, 1)], 10.0) == [0.0, 0.5]
    for wrong in ({"rate": 0}, {"rate": 1, "burstiness": 0}, {"rate": 1, "process": "odd"}):
        with pytest.raises(ValueError):
            arrival_times(2, **wrong)


def test_random_prompts_have_the_lengths_and_the_prefix_asked_for():
    requests = random_requests(20, 40, 10, 100, range_ratio=0.5, prefix_share=0.25, seed=0)
    assert {len(r.token_ids[:10]) for r in requests} == {10} and len({tuple(r.token_ids[:10]) for r in requests}) == 1
    assert len({tuple(r.token_ids[10:20]) for r in requests}) == 20
    lengths = [len(r.token_ids) for r in requests]
    assert min(lengths) >= 20 and max(lengths) <= 60 and len(set(lengths)) > 5
    assert all(5 <= r.num_output_tokens <= 15 for r in requests)
    assert {len(r.token_ids) for r in random_requests(4, 8, 2, 100, prefix_share=1.0)} == {8}
    with pytest.raises(ValueError, match="at least 1"):
        random_requests(1, 0, 1, 10)
    with pytest.raises(ValueError, match="prefix_share"):
        random_requests(1, 1, 1, 10, prefix_share=2)


def test_a_trace_is_cut_to_what_the_model_takes():
    requests = traced_requests([Arrival(0, 500, 20), Arrival(0, 3, 900), Arrival(0, 5, 6)], 64, 50)
    assert [(len(r.token_ids), r.num_output_tokens) for r in requests] == [(44, 20), (1, 63), (5, 6)]


def test_conversations(tmp_path):
    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(range(len(text.split()) + add_special_tokens))

    def talk(question: int, answer: int) -> dict:
        return {"conversations": [{"value": "w " * question}, {"value": "w " * answer}, {"value": "ignored"}]}

    path = tmp_path / "c.json"
    path.write_text(json.dumps([talk(5, 6), talk(1, 6), talk(5, 2), talk(90, 20), {"conversations": [{"value": "x"}]}]))
    (request,) = sharegpt_requests(path, 10, Words(), 64)
    assert (len(request.token_ids), request.num_output_tokens) == (6, 6)
    assert sharegpt_requests(path, 10, Words(), 64, output_len=9)[0].num_output_tokens == 9
    assert {r.num_output_tokens for r in sharegpt_requests(path, 10, Words(), 64, output_len=2)} == {2}
    path.write_text('[{"conversations": [1, 2]}]')
    with pytest.raises(ValueError, match="no ShareGPT file"):
        sharegpt_requests(path, 1, Words(), 64)
    with pytest.raises(ValueError, match="no tokenizer"):
        sharegpt_requests(path, 1, None, 64)
