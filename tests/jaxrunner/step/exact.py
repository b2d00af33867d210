"""Sampling by its definitions, one token at a time in float64: what the device's sampler is held against."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.request_tables import TableSizes, pack
from jaxrunner.sampling_columns import HELD_BACK, sampling_flags, sampling_record
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.step import DeviceState, enter_requests, enter_tables, init_state

HISTORY = 40  # tokens of a request in these tests

_enter_requests = jax.jit(enter_requests)
_enter_tables = jax.jit(enter_tables)


def device_state(
    params: Sequence[SamplingParams],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    stop: tuple[int, ...] = (),
    seed_names: Sequence[str] | None = None,
) -> DeviceState:
    """State in which request i holds index i."""
    n = len(params)
    prompts = prompts or [[0] * 3] * n
    outputs = outputs or [[]] * n
    names = seed_names or [f"r{i}" for i in range(n)]
    records = [
        np.frombuffer(sampling_record(p, name, len(prompt), stop, 0), np.int32)
        for p, name, prompt in zip(params, names, prompts, strict=True)
    ]
    sizes = TableSizes(n, HISTORY, vocab_size)
    state = _enter_requests(init_state(n, [1], sizes), jnp.arange(n, dtype=jnp.int32), jnp.asarray(np.stack(records)))
    tables = state.tables
    for i, p in enumerate(params):
        words = pack(sizes, p, np.array([*prompts[i], *outputs[i]], np.int32), len(prompts[i]))
        tables = _enter_tables(tables, jnp.int32(i), jnp.asarray(words))
    return DeviceState(state.block_tables, state.last_sampled, state.sampling, tables)


def flags_of(params: SamplingParams, num_outputs: int) -> int:
    """The features that a row of these parameters needs."""
    return sampling_flags(params) | (HELD_BACK if num_outputs < params.min_tokens else 0)


def adjusted(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop: Sequence[int] = ()
) -> np.ndarray:
    """Logits [V] before the temperature."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for word in params.bad_words_token_ids or ():
        *before, last = word
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in {*stop, *(params.stop_token_ids or ())}:
            x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        times = list(output).count(token)
        x[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return x


def kept_by_sorting(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """The filters by their definition, one after the other, on logits over temperature."""
    keep = np.exp(scaled - scaled.max()) >= min_p
    if top_k:
        kth = np.sort(np.where(keep, scaled, -np.inf))[::-1][min(top_k, len(scaled)) - 1]
        keep &= scaled >= kth
    if top_p < 1:
        p = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
        p /= p.sum()
        above = np.array([p[p > x].sum() for x in p])
        keep &= above < top_p
    return keep


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution [V] that adjusted logits are sampled from."""
    scaled = (logits - logits.max()) / params.temperature
    keep = kept_by_sorting(scaled, params.min_p, params.top_k, params.top_p)
    p = np.where(keep, np.exp(scaled), 0.0)
    return p / p.sum()


def chi_square_fits(counts: np.ndarray, probability: np.ndarray) -> bool:
    """The draw is plausible at the 0.1 % level (normal approximation of chi-square's tail)."""
    total, there = counts.sum(), probability > 0
    assert not counts[~there].any(), "a token of probability 0 was drawn"
    expected = total * probability[there]
    statistic, freedom = ((counts[there] - expected) ** 2 / expected).sum(), there.sum() - 1
    return bool(statistic < freedom + 3.3 * np.sqrt(2 * freedom) + 6)
