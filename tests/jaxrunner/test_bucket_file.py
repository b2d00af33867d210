"""Ladders from a file, as a sweep writes them, and by name, in both configurations."""

import pytest

from jaxrunner.bucket_file import parse_buckets, read_buckets, write_buckets
from jaxrunner.config import RunnerConfig
from jaxrunner.llm_config import LLMConfig

LIMITS = {"max_num_reqs": 4, "max_num_batched_tokens": 32}


def test_what_was_written_is_a_runners_ladder(tmp_path) -> None:
    path = tmp_path / "ladder.json"
    write_buckets(path, token_buckets=(3, 9, 32), logits_buckets=(2, 4))
    assert read_buckets(path, "token_buckets") == (3, 9, 32)
    config = RunnerConfig(**LIMITS, token_buckets=str(path), logits_buckets=str(path))
    assert config.shapes().tokens == (3, 9, 32) and config.shapes().logits == (2, 4)
    path.write_text("[5, 7]")  # a bare list as well
    llm = LLMConfig(max_num_seqs=4, max_num_batched_tokens=32, token_buckets=str(path), request_buckets=(3,))
    assert llm.runner_config(64, "cpu").shapes().tokens == (5, 7, 32)
    assert llm.runner_config(64, "cpu").shapes().requests == (3, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "token_buckets .* can't be read: .*No such file"),
        ("{", "token_buckets .* can't be read"),
        ('{"logits_buckets": [1]}', "must hold a list of sizes, or an object with one under 'token_buckets'"),
        ("[]", "must hold a list of sizes"),
        ("[0]", "must hold a list of sizes"),
        ('["1"]', "must hold a list of sizes"),
    ],
)
def test_other_files_are_refused(tmp_path, text: str | None, message: str) -> None:
    path = tmp_path / "ladder.json"
    if text is not None:
        path.write_text(text)
    for config in (RunnerConfig, LLMConfig):
        with pytest.raises(ValueError, match=message):
            config(token_buckets=str(path))


def test_ladders_by_name() -> None:
    assert RunnerConfig(**LIMITS, token_buckets="bounded:50").shapes().tokens == (1, 3, 7, 15, 32)
    for config in (RunnerConfig, LLMConfig):
        with pytest.raises(ValueError, match="token_buckets: buckets are a list of sizes, .*; got 'pow'"):
            config(token_buckets="pow")
        with pytest.raises(ValueError, match="execution_mode must be one of .*'PIECEWISE', 'FULL', .*got 'full'"):
            config(execution_mode="full")


def test_buckets_on_a_command_line() -> None:
    assert parse_buckets("1, 8,64") == (1, 8, 64) and parse_buckets("16") == (16,)
    assert parse_buckets("bounded:10") == "bounded:10" and parse_buckets("a.json") == "a.json"
