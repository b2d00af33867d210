import pytest

from jaxrunner.arrival_trace import Arrival, read_arrival_trace


def test_the_published_formats(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,31,8\n"
    )
    first, second = read_arrival_trace(azure)
    assert first == Arrival(0.0, 4808, 10)
    assert second.time == pytest.approx(0.052, abs=1e-6) and second.num_prompt_tokens == 31
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    assert [a.time for a in read_arrival_trace(azure)] == pytest.approx([0.0, 0.99007], abs=1e-6)
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "45,ChatGPT,472,18,490,Conversation log\n5,GPT-4,10,0,10,API log\n5.5,ChatGPT,9,3,12,Conversation log\n"
    )
    assert read_arrival_trace(burst) == [Arrival(0.0, 9, 3), Arrival(39.5, 472, 18)]  # by time, failed ones left out
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text(
        '{"timestamp": 1000, "input_length": 7, "output_length": 2, "hash_ids": [0]}\n\n'
        '{"timestamp": 1500, "input_length": 8, "output_length": 3}\n'
    )
    assert read_arrival_trace(mooncake) == [Arrival(0.0, 7, 2), Arrival(0.5, 8, 3)]
    assert read_arrival_trace(mooncake, limit=1) == [Arrival(0.0, 7, 2)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n1,2\n", "has the columns"),
        ("Timestamp,Request tokens,Response tokens\n1,x,2\n", "request 1"),
        ("Timestamp,Request tokens,Response tokens\n1,2,0\n", "no request"),
        ("", "no request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_arrival_trace(path)
