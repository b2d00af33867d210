"""Transformers' side of scripts/bench_transformers.py. Runs in an environment of its own: torch and transformers.

    pip install torch==2.13.0 transformers==5.24.0        # Python 3.11 has a CPU build of torch
    transformers_decode.py FOLDER --prompts prompts.json --new-tokens 128 --threads 2

Prints one JSON object: prefill and decode seconds of a plain loop over the model (no generate() around it, which is
slower), the wall seconds of generate() for the same work, and the greedy tokens.
"""

import argparse
import json
import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="model in Hugging Face's layout")
    parser.add_argument("--prompts", required=True, help="JSON: a list of equally long lists of token ids")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = torch.tensor(json.load(file))
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        model(prompts[:, :8])  # first call: allocations, thread pools
        start = time.perf_counter()
        out = model(prompts, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - start
        cache = getattr(out, "cache", None) or out.past_key_values
        name = "cache" if hasattr(out, "cache") else "past_key_values"
        token = out.logits[:, -1:].argmax(-1)
        tokens, steps = [token], []
        for _ in range(args.new_tokens - 1):
            start = time.perf_counter()
            out = model(token, use_cache=True, logits_to_keep=1, **{name: cache})
            token = out.logits[:, -1:].argmax(-1)
            steps.append(time.perf_counter() - start)
            tokens.append(token)
        start = time.perf_counter()
        mask = torch.ones_like(prompts)
        options = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(prompts, attention_mask=mask, **options)
        generate = time.perf_counter() - start
    print(
        json.dumps(
            {
                "prefill_s": prefill,
                "decode_step_s": steps,
                "generate_s": generate,
                "tokens": torch.cat(tokens, 1).tolist(),
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
