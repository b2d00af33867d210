"""Cases by id: (input, expected)."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "cases"


def case(file: str, case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Input and expected values of one case of tests/cases/<file>.json."""
    cases = json.loads((_FOLDER / f"{file}.json").read_text(encoding="utf-8"))["cases"]
    found = next(c for c in cases if c["id"] == case_id)
    return found["input"], found["expected"]
