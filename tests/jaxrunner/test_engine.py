"""The engine over a scripted runner: whole requests, streaming, aborts, and steps that fail."""

import pytest

from jaxrunner.active_request import fan_out
from jaxrunner.engine import Engine
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.outputs import Prompt
from jaxrunner.sampling_params import SamplingParams
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import word_tokenizer
from tests.jaxrunner.scripted_runner import ScriptedRunner

WORDS = ["<unk>", "ab", "cST", "OPd", "a", "b", "c", "<eos>"]
EOS = WORDS.index("<eos>")
SUCCESSOR = {1: 2, 2: 3, 3: 1, 4: 5, 5: 6, 6: EOS, EOS: 4, 0: 0}
TOKENIZER = Tokenizer(word_tokenizer(WORDS), {})
CONFIG = {"max_model_len": 64, "max_num_reqs": 4, "max_num_batched_tokens": 8, "block_size": 4, "num_blocks": 64}


def make_engine(tokenizer=TOKENIZER, num_blocks=64, **options):
    config = KVCacheConfig(num_blocks, [KVCacheGroup([0], FullAttentionSpec(4, 1, 1))])
    return Engine(ScriptedRunner(SUCCESSOR, **CONFIG), config, tokenizer, eos_token_ids=(EOS,), **options)


def prompt(*ids, text=None, **params):
    # The runner is scripted: temperatures don't matter to it, and n > 1 is not for greedy requests.
    return Prompt(text, list(ids), SamplingParams(temperature=1 if "n" in params else 0, **params))


def run(engine):
    """(finished outputs by request id, deltas by (request id, index))"""
    finished, deltas = {}, {}
    while engine.has_unfinished_requests():
        result = engine.step()
        for delta in result.deltas:
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        finished |= {output.request_id: output for output in result.finished}
    return finished, deltas


def test_stops_of_every_kind():
    engine = make_engine()
    engine.add_request("length", prompt(1, max_tokens=4))
    engine.add_request("eos", prompt(4, max_tokens=9))
    engine.add_request("token", prompt(4, max_tokens=9, stop_token_ids=[6]))
    engine.add_request("string", prompt(3, max_tokens=9, stop="STOP"))
    engine.add_request("ignore", prompt(4, max_tokens=6, ignore_eos=True))
    finished, deltas = run(engine)
    ends = {
        i: (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for i, o in finished.items()
    }
    assert ends == {
        "length": ([2, 3, 1, 2], "length", None),
        "eos": ([5, 6, EOS], "stop", None),
        "token": ([5, 6], "stop", 6),
        "string": ([1, 2, 3], "stop", "STOP"),
        "ignore": ([5, 6, EOS, 4, 5, 6], "length", None),
    }
    texts = {i: o.outputs[0].text for i, o in finished.items()}
    assert texts["string"] == "abc" and texts["eos"] == "bc" and texts["token"] == "b"
    for (request_id, _), parts in deltas.items():
        assert "".join(d.text for d in parts) == texts[request_id]
        assert sum((d.token_ids for d in parts), []) == finished[request_id].outputs[0].token_ids
        assert [d.finish_reason for d in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == finished[request_id].outputs[0].finish_reason


def test_no_delta_shows_a_part_of_the_stop_string():
    engine = make_engine()
    engine.add_request("r", prompt(3, stop="STOP"))
    _, deltas = run(engine)
    assert [d.text for d in deltas["r", 0]] == ["ab", "c", ""]


def test_a_stopped_sequence_gives_its_blocks_back():
    engine = make_engine(enable_prefix_caching=False)
    free = engine.scheduler.manager.num_free_blocks
    engine.add_request("r", prompt(3, stop="STOP", max_tokens=30))
    run(engine)
    assert engine.scheduler.manager.num_free_blocks == free
    assert not engine.scheduler.requests


def test_n_sequences_come_back_as_one_request():
    engine = make_engine()
    engine.add_request("r", prompt(4, text="a", n=3, max_tokens=2))
    finished, deltas = run(engine)
    output = finished["r"]
    assert [(c.index, c.token_ids) for c in output.outputs] == [(i, [5, 6]) for i in range(3)]
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("a", [4], True)
    assert sorted(deltas) == [("r", 0), ("r", 1), ("r", 2)]


def test_fan_out_seeds_differ_and_ids_are_unique():
    params = SamplingParams(n=3, seed=2**64 - 1, max_tokens=5)
    children = fan_out("7", params)
    assert len({i for i, _ in children}) == 3
    assert [p.seed for _, p in children] == [2**64 - 1, 0, 1]
    assert all(p.n == 1 and p.max_tokens == 5 for _, p in children)
    assert [p.seed for _, p in fan_out("7", SamplingParams(n=2))] == [None, None]
    assert params.n == 3


def test_metrics_and_cached_tokens():
    engine = make_engine()
    engine.add_request("first", prompt(*[4] * 20, max_tokens=2))
    run(engine)
    engine.add_request("second", prompt(*[4] * 20, max_tokens=2))
    output = run(engine)[0]["second"]
    assert output.num_cached_tokens == 16
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time


def test_abort_returns_what_there_is_and_leaves_the_others():
    engine = make_engine()
    engine.add_request("gone", prompt(*[1] * 3, n=2, max_tokens=30))
    engine.add_request("stays", prompt(4, max_tokens=2))
    engine.step()
    (aborted,) = engine.abort(["gone", "never was"])
    # The second sequence was going to branch off after this step.
    assert [(c.token_ids, c.finish_reason) for c in aborted.outputs] == [([2], "abort"), ([], "abort")]
    finished, _ = run(engine)
    assert list(finished) == ["stays"] and finished["stays"].outputs[0].token_ids == [5, 6]


def test_a_taken_id_is_refused_and_hurts_nobody():
    engine = make_engine()
    engine.add_request("r", prompt(4, max_tokens=2))
    with pytest.raises(ValueError, match="'r' is taken"):
        engine.add_request("r", prompt(4))
    assert run(engine)[0]["r"].outputs[0].token_ids == [5, 6]


def test_a_request_that_the_scheduler_refuses_leaves_nothing_behind():
    engine = make_engine(num_blocks=3)
    with pytest.raises(ValueError, match="KV cache"):
        engine.add_request("r", prompt(*[4] * 20, n=2))
    assert not engine.has_unfinished_requests() and not engine.scheduler.requests
    engine.add_request("r", prompt(4, max_tokens=2))
    assert run(engine)[0]["r"].outputs[0].token_ids == [5, 6]


@pytest.mark.parametrize("failure", [RuntimeError("the device is gone"), KeyboardInterrupt()])
def test_after_a_failed_step_the_engine_is_as_new(failure):
    engine = make_engine()
    runner = engine.runner
    for i in range(6):
        engine.add_request(str(i), prompt(*[4] * 5, max_tokens=9, ignore_eos=True))
    runner.fail_at, runner.failure = 3, failure
    with pytest.raises(type(failure)):
        run(engine)
    assert not engine.has_unfinished_requests() and not runner.tokens
    engine.add_request("0", prompt(*[4] * 5, max_tokens=2))
    output = run(engine)[0]["0"]
    assert output.outputs[0].token_ids == [5, 6] and output.num_cached_tokens == 0


def test_without_a_tokenizer_only_ids_come_back():
    engine = make_engine(tokenizer=None)
    with pytest.raises(ValueError, match="detokenize=False"):
        engine.add_request("r", prompt(4))
    assert not engine.has_unfinished_requests()
    engine.add_request("r", prompt(4, max_tokens=2, detokenize=False))
    output = run(engine)[0]["r"]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5, 6])
