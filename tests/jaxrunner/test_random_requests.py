"""Random requests through the whole engine, in tiny pools: all end, all blocks come back, and what each request gets
is to the last bit what it gets alone, at the same padded shape.

``pytest tests/jaxrunner/test_random_requests.py --random-requests 1000`` runs a thousand.
"""

import random
from dataclasses import dataclass, field

import pytest

from jaxrunner import LLM, RequestOutput, SamplingParams
from jaxrunner.engine import Engine
from jaxrunner.grammars import Grammars
from jaxrunner.input_processor import InputProcessor
from jaxrunner.kv_cache import KVCacheConfig
from jaxrunner.llm_parts import kv_cache_config
from jaxrunner.loading import load_model
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import word_tokenizer
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_folder

V, EOS, BLOCKS, PER_ROUND = 320, 2, 160, 20
TOKENIZER = Tokenizer(word_tokenizer([f"w{i % 7}{'xyz'[i % 3]}" if i % 5 else f"{i}" for i in range(V)]), {})
GRAMMARS = Grammars(TOKENIZER, V, (EOS,))
SHAPES = [{"regex": "[0-9]{3,12}"}, {"choice": ["5", "10101010"]}, {"regex": "(w[0-9][xyz])+5"}]
PREFIXES = [[7] * 4, list(range(10, 31)), list(range(10, 26)) + [9] * 7, list(range(40, 57))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    config = CONFIGS["llama"]
    write_folder(folder, config, random_tensors(config))
    return LLM(
        load_model(folder, tokenizer=TOKENIZER),
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=4,
        num_gpu_blocks_override=BLOCKS,
        token_buckets=[16],
        logits_buckets=[8],
        check_invariants=True,
        quiet=True,
    )


@dataclass
class Spec:
    """A request, when it comes, and after how many of its steps it is aborted."""

    request_id: str
    prompt: dict
    params: SamplingParams
    priority: int
    arrives: int
    aborted_after: int | None
    told: list[RequestOutput] = field(default_factory=list)


def draw_params(draw: random.Random) -> dict:
    params: dict = {"max_tokens": draw.choice([1, 3, 10, 20, None]), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.4:
        params["temperature"] = 0
    else:
        params |= {"temperature": draw.choice([0.5, 1.0, 1.5]), "seed": draw.choice([None, draw.randrange(2**40)])}
        params |= draw.choice([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}])
        params["n"] = draw.choice([1, 1, 2, 4])
    if draw.random() < 0.3:
        params["stop"] = draw.sample(["x", "w3zw", "1w", "y0", "5"], 2)
        params["include_stop_str_in_output"] = draw.random() < 0.5
    elif draw.random() < 0.2:
        params["detokenize"] = False
    if draw.random() < 0.2:
        params["stop_token_ids"] = draw.sample(range(V), 40)
    elif draw.random() < 0.3:
        params["min_tokens"] = draw.randint(1, params["max_tokens"] or 10)
    if draw.random() < 0.25:
        params |= {"repetition_penalty": draw.choice([0.7, 1.3]), "presence_penalty": draw.choice([0.0, 1.0])}
        params["frequency_penalty"] = draw.choice([-0.5, 0.8])
    if draw.random() < 0.2:
        params["logit_bias"] = {draw.randrange(V): draw.uniform(-5, 5) for _ in range(3)}
    if draw.random() < 0.15:
        params["allowed_token_ids"] = draw.sample(range(V), 30)
    if draw.random() < 0.15:
        params["bad_words"] = [f"{draw.randrange(64) * 5}" for _ in range(2)]
    elif draw.random() < 0.05:  # after one of these no other may follow
        ids = draw.sample(range(3, V), 2)
        params |= {"allowed_token_ids": ids, "bad_words_token_ids": [[i, j] for i in ids for j in ids]}
    if draw.random() < 0.15:
        params["structured_outputs"] = draw.choice(SHAPES)
    params["logprobs"] = draw.choice([None, None, None, 0, 3])
    if params["logprobs"] is None and draw.random() < 0.2:
        params["logprob_token_ids"] = draw.sample(range(V), draw.randint(1, 9))
    params["prompt_logprobs"] = draw.choice([None, None, None, None, 2])
    params["truncate_prompt_tokens"] = draw.choice([None, None, None, -1, 5])
    params["skip_reading_prefix_cache"] = draw.choice([None, None, None, True])
    return params


def draw_specs(draw: random.Random, count: int, priorities: bool, longest: int) -> list[Spec]:
    specs, now = [], 0
    for i in range(count):
        tail = [draw.randrange(3, V) for _ in range(draw.randint(1, 12))]
        ids = (draw.choice([[], *PREFIXES]) + tail)[:longest]
        prompt = {"prompt_token_ids": ids, "cache_salt": draw.choice([None, None, None, "salt"])}
        now += draw.choice([0, 0, 0, 1, 3])
        aborted = draw.randint(0, 8) if draw.random() < 0.15 else None
        priority = draw.randint(0, 2) if priorities else 0
        specs.append(Spec(f"r{i}", prompt, SamplingParams(**draw_params(draw)), priority, now, aborted))
    return specs


def draw_engine(draw: random.Random, llm: LLM) -> Engine:
    whole = kv_cache_config(llm.runner)
    threshold = draw.choice([0, 0, 5])
    most = draw.choice([0, 1, 3])
    return Engine(
        llm.runner,
        KVCacheConfig(draw.choice([6, 9, 14, 20, 30, 80]), whole.groups),
        TOKENIZER,
        eos_token_ids=(EOS,),
        grammars=GRAMMARS,
        enable_prefix_caching=draw.random() < 0.75,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=most,
        max_long_partial_prefills=1 if threshold and draw.random() < 0.5 else 0,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
    )


def inputs_of(engine: Engine) -> InputProcessor:
    return InputProcessor(TOKENIZER, V, engine.scheduler.limits, (EOS,), grammars=GRAMMARS)


def run_crowd(engine: Engine, specs: list[Spec], draw: random.Random) -> None:
    inputs, waiting, now = inputs_of(engine), list(specs), 0
    by_id = {spec.request_id: spec for spec in specs}
    manager = engine.scheduler.manager
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].arrives <= now:
            spec = waiting.pop(0)
            engine.add_request(spec.request_id, inputs.process(spec.prompt, spec.params), spec.priority)
        for spec in specs:
            if spec.aborted_after is not None and now == spec.arrives + spec.aborted_after:
                spec.told += engine.abort([spec.request_id])
        if draw.random() < 0.01:
            engine.scheduler.reset_prefix_cache(reset_running_requests=draw.random() < 0.5)
        if engine.has_unfinished_requests():
            for output in engine.step().outputs:
                by_id[output.request_id].told.append(output)
            manager.check_accounting()
        now += 1
        assert now < 100_000
    assert manager.num_free_blocks == manager.config.num_blocks - 1
    assert not engine.scheduler.requests and not manager.holds


def run_alone(llm: LLM, limits_of: Engine, spec: Spec) -> RequestOutput:
    """In a cache of its own, without prefix caching; as long as it may get in the other engine."""
    config = kv_cache_config(llm.runner)
    engine = Engine(llm.runner, config, TOKENIZER, eos_token_ids=(EOS,), grammars=GRAMMARS, enable_prefix_caching=False)
    engine.scheduler.max_model_len = limits_of.scheduler.max_model_len
    engine.add_request(spec.request_id, inputs_of(limits_of).process(spec.prompt, spec.params))
    while engine.has_unfinished_requests():
        result = engine.step()
    engine.runner.execute_model(engine.scheduler.schedule())  # tells the runner who ended
    return result.finished[0]


def check(spec: Spec, alone: RequestOutput) -> None:
    last = spec.told[-1]
    assert last.finished and not any(output.finished for output in spec.told[:-1])
    assert last.prompt_token_ids == alone.prompt_token_ids and (
        last.error == alone.error or spec.aborted_after is not None
    )
    if last.outputs[0].finish_reason != "abort":
        assert last.prompt_logprobs == alone.prompt_logprobs
    for got, right in zip(last.outputs, alone.outputs, strict=True):
        if got.finish_reason == "abort":
            assert got.token_ids == right.token_ids[: len(got.token_ids)]
            assert right.text.startswith(got.text) or spec.params.stop or spec.params.stop_token_ids
        else:
            assert got == right
    for output in spec.told[:-1]:
        for part, right in zip(output.outputs, last.outputs, strict=True):
            assert right.text.startswith(part.text)
            assert part.token_ids == right.token_ids[: len(part.token_ids)]


def test_random_requests(llm, request):
    count = request.config.getoption("--random-requests")
    seen = {"abort": 0, "stop": 0, "length": 0}
    errors = 0  # where other parameters rule out what a grammar allows
    preemptions = branches = hits = 0
    for number, at in enumerate(range(0, count, PER_ROUND)):
        draw = random.Random(number)
        llm.runner.reset()
        engine = draw_engine(draw, llm)
        size = min(PER_ROUND, count - at)
        specs = draw_specs(draw, size, engine.scheduling_policy == "priority", engine.scheduler.limits.max_prompt)
        run_crowd(engine, specs, draw)
        preemptions += engine.scheduler.num_preemptions
        stats = engine.scheduler.manager.stats
        branches, hits = branches + stats.branches, hits + stats.hits
        llm.runner.reset()
        for spec in specs:
            check(spec, run_alone(llm, engine, spec))
            for part in spec.told[-1].outputs:
                if part.finish_reason == "error":
                    errors += 1
                else:
                    seen[part.finish_reason] += 1
    print(f"\n{count} requests: sequences ended {seen}, {errors} errors")
    print(f"{preemptions} preemptions, {branches} branches, {hits} hits")
    assert min(seen.values()) > 0 and preemptions > 0 and branches > 0 and hits > 0
