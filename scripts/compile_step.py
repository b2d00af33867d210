#!/usr/bin/env python
"""Compiles the whole step of a model for a GPU that isn't here, from shapes alone, and looks at the program.

  compile_step.py --config llama-3.1-8b --implementation triton
  compile_step.py --config qwen3-8b --target a100 --tokens 2048 --reqs 64 --json out.json
  compile_step.py --model smollm2-135m-instruct --implementation reference
  compile_step.py --config llama-3.1-8b --layers 4 --show               the launches, in order

The step is a runner's own: forward over the tokens, head and sampler over the rows, donated caches and state. No
weights are needed, and nothing runs. Counted: what the device is told to do (launches; those of a layer from two
programs that differ in one), copies of a cache (must be none), caches updated in place (must be all), temporary memory.

Products of matrices are chosen without tuning, which takes a GPU; how many launches they are may differ there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from pallas_kernels.gpus import GPUS
from scripts.command import report_error, run_command  # noqa: E402
from scripts.gpu.compiler import CompilerUnavailable, ensure_compiler
from scripts.gpu.published import PUBLISHED
from scripts.tables import show_table  # noqa: E402


def compile_here(args: argparse.Namespace) -> dict[str, Any]:
    """The figures. Runs in a process that has the GPU compiler on its path."""
    import jax

    from models import ModelConfig, open_checkpoint, resolve_model
    from pallas_kernels import choose_attention
    from scripts.gpu.compile import aliased_arguments, compile_program, copies_of
    from scripts.gpu.launches import launches, per_layer
    from scripts.gpu.step_programs import Program, StepSize, step_programs, with_layers
    from scripts.gpu.target import target_mesh
    from scripts.gpu.traffic import kernel_bytes, least_bytes

    if args.config:
        config = ModelConfig.from_hf(PUBLISHED[args.config])
    else:
        config = open_checkpoint(resolve_model(args.model)).config
    if args.layers:
        config = with_layers(config, args.layers)
    gpu = GPUS[args.target]
    size = StepSize(args.tokens, args.reqs, args.blocks, args.block_size, args.max_model_len)
    with jax.set_mesh(target_mesh(gpu)):
        implementation, refusals = choose_attention(
            config.attention_layers(), args.block_size, args.dtype, "gpu", requested=args.implementation
        )

    def programs(layers: int) -> tuple[Program, Program]:
        with jax.set_mesh(target_mesh(gpu)):
            return step_programs(with_layers(config, layers), implementation, size, args.dtype)

    def compiled(program: Program) -> Any:
        return compile_program(program.function, program.args, program.donate, gpu, args.dumps)

    forward, head = programs(config.num_layers)
    full = compiled(forward)
    ran = launches(full.thunks)
    if config.num_layers > 1:
        shorter = launches(compiled(programs(config.num_layers - 1)[0]).thunks)
    else:
        shorter = []
    head_launches = len(launches(compiled(head).thunks))
    params, caches, _, _ = forward.args
    first = len(jax.tree.leaves(params))
    cache_leaves = jax.tree.leaves(caches)
    aliased = aliased_arguments(full.hlo) & set(range(first, first + len(cache_leaves)))
    moved = least = None
    if args.tokens == args.reqs:  # a decode, in which a request's keys are read for one token
        cache_shapes = {leaf.shape for leaf in cache_leaves}
        tables = {(args.reqs, size.table_width), (args.reqs + 1, size.table_width)}
        beside = kernel_bytes(full.hlo, [*cache_shapes, *tables]) / config.num_layers
        facts, itemsize = config.attention_layers()[0], cache_leaves[0].dtype.itemsize
        keys = args.reqs * args.context
        least = least_bytes(args.tokens, keys, facts.num_heads, facts.num_kv_heads, facts.head_dim, itemsize)
        # Keys and values are read block by block, written once by slot.
        blocks = args.reqs * -(-args.context // args.block_size)
        moved = (
            int(beside) + 2 * (blocks * args.block_size + args.tokens) * facts.num_kv_heads * facts.head_dim * itemsize
        )
    copies = [copy for shape in {leaf.shape for leaf in cache_leaves} for copy in copies_of(full.hlo, shape)]
    return {
        "model": args.config or args.model,
        "target": args.target,
        "implementation": implementation.name,
        "passed_over": refusals,
        "tokens": args.tokens,
        "reqs": args.reqs,
        "layers": config.num_layers,
        "launches": len(ran) + head_launches,
        "launches_per_layer": len(ran) - len(shorter),
        "launches_of_a_layer": per_layer(ran, shorter, 1),
        "launches_of_forward": len(ran),
        "launches_of_head_and_sampler": head_launches,
        "cache_copies": len(copies),
        "copies": copies[:4],
        "caches_aliased": len(aliased),
        "caches": len(cache_leaves),
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in cache_leaves),
        "temp_bytes": full.temp_bytes,
        "context": args.context,
        "kernel_bytes_per_layer": moved,
        "least_bytes_per_layer": least,
        "lower_s": round(full.lower_s, 2),
        "compile_s": round(full.compile_s, 2),
        "sequence": [f"{kind} {name}" for kind, name in ran] if args.show else None,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The figures, from a process of its own."""
    compiler = ensure_compiler(lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="compile_step.") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, os.path.abspath(__file__), "--inside", str(result), "--dumps", folder]
        for name in (
            "target",
            "tokens",
            "reqs",
            "blocks",
            "block_size",
            "max_model_len",
            "context",
            "dtype",
            "implementation",
        ):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--config", args.config] if args.config else ["--model", args.model]
        command += ["--layers", str(args.layers)] if args.layers else []
        command += ["--show"] if args.show else []
        with Console(stderr=True).status(f"compiling the step for {args.target}"):
            done = subprocess.run(command, env=compiler.environment(Path(folder)), capture_output=True, text=True)
        if not result.exists():
            raise RuntimeError(done.stderr[-3000:] or f"the compiler's process ended with {done.returncode}")
        answer = json.loads(result.read_text())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def problems_of(figures: dict[str, Any], most_launches: int | None) -> list[str]:
    """What is wrong with a step, in words."""
    problems = []
    if figures["cache_copies"]:
        problems.append(f"{figures['cache_copies']} copies of a cache, such as {figures['copies'][0]}")
    if figures["caches_aliased"] < figures["caches"]:
        problems.append(f"{figures['caches_aliased']} of {figures['caches']} caches are updated in place")
    if most_launches is not None and figures["launches_per_layer"] > most_launches:
        problems.append(f"{figures['launches_per_layer']} launches a layer, {most_launches} are allowed")
    return problems


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(
        title=f"{figures['model']}: {figures['tokens']} tokens, {figures['reqs']} rows, "
        f"compiled for {figures['target']}, not run"
    )
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    in_place = f"{figures['caches_aliased']} of {figures['caches']} ({figures['cache_bytes'] / 1e9:.2f} GB)"
    traffic, least = "not a decode", figures["least_bytes_per_layer"]
    if least:
        moved = figures["kernel_bytes_per_layer"]
        traffic = f"{moved / 1e6:.1f} MB, {moved / least:.3f} of the least, at {figures['context']} tokens a request"
    rows = {
        "attention": figures["implementation"],
        "launches": figures["launches"],
        "  forward": figures["launches_of_forward"],
        "  of it a layer": figures["launches_per_layer"],
        "  head and sampler": figures["launches_of_head_and_sampler"],
        "copies of a cache": figures["cache_copies"],
        "caches in place": in_place,
        "temporaries": f"{figures['temp_bytes'] / 1e6:.1f} MB",
        "kernels move a layer": traffic,
        "lowering, compiling": f"{figures['lower_s']:.1f} s, {figures['compile_s']:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    show_table(table, console)
    layer = (f"{count:g} {name}" for name, count in sorted(figures["launches_of_a_layer"].items()))
    console.print(f"a layer: {', '.join(layer)}")
    for line in figures["passed_over"]:
        console.print(f"passed over {line}")
    for line in figures["sequence"] or []:
        console.print(line)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", choices=PUBLISHED, help="a published model's shapes (default: llama-3.1-8b)")
    which.add_argument("--model", help="a model that is here: a path, or a name of scripts/fetch_model.py")
    parser.add_argument("--implementation", default="auto", help='of attention, by name (default: "auto", the best)')
    parser.add_argument("--target", default="h200", choices=GPUS)
    parser.add_argument("--tokens", type=int, default=256, help="padded tokens of the step (default: 256)")
    parser.add_argument("--reqs", type=int, default=256, help="rows of the step (default: 256)")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument("--blocks", type=int, default=4096, help="of the KV cache (default: 4096)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=8192, help="sets the block table's width (default: 8192)")
    parser.add_argument("--context", type=int, default=2048, help="tokens a request has, for bytes (default: 2048)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most-launches", type=int, metavar="N", help="fail on more than N a layer")
    parser.add_argument("--show", action="store_true", help="also list the launches, in order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dumps", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not args.config and not args.model:
        args.config = "llama-3.1-8b"
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.inside:
        try:
            answer = compile_here(args)
        except ValueError as error:  # a refusal, an impossible size: for the user's eyes
            answer = {"error": str(error)}
        args.inside.write_text(json.dumps(answer))
        return 0
    try:
        figures = run(args)
    except CompilerUnavailable as error:
        print(f"the GPU compiler can't be had, so nothing was compiled: {error}", file=sys.stderr)
        return 3
    except ValueError as error:
        return report_error("compile_step", error, args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    show(Console(highlight=False), figures)
    problems = problems_of(figures, args.most_launches)
    for line in problems:
        print(f"FAILED: {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
