"""Faults that other engines had in sampling, hand-off and pooling, with their right values."""

import numpy as np
import pytest

from jaxrunner import LLM, PoolingParams, SamplingParams
from jaxrunner.batch import BufferRing, InputBatch, prepare_inputs, update_states
from jaxrunner.pooling import Pooling
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.shapes import StepShapes
from tests.cases_by_id import case
from tests.jaxrunner.chain import successor_logits, write_chain

V, EOS = 40, 7
OPTIONS = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "token_buckets": [16],
    "logits_buckets": [4],
    "block_size": 4,
    "quiet": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    logits = np.random.default_rng(0).normal(0, 1, (V, V)).astype(np.float32) + successor_logits(V, {}, 1.0)
    return write_chain(tmp_path_factory.mktemp("chain"), logits, config={"eos_token_id": EOS})


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


def test_seeded_tokens_do_not_depend_on_discarded_samples(llm, folder):
    """A prompt of 12 tokens in one chunk or in three, each of which samples a token that is thrown away."""
    params = SamplingParams(seed=3, temperature=1.5, top_p=0.9, max_tokens=12, detokenize=False, ignore_eos=True)
    prompt = list(range(10, 22))
    chunked = LLM(folder, **OPTIONS, long_prefill_token_threshold=4)
    said = [each.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for each in (llm, chunked)]
    assert said[0] == said[1]


def test_min_tokens_counts_tokens_not_positions(llm):
    """The end forced by a bias, and held back for four tokens: five come, the last of them the end."""
    inputs, expected = case("runner_cases", "min_tokens_v2")
    params = SamplingParams(
        temperature=0, min_tokens=inputs["min_tokens"], logit_bias={EOS: 100}, max_tokens=20, detokenize=False
    )
    (output,) = llm.generate([[3, 4]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == expected["output_len"] and tokens[-1] == EOS and EOS not in tokens[:-1]


def test_pooling_keeps_what_it_knows_of_a_step():
    """The buffers that a step was packed in are written again while its hidden states are still to come."""
    batch = InputBatch(max_num_reqs=2, max_model_len=32, max_num_batched_tokens=16, vocab_size=V, block_sizes=(4,))
    shapes, pooling = StepShapes(16, 2, min_block_size=4), Pooling()
    ring = BufferRing(max(layout.size for layout in shapes.layouts.values()), depth=1)
    seen = []
    for step, req_id in enumerate("ab"):
        length = 5 + 4 * step
        blocks = [list(range(1 + 8 * step, 9 + 8 * step))]
        data = NewRequestData(req_id, [9] * length, (blocks[0],), pooling_params=PoolingParams())
        plan = SchedulerOutput(
            [data], num_scheduled_tokens={req_id: length}, total_num_scheduled_tokens=length,
            finished_req_ids={"a"} if step else set(),
        )  # fmt: skip
        update_states(batch, plan)
        pooling.note(plan)
        seen.append(pooling.rows_of(batch, prepare_inputs(batch, plan, shapes, buffers=ring)))
    assert seen[0].starts.tolist() == [0, 5, 5] and seen[0].rows == [(0, "a", 0, 5)]
    assert seen[1].starts.tolist() == [0, 9, 9] and seen[1].rows == [(0, "b", 0, 9)]
