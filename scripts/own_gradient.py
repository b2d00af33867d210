#!/usr/bin/env python
"""Differentiates through the step: which parameters does the log-probability of a continuation depend on most?

  own_gradient.py --prompt "The capital of France is" --continuation " Paris"

Any function of the step's outputs has a gradient, through the paged cache too, on attention's reference implementation.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from rich.table import Table

from jaxrunner import load_model
from jaxrunner.own_step import own_inputs, own_step
from models import merge
from scripts.tables import show_table  # noqa: E402


def log_probability(step, params, kv_caches, state, prompt, continuation):
    """Of the tokens ``continuation`` after ``prompt``: the prompt goes into the cache, then a token at a time."""
    one, computed, total = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(())
    tokens = prompt
    for target in continuation:
        count = one * tokens.shape[0]
        hidden, _, kv_caches, state = step.forward(params, kv_caches, state, own_inputs(tokens, count, computed))
        total += jax.nn.log_softmax(merge(step.graphdef, params).compute_logits(hidden)[0])[target]
        tokens, computed = target[None], computed + count
    return total


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--continuation", default=" Paris")
    parser.add_argument("--top", type=int, default=8, help="parameters to show")
    options = parser.parse_args(arguments)
    model = load_model(options.model, dtype="float32")
    if model.tokenizer is None:
        parser.error(f"{options.model} has no tokenizer")
    ids, both = (model.tokenizer.encode(text) for text in (options.prompt, options.prompt + options.continuation))
    prompt, rest = jnp.array(ids, jnp.int32), jnp.array(both[len(ids) :], jnp.int32)
    step, params, caches, state = own_step(model.decoder, 1, len(both), attention="reference")
    value, slopes = jax.jit(jax.value_and_grad(lambda p: log_probability(step, p, caches, state, prompt, rest)))(params)
    table = Table("parameter", "gradient's norm", title=f"log p = {float(value):.4f}")
    norms = {name: float(jnp.linalg.norm(slope)) for name, slope in zip(step.graphdef.names, slopes, strict=True)}
    for name in sorted(norms, key=norms.__getitem__, reverse=True)[: options.top]:
        table.add_row(name, f"{norms[name]:.4g}")
    show_table(table)


if __name__ == "__main__":
    main()
