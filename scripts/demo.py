#!/usr/bin/env python
"""Answers a handful of questions with SmolLM2-135M-Instruct, all at once, and says where the time went.

Examples:
  scripts/demo                                          sets everything up first, on a fresh machine
  demo.py --prompt "Why is the sky blue?" "Name three rivers." --max-tokens 100
  demo.py --temperature 0.7 --seed 3
  demo.py --json                                        one JSON object on stdout, for a script to read

A first run compiles the model for this machine and keeps that in your cache folder; later runs start at once. On a
CPU whole programs are kept, so that they need not even be traced; --executables names another folder for them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.command import report_error, run_command  # noqa: E402

if TYPE_CHECKING:
    from jaxrunner.runner import ModelRunner

QUESTIONS = [
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about the sea.",
    "Give me three tips for learning to play the guitar.",
    "What is 7 times 8?",
    "Write a Python function that reverses a string.",
]
# Few shapes, so that little is compiled: one for the prompts, one for decoding.
STEP_TOKENS, MAX_SEQS = 256, 8

stderr = Console(stderr=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", default=QUESTIONS, help="other questions")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--seed", type=int, help="for a temperature above 0")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a chat model (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto (default: auto)")
    parser.add_argument(
        "--executables",
        type=Path,
        metavar="FOLDER",
        default=platformdirs.user_cache_path("jaxrunner") / "demo",
        help="where compiled programs are kept for the next run (default: one in your cache folder)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Loads, compiles, answers; everything that is worth telling, as plain data."""
    from jaxrunner.sampling_params import SamplingParams  # checks the flags before JAX is imported

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    clock = time.perf_counter
    start = clock()
    with stderr.status(f"loading {options.model}"):
        import jax

        from jaxrunner import LLM

        imported = clock()
        llm = LLM(
            options.model,
            dtype=options.dtype,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=STEP_TOKENS,
            token_buckets=(MAX_SEQS, STEP_TOKENS),
            logits_buckets=(MAX_SEQS,),
            cpu_cache_bytes=256 << 20,
            warmup="lazy",
            quiet=True,
        )
    loaded = clock()
    runner = llm.runner
    executables = {}
    # Programs for a GPU have not been saved and loaded on one yet; there the compilation cache alone serves.
    keeps = jax.default_backend() == "cpu"
    kept = load_kept(runner, options.executables) if keeps else "none are kept on this device"
    with stderr.status("compiling") as status:
        for compiled in runner.executables.compile_all(runner.shapes.tokens):
            executables[compiled.name] = compiled.seconds
            status.update(f"compiling (have {', '.join(executables)})")
    runner.executables.warm = True
    # What comes out of the compilation cache would have to be compiled again to be saved.
    if keeps and not any(compiled.cached for compiled in runner.executables.compiled.values()):
        runner.executables.save(options.executables)
    compiled_at = clock()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in options.prompt], params)
    finished = clock()

    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    decode_seconds = max(m.finished_time or 0 for m in metrics) - min(m.first_token_time or 0 for m in metrics)
    device = jax.devices()[0]
    weights = jax.tree.leaves(runner.params)
    segments, steps = runner.times.seconds(), runner.times.steps
    seconds = finished - compiled_at
    segments["scheduling, text"] = seconds - sum(segments.values())
    return {
        "model": options.model,
        "parameters": sum(w.size for w in weights),
        "dtype": weights[0].dtype.name,
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()} of it",
        "jax": jax.__version__,
        "attention": runner.attention_choice,
        "kernels": kernel_choices(device.platform),
        "kv_cache": runner.cache_plan.why,
        "answers": [
            {
                "prompt": question,
                "prompt_tokens": len(output.prompt_token_ids),
                "text": output.outputs[0].text,
                "tokens": len(output.outputs[0].token_ids),
                "finish_reason": output.outputs[0].finish_reason,
            }
            for question, output in zip(options.prompt, outputs, strict=True)
        ],
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "generated_tokens": generated,
        "decode_tokens_per_second": (generated - len(outputs)) / decode_seconds if decode_seconds > 0 else None,
        "total_tokens_per_second": generated / seconds,
        "import_seconds": imported - start,
        "load_seconds": loaded - imported,
        "compile_seconds": compiled_at - loaded,
        "executables": executables,
        "kept_executables": kept,
        "compilation_cache": {"hits": runner.counter.hits, "misses": runner.counter.misses},
        "compilations_while_generating": runner.compilations,
        "generate_seconds": seconds,
        "steps": steps,
        "segments": segments,
    }


def load_kept(runner: ModelRunner, folder: Path) -> int | str:
    """How many programs of an earlier run fit this one, which takes them from there; or why there are none."""
    from jaxrunner.saved_executables import SavedExecutablesError

    try:
        return runner.executables.load(folder)
    except SavedExecutablesError as error:
        return str(error)


def kernel_choices(platform: str) -> list[str]:
    """Which implementation of each kernel beside attention a step takes, and why; a line each."""
    from pallas_kernels.configurations import kernel_tables
    from pallas_kernels.implementation import choose_kernel

    lines = []
    for what, kernels in kernel_tables().items():
        if what == "paged_attention":
            continue
        chosen, refusals = choose_kernel(what, kernels)
        if len(kernels) == 1:
            why = f"the only implementation on {platform}"
        else:
            why = "; ".join(f"passed over {refusal}" for refusal in refusals) or f"the first of {len(kernels)}"
        lines.append(f"{what}: {chosen.name} ({why})")
    return lines


def show(report: dict[str, Any]) -> None:
    console = Console()
    facts = Table(show_header=False, box=None)
    size = f"{report['parameters'] / 1e6:.0f} M parameters, {report['dtype']}"
    facts.add_row("model", f"{report['model']} ({size})")
    facts.add_row("device", f"{report['device']} (JAX {report['jax']})")
    facts.add_row("attention", Text("\n".join(report["attention"])))
    facts.add_row("other kernels", Text("\n".join(report["kernels"])))
    facts.add_row("KV cache", report["kv_cache"])
    console.print(facts)
    for answer in report["answers"]:
        console.print(
            Panel(
                Text(answer["text"]),
                title=Text(answer["prompt"]),
                subtitle=f"{answer['tokens']} tokens, {answer['finish_reason']}",
                title_align="left",
                subtitle_align="right",
            )
        )
    decode = report["decode_tokens_per_second"]
    console.print(
        f"{report['generated_tokens']} tokens for {len(report['answers'])} prompts of {report['prompt_tokens']} tokens"
        f" in {report['generate_seconds']:.2f} s: [bold]{report['total_tokens_per_second']:.1f} tokens/s[/bold] in all"
        + (f", [bold]{decode:.1f} tokens/s[/bold] while decoding" if decode else "")
    )
    cache, late = report["compilation_cache"], report["compilations_while_generating"]
    kept = report["kept_executables"]
    if isinstance(kept, int):
        console.print(f"{kept} whole programs of an earlier run were taken as they are.")
    console.print(
        f"Compilation cache: {cache['hits']} programs found, {cache['misses']} not."
        f" Compiled while generating: {late}{', so the times above are not of a steady state' if late else ''}."
    )
    console.print(times(report))


def times(report: dict[str, Any]) -> Table:
    """Where the time went: before generating, and in it, by part of a step."""
    table = Table(title="where the time went")
    for name in ("", "seconds", "ms a step", "share of generating"):
        table.add_column(name, justify="left" if not name else "right")
    parts = {"import": "import_seconds", "load the model": "load_seconds", "compile": "compile_seconds"}
    for name, key in parts.items():
        table.add_row(name, f"{report[key]:.2f}")
    table.add_section()
    for name, seconds in report["segments"].items():
        share = seconds / report["generate_seconds"]
        table.add_row(name, f"{seconds:.3f}", f"{1e3 * seconds / report['steps']:.3f}", f"{share:.1%}")
    table.add_section()
    whole = report["generate_seconds"]
    table.add_row(f"generate ({report['steps']} steps)", f"{whole:.2f}", f"{1e3 * whole / report['steps']:.2f}", "")
    return table


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = run(options)
    except ValueError as error:
        return report_error("demo", error, options)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


if __name__ == "__main__":
    run_command(main)
