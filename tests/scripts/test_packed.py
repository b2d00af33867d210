"""scripts/packed.py as a command: the documents' numbers, on the screen and as data; errors say what is wrong."""

import json

import pytest

from scripts import packed
from tests.cases_by_id import case


def as_json(capsys, *arguments):
    packed.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments, case_id",
    [
        ([], "seed2_six_tokens"),
        (["--example", "first"], "seed1_six_tokens"),
        (["--example", "experiment"], "seed1_minimal_experiment"),
        (["--scheduled", "2,5,3"], "seed1_boundaries"),
        (["--lengths", "2,5,3"], "seed1_boundaries"),
        (["--lengths", "2,1,3", "--computed", "4,10,0", "--tables", "7,2;1,3,5;8"], "seed2_six_tokens"),
        (["--scheduled", "2,1,3", "--computed", "4,10,0", "--tables", "7,2;1,3,5;8"], "seed2_six_tokens"),
        (["--scheduled", "1,3", "--computed", "8,0", "--tokens", "9,10"], "seed1_minimal_experiment"),
    ],
)
def test_numbers_are_the_documents(capsys, arguments, case_id):
    _, expected = case("seed_cases", case_id)
    result = as_json(capsys, *arguments)
    for name, values in expected.items():
        if name == "visible_keys":
            assert [token[name] for token in result["tokens"]] == values
        elif name == "at_most_sampled":
            assert len(result["logits_indices"]) == values
        else:
            assert result[name] == values, name


def test_pack(capsys):
    _, expected = case("seed_cases", "seed2_pack")
    result = as_json(capsys, "pack")
    assert {name: result[name] for name in expected} == expected
    assert as_json(capsys, "pack", "--lengths", "4,1,2", "--dim", "3")["packed_shape"] == [7, 3]
    packed.main(["pack"])
    assert "padded [2, 3, 4] -> packed [5, 4], cu_seqlens [0, 3, 5]" in capsys.readouterr().out


def test_the_screen_shows_padding_and_what_is_discarded(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    packed.main(["--pad", "4"])
    out = capsys.readouterr().out
    assert out.count("padding") >= 4 and "slot_mapping     [8, 9, 22, 32, 33, 34]" in out
    packed.main(["--example", "experiment"])
    assert "discard          [False, True]" in capsys.readouterr().out


def test_padding_is_in_the_data_too(capsys):
    tokens = as_json(capsys, "--pad", "4")["tokens"]
    assert [token["kv_slot"] for token in tokens] == [8, 9, 22, 32, 33, 34, -1, -1, -1, -1]


def test_a_common_prefix_may_be_shared(capsys):
    # Block 7 is full for both, and each goes on in a block of its own.
    result = as_json(capsys, "--scheduled", "1,2", "--computed", "4,5", "--tables", "7,1;7,2")
    assert result["slot_mapping"] == [4, 9, 10]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--block-size", "0"], "--block-size: must be at least 1, got 0"),
        (["--block-size", "-2"], "--block-size: must be at least 1, got -2"),
        (["--pad", "-5"], "--pad: must be at least 0, got -5"),
        (["--pad", "x"], "--pad: invalid number value: 'x'"),
        (["pack", "--dim", "0"], "--dim: must be at least 1"),
        (["pack", "--lengths", "3,0"], "lengths must be from 1"),
        (["pack", "--width", "2"], "padded width 2"),
        (["--computed", "1,2,3"], "give --scheduled too"),
        (["--lengths", "3,2", "--scheduled", "3,2"], "mean the same for a step: give one"),
        (["--lengths", "3,2", "--dim", "4"], "packed.py pack --lengths 3,2"),
        (["pack", "--scheduled", "2"], "pack takes --lengths, --width and --dim"),
        (["--scheduled", "99999999999"], "steps and blocks of up to 16384 tokens"),
        (["--scheduled", "1", "--computed", "99999999999"], "steps and blocks of up to 16384 tokens"),
        (["--pad", "99999999999"], "steps and blocks of up to 16384 tokens, padding included"),
        (["--block-size", "99999999999"], "steps and blocks of up to 16384 tokens"),
        (["pack", "--width", "99999999999"], "padded tensors of up to 1048576 values"),
        (["--scheduled", "2", "--computed", "-3"], "computed tokens must be 0 or more"),
        (["--scheduled", "2,1", "--computed", "4"], "need 2 entries each"),
        (["--scheduled", "2", "--tables", "1;"], "--tables: invalid tables value: '1;'"),
        # Of the shared block 2, A's second, B's first: A is writing to it; then B is.
        (["--scheduled", "2,1", "--computed", "4,4", "--tables", "1,2;2,3"], "block 2 is entry 1 of request A's table"),
        (["--scheduled", "2,1", "--computed", "4,3", "--tables", "1,2;1,3"], "entry 0 of B's: requests can only share"),
        (["--scheduled", "1", "--computed", "8", "--tables", "1,1,2"], "block 1 is entry 0 of request A's table"),
    ],
)
def test_errors_say_what_is_wrong(capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        packed.main(arguments)
    captured = capsys.readouterr()
    assert error.value.code == 2 and words in captured.err and captured.out == ""
