"""Lines of requests in, lines of answers out."""

import json

import pytest

from jaxrunner.outputs import CompletionOutput, RequestOutput
from jaxrunner.request_file import answer_lines, read_requests


def test_prompts_of_every_kind_and_fields_over_the_defaults():
    lines = [
        '{"prompt": "a", "max_tokens": 3, "stop": ["x"]}\n',
        "\n",
        '{"prompt_token_ids": [1, 2]}',
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}',
        '{"prompt": ""}',
    ]
    requests = read_requests(lines, {"max_tokens": 7, "temperature": 0.0})
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert [r.prompt for r in requests] == [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}, chat, {"prompt": ""}]
    assert [r.params.max_tokens for r in requests] == [3, 7, 7, 7]
    assert [r.params.temperature for r in requests] == [0.0, 0.0, 0.5, 0.0]
    assert requests[0].params.stop == ("x",)


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "not JSON: .* at column 2"),
        ('{"prompt": "a",}\n', "not JSON: .* at column 1[56]"),  # the column of the comma, or behind it
        ('{"prompt": "a"\n', "not JSON: .* at column 15"),
        ('"a"', "must be an object"),
        ("{}", "needs 'prompt'"),
        ('{"prompt": null}', "needs 'prompt'"),
        ('{"messages": [], "prompt": "a"}', "'messages' alone"),
        ('{"prompt": "a", "max_token": 3}', r"unknown 'max_token' \(did you mean 'max_tokens'\?\).*top_p"),
        ('{"promt": "a", "prompt": "a"}', r"unknown 'promt' \(did you mean 'prompt'\?\)"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be a finite number"),
        ('{"prompt": "a", "stop": [""]}', "empty string"),
        ('{"prompt": "a", "min_tokens": 9}', "min_tokens 9 is greater than max_tokens 8"),
        ('{"prompt": "a", "logit_bias": 3}', "logit_bias must map"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, words):
    with pytest.raises(ValueError, match=words) as error:
        read_requests(['{"prompt": "fine"}', line], {"max_tokens": 8}, "requests.jsonl")
    assert str(error.value).startswith("requests.jsonl, line 2: ")


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does():
    requests = read_requests(['\ufeff{"prompt": "a"}\r\n', " \r\n", '{"prompt": "b"}\r\n'], {})
    assert [r.prompt["prompt"] for r in requests] == ["a", "b"]
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_requests(['{"prompt": "a"}', '\ufeff{"prompt": "b"}'], {})


def test_answers():
    done = RequestOutput("0", "p", [1], [CompletionOutput(0, "é\n", [2], finish_reason="stop")], True)
    twice = [CompletionOutput(i, "", [i], finish_reason="length") for i in range(2)]
    outputs = [done, RequestOutput.refused("1", None, [], "too long"), RequestOutput("2", "p", [1], twice, True)]
    lines = list(answer_lines(outputs))
    assert all("\n" not in line for line in lines)
    assert [json.loads(line) for line in lines] == [
        {"index": 0, "prompt_token_ids": [1], "token_ids": [2], "text": "é\n", "finish_reason": "stop"},
        {
            "index": 1,
            "prompt_token_ids": [],
            "token_ids": [],
            "text": "",
            "finish_reason": "error",
            "error": "too long",
        },
        {"index": 2, "prompt_token_ids": [1], "token_ids": [0], "text": "", "finish_reason": "length", "sample": 0},
        {"index": 2, "prompt_token_ids": [1], "token_ids": [1], "text": "", "finish_reason": "length", "sample": 1},
    ]
