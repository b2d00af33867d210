#!/usr/bin/env python
r"""Makes tests/cases/long_prompts.json: greedy continuations of a 900-token prompt, by transformers in float32.

The models are written as Hugging Face folders first, by this project's Python; then transformers' turn is in an
environment of its own (pip install torch==2.13.0 transformers==5.24.0, which bring tokenizers along):

    export_hf.py smollm2-135m-instruct smollm2 gemma3-270m gemma3 qwen2.5-coder-0.5b qwen
    make_long_prompts.py --text /usr/share/common-licenses/GPL-3 smollm2-135m-instruct=smollm2 gemma3-270m=gemma3 \
        qwen2.5-coder-0.5b=qwen > tests/cases/long_prompts.json
"""

import argparse
import json
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", required=True, help="a file with enough text")
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    import torch  # not in this project's environment, nor is transformers
    import transformers
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    with open(args.text, encoding="utf-8") as file:
        text = file.read()
    torch.set_num_threads(1)
    how = f"{args.length} first tokens of GPL-3; torch {torch.__version__}, transformers {transformers.__version__}"
    how += ", float32, eager, greedy with cache, batch 1; min_margin is top1 - top2"
    result: dict[str, Any] = {"how": how, "models": {}}
    for item in args.models:
        name, folder = item.split("=", 1)
        ids = Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text).ids[: args.length]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        tokens, margins, fed, cache = [], [], torch.tensor([ids]), None
        with torch.inference_mode():
            for _ in range(args.new_tokens):
                known: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
                out = model(fed, use_cache=True, **known)
                cache = out.past_key_values
                top = torch.topk(out.logits[0, -1], 2)
                tokens.append(int(top.indices[0]))
                margins.append(float(top.values[0] - top.values[1]))
                fed = torch.tensor([[tokens[-1]]])
        result["models"][name] = {"prompt_ids": ids, "output_ids": tokens, "min_margin": min(margins)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
