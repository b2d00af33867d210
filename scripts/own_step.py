#!/usr/bin/env python
"""A decoding loop of your own over the pure step: your bucket, your sampler, no host between two tokens.

own_step.py --prompt "The capital of France is" "1, 2, 3," --new-tokens 16
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jaxrunner import load_model
from jaxrunner.own_step import own_inputs, own_step
from models import merge


def pick(logits):  # the sampling function: greedy; make it yours
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def generate(step, params, kv_caches, state, prompts, lengths, new_tokens):
    """Greedy continuations [R, new_tokens] of prompts [T], packed and padded; and caches and state, in place."""

    def run(kv_caches, state, *tokens):
        hidden, _, kv_caches, state = step.forward(params, kv_caches, state, own_inputs(*tokens))
        return pick(merge(step.graphdef, params).compute_logits(hidden)), kv_caches, state

    def decode(carry, _):
        token, computed, kv_caches, state = carry
        following, kv_caches, state = run(kv_caches, state, token, jnp.ones_like(computed), computed)
        return (following, computed + 1, kv_caches, state), token

    first, kv_caches, state = run(kv_caches, state, prompts, lengths, jnp.zeros_like(lengths))
    (_, _, kv_caches, state), tokens = jax.lax.scan(decode, (first, lengths, kv_caches, state), length=new_tokens)
    return tokens.T, kv_caches, state


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt", nargs="+", default=["The capital of France is"])
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    model = load_model(options.model)
    prompts = [model.tokenizer.encode(text) for text in options.prompt]  # type: ignore[union-attr]
    lengths = jnp.array([len(ids) for ids in prompts], jnp.int32)
    step, *arrays = own_step(model.decoder, len(prompts), max(map(len, prompts)) + options.new_tokens)
    padded = jnp.array(sum(prompts, []) + [0] * (-sum(map(len, prompts)) % 32), jnp.int32)  # the bucket: 32, 64, ...
    loop = jax.jit(generate, static_argnames=("step", "new_tokens"), donate_argnames=("kv_caches", "state"))
    answers = loop(step, *arrays, padded, lengths, options.new_tokens)[0].tolist()
    for text, ids in zip(options.prompt, answers, strict=True):
        print(text + model.tokenizer.decode(ids))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
