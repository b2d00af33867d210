"""ModelConfig: every spelling of a configuration, and none of the wrong ones."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import ModelConfig
from models.rope import LinearScaling, Llama3Scaling, RopeConfig
from tests.models.fixtures import NAMES, fixture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(config)


def in_transformers_4_words(config: dict[str, Any]) -> dict[str, Any]:
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types", "dtype")}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        old["sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
        old.pop("_sliding_window_pattern", None)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old["rope_theta"] = rope["rope_theta"]
    old["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    old["torch_dtype"] = "float32"
    return old


@pytest.mark.parametrize("name", NAMES)
def test_spellings_of_transformers_4_and_5_are_one(name):
    config = fixture(name).config
    assert read(in_transformers_4_words(config)) == read(config)


def test_theta_in_rope_parameters_alone():
    assert read(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}).rope == RopeConfig(5e5)
    assert read(LLAMA | {"rope_theta": 5e5}).rope == RopeConfig(5e5)
    assert read(LLAMA).rope == RopeConfig(1e4)


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(1e4, LinearScaling(4.0))),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, RopeConfig(1e4, LinearScaling(4.0))),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0}, RopeConfig(7.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}, "rope_theta": 5e5},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        # Both: what is said the old way was added by hand, and goes first.
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 3.0},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            RopeConfig(3.0, LinearScaling(2.0)),
        ),
    ],
)
def test_rope_scaling(rope, expected):
    assert read(LLAMA | rope).rope == expected


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", 7])
def test_rope_types_that_are_not_supported_are_named(kind):
    with pytest.raises(ValueError, match=rf"rope type '?{kind}'? isn't supported; supported: default, linear, llama3"):
        read(LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "mixtral"}, "'mixtral' isn't supported; supported: LlamaForCausalLM, Mistral"),
        ({"model_type": None}, "None isn't supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' isn't supported"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of class names"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \('gptq'\), which isn't supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu"}, "'relu' isn't supported; supported: silu"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}}, "more than low_freq"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected a whole number from 1 to"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": 66}, "66 isn't a multiple of num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"intermediate_size": -96}, "intermediate_size is -96"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_heads 4 isn't a multiple of num_kv_heads 3"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": ["a"]}, "expected a token id"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        read(LLAMA | config)


def test_missing_size_is_named():
    with pytest.raises(ValueError, match="lacks 'hidden_size'"):
        read({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    "config, head_dim",
    [({}, 16), ({"head_dim": None}, 16), ({"head_dim": 32}, 32), ({"model_type": "qwen3"}, 128), (GEMMA3, 256)],
)
def test_head_dim(config, head_dim):
    assert read(LLAMA | config).head_dim == head_dim


@pytest.mark.parametrize(
    "config, windows",
    [
        ({"sliding_window": 8}, [None, None]),
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "mistral"}, [4096, 4096]),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 0}, [None, None]),
        (
            {"model_type": "qwen2", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            [None, None],
        ),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            [None, 8],
        ),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}, [None, None]),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [8, None],
        ),
        (GEMMA3, [8] * 5 + [None, 8]),
        (GEMMA3 | {"sliding_window_pattern": 2}, [8, None] * 3 + [8]),
        (GEMMA3 | {"_sliding_window_pattern": 2}, [8, None] * 3 + [8]),
        (GEMMA3 | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, [None, 8]),
    ],
)
def test_windows(config, windows):
    assert list(read(LLAMA | config).layer_windows) == windows


@pytest.mark.parametrize(
    "config, words",
    [
        ({"layer_types": ["full_attention"]}, r"expected a list of 7 \(num_hidden_layers\) entries"),
        ({"layer_types": ["linear_attention"] * 7}, "layer type 'linear_attention' isn't supported; supported: full_"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
    ],
)
def test_wrong_windows_and_scales_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        read(GEMMA3 | config)


def test_gemma3_by_its_defaults():
    config = read(GEMMA3)
    assert config.rope == RopeConfig(1e6) and config.local_rope == RopeConfig(1e4)
    assert config.embed_scale == 8.0 and config.activation == "gelu_tanh" and config.attention_scale == 256**-0.5
    assert config.tie_word_embeddings and config.norm_plus_one and config.sandwich_norms and config.qk_norm
    assert config.logits_soft_cap is None and config.attn_soft_cap is None
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (2, (1,), 0)
    scaled = read(GEMMA3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert scaled.rope == RopeConfig(1e6, LinearScaling(8.0)) and scaled.local_rope == RopeConfig(1e4)


def test_the_text_model_of_a_multimodal_gemma3():
    """As published: the text part names only what differs from transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.hidden_size, config.vocab_size, config.num_heads, config.num_kv_heads) == (2560, 262208, 8, 4)
    assert config.eos_token_ids == (1, 106) and config.tie_word_embeddings
    assert config.layer_windows.count(None) == 5 and config.rope == RopeConfig(1e6, LinearScaling(8.0))
    untied = read({"model_type": "gemma3", "tie_word_embeddings": False, "text_config": text})
    assert not untied.tie_word_embeddings


@pytest.mark.parametrize("value, ids", [(None, ()), (7, (7,)), ([7, 9], (7, 9)), ([], ())])
def test_end_of_text_ids(value, ids):
    assert read(LLAMA | {"eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize(
    "config, biased",
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
        ({"model_type": "qwen2"}, (True, False, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False, False)),
    ],
)
def test_biases(config, biased):
    config = read(LLAMA | config)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biased


def test_architecture_by_class_when_there_is_no_model_type():
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert read(config | {"architectures": ["Qwen3ForCausalLM"]}).architecture == "qwen3"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**40, 10**400, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
BASES = [
    *(fixture(name).config for name in NAMES),
    {"model_type": "gemma3", "text_config": fixture("gemma3").config, "tie_word_embeddings": None},
]


@given(st.data())
def test_any_json_gives_a_configuration_or_a_value_error(data):
    config = json.loads(json.dumps(data.draw(st.sampled_from(BASES))))
    target = config
    while True:
        key = data.draw(st.sampled_from(sorted(target)))
        if not isinstance(target[key], dict) or data.draw(st.booleans()):
            break
        target = target[key]
        if not target:
            return
    target[key] = data.draw(JSON)
    try:
        assert hash(read(config)) is not None
    except ValueError as error:
        assert str(error)
