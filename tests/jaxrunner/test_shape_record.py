"""Files of step shapes: what is written is read, plain or compressed; another line is refused by file and number."""

import pytest

from jaxrunner.shape_record import StepRecord, read_shapes, write_shapes

STEPS = [StepRecord(9, 1, 1, 9, 9), StepRecord(3, 3, 3, 1, 40, "PIECEWISE")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_read_what_was_written(tmp_path, name: str) -> None:
    write_shapes(tmp_path / name, STEPS)
    assert read_shapes([tmp_path / name, tmp_path / name]) == STEPS * 2


def test_a_lines_keys() -> None:
    assert STEPS[0].line() == (
        '{"tokens": 9, "requests": 1, "logits_rows": 1, "max_query": 9, "max_len": 9, "mode": "FULL"}'
    )


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"tokens": 1}', STEPS[0].line().replace("9", "-9"), '{"a": 1}'])
def test_another_line_is_refused_by_file_and_number(tmp_path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{STEPS[0].line()}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:3: expected a JSON object with tokens, requests"):
        read_shapes([path])
