"""From a name to a model: dtypes, tokenizers from elsewhere, and the checkpoint's recommendations."""

import logging

import jax
import pytest

from jaxrunner.loading import choose_dtype, load_model, recommended_params
from jaxrunner.sampling_params import SamplingParams
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain


def test_recommendations_are_taken_and_others_left_out(caplog):
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 99,
        "repetition_penalty": 1.1,
        "top_p": 7,
        "min_p": None,
    }
    with caplog.at_level(logging.WARNING, "jaxrunner"):
        params = recommended_params(config)
    assert params == SamplingParams(temperature=0.6, top_k=20, max_tokens=99, repetition_penalty=1.1)
    assert "top_p is left out" in caplog.text
    assert recommended_params({}) == SamplingParams()


def test_dtypes():
    assert choose_dtype("bfloat16").name == "bfloat16"
    assert choose_dtype("auto").name == ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    with pytest.raises(ValueError, match="dtype must be 'auto', 'float32' or 'bfloat16', got 'float16'"):
        choose_dtype("float16")


def test_end_of_sequence_ids_of_all_three_files_and_a_tokenizer_from_elsewhere(tmp_path):
    words = [f"w{i}" for i in range(8)]
    folder = write_chain(
        tmp_path / "model",
        successor_logits(8, {}),
        word_tokenizer(words),
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [3, 2]},
        tokenizer_config={"eos_token": "w5"},
    )
    model = load_model(folder, dtype="bfloat16")
    assert model.eos_token_ids == (2, 3, 5) and model.decoder.dtype.name == "bfloat16"
    assert model.source == str(folder) and model.seconds > 0

    bare = write_chain(tmp_path / "bare", successor_logits(8, {}))
    assert load_model(bare).tokenizer is None
    assert load_model(bare, folder).tokenizer.encode("w5") == [5]
    assert load_model(bare, folder).eos_token_ids == (5,)
    mine = Tokenizer(word_tokenizer(words), {})
    assert load_model(bare, mine).tokenizer is mine
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_model(folder, bare)
