"""A request's tokens are the same alone, in a crowd, in chunks, from the prefix cache, and after preemption.

On a random model, at one padded shape, so that equal means equal to the last bit.
"""

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading import load_model
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_folder

OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "token_buckets": [16],
    "logits_buckets": [8],
    "check_invariants": True,
    "quiet": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, detokenize=False)
RNG = np.random.default_rng(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    config = CONFIGS["llama"]
    write_folder(folder, config, random_tensors(config))
    return load_model(folder)


@pytest.fixture(scope="module")
def roomy(model):
    return LLM(model, num_gpu_blocks_override=300, **OPTIONS)


def tokens(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def prompt(length):
    return RNG.integers(3, 320, length).tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_shared_prefix_in_chunks_equals_solo(model, roomy, params):
    shared = prompt(64)
    prompts = [shared + prompt(3 + i) for i in range(8)]
    solo = []
    for one in prompts:
        roomy.reset_prefix_cache()
        solo += tokens(roomy, [one], params)
    roomy.reset_prefix_cache()
    assert tokens(roomy, prompts, params) == solo
    assert tokens(roomy, prompts, params) == solo  # all of it from the cache


def test_cached_tokens_are_counted(roomy):
    one = prompt(33)
    roomy.reset_prefix_cache()
    counts = [roomy.generate([one], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 32]


def test_without_prefix_caching_nothing_is_found(model):
    llm = LLM(model, enable_prefix_caching=False, num_gpu_blocks_override=300, **OPTIONS)
    one = prompt(33)
    counts = [llm.generate([one], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 0]


def test_preemption_with_prefix_hits_equals_a_large_cache(model, roomy):
    shared = prompt(8)
    prompts = [shared[: RNG.integers(1, 9)] + prompt(RNG.integers(1, 12)) for _ in range(64)]
    params = [SAMPLED if i % 2 else GREEDY for i in range(64)]
    tight = LLM(model, num_gpu_blocks_override=24, **OPTIONS)
    assert tokens(tight, prompts, params) == tokens(roomy, prompts, params)
    assert tight.engine.scheduler.num_preemptions > 0
    assert tight.engine.scheduler.manager.num_free_blocks == 23


def test_two_prompts_of_60_percent_of_the_cache_do_not_starve_each_other(model, roomy):
    tight = LLM(model, num_gpu_blocks_override=21, enable_prefix_caching=False, **OPTIONS)
    prompts = [prompt(48), prompt(48)]
    assert tokens(tight, prompts, GREEDY) == tokens(roomy, prompts, GREEDY)
    assert tight.engine.scheduler.num_preemptions <= 2


def test_a_prompt_larger_than_the_cache_is_refused(model):
    tight = LLM(model, num_gpu_blocks_override=4, **OPTIONS)
    with pytest.raises(ValueError, match="KV cache holds 12"):
        tokens(tight, [prompt(13)], GREEDY)
    # 12 tokens fill the cache; the last output token needs no room.
    assert [len(t) for t in tokens(tight, [prompt(12), prompt(6)], GREEDY)] == [1, 7]


def test_an_abort_in_the_middle_of_a_prompt_leaves_the_others_alone(roomy):
    prompts = [prompt(50), prompt(20)]
    roomy.reset_prefix_cache()
    solo = tokens(roomy, prompts[1:], GREEDY)
    roomy.reset_prefix_cache()
    engine = roomy.engine
    free = engine.scheduler.manager.num_free_blocks
    for request_id, ids in zip(("gone", "stays"), prompts, strict=True):
        engine.add_request(request_id, roomy.inputs.process(ids, GREEDY))
    engine.step()  # the first chunk of four
    (aborted,) = engine.abort(["gone"])
    assert aborted.outputs[0].finish_reason == "abort"
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step().finished
    assert [output.outputs[0].token_ids for output in finished] == solo
    assert engine.scheduler.manager.num_free_blocks == free


def test_after_the_warm_up_nothing_compiles(model):
    options = OPTIONS | {"token_buckets": [4, 16], "logits_buckets": [1, 8], "check_invariants": False}
    llm = LLM(model, num_gpu_blocks_override=30, warmup="all", **options)
    params = [GREEDY, SAMPLED, SamplingParams(n=3, top_k=5, min_tokens=3, max_tokens=9, detokenize=False)]
    compiled = []

    def listen(event, duration, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        lengths = [1, 3, 16, 40, 2, 17, 60, 5, 9]
        outputs = llm.generate([prompt(n) for n in lengths], params * 3, use_tqdm=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert all(output.finished for output in outputs)
    assert compiled == [] and llm.runner.executables.late == 0


def test_salted_prompts_share_with_their_own_kind_only(roomy):
    one = prompt(33)
    roomy.reset_prefix_cache()

    def cached(salt):
        salted = {"prompt_token_ids": one, "cache_salt": salt}
        return roomy.generate([salted], GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", None, "a")] == [0, 0, 0, 32]


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_one_prompt_share_it_and_equal_requests_of_their_own(model, roomy, caching):
    llm = LLM(model, enable_prefix_caching=caching, num_gpu_blocks_override=60, **OPTIONS)
    several = SamplingParams(n=5, seed=3, max_tokens=6, ignore_eos=True, detokenize=False)
    each = [SamplingParams(seed=3 + i, max_tokens=6, ignore_eos=True, detokenize=False) for i in range(5)]
    for length in (1, 9, 22, 24):
        one = prompt(length)
        before = llm.stats().prefix_cache.branched
        (output,) = llm.generate([one], several, use_tqdm=False)
        assert llm.stats().prefix_cache.branched - before == 4 * (length - 1)
        assert llm.stats().num_free_blocks == 59
        roomy.reset_prefix_cache()
        assert [c.token_ids for c in output.outputs] == tokens(roomy, [one] * 5, each)


def test_a_request_of_nan_hurts_nobody(tmp_path, model):
    """Token 7's embedding is NaN, so all that its request computes is, and stays behind in the blocks it had."""
    config = CONFIGS["llama"]
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"][7] = np.nan
    write_folder(tmp_path, config, tensors)
    llm = LLM(load_model(tmp_path), num_gpu_blocks_override=24, enable_prefix_caching=False, **OPTIONS)
    good = [[i for i in prompt(9) if i != 7] + [8] for _ in range(4)]
    avoid = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logit_bias={7: -100})
    alone = [tokens(llm, [one], avoid)[0] for one in good]
    together = llm.generate([good[0], [7] * 30, *good[1:], [9, 7]], avoid, use_tqdm=False)
    assert [together[i].outputs[0].token_ids for i in (0, 2, 3, 4)] == alone
    assert all(len(output.outputs[0].token_ids) == 12 for output in together)
    assert tokens(llm, good * 2, avoid) == alone * 2
