"""What stands in a trace: JSON lines, a header first, then a line per step.

The header: ``format`` ("jaxrunner-trace"), ``version``, ``geometry`` (``Geometry``), ``config`` (the runner's
configuration), ``versions``, ``commit`` (of the source tree, or null), ``model`` and ``device`` (or null).

A step's line. Arrays carry their padding: T tokens, R rows and S logits rows of the bucket.

====================  =======  ============================================================================
step                           number of the step, from 0
req_ids               [n]      request of each row
request_indices       [R]      permanent index of each row's request; padding: max_num_reqs
scheduled, computed   [R]      tokens of this step; tokens with keys and values before it
known, prompt         [R]      tokens the request has; tokens of its prompt
drafts, use_device    [R]      draft tokens at the end of the interval; last token comes from the device
query_start_loc       [R+1]    row r owns tokens [query_start_loc[r], query_start_loc[r+1])
seq_lens, discard     [R]      length after the step; the sample must not count
logits_indices        [S_max]  token whose hidden state gets logits; ``num_logits`` of them are in use
token_ids, positions  [T]      ``num_tokens`` of them are in use
req_indices           [T]      row of each token; padding: R
slot_mapping          [G][T]   KV slot of each token; padding: -1
block_rows            [G][R]   leading blocks of each row's table as the step sees it, null blocks at the end left out
block_row_lengths     [G][R]   their numbers before ``block_rows`` was cut at 64
bucket, mode, flags            padded sizes (in mode PIECEWISE ``requests`` are attention's rows, and R those of the
                               upload); how the step was executed; sampling features in use
sampled               [n]      tokens that each row committed
buffer_intact                  the upload was still the same when the step had ended
times_us                       update, prepare, dispatch, wait, record
plan                           the SchedulerOutput
====================  =======  ============================================================================

A step in which nothing was scheduled has only step, req_ids, sampled, buffer_intact, times_us and plan. A line
``{"event": "reset"}`` says that the runner forgot all requests. A step that raised is a line with ``event`` "failed"
and ``error``; it has arrays if they were packed by then, else no req_ids, and a plan that the batch may not have taken
(null if it could not be read).
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

FORMAT, VERSION = "jaxrunner-trace", 1
# In the order in which a step's data flows: the first that is wrong is nearest to the cause.
ROW_ARRAYS = ("scheduled", "computed", "known", "prompt", "drafts", "use_device", "seq_lens", "discard")
TOKEN_ARRAYS = ("token_ids", "req_indices", "positions")
ARRAYS = (
    "req_ids",
    "request_indices",
    *ROW_ARRAYS[:6],
    "query_start_loc",
    *TOKEN_ARRAYS,
    "seq_lens",
    "block_row_lengths",
    "block_rows",
    "slot_mapping",
    "logits_indices",
    "discard",
    "num_tokens",
    "num_logits",
    "flags",
    "bucket",
    "sampled",
)


def versions() -> dict[str, str]:
    """Of Python and of the libraries that a step's numbers can depend on; those that are installed."""
    found = {"python": platform.python_version()}
    for name in ("jaxrunner", "jax", "jaxlib", "numpy", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The source tree's commit, with "+" behind it if files have changed since; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
