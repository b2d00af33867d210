"""A run's numbers as a table, as JSON with all that is needed to repeat it, as CSV, and as a plot."""

from __future__ import annotations

import csv
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table

from jaxrunner.bench.events import RunLog
from jaxrunner.bench.metrics import SEGMENTS, Metrics, Summary, latencies
from jaxrunner.trace.format import commit, versions

_LATENCIES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2el_ms"}
_MIB = 2**20


def environment() -> dict[str, Any]:
    """What the numbers depend on beside the configuration: versions, commit, device."""
    device = jax.devices()[0]
    return {
        "versions": versions(),
        "commit": commit(),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
    }


def peak_memory() -> dict[str, int | None]:
    """Bytes at their peak: of this process on the host, and of the device where it tells."""
    unit = 1 if sys.platform == "darwin" else 1024
    stats = jax.devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"host_bytes": host, "device_bytes": stats.get("peak_bytes_in_use")}


def metrics_table(metrics: Metrics, memory: Mapping[str, int | None], title: str) -> Table:
    """All numbers, a line each; latencies with mean, median, p90 and p99."""
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("")
    for name in ("mean", "median", "p90", "p99", "count"):
        table.add_column(name, justify="right")

    def line(name: str, value: str) -> None:
        table.add_row(name, value)

    line("requests completed / failed", f"{metrics.completed} / {metrics.failed}")
    line("duration", f"{metrics.duration_s:.2f} s")
    line("input tokens (cached)", f"{metrics.total_input_tokens} ({metrics.cached_input_tokens})")
    line("output tokens", str(metrics.total_output_tokens))
    if metrics.draft_tokens:
        line("drafts accepted / proposed", f"{metrics.accepted_tokens} / {metrics.draft_tokens}")
    line("request throughput", f"{metrics.request_throughput:.3f} /s")
    line("output token throughput", f"{metrics.output_throughput:.1f} tokens/s")
    line("total token throughput", f"{metrics.total_token_throughput:.1f} tokens/s")
    if metrics.request_goodput is not None:
        line("goodput", f"{metrics.request_goodput:.3f} requests/s")
    table.add_section()
    for name, attribute in _LATENCIES.items():
        _distribution(table, f"{name} (ms)", getattr(metrics, attribute))
    table.add_section()
    for name, summary in metrics.segments_ms.items():
        _distribution(table, f"{name} of a step (ms)", summary)
    table.add_section()
    line("steps", str(metrics.steps))
    line("padding waste", f"{metrics.padding_waste:.1%} of the padded tokens")
    line("queue depth, mean / most", f"{metrics.mean_queue_depth:.1f} / {metrics.max_queue_depth}")
    line("KV blocks in use, mean / most", f"{metrics.mean_kv_usage:.1%} / {metrics.peak_kv_usage:.1%}")
    line("preemptions", str(metrics.preemptions))
    line("peak host memory", _bytes(memory["host_bytes"]))
    if memory["device_bytes"] is not None:
        line("peak device memory", _bytes(memory["device_bytes"]))
    verdict = "" if not metrics.compilations else ": these times are not of a steady state"
    line("compilations in the run", f"{metrics.compilations}{verdict}")
    return table


def write_json(path: str | Path, metrics: Metrics, log: RunLog | None, about: Mapping[str, Any]) -> None:
    """Numbers, environment, configuration; and with ``log`` every event."""
    found = {**about, **environment(), "metrics": metrics.as_json(), "memory": peak_memory()}
    if log is not None:
        found["events"] = log.as_json()
    Path(path).write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


def write_csv(path: str | Path, log: RunLog) -> None:
    """A line per request: its times in seconds, its tokens."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["request", "arrival", "prompt_tokens", "cached_tokens", "output_tokens", "ttft", "tpot",
                         "e2el", "finish_reason"])  # fmt: skip
        for r in log.requests:
            ttft, tpot, _, e2el = latencies(r) if r.outputs else (None, None, [], None)
            writer.writerow([r.request_id, r.arrival, r.num_prompt_tokens, r.num_cached_tokens, r.num_output_tokens,
                             ttft, tpot, e2el, r.finish_reason])  # fmt: skip


def plot(path: str | Path, log: RunLog, title: str) -> None:
    """ITL over the run and as a distribution; the three segments of each step; queue and cache.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    gaps = [(t, 1000 * (t - s)) for r in log.requests for (s, _), (t, _) in zip(r.outputs, r.outputs[1:], strict=False)]
    axes[0, 0].scatter([t for t, _ in gaps], [g for _, g in gaps], s=4)
    axes[0, 0].set(title="inter-token latency", xlabel="seconds", ylabel="ms", ylim=(0, None))
    ordered = sorted(g for _, g in gaps)
    axes[0, 1].plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    axes[0, 1].set(title="inter-token latency, cumulative", xlabel="ms", ylabel="fraction of gaps", ylim=(0, 1))
    times = [s.start for s in log.steps]
    parts = {n: [1000 * sum(s.segments.get(p, 0.0) for p in ps) for s in log.steps] for n, ps in SEGMENTS.items()}
    axes[1, 0].stackplot(times, *parts.values(), labels=list(parts), step="post")
    axes[1, 0].set(title="the three segments of a step", xlabel="seconds", ylabel="ms")
    axes[1, 0].legend(loc="upper right")
    axes[1, 1].step(times, [s.num_waiting for s in log.steps], where="post", label="waiting")
    axes[1, 1].step(times, [s.num_running for s in log.steps], where="post", label="running")
    axes[1, 1].set(title="requests, and KV blocks in use", xlabel="seconds", ylabel="requests")
    usage = axes[1, 1].twinx()
    usage.step(times, [100 * s.kv_usage for s in log.steps], where="post", color="tab:green", label="KV blocks")
    usage.set(ylabel="% of the blocks", ylim=(0, 100))
    axes[1, 1].legend(loc="upper left")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _distribution(table: Table, name: str, summary: Summary | None) -> None:
    if summary is None:
        table.add_row(name, "undefined")
        return
    p = summary.percentiles
    table.add_row(name, *(f"{v:.2f}" for v in (summary.mean, summary.median, p["p90"], p["p99"])), str(summary.count))


def _bytes(n: int | None) -> str:
    return "" if n is None else f"{n / _MIB:.0f} MiB"
