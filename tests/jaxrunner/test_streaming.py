"""Outputs while they come, of every kind: through the engine, ``LLM.stream`` and ``AsyncLLM``."""

import asyncio
import threading

import pytest

from jaxrunner import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jaxrunner.async_llm import merged
from jaxrunner.outputs import CompletionOutput, RequestOutput
from tests.jaxrunner.chain import chain, successor_logits, word_tokenizer, write_chain

V = 64
NAMED = ["<unk>", "<s>", "ab", "cST", "OPd", "go"]
WORDS = [*NAMED, *(f"w{i}" for i in range(len(NAMED), V))]
ID = {word: i for i, word in enumerate(WORDS)}
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "token_buckets": [32],
    "logits_buckets": [8],
    "scheduling_policy": "priority",
    "quiet": True,
}
CUMULATIVE, DELTA, FINAL = RequestOutputKind


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """go ab cST OPd w9 w10 w11 ..."""
    successor = chain(ID["go"], ID["ab"], ID["cST"], ID["OPd"], 9)
    folder = write_chain(tmp_path_factory.mktemp("words"), successor_logits(V, successor), word_tokenizer(WORDS))
    return LLM(folder, **OPTIONS)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert not llm.engine.has_unfinished_requests() and not llm.shared._inboxes
    assert llm.engine.scheduler.manager.num_free_blocks == 199
    llm.engine.scheduler.manager.check_accounting()


def greedy(**params):
    return SamplingParams(temperature=0, **params)


def streamed(llm, params, prompts="go"):
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.finished) for o in llm.stream(prompts, params)]


def test_kinds_of_output(llm):
    ab, cst, opd = ID["ab"], ID["cST"], ID["OPd"]
    assert streamed(llm, greedy(max_tokens=3, output_kind=CUMULATIVE)) == [
        ("ab", [ab], False),
        ("abcST", [ab, cst], False),
        ("abcSTOPd", [ab, cst, opd], True),
    ]
    assert streamed(llm, greedy(max_tokens=3)) == streamed(llm, greedy(max_tokens=3, output_kind=CUMULATIVE))
    assert streamed(llm, greedy(max_tokens=3, output_kind=DELTA)) == [
        ("ab", [ab], False),
        ("cST", [cst], False),
        ("OPd", [opd], True),
    ]
    assert streamed(llm, greedy(max_tokens=3, output_kind=FINAL)) == [("abcSTOPd", [ab, cst, opd], True)]


@pytest.mark.parametrize(
    ("params", "cumulative"),
    [
        ({"stop": "STOP"}, ["ab", "abc", "abc"]),
        ({"stop": "STOP", "include_stop_str_in_output": True}, ["ab", "abc", "abcSTOP"]),
        ({"stop": "STX", "max_tokens": 3}, ["ab", "abc", "abcSTOPd"]),  # held back, and then shown after all
        ({"stop": "Tz", "max_tokens": 2}, ["ab", "abcST"]),  # the end shows what was held back
        ({"max_tokens": 2, "detokenize": False}, ["", ""]),
    ],
)
def test_no_text_is_taken_back(llm, params, cumulative):
    texts = [text for text, _, _ in streamed(llm, greedy(**params))]
    assert texts == cumulative
    deltas = [text for text, _, _ in streamed(llm, greedy(**params, output_kind=DELTA))]
    assert ["".join(deltas[: i + 1]) for i in range(len(deltas))] == cumulative
    assert llm.generate("go", greedy(**params), use_tqdm=False)[0].outputs[0].text == cumulative[-1]


def test_several_requests_and_sequences(llm):
    """Each output names its request; of several sequences a delta has those that got something."""
    params = [greedy(max_tokens=2, output_kind=DELTA), SamplingParams(n=3, seed=1, max_tokens=4, output_kind=DELTA)]
    texts, last = {}, {}
    for output in llm.stream(["w9", "go"], params):
        for part in output.outputs:
            key = output.request_id, part.index
            assert not last.get(output.request_id)
            texts.setdefault(key, []).extend(part.token_ids)
        last[output.request_id] = output.finished
    first, second = sorted(last, key=int)
    assert texts[first, 0] == [10, 11]
    (whole,) = llm.generate("go", SamplingParams(n=3, seed=1, max_tokens=4), use_tqdm=False)
    assert [texts[second, i] for i in range(3)] == [c.token_ids for c in whole.outputs]
    outputs = list(llm.stream("go", SamplingParams(n=3, seed=1, max_tokens=4)))
    assert all(len(output.outputs) == 3 for output in outputs)
    assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in whole.outputs]


def test_an_iterator_that_is_closed_aborts_its_requests(llm):
    stream = llm.stream(["go", "w9"], greedy(max_tokens=40))
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()


def test_an_iterator_that_is_never_started_queues_nothing(llm):
    llm.stream("go", greedy())
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.stream(["go", []], greedy())
    with pytest.raises(ValueError, match="priority has 2 entries for 1 prompts"):
        llm.stream("go", greedy(), priority=[1, 2])


def test_an_abort_while_it_streams(llm):
    """The last output says so, and shows what had been held back."""
    for kind, text in [(CUMULATIVE, "abcST"), (DELTA, "ST"), (FINAL, None)]:
        stream = llm.stream("go", greedy(stop="STX", max_tokens=40, output_kind=kind))
        if kind is FINAL:
            llm.abort("0")  # nobody's
            list(stream)
            continue
        next(stream)
        output = next(stream)
        llm.abort(output.request_id)
        (last,) = list(stream)
        assert (last.outputs[0].text, last.outputs[0].finish_reason, last.finished) == (text, "abort", True)


def test_streams_and_generate_of_several_threads_share_the_steps(llm):
    results = {}

    def generate(i):
        outputs = llm.generate([[10 + i], [20 + i]], greedy(max_tokens=10), use_tqdm=False)
        results[i] = [o.outputs[0].token_ids for o in outputs]

    def stream(i):
        *_, last = llm.stream([[10 + i]], greedy(max_tokens=10))
        results[i] = [last.outputs[0].token_ids]

    threads = [threading.Thread(target=stream if i % 2 else generate, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        starts = [10 + i] if i % 2 else [10 + i, 20 + i]
        assert results[i] == [list(range(s + 1, s + 11)) for s in starts]


def test_the_important_come_first(llm):
    prompts = [[10 + i] for i in range(20)]
    priority = [i % 3 for i in range(20)]
    order = [o.request_id for o in llm.stream(prompts, greedy(max_tokens=2, output_kind=FINAL), priority=priority)]
    ids = sorted(order, key=int)
    assert [priority[ids.index(i)] for i in order] == sorted(priority)


def test_async_tasks(llm):
    served = AsyncLLM(llm)

    async def task(i, kind):
        parts = [o async for o in served.generate([10 + i], greedy(max_tokens=12, output_kind=kind), f"task {i}")]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        if kind is DELTA:
            return sum((part.outputs[0].token_ids for part in parts), [])
        return parts[-1].outputs[0].token_ids

    async def main():
        return await asyncio.gather(*(task(i, (CUMULATIVE, DELTA, FINAL)[i % 3]) for i in range(9)))

    assert asyncio.run(main()) == [list(range(11 + i, 23 + i)) for i in range(9)]
    assert asyncio.run(main())[0] == list(range(11, 23))  # another event loop
    served.shutdown()


def test_async_aborts(llm, monkeypatch):
    served, step, gate = AsyncLLM(llm), llm.engine.step, threading.Event()
    gate.set()

    def gated_step():
        assert gate.wait(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", gated_step)

    async def main():
        stream = served.generate("go", greedy(max_tokens=50), "broken off")
        async for _ in stream:
            break
        await stream.aclose()
        gate.clear()  # no step ends before the request is cancelled, however slow this task is
        task = asyncio.create_task(anext(served.generate("go", greedy(max_tokens=50, output_kind=FINAL), "cancelled")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        outputs, first = [], llm.engine.step

        def one_step():
            monkeypatch.setattr(llm.engine, "step", first)
            gate.clear()
            return step()

        monkeypatch.setattr(llm.engine, "step", one_step)
        async for output in served.generate("go", greedy(max_tokens=50), "aborted"):
            outputs.append(output)
            if len(outputs) == 1:
                await served.abort("aborted")
                gate.set()
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert len(outputs[-1].outputs[0].token_ids) < 50
        with pytest.raises(ValueError, match="the prompt is empty"):
            await anext(served.generate([], greedy()))
        assert (await served.stats()).num_running == 0
        await served.reset_prefix_cache()
        assert (await served.get_tokenizer()) is llm.get_tokenizer()

    asyncio.run(main())
    served.shutdown()


def test_an_id_is_taken_until_its_request_has_ended(llm):
    served = AsyncLLM(llm)

    async def main():
        first = served.generate("go", greedy(max_tokens=30), "x")
        await anext(first)
        with pytest.raises(ValueError, match="'x' is taken"):
            await anext(served.generate("go", greedy(), "x"))
        await first.aclose()

    asyncio.run(main())
    served.shutdown()
    with pytest.raises(TypeError, match="takes no options any more, got .'dtype'."):
        AsyncLLM(llm, dtype="float32")


def test_outputs_that_piled_up_come_as_one():
    def output(text, tokens, index=0, finished=False):
        return RequestOutput("r", None, [1], [CompletionOutput(index, text, tokens)], finished)

    pile = [output("a", [1]), output("x", [9], 1), output("b", [2, 3]), output("", [4], 1, True)]
    joined = merged(pile, DELTA)
    assert [(c.index, c.text, c.token_ids) for c in joined.outputs] == [(0, "ab", [1, 2, 3]), (1, "x", [9, 4])]
    assert joined.finished
    assert merged(pile, CUMULATIVE) is pile[-1]
