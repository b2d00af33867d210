"""Tokenizers of both formats: ids, text, bytes, BOS and EOS; the three real ones against transformers' ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import TemplateError, TokenizerError
from models.gguf_file import GGUFFile, read_gguf
from models.gguf_tokenizer import build_backend, gguf_tokenizer
from models.hf_tokenizer import folder_tokenizer
from models.tokenizer import Tokenizer
from tests.models.tiny_checkpoints import CONFIGS, byte_level_vocabulary, sentencepiece_vocabulary, write_gguf

REFERENCE = json.loads((Path(__file__).parents[1] / "cases" / "model_reference.json").read_text())["models"]
REAL = [
    pytest.param("smollm2-135m-instruct", "smollm2-135m", id="smollm2"),
    pytest.param("gemma3-270m", "gemma3-270m", id="gemma3", marks=pytest.mark.larger_model("gemma3-270m")),
    pytest.param(
        "qwen2.5-coder-0.5b", "qwen25-coder-0.5b", id="qwen2.5", marks=pytest.mark.larger_model("qwen2.5-coder-0.5b")
    ),
]


@pytest.fixture(scope="module")
def real(model_path):
    """A function from a registered model's name to its tokenizer, built once."""
    built: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in built:
            built[name] = gguf_tokenizer(read_gguf(model_path(name)))
        return built[name]

    return get


def gguf_file(tmp_path: Path, vocabulary: dict[str, Any], **changes: Any) -> GGUFFile:
    """A file with that vocabulary; a change of None takes its key away, others replace or add `tokenizer.ggml.KEY`."""
    keys = vocabulary | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return read_gguf(write_gguf(tmp_path / "t.gguf", CONFIGS["llama"], {}, keys))


@pytest.fixture
def byte_level(tmp_path):
    return gguf_tokenizer(gguf_file(tmp_path, byte_level_vocabulary()))


@pytest.fixture
def sentencepiece(tmp_path):
    return gguf_tokenizer(gguf_file(tmp_path, sentencepiece_vocabulary()))


@pytest.mark.parametrize("name, case", REAL)
def test_real_models_encode_and_decode_as_transformers(real, name, case):
    tokenizer = real(name)
    for prompt in REFERENCE[case]["prompts"]:
        ids = tokenizer.encode(prompt["text"], add_special_tokens=prompt["kind"] != "chat")
        assert ids == prompt["prompt_ids"]
        text = tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=False)
        bos = REFERENCE[case]["prompts"][0]["prompt_ids"][0] == tokenizer.bos_token_id and case == "gemma3-270m"
        assert text == ("<bos>" if bos else "") + prompt["text"]
        assert tokenizer.decode(prompt["output_ids"], skip_special_tokens=False) == prompt["output_text"]


@pytest.mark.parametrize("name, case", REAL)
def test_real_models_special_tokens(real, name, case):
    tokenizer, expected = real(name), REFERENCE[case]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (expected["bos"], expected["eos"])
    assert tokenizer.eos_token_ids == (expected["eos"],)
    assert tokenizer.chat_template == expected["chat_template"]
    eos = tokenizer.id_to_token(expected["eos"])
    assert tokenizer.encode(f"a{eos}", add_special_tokens=False)[-1] == expected["eos"]
    assert tokenizer.decode([expected["eos"]]) == ""
    assert expected["eos"] in tokenizer.special_token_ids


@pytest.mark.parametrize("name, case", [REAL[0], REAL[2]])
def test_real_chat_templates_render_the_reference_prompts(real, name, case):
    tokenizer, seen = real(name), 0
    for prompt in REFERENCE[case]["prompts"]:
        if prompt["kind"] != "chat":
            continue
        question = prompt["text"].rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": question}]
        assert tokenizer.apply_chat_template(messages) == prompt["text"]
        assert tokenizer.encode_chat(messages) == prompt["prompt_ids"]
        seen += 1
    assert seen


@pytest.mark.larger_model("qwen2.5-coder-0.5b")
def test_real_tools_template_lists_the_tools(real):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    text = real("qwen2.5-coder-0.5b").apply_chat_template([{"role": "user", "content": "Rain?"}], tools=[tool])
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text


@pytest.mark.larger_model("gemma3-270m")
def test_real_base_model_has_no_chat_template(real):
    with pytest.raises(TemplateError, match="has no chat template"):
        real("gemma3-270m").apply_chat_template([{"role": "user", "content": "hi"}])


# SmolLM2's vocabulary lacks the bytes of some control characters and of the planes from U+40000 on; they vanish.
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=60))
def test_smollm2_round_trips_any_text(real, text):
    tokenizer = real("smollm2-135m-instruct")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.larger_model("gemma3-270m")
@given(text=st.text(max_size=60))
def test_gemma3_round_trips_any_text(real, text):
    tokenizer = real("gemma3-270m")
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = text.replace("▁", " ")  # SentencePiece writes spaces as ▁ and can't tell the two apart
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected


def test_byte_level_ids_follow_the_merges(byte_level):
    vocabulary = byte_level_vocabulary()["tokenizer.ggml.tokens"]
    ids = byte_level.encode("hello world hex")
    assert [vocabulary[i] for i in ids] == ["hello", "Ġworld", "Ġ", "he", "x"]
    assert byte_level.decode(ids) == "hello world hex"
    assert [byte_level.token_bytes(i) for i in ids] == [b"hello", b" world", b" ", b"he", b"x"]


def test_sentencepiece_ids_follow_the_scores(sentencepiece):
    vocabulary = sentencepiece_vocabulary()["tokenizer.ggml.tokens"]
    ids = sentencepiece.encode("hello world é")
    assert [vocabulary[i] for i in ids] == ["<s>", "▁hello", "▁world", "▁", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(ids) == "hello world é"
    assert b"".join(map(sentencepiece.token_bytes, ids[1:])).decode() == " hello world é"


def test_ids_without_a_token_and_beyond_are_nothing(byte_level):
    hello = byte_level.encode("hello")
    assert byte_level.decode([*hello, 5000]) == "hello"
    assert byte_level.token_bytes(5000) == byte_level.token_bytes(-1) == b""
    assert byte_level.id_to_token(5000) is None and byte_level.token_to_id("nonesuch") is None
    with pytest.raises(TokenizerError, match="-1"):
        byte_level.decode([-1])


def test_text_that_is_no_unicode(byte_level):
    with pytest.raises(TokenizerError, match="position 1"):
        byte_level.encode("a\ud800")
    with pytest.raises(TokenizerError, match="got a bytes"):
        byte_level.encode(b"a")


@pytest.mark.parametrize("ending", ["", " x"])
def test_half_a_character_decodes_without_an_exception(byte_level, ending):
    """Three bytes make 你. Two of them are one replacement character, whatever follows."""
    first, second, third = byte_level.encode("你")
    rest = byte_level.encode(ending)
    assert byte_level.decode([first, second, *rest]) == "\ufffd" + ending
    assert byte_level.decode([first, second, *rest, first, second, third]) == "\ufffd" + ending + "你"


def test_spaces_of_sentencepiece_survive_in_sequences(sentencepiece):
    ids = sentencepiece.encode("a hello world", add_special_tokens=False)
    whole = sentencepiece.decode(ids)
    assert whole == "a hello world"
    assert all(whole.startswith(sentencepiece.decode(ids[:n])) for n in range(len(ids)))


@pytest.mark.parametrize("vocabulary", [byte_level_vocabulary, sentencepiece_vocabulary])
@pytest.mark.parametrize("add", [True, False])
def test_add_bos_token_is_obeyed(tmp_path, vocabulary, add):
    tokenizer = gguf_tokenizer(gguf_file(tmp_path, vocabulary(), add_bos_token=add))
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_token_id) is add
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != tokenizer.bos_token_id
    assert tokenizer.encode("") == ([tokenizer.bos_token_id] if add else [])


def test_bos_without_a_flag_and_eos_with_one(tmp_path):
    plain = gguf_tokenizer(gguf_file(tmp_path, byte_level_vocabulary(), add_eos_token=True))
    assert plain.encode("hello")[0] != plain.bos_token_id
    assert plain.encode("hello")[-1] == plain.eos_token_id
    pieces = gguf_tokenizer(gguf_file(tmp_path, sentencepiece_vocabulary()))
    assert pieces.encode("hello")[0] == pieces.bos_token_id
    llama3 = gguf_tokenizer(gguf_file(tmp_path, byte_level_vocabulary(), pre="llama-bpe"))
    assert llama3.encode("hello")[0] == llama3.bos_token_id


@pytest.mark.parametrize("pre", [None, "default"])
def test_sentencepiece_needs_no_name_for_its_cutting(tmp_path, pre):
    tokenizer = gguf_tokenizer(gguf_file(tmp_path, sentencepiece_vocabulary(), pre=pre))
    assert tokenizer.id_to_token(tokenizer.encode("hello")[1]) == "▁hello"


@pytest.mark.parametrize("pre", [None, "default", "invented"])
def test_byte_level_without_a_known_cutting_is_refused_by_name(tmp_path, pre):
    with pytest.raises(TokenizerError, match="tokenizer.ggml.pre.*supported are gpt-2, smollm, qwen2") as caught:
        gguf_tokenizer(gguf_file(tmp_path, byte_level_vocabulary(), pre=pre))
    assert pre is None or repr(pre) in str(caught.value)


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("smollm", "x 123\n\n4", ["x", "Ġ", "1", "2", "3", "ĊĊ", "4"]),
        ("gpt-2", "x 123\n\n4", ["x", "Ġ123", "Ċ", "Ċ", "4"]),
        ("qwen2", "x 123\n\n4", ["x", "Ġ", "1", "2", "3", "ĊĊ", "4"]),
        ("llama-bpe", "x 12345\n\n4", ["x", "Ġ", "123", "45", "ĊĊ", "4"]),
        ("qwen2", "It'S e\u0301", ["It", "'S", "ĠÃ©"]),
    ],
)
def test_each_cutting_cuts_its_way(tmp_path, pre, text, pieces):
    backend = build_backend(gguf_file(tmp_path, byte_level_vocabulary(), pre=pre))
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)] == pieces


def test_user_defined_runs_of_spaces_match_whole_and_as_underscores(tmp_path):
    """Converters write such a token with spaces; its name, and a literal ▁ in a text, mean the same."""
    vocabulary = sentencepiece_vocabulary()
    vocabulary["tokenizer.ggml.tokens"][-1] = "  "
    vocabulary["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = gguf_tokenizer(gguf_file(tmp_path, vocabulary, add_space_prefix=False))
    for text in ("a  b", "a ▁b", "a▁▁b"):
        assert tokenizer.encode(text)[2] == 319
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "bert"}, "of kind 'bert'"),
        ({"model": 3}, "expected a value of type str"),
        ({"merges": None}, "lacks 'tokenizer.ggml.merges'"),
        ({"merges": ["he llo"]}, "inconsistent"),
        ({"merges": ["hello"]}, "inconsistent"),
        ({"token_type": [1, 2]}, "2 token types"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "1 tokens twice"),
        ({"tokens": [1, 2, 3]}, "expected a value of type list"),
        ({"bos_token_id": 320, "add_bos_token": True}, "id 320"),
        ({"add_bos_token": "yes"}, "expected a value of type bool"),
    ],
)
def test_inconsistent_vocabularies_are_refused(tmp_path, changes, words):
    file = gguf_file(tmp_path, byte_level_vocabulary(), **changes)
    with pytest.raises(ValueError, match=words):
        gguf_tokenizer(file)


def test_scores_must_fit(tmp_path):
    with pytest.raises(TokenizerError, match="320 tokens, but 2 scores"):
        gguf_tokenizer(gguf_file(tmp_path, sentencepiece_vocabulary(), scores=[0.0, 1.0]))


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    assert gguf_tokenizer(gguf_file(tmp_path, {})) is None


def test_end_of_turn_ends_a_text_too(tmp_path):
    assert gguf_tokenizer(gguf_file(tmp_path, byte_level_vocabulary(), eot_token_id=0)).eos_token_ids == (2, 0)


# Folders


def write_tokenizer(folder: Path, backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder


@pytest.fixture
def backend(byte_level):
    return byte_level.backend


def test_folder_tokenizer_is_the_same_as_the_files(tmp_path, byte_level):
    folder = folder_tokenizer(write_tokenizer(tmp_path, byte_level.backend))
    assert folder.encode("hello world") == byte_level.encode("hello world")
    assert (folder.bos_token_id, folder.eos_token_ids) == (1, (2,))
    assert folder.vocab_size == 320


@pytest.mark.parametrize("bos, eos", [(True, False), (False, True), (True, True), (False, False)])
def test_flags_of_tokenizer_config_are_obeyed(tmp_path, backend, bos, eos):
    tokenizer = folder_tokenizer(write_tokenizer(tmp_path, backend, add_bos_token=bos, add_eos_token=eos))
    ids = tokenizer.encode("hello")
    assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)


def test_special_tokens_as_objects_and_in_the_older_file(tmp_path, backend):
    write_tokenizer(tmp_path, backend, bos_token={"content": "<s>", "lstrip": False}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_named_special_tokens_are_special_even_if_tokenizer_json_forgot(tmp_path, backend):
    assert "hello" not in [token.content for token in backend.get_added_tokens_decoder().values()]
    tokenizer = folder_tokenizer(write_tokenizer(tmp_path, backend, pad_token="hello"))
    assert tokenizer.decode(tokenizer.encode("hello world")) == " world"


def test_tokens_that_only_the_config_declares(tmp_path, backend):
    declared = {"320": {"content": "<tool>", "special": False}, "1": {"content": "<s>", "special": True}}
    tokenizer = folder_tokenizer(write_tokenizer(tmp_path, backend, added_tokens_decoder=declared))
    assert tokenizer.encode("hello<tool>")[-1] == 320
    with pytest.raises(TokenizerError, match="'<tool>' the id 400"):
        declared = {"400": {"content": "<tool>"}}
        folder_tokenizer(write_tokenizer(tmp_path, backend, added_tokens_decoder=declared))


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path, backend):
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(folder_tokenizer(write_tokenizer(tmp_path, backend)).encode("hello hello hello")) == 3


def test_bos_of_the_template_is_the_only_one(tmp_path, backend):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = folder_tokenizer(write_tokenizer(tmp_path, backend, add_bos_token=True, chat_template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids == tokenizer.encode("hello") and ids.count(1) == 1


def test_templates_come_from_files_lists_and_arguments(tmp_path, backend):
    stored = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    write_tokenizer(tmp_path, backend, chat_template=stored)
    messages = [{"role": "user", "content": "x"}]
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "list"
    assert tokenizer.apply_chat_template(messages, tools=[]) == "tools"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "tools"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ eos_token }}") == "</s>"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ mood }}", mood="fine") == "fine"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "file"
    assert tokenizer.apply_chat_template(messages, chat_template="rag") == "rag"


def test_templates_that_are_none_are_named(tmp_path, backend):
    tokenizer = folder_tokenizer(write_tokenizer(tmp_path, backend))
    with pytest.raises(TemplateError, match=r"the chat_template that was passed must be a text, got \['x'\]"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=["x"])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="chat_template.jinja: isn't UTF-8"):
        folder_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_or_with_an_older_format(tmp_path):
    assert folder_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match="tokenizer.model but no tokenizer.json"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "Nonesuch"}}'])
def test_a_broken_tokenizer_json_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="tokenizer.json: isn't a tokenizer"):
        folder_tokenizer(tmp_path)
