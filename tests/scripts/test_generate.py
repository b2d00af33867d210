"""scripts/generate.py, run in this process on a scripted checkpoint."""

import json
from pathlib import Path

import pytest

from scripts import generate
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain

V = 64
WORDS = ["<unk>", "<s>", *(f"w{i}" for i in range(2, V))]
TEMPLATE = "{{ messages[-1].content }} w50"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(
        write_chain(
            folder,
            successor_logits(V, {}),
            word_tokenizer(WORDS),
            config={"max_position_embeddings": 32},
            tokenizer_config={"chat_template": TEMPLATE},
        )
    )


def run(model, *arguments):
    flags = ["--model", model, "--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--num-blocks", "40"]
    return generate.main([*flags, *arguments])


def test_a_file_of_requests_gives_a_file_of_answers(model, tmp_path):
    requests = [
        {"prompt": "w3 w4"},
        {"prompt_token_ids": [10], "max_tokens": 2},
        {"prompt": ""},
        {"prompt": "w3", "stop": "w6", "ignore_eos": True},
        {"prompt_token_ids": [V]},
        {"prompt_token_ids": [20] * 40},
        {"messages": [{"role": "user", "content": "w3"}]},
    ]
    source, target = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)))
    assert run(model, "--input", str(source), "--json", str(target), "--max-tokens", "3") == 0
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [answer["index"] for answer in answers] == list(range(7))
    fields = {"index", "prompt_token_ids", "token_ids", "text", "finish_reason"}
    assert answers[0] == {
        "index": 0,
        "prompt_token_ids": [3, 4],
        "token_ids": [5, 6, 7],
        "text": "w5w6w7",
        "finish_reason": "length",
    }
    assert answers[1]["token_ids"] == [11, 12]
    assert (answers[3]["text"], answers[3]["finish_reason"]) == ("w4w5", "stop")
    assert answers[6]["prompt_token_ids"] == [3, 50] and answers[6]["token_ids"] == [51, 52, 53]
    for i in (2, 4, 5):
        assert answers[i].keys() == fields | {"error"} and answers[i]["finish_reason"] == "error"
    assert "vocabulary" in answers[4]["error"] and answers[5]["prompt_token_ids"] == [20] * 40


def test_stdout_holds_the_answers_and_nothing_else(model, capsys):
    assert run(model, "--prompt", "w3", "w8", "--json", "-", "--max-tokens", "1") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["token_ids"] for answer in answers] == [[4], [9]]


def test_chat_and_the_screen(model, capsys):
    assert run(model, "--prompt", "w3", "--chat", "--max-tokens", "2") == 0
    out = capsys.readouterr().out
    assert "w3 w50" in out and "w51w52" in out and "length, 2 tokens" in out


def test_one_seed_for_all_requests(model, capsys):
    assert run(model, "--prompt", "w3", "w3", "--temperature", "100", "--seed", "3", "--json", "-") == 0
    first, second = (json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines())
    assert first == second
    assert run(model, "--prompt", "w3", "w3", "--temperature", "100", "--json", "-") == 0
    first, second = (json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines())
    assert first != second


def test_only_refused_requests_is_a_failure(model, capsys):
    assert run(model, "--prompt", "", "--json", "-") == 1
    assert "1 of 1 requests could not be served: [0]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "a", "--temperature", "nan"], "temperature must be a finite number"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens must be an integer from 1"),
        (["--input", "no/such/file"], "--input no/such/file: can't be read: No such file"),
        (["--input", "."], "--input .: can't be read: Is a directory"),
        (["--prompt", "a", "--trace", "no/such/folder/t"], "--trace must be a file in a folder that exists or None"),
        (["--prompt", "a", "--num-blocks", "999999999999"], "a KV cache of 999999999999 blocks takes"),
        (["--prompt", "a", "--json", "no/such/folder/a"], "no such folder"),
        (["--prompt", "a", "--model", "no-such-model"], "can't find the model 'no-such-model'"),
        (["--prompt", "a", "--block-size", "0"], "--block-size must be"),
        (["--prompt", "a", "--attention", "magic"], "magic"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(model, capsys, arguments, words):
    assert run(model, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("generate: ") and words in captured.err and captured.out == ""


def test_a_bad_line_is_named_before_the_model_is_loaded(tmp_path, capsys):
    source = tmp_path / "requests.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "a", "max_tokens": 0}\n')
    assert run("no-such-model", "--input", str(source)) == 2
    assert f"{source}, line 2: max_tokens must be" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_requests_has_no_answers_and_says_so(tmp_path, capsys, text):
    source, target = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text(text)
    assert run("no-such-model", "--input", str(source), "--json", str(target)) == 0
    assert capsys.readouterr().err == f"generate: {source} holds no requests\n" and target.read_text() == ""


def test_a_file_that_is_not_utf8_is_named(tmp_path, capsys):
    source = tmp_path / "requests.jsonl"
    source.write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    assert run("no-such-model", "--input", str(source)) == 2
    assert f"{source} isn't UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("kind, words", [("folder", "this is a folder"), ("locked", "no permission")])
def test_answers_that_could_not_be_written_are_not_made(tmp_path, capsys, monkeypatch, kind, words):
    target = tmp_path / "answers"
    if kind == "folder":
        target.mkdir()
    else:  # as for another user's folder; this one may be root, to whom nothing is locked
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert run("no-such-model", "--prompt", "a", "--json", str(target)) == 2
    assert f"--json {target}: {words}" in capsys.readouterr().err
    assert not target.is_file()


def test_help_teaches_by_examples(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    out = capsys.readouterr().out
    assert out.count("generate.py --") >= 5


def test_step_shapes_are_recorded_at_the_buckets_asked_for(model, tmp_path):
    record = tmp_path / "shapes.jsonl"
    arguments = ["--prompt", "w3 w4 w5", "--max-tokens", "3", "--json", str(tmp_path / "a.jsonl")]
    assert run(model, *arguments, "--record", str(record), "--token-buckets", "2,16") == 0
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert [step["tokens"] for step in steps] == [3, 1, 1]
    assert steps[0] == {"tokens": 3, "requests": 1, "logits_rows": 1, "max_query": 3, "max_len": 3, "mode": "FULL"}


def test_a_ladder_that_is_none_is_refused(model, capsys):
    assert run(model, "--prompt", "w3", "--token-buckets", "many") == 2
    assert "--token-buckets: buckets are a list of sizes" in capsys.readouterr().err
