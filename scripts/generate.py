#!/usr/bin/env python
"""Continues prompts with a model: from the command line or from a file, to the screen or to a file.

Examples:
  generate.py --prompt "The capital of France is" "1, 2, 3,"
  generate.py --chat --prompt "Why is the sky blue?" --max-tokens 200
  generate.py --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  generate.py --input requests.jsonl --json answers.jsonl
  echo '{"prompt": "Hi", "max_tokens": 4}' | generate.py --input - --json -
  generate.py --model ./my-folder --dtype bfloat16 --prompt "def fib(n):"
  generate.py --input requests.jsonl --max-num-batched-tokens 16 --block-size 4 --num-blocks 64 --check-invariants

A line of requests is {"prompt": "..."} or {"prompt_token_ids": [...]} (or {"messages": [...]}, a conversation), with
any field of SamplingParams beside it: {"prompt": "...", "max_tokens": 8, "stop": ["\\n"]}. What a line doesn't say, the
flags say. A line of answers is {"index", "prompt_token_ids", "token_ids", "text", "finish_reason"}, in the order of
the requests. A request that can't be served (empty, too long, ids outside the vocabulary) has finish_reason "error"
and says why in "error"; the others are served all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxrunner.bucket_file import parse_buckets  # noqa: E402
from jaxrunner.outputs import RequestOutput  # noqa: E402
from jaxrunner.request_file import FileRequest, answer_lines, read_requests  # noqa: E402
from jaxrunner.sampling_params import SamplingParams  # noqa: E402
from models.registry import DEFAULT_MODEL  # noqa: E402
from scripts.command import report_error, run_command  # noqa: E402


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="folder, .gguf file, fetched name or hub id (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, or auto: float32 on CPU, else bfloat16 (default: auto)"
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    prompts.add_argument("--input", metavar="FILE", help="a file of requests, a JSON object a line; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says to a chat model")
    parser.add_argument(
        "--json", metavar="FILE", help="write answers there, a JSON object a line; - writes to stdout, and only that"
    )

    sampling = parser.add_argument_group("sampling, for requests that don't say it themselves")
    sampling.add_argument("--max-tokens", type=int, default=64, help="tokens to generate at most (default: 64)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    sampling.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest tokens (default: all)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens that make up P")
    sampling.add_argument("--min-p", type=float, default=0.0, help="leave out tokens less than P times the likeliest")
    sampling.add_argument(
        "--seed",
        type=int,
        help="of every request; without it each has its own, which follows from its place in the input",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on behind end-of-sequence tokens")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a request, prompt and output")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step")
    engine.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens of a KV-cache block (default: 16)"
    )
    engine.add_argument("--num-blocks", type=int, metavar="N", help="KV-cache blocks (default: what there is room for)")
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute common beginnings of prompts anew")
    engine.add_argument("--attention", default="auto", help="name of an attention implementation (default: auto)")
    engine.add_argument("--check-invariants", action="store_true", help="check every step before it runs (slower)")
    engine.add_argument(
        "--token-buckets",
        metavar="LADDER",
        help="padded sizes: 1,8,64 or powers_of_two, vllm, bounded:P (at most P %% padding), or a .json file of sizes",
    )
    engine.add_argument("--execution-mode", default="FULL", help="FULL (default), PIECEWISE, NONE, ...: docs/shapes.md")
    engine.add_argument(
        "--record", metavar="FILE", help="write every step's shape, a JSON line each; for scripts/sweep_buckets.py"
    )
    engine.add_argument("--trace", metavar="FILE", help="record every step here; look at it with scripts/trace.py")
    return parser.parse_args(arguments)


def requests_of(options: argparse.Namespace) -> list[FileRequest]:
    """What is asked for, by flags or by file.

    Raises:
        ValueError: a flag or a line is wrong, or the file can't be read.
    """
    defaults: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "ignore_eos": options.ignore_eos,
    }
    params = SamplingParams(**defaults)
    if options.prompt:
        requests = [FileRequest({"prompt": text}, params) for text in options.prompt]
    elif options.input == "-":
        requests = read_requests(sys.stdin, defaults, "stdin")
    else:
        try:
            with open(options.input, encoding="utf-8") as lines:
                requests = read_requests(lines, defaults, options.input)
        except OSError as error:
            raise ValueError(f"--input {options.input}: can't be read: {error.strerror}") from None
    return [as_chat(request) for request in requests] if options.chat else requests


def as_chat(request: FileRequest) -> FileRequest:
    """The prompt's text as a user's message."""
    if request.prompt.keys() != {"prompt"}:
        return request
    return FileRequest({"messages": [{"role": "user", "content": request.prompt["prompt"]}]}, request.params)


def check_writable(target: Path) -> None:
    """Hours of answers must not be lost at the end for a name that can't be written to.

    Raises:
        ValueError: it can't; the message says why.
    """
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--json {target}: there is no such folder")
    if target.is_dir():
        raise ValueError(f"--json {target}: this is a folder; name a file")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ValueError(f"--json {target}: no permission to write it")


def write(outputs: list[RequestOutput], target: str | None) -> None:
    """Answers to the screen, to stdout as JSON lines ("-"), or to a file."""
    if target is None:
        show(outputs)
    elif target == "-":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        sys.stdout.writelines(f"{line}\n" for line in answer_lines(outputs))
        sys.stdout.flush()
    else:
        with open(target, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in answer_lines(outputs))


def show(outputs: list[RequestOutput]) -> None:
    """A panel for each generated text."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    for index, output in enumerate(outputs):
        prompt = output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids)} token ids"
        for sequence in output.outputs:
            body = Text(prompt, style="dim").append(sequence.text, style="not dim bold")
            end = f"{sequence.finish_reason}, {len(sequence.token_ids)} tokens"
            if output.error is not None:
                body, end = Text(output.error, style="red"), "refused"
            console.print(Panel(body, title=f"{index}", subtitle=end, title_align="left", subtitle_align="right"))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        requests = requests_of(options)
        if options.json not in (None, "-"):
            check_writable(Path(options.json))
        if not requests:
            print(f"generate: {options.input} holds no requests", file=sys.stderr)
            write([], options.json)
            return 0
        from jaxrunner import LLM  # after all that can fail quickly: importing JAX takes a second

        llm = LLM(
            options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size,
            num_gpu_blocks_override=options.num_blocks,
            enable_prefix_caching=not options.no_prefix_caching,
            token_buckets=parse_buckets(options.token_buckets) if options.token_buckets else None,
            execution_mode=options.execution_mode,
            record_shapes=options.record,
            trace=options.trace,
            attention=options.attention,
            check_invariants=options.check_invariants,
        )
        outputs = llm.generate([r.prompt for r in requests], [r.params for r in requests], on_error="return")
        write(outputs, options.json)
    except (ValueError, OSError) as error:
        return report_error("generate", error, options)
    except KeyboardInterrupt:
        print("generate: interrupted", file=sys.stderr)
        return 130
    refused = [index for index, output in enumerate(outputs) if output.error is not None]
    if refused:
        print(f"generate: {len(refused)} of {len(outputs)} requests could not be served: {refused}", file=sys.stderr)
    return 1 if outputs and len(refused) == len(outputs) else 0


if __name__ == "__main__":
    run_command(main)
