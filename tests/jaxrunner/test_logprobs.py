"""Log probabilities: transformers' within 1e-4, raw whatever the sampling, by token id, with ranks, in any batch."""

import asyncio
import pickle
from copy import deepcopy

import numpy as np
import pytest

from jaxrunner import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jaxrunner.loading import LoadedModel
from jaxrunner.logprobs import FlatLogprobs, Logprob
from jaxrunner.logprobs_lists import ALL, LogprobsLists, check_logprobs
from tests.jaxrunner.chain import byte_level_tokenizer, successor_logits, write_chain
from tests.jaxrunner.small_llm import OPTIONS
from tests.models import fixtures


@pytest.fixture(scope="module")
def llm(fixture):
    return LLM(LoadedModel(fixtures.decoder_from(fixture.config, fixture.tensors)), max_logprobs=-1, **OPTIONS)


def reference(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def first(llm, prompts, **fields):
    """What is known of the first output token of each prompt: (id, its dictionary)."""
    params = SamplingParams(max_tokens=1, detokenize=False, **fields)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids[0], o.outputs[0].logprobs[0]) for o in outputs]


def test_against_transformers(llm, fixture):
    """Prompts of many lengths, crowded and cut: the dictionary holds the chosen token and the five likeliest."""
    ids, lengths = fixture.ids.tolist(), [1, 3, 17, 31, 40]
    for fields in ({"temperature": 0}, {"temperature": 3.0, "seed": 5}):
        answers = first(llm, [ids[:n] for n in lengths], logprobs=5, **fields)
        for n, (chosen, found) in zip(lengths, answers, strict=True):
            expected = reference(fixture.logits[n - 1])
            order = np.argsort(-expected)
            assert list(found)[0] == chosen
            assert set(found) == {chosen, *order[:5].tolist()}
            for token, logprob in found.items():
                assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)
                assert logprob.rank == 1 + order.tolist().index(token)


def test_the_whole_vocabulary(llm, fixture):
    (found,) = [d for _, d in first(llm, [fixture.ids.tolist()], logprobs=-1, temperature=0)]
    assert len(found) == len(fixture.logits[0])
    assert sum(np.exp(p.logprob) for p in found.values()) == pytest.approx(1.0, abs=1e-5)
    assert [p.rank for p in found.values()] == list(range(1, len(found) + 1))


def test_no_top_tokens_gives_the_chosen_alone(llm):
    ((chosen, found),) = first(llm, [[5]], logprobs=0, temperature=2.0, seed=1)
    assert list(found) == [chosen] and found[chosen].rank >= 1


def test_they_are_raw_whatever_the_sampling(llm):
    """Filters, bias and penalties change what is chosen, not what is reported; nothing is NaN or missing."""
    plain = dict(first(llm, [[5, 9]], logprobs=5, temperature=0)[0][1])
    for fields in ({"top_k": 1}, {"logit_bias": {7: 50}, "temperature": 0}, {"allowed_token_ids": [11], "top_p": 0.1}):
        chosen, found = first(llm, [[5, 9]], logprobs=5, **fields)[0]
        assert {t: p for t, p in found.items() if t in plain} == plain
        assert all(np.isfinite(p.logprob) for p in found.values()) and chosen in found


def test_neighbours_do_not_matter_and_who_asks_for_none_gets_none(llm):
    params = [SamplingParams(logprobs=n, max_tokens=6, detokenize=False, seed=i) for i, n in enumerate([3, None, 0, 7])]
    prompts = [[5, 9], [7], [8, 8, 8], [11] * 20]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    for mixed, single, q in zip(together, alone, params, strict=True):
        mixed, single = mixed.outputs[0], single.outputs[0]
        assert mixed.token_ids == single.token_ids
        assert mixed.logprobs == single.logprobs and mixed.cumulative_logprob == single.cumulative_logprob
        if q.logprobs is None:
            assert mixed.logprobs is None and mixed.cumulative_logprob is None
        else:
            assert len(mixed.logprobs) == 6
            chosen = [d[t].logprob for d, t in zip(mixed.logprobs, mixed.token_ids, strict=True)]
            assert mixed.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-5)


def test_streams_carry_them(llm):
    params = SamplingParams(logprobs=2, max_tokens=5, detokenize=False, temperature=0)
    whole = llm.generate([[5]], params, use_tqdm=False)[0].outputs[0]

    async def stream(kind):
        request = SamplingParams(logprobs=2, max_tokens=5, detokenize=False, temperature=0, output_kind=kind)
        return [o.outputs[0].logprobs async for o in AsyncLLM(llm).generate([5], request)]

    parts = asyncio.run(stream(RequestOutputKind.DELTA))
    assert [d for part in parts for d in part] == whole.logprobs
    assert asyncio.run(stream(RequestOutputKind.CUMULATIVE))[-1] == whole.logprobs


def test_tokens_are_told_apart_by_id(tmp_path):
    """Bytes that are no characters have the same text, and each keeps its entry."""
    tokenizer = byte_level_tokenizer()
    size = tokenizer.get_vocab_size()
    logits = successor_logits(size, {})
    parts = [tokenizer.token_to_id(c) for c in "½¾¿ÀÁ"]  # bytes above 0x7F, as byte-level BPE writes them
    logits[7, parts] = [30, 29, 28, 27, 26]
    llm = LLM(write_chain(tmp_path, logits, tokenizer), **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (output,) = llm.generate([[7]], params, use_tqdm=False)
    found = output.outputs[0].logprobs[0]
    assert list(found) == parts and {p.decoded_token for p in found.values()} == {"\N{REPLACEMENT CHARACTER}"}


def test_too_many_are_refused_and_the_engine_lives(llm, tmp_path):
    size = llm.inputs.vocab_size
    with pytest.raises(ValueError, match=f"logprobs is {size + 1}, the limit is {size}"):
        first(llm, [[5]], logprobs=size + 1)
    first(llm, [[5]], logprobs=size)
    with pytest.raises(ValueError, match=r"logprobs is -1, the limit is 20: .*raise max_logprobs \(to -1"):
        check_logprobs(SamplingParams(logprobs=ALL), 20, 256)
    with pytest.raises(ValueError, match="prompt_logprobs is 21, the limit is 20"):
        check_logprobs(SamplingParams(prompt_logprobs=21), 20, 256)


def test_named_tokens(llm, fixture):
    """In place of the most likely ones: the chosen token and those named, in their order; no rank but the chosen's."""
    ids, named = fixture.ids.tolist(), [60, 3, 31, 3]
    for n, fields in [
        (5, {"temperature": 0}),
        (20, {"temperature": 3.0, "seed": 5}),
        (33, {"logprobs": 4, "top_k": 1}),
    ]:
        ((chosen, found),) = first(llm, [ids[:n]], logprob_token_ids=named, **fields)
        expected = reference(fixture.logits[n - 1])
        assert list(found) == [chosen, *(t for t in dict.fromkeys(named) if t != chosen)]
        for token, logprob in found.items():
            assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)
            rank = 1 + np.argsort(-expected).tolist().index(token)
            assert logprob.rank == (rank if token == chosen else None)
    ((chosen, found),) = first(llm, [[5]], logprob_token_ids=[chosen], temperature=0)
    assert chosen in found


def test_named_tokens_beside_others(llm):
    """Rows of one batch want different things, and get what each gets alone. The sums are over what was chosen."""
    wanted = [
        {"logprob_token_ids": [7, 9]},
        {"logprobs": 2},
        {},
        {"logprob_token_ids": list(range(64))},
        {"logprobs": 0},
    ]
    params = [SamplingParams(max_tokens=6, detokenize=False, seed=i, **fields) for i, fields in enumerate(wanted)]
    prompts = [[5, 9], [7], [8, 8, 8], [11] * 20, [4]]
    together = llm.generate(prompts, params, use_tqdm=False)
    for mixed, prompt, q in zip(together, prompts, params, strict=True):
        alone, mixed = llm.generate([prompt], q, use_tqdm=False)[0].outputs[0], mixed.outputs[0]
        assert (mixed.token_ids, mixed.logprobs) == (alone.token_ids, alone.logprobs)
        if q.logprob_token_ids is not None:
            named = set(q.logprob_token_ids)
            assert [set(d) for d in mixed.logprobs] == [named | {token} for token in mixed.token_ids]
        if mixed.logprobs is not None:
            chosen = [d[t].logprob for d, t in zip(mixed.logprobs, mixed.token_ids, strict=True)]
            assert mixed.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-5)


def test_named_tokens_that_can_not_be_had(llm):
    size = llm.inputs.vocab_size
    for fields, message in [
        ({"logprob_token_ids": [size]}, f"logprob_token_ids holds {size}, which is outside the vocabulary"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids has 129 entries, 128 at most fit"),
        ({"logprob_token_ids": [1, 2], "logprobs": 5}, "logprobs is 5 and logprob_token_ids names 2 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            first(llm, [[5]], **fields)
    with pytest.raises(ValueError, match=r"logprob_token_ids\[1\] must be an integer from 0"):
        SamplingParams(logprob_token_ids=[3, -1])
    assert SamplingParams(logprob_token_ids=[]) == SamplingParams()


def words_of(*rows):
    """Rows as the device packs them: (token, value, rank), then (token, value) pairs."""
    words = [
        [w if i == 2 or i % 2 == (i > 2) else np.float32(w).view(np.int32) for i, w in enumerate(row)] for row in rows
    ]
    return np.array(words, np.int32)


def test_words_and_arrays():
    """Two rows of two top tokens."""
    lists = LogprobsLists(words_of((4, -2.0, 2, 3, -0.1, 4, -2.0), (1, -9.0, 40, 7, -0.5, 8, -0.7)))
    assert lists.logprob_token_ids.tolist() == [[4, 3, 4], [1, 7, 8]]
    np.testing.assert_array_equal(lists.logprobs, np.float32([[-2.0, -0.1, -2.0], [-9.0, -0.5, -0.7]]))
    assert lists.sampled_token_ranks.tolist() == [2, 40] and lists.chosen == [-2.0, -9.0]
    with pytest.raises(ValueError, match="row 1 has no log probabilities of given tokens"):
        lists.given_row(1, 2)


def test_they_read_like_a_list_of_dictionaries():
    lists = LogprobsLists(words_of((4, -2.0, 2, 3, -0.5, 4, -2.0), (1, -9.0, 40, 7, -0.5, 8, -0.75)))
    asked = []
    flat = FlatLogprobs([None, lists.row(0, 2), lists.row(1, 1)], lambda t: asked.append(t) or str(t))
    part = flat.part(1)
    assert not asked  # nothing is decoded before somebody reads it
    expected = [
        None,
        {4: Logprob(-2.0, 2, "4"), 3: Logprob(-0.5, 1, "3")},
        {1: Logprob(-9.0, 40, "1"), 7: Logprob(-0.5, 1, "7")},
    ]
    assert flat == expected == flat and list(flat) == expected and flat != expected[:2] and flat != 3
    assert part == expected[1:] and len(part) == 2 and repr(part) == repr(expected[1:])
    assert [list(d) for d in part] == [[4, 3], [1, 7]]
    assert flat[-1] == expected[-1] and flat[1:] == expected[1:] and flat[::2] == expected[::2] and None in flat
    assert flat + part == expected + expected[1:] and flat + [None] == [*expected, None]
    with pytest.raises(IndexError):
        flat[3]
    for copy in (pickle.loads(pickle.dumps(flat)), deepcopy(flat)):
        assert copy == expected and copy._rows is not flat._rows
    # As arrays: the entries of all tokens, each with those of its own between two indices.
    three = FlatLogprobs([None, lists.row(0, 2), lists.row(1, 2)], str)
    assert (three.start_indices.tolist(), three.end_indices.tolist()) == ([0, 0, 3], [0, 3, 6])
    assert three.token_ids.tolist() == [4, 3, 4, 1, 7, 8] and three.ranks == [2, 1, 2, 40, 1, 2]
    assert three.logprobs.tolist() == [-2.0, -0.5, -2.0, -9.0, -0.5, -0.75]
    assert three.decoded_tokens == list("434178")
    assert FlatLogprobs([], str).token_ids.size == 0 and FlatLogprobs([], str) == []
