"""config.json: every spelling read alike, every field obeyed, the rest refused by name.

The expected numbers of the published models are written out, not computed by the code under test.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage0_reference.model_config import (
    SUPPORTED_MODEL_TYPES,
    SUPPORTED_ROPE_TYPES,
    SUPPORTED_SCORING_FUNCTIONS,
    SUPPORTED_TOPK_METHODS,
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
)
from tests.model_factory import config_fields

pytestmark = pytest.mark.stage0

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)

_WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_COMMON = {
    **_WIDTHS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _yarn(factor: float, mscale: float, *, beta_fast: float = 32) -> dict[str, Any]:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


DEEPSEEK_V2_LITE = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": _yarn(40, 0.707),
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
DEEPSEEK_V3 = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": _yarn(40, 1.0),
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": _yarn(32.0, 1.0, beta_fast=1.0),
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a published model without this code."""

    softmax_scale: float  # 192^-0.5 = 0.0721688, times (0.1 mscale_all_dim ln(factor) + 1)^2
    first_moe_layer: int
    num_layers: int
    routing: tuple[str, str]
    groups: tuple[int, int]
    rms_norm_eps: float
    theta: float
    eos: tuple[int, ...]
    routed_scaling_factor: float


PUBLISHED = {
    "DeepSeek-V2-Lite": (
        DEEPSEEK_V2_LITE,
        Facts(0.1147213868, 1, 27, ("greedy", "softmax"), (1, 1), 1e-6, 10000.0, (100001,), 1.0),
    ),
    "DeepSeek-V2": (
        DEEPSEEK_V2,
        Facts(
            0.1147213868,
            1,
            60,
            ("group_limited_greedy", "softmax"),
            (8, 3),
            1e-6,
            10000.0,
            (100001,),
            16.0,
        ),
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        Facts(0.1352337789, 3, 61, ("noaux_tc", "sigmoid"), (8, 4), 1e-6, 10000.0, (1,), 2.5),
    ),
    "Kimi-K2": (
        KIMI_K2,
        Facts(
            0.1308608000, 1, 61, ("noaux_tc", "sigmoid"), (1, 1), 1e-6, 50000.0, (163585,), 2.827
        ),
    ),
    "Moonlight-16B-A3B": (
        MOONLIGHT,
        Facts(
            0.0721687836, 1, 27, ("noaux_tc", "sigmoid"), (1, 1), 1e-5, 50000.0, (163586,), 2.446
        ),
    ),
}


@pytest.mark.parametrize(("fields", "facts"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_models_are_read_as_published(fields: dict[str, Any], facts: Facts) -> None:
    config = ModelConfig.from_dict(fields)
    # The expected value is given to ten decimals: half a unit of the last is all that is allowed.
    assert abs(config.softmax_scale - facts.softmax_scale) <= 0.5e-10
    assert config.qk_head_dim == 192
    assert config.num_hidden_layers == facts.num_layers
    moe_layers = [i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]
    assert moe_layers == list(range(facts.first_moe_layer, facts.num_layers))
    assert (config.topk_method, config.scoring_func) == facts.routing
    assert (config.n_group, config.topk_group) == facts.groups
    assert config.rms_norm_eps == facts.rms_norm_eps
    assert config.rope.theta == facts.theta
    assert config.rope.amplitude == 1.0  # mscale and mscale_all_dim are equal in all of them
    assert config.eos_token_ids == facts.eos
    assert config.routed_scaling_factor == facts.routed_scaling_factor
    for name in (*NEEDED, "q_lora_rank", "n_routed_experts", "n_shared_experts", "norm_topk_prob"):
        assert getattr(config, name) == fields[name], name


@pytest.mark.parametrize(
    ("mscale_all_dim", "squared"), [(0.707, 1.5896), (1.0, 1.8739)], ids=["0.707", "1.0"]
)
def test_yarn_corrects_the_softmax_and_keeps_the_naive_width(
    mscale_all_dim: float, squared: float
) -> None:
    config = ModelConfig.from_dict(
        config_fields(rope_theta=10000.0, rope_scaling=_yarn(40, mscale_all_dim))
    )
    # qk_nope_head_dim + qk_rope_head_dim, not the absorbed kv_lora_rank + qk_rope_head_dim
    expected = (12 + 16) ** -0.5 * squared
    assert abs(config.softmax_scale - expected) <= 0.5e-4 * (12 + 16) ** -0.5  # four decimals


def test_yarn_amplitude_is_the_ratio_of_the_two_magnitudes() -> None:
    scaling = {**_yarn(40, 1.0), "mscale_all_dim": 0.5}
    rope = ModelConfig.from_dict(config_fields(rope_scaling=scaling)).rope
    expected = (0.1 * math.log(40) + 1.0) / (0.05 * math.log(40) + 1.0)
    assert math.isclose(rope.amplitude, expected, rel_tol=4 * 2**-52)
    without = {k: v for k, v in scaling.items() if not k.startswith("mscale")}
    rope = ModelConfig.from_dict(config_fields(rope_scaling=without)).rope
    assert math.isclose(rope.amplitude, 0.1 * math.log(40) + 1.0, rel_tol=4 * 2**-52)
    assert rope.softmax_correction == 1.0
    outright = {**scaling, "attention_factor": 1.25}
    rope = ModelConfig.from_dict(config_fields(rope_scaling=outright)).rope
    assert rope.amplitude == 1.25


def test_nothing_is_corrected_where_nothing_is_stretched() -> None:
    rope = RopeConfig("yarn", factor=1.0, mscale=1.0, mscale_all_dim=0.5)
    assert (rope.amplitude, rope.softmax_correction) == (1.0, 1.0)
    assert RopeConfig("linear", factor=8.0).amplitude == 1.0
    assert RopeConfig("default", mscale_all_dim=1.0, factor=8.0).softmax_correction == 1.0


rope_settings = st.fixed_dictionaries(
    {
        "factor": st.one_of(st.integers(1, 64), st.floats(1.0, 64.0)),
        "original_max_position_embeddings": st.integers(1, 8192),
    },
    optional={
        "beta_fast": st.floats(1.0, 64.0),
        "beta_slow": st.floats(0.5, 1.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "attention_factor": st.floats(0.5, 2.0),
        "truncate": st.booleans(),
    },
)


@given(
    st.sampled_from(SUPPORTED_MODEL_TYPES),
    st.sampled_from(SUPPORTED_ROPE_TYPES),
    st.one_of(st.integers(2, 10**6), st.floats(2.0, 1e6)),
    rope_settings,
)
def test_every_spelling_of_rope_gives_the_same_config(
    model_type: str, rope_type: str, theta: float, settings: dict[str, Any]
) -> None:
    if rope_type == "default":
        settings = {}
    if rope_type == "linear":
        settings = {"factor": settings["factor"]}
    if rope_type == "longrope":
        # Eight pairs each; the model's context is 256.
        settings |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spellings: dict[str, dict[str, Any]] = {
        "rope_scaling, type": {
            "rope_theta": theta,
            "rope_scaling": {"type": rope_type, **settings},
        },
        "rope_scaling, rope_type": {
            "rope_theta": theta,
            "rope_scaling": {"rope_type": rope_type, **settings},
        },
        "rope_parameters": {
            "rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **settings}
        },
        "rope_parameters, saved again from an older file": {
            "rope_parameters": {
                "rope_type": rope_type,
                "type": rope_type,
                "rope_theta": theta,
                **settings,
            }
        },
        "rope_parameters, theta outside": {
            "rope_theta": theta,
            "rope_parameters": {"rope_type": rope_type, **settings},
        },
    }
    if rope_type == "default" and model_type != "mistral4":  # which says how it stretches
        spellings["no scaling"] = {"rope_theta": theta}
        spellings["null scaling"] = {"rope_theta": theta, "rope_scaling": None}
        spellings["empty scaling"] = {"rope_theta": theta, "rope_scaling": {}}
    configs = {
        spelling: ModelConfig.from_dict(config_fields(model_type, **fields))
        for spelling, fields in spellings.items()
    }
    first = configs["rope_scaling, type"]
    for spelling, config in configs.items():
        assert config == first, spelling
    assert first.rope.rope_type == rope_type
    assert first.rope.theta == theta
    for name, value in settings.items():
        if name not in ("short_factor", "long_factor"):
            assert getattr(first.rope, name) == value, name
    if rope_type == "longrope":
        longer = settings["original_max_position_embeddings"] < 256
        assert first.rope.pair_factors == ((2.0,) if longer else (1.0,)) * 8


def test_rope_theta_is_10000_where_nobody_says() -> None:
    assert ModelConfig.from_dict(config_fields()).rope == RopeConfig(
        original_max_position_embeddings=256
    )


def test_a_missing_yarn_factor_is_the_ratio_of_the_contexts() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 64, "factor": None}
    config = ModelConfig.from_dict(config_fields(rope_scaling=scaling, max_position_embeddings=256))
    assert config.rope.factor == 4.0


@pytest.mark.parametrize(
    ("model_type", "topk_method", "scoring_func"),
    [
        ("deepseek_v2", "greedy", "softmax"),
        ("deepseek_v3", "noaux_tc", "sigmoid"),
        ("kimi_k2", "noaux_tc", "sigmoid"),
    ],
    ids=["deepseek_v2", "deepseek_v3", "kimi_k2"],
)
def test_the_model_type_implies_the_routing(
    model_type: str, topk_method: str, scoring_func: str
) -> None:
    implied = ModelConfig.from_dict(config_fields(model_type))
    assert (implied.topk_method, implied.scoring_func) == (topk_method, scoring_func)
    spelt_out = ModelConfig.from_dict(
        config_fields(model_type, topk_method=topk_method, scoring_func=scoring_func)
    )
    assert spelt_out == implied


OPTIONAL = (
    "q_lora_rank",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_nextn_predict_layers",
    "bos_token_id",
    "eos_token_id",
    "topk_method",
    "scoring_func",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
)


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_means_absent(name: str) -> None:
    base: dict[str, Any] = {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}
    absent = ModelConfig.from_dict(config_fields(**{**base, name: ...}))
    assert ModelConfig.from_dict(config_fields(**{**base, name: None})) == absent


_LINEAR = {"type": "linear", "factor": 2.0}
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
_LONGROPE = {"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    # attribute: (fields before, fields after, what the attribute then is)
    **{
        name: ({}, {name: value}, value)
        for name, value in {
            "vocab_size": 62,
            "hidden_size": 50,
            "intermediate_size": 42,
            "num_hidden_layers": 4,
            "num_attention_heads": 5,
            "kv_lora_rank": 34,
            "qk_nope_head_dim": 13,
            "qk_rope_head_dim": 18,
            "v_head_dim": 11,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_interleave": False,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 15,
            "first_k_dense_replace": 2,
            "moe_layer_freq": 2,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "n_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "bos_token_id": 3,
        }.items()
    },
    "model_type": ({}, {"model_type": "kimi_k2"}, "kimi_k2"),
    **{
        name: ({"model_type": "minicpm3"}, {name: value}, value)
        for name, value in {"scale_emb": 5, "scale_depth": 2.0, "dim_model_base": 30}.items()
    },
    "zero_expert_num": ({"model_type": "longcat_flash"}, {"zero_expert_num": 5}, 5),
    **{
        name: ({"model_type": "longcat_flash"}, {name: False}, False)
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora")
    },
    "topk_group": ({"n_group": 2}, {"topk_group": 2}, 2),
    "eos_token_ids": ({}, {"eos_token_id": 7}, (7,)),
    "max_position_embeddings": (
        {"rope_scaling": _YARN},
        {"max_position_embeddings": 512},
        512,
    ),
    "rope.rope_type": (
        {"rope_scaling": {**_LINEAR, "original_max_position_embeddings": 128}},
        {"rope_scaling": _YARN},
        "yarn",
    ),
    "rope.pair_factors": (
        {"rope_scaling": _LONGROPE},
        {"rope_scaling": {**_LONGROPE, "short_factor": [3.0] * 8}},
        (3.0,) * 8,
    ),
    "rope.llama_4_scaling_beta": (
        {"rope_scaling": _YARN},
        {"rope_scaling": {**_YARN, "llama_4_scaling_beta": 0.1}},
        0.1,
    ),
    "rope.theta": ({}, {"rope_theta": 50000.0}, 50000.0),
    "rope.factor": ({"rope_scaling": _LINEAR}, {"rope_scaling": {**_LINEAR, "factor": 3}}, 3.0),
    **{
        f"rope.{name}": ({"rope_scaling": _YARN}, {"rope_scaling": {**_YARN, name: value}}, value)
        for name, value in {
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.5,
            "mscale_all_dim": 0.5,
            "attention_factor": 1.5,
            "truncate": False,
        }.items()
    },
}


def _flat(config: ModelConfig) -> dict[str, Any]:
    """Every number of a configuration under one name."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    rope = values.pop("rope")
    return values | {f"rope.{f.name}": getattr(rope, f.name) for f in dataclasses.fields(rope)}


def test_the_table_of_fields_is_complete() -> None:
    assert set(FIELDS) == set(_flat(ModelConfig.from_dict(config_fields())))


@pytest.mark.parametrize("attribute", FIELDS)
def test_a_field_sets_its_attribute_and_nothing_else(attribute: str) -> None:
    before, after, expected = FIELDS[attribute]
    original = _flat(ModelConfig.from_dict(config_fields(**before)))
    changed = _flat(ModelConfig.from_dict(config_fields(**{**before, **after})))
    assert changed[attribute] == expected
    assert original[attribute] != expected
    assert changed == {**original, attribute: expected}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, (1,)), (0, (0,)), ([1, 2], (1, 2)), ([], ()), (None, ())],
    ids=["one", "zero", "list", "empty", "null"],
)
def test_end_of_text_may_be_one_token_or_several(value: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(config_fields(eos_token_id=value)).eos_token_ids == expected


@given(num_layers=st.integers(1, 12), first_k_dense=st.integers(0, 13), frequency=st.integers(1, 4))
def test_a_layer_is_a_mixture_by_depth_and_frequency(
    num_layers: int, first_k_dense: int, frequency: int
) -> None:
    fields = config_fields(
        num_hidden_layers=num_layers, first_k_dense_replace=first_k_dense, moe_layer_freq=frequency
    )
    config = ModelConfig.from_dict(fields)
    # The list as DeepSeek's own decoder builds it, layer by layer.
    expected = []
    for layer in range(num_layers):
        if layer < first_k_dense:
            continue
        if layer % frequency == 0:
            expected.append(layer)
    assert [i for i in range(num_layers) if config.is_moe_layer(i)] == expected


def test_a_dense_model_needs_no_expert_fields() -> None:
    fields = config_fields(
        n_routed_experts=...,
        n_shared_experts=...,
        num_experts_per_tok=...,
        moe_intermediate_size=...,
        first_k_dense_replace=...,
    )
    config = ModelConfig.from_dict(fields)
    assert config.n_routed_experts is None
    assert not any(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))


def test_no_rotary_part_is_allowed() -> None:
    config = ModelConfig.from_dict(config_fields(qk_rope_head_dim=0))
    assert config.qk_head_dim == config.qk_nope_head_dim == 12


@pytest.mark.parametrize(
    ("fields", "name", "value", "supported"),
    [
        ({"model_type": "llama"}, "model_type", "llama", SUPPORTED_MODEL_TYPES),
        ({"model_type": None}, "model_type", "None", SUPPORTED_MODEL_TYPES),
        ({"rope_scaling": {"type": "llama3"}}, "rope type", "llama3", SUPPORTED_ROPE_TYPES),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "rope type",
            "dynamic",
            SUPPORTED_ROPE_TYPES,
        ),
        ({"topk_method": "aux_tc"}, "topk_method", "aux_tc", SUPPORTED_TOPK_METHODS),
        ({"scoring_func": "sqrt"}, "scoring_func", "sqrt", SUPPORTED_SCORING_FUNCTIONS),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu", ("silu",)),
    ],
    ids=["model_type", "no model_type", "llama3", "dynamic", "topk", "scoring", "activation"],
)
def test_the_unsupported_is_refused_by_name_with_what_is_supported(
    fields: dict[str, Any], name: str, value: str, supported: Sequence[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict({**config_fields(), **fields})
    message = str(caught.value)
    assert name in message
    assert value in message
    for choice in supported:
        assert choice in message


@given(st.sets(st.sampled_from(NEEDED), min_size=1), st.booleans())
def test_missing_fields_are_named_all_at_once(names: set[str], as_null: bool) -> None:
    fields = config_fields(**dict.fromkeys(names, None if as_null else ...))
    with pytest.raises(ValueError, match="config.json lacks") as caught:
        ModelConfig.from_dict(fields)
    listed = str(caught.value).removeprefix("config.json lacks ").split(", needed for")[0]
    assert set(listed.split(", ")) == names


GROUPED = {"n_group": 2, "topk_group": 1}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    # name: (fields, what the message has to say)
    **{
        f"{name} 0": ({name: 0}, rf"{name} must be .*got 0")
        for name in NEEDED
        if "rope" not in name
    },
    "kv_lora_rank negative": ({"kv_lora_rank": -512}, "kv_lora_rank must be .*got -512"),
    "moe_layer_freq 0": ({"moe_layer_freq": 0}, "moe_layer_freq must be .*got 0"),
    "rope width odd": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even.*got 15"),
    "rope width negative": ({"qk_rope_head_dim": -2}, "qk_rope_head_dim must be .*got -2"),
    "q_lora_rank 0": ({"q_lora_rank": 0}, "q_lora_rank must be .*got 0"),
    "experts do not divide": (
        {"n_routed_experts": 9, **GROUPED},
        "n_routed_experts must divide into n_group.*9 experts in 2 groups",
    ),
    "n_group 0": ({"n_group": 0}, "n_group must be .*got 0"),
    "more groups kept than there are": (
        {"n_group": 2, "topk_group": 3},
        r"topk_group must be between 1 and n_group \(2\); got 3",
    ),
    "no group kept": ({"n_group": 2, "topk_group": 0}, "topk_group must be .*got 0"),
    "more experts than groups hold": (
        {**GROUPED, "num_experts_per_tok": 5},
        "num_experts_per_tok must be between 1 and the 4 experts.*got 5",
    ),
    "more experts than there are": (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok must be between 1 and the 8 experts.*got 9",
    ),
    "no expert per token": ({"num_experts_per_tok": 0}, "num_experts_per_tok must be .*got 0"),
    "no experts": ({"n_routed_experts": 0}, "n_routed_experts|num_experts_per_tok"),
    "experts without width": (
        {"moe_intermediate_size": 0},
        "moe_intermediate_size must be .*got 0",
    ),
    "shared experts negative": ({"n_shared_experts": -1}, "n_shared_experts must be .*got -1"),
    "linear rope without factor": ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "needs a factor"),
    "factor below 1": (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "factor must be at least 1; got 0.5",
    ),
    "a number as text": ({"hidden_size": "48"}, "hidden_size must be .*got '48'"),
    "half a head": ({"num_attention_heads": 2.5}, "num_attention_heads must be .*got 2.5"),
    "rope_scaling as text": ({"rope_scaling": "yarn"}, "rope_scaling must be .*got 'yarn'"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config_fields(**fields))


@pytest.mark.parametrize("as_path", [str, Path], ids=["str", "Path"])
def test_a_directory_is_read_as_its_file(
    tmp_path: Path, as_path: Callable[[Path], str | Path]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    assert ModelConfig.from_directory(as_path(tmp_path)) == ModelConfig.from_dict(KIMI_K2)


def test_an_absent_config_is_refused_with_the_expected_layout(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json in .*expected a checkpoint"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("model_type", "assumed"),
    [("deepseek_v3", (True, 2.5, 8, 4)), ("deepseek_v2", (False, 1.0, 1, 1))],
)
def test_routing_that_a_file_leaves_out_is_what_transformers_assumes(model_type, assumed):
    silent = dict.fromkeys(
        ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"), ...
    )
    config = ModelConfig.from_dict(config_fields(model_type, n_routed_experts=16, **silent))
    got = (
        config.norm_topk_prob,
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
    )
    assert got == assumed


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "yarn", "factor": "2"}, "factor of rope_scaling must be a number; got '2'"),
        ({"type": "yarn", "factor": True}, "factor of rope_scaling must be a number; got True"),
    ],
)
def test_rotary_fields_that_are_no_numbers_are_refused_by_name(rope, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config_fields(rope_scaling=rope))


@pytest.mark.parametrize("theta", [0, -1.0, "10000"])
def test_a_base_that_is_not_positive_is_refused(theta):
    with pytest.raises(ValueError, match="rope_theta must be a positive number"):
        ModelConfig.from_dict(config_fields(rope_theta=theta))


@pytest.mark.parametrize(
    "content",
    [b"", b"{'model_type': 1}", b'{"model_type": "deepseek_v3"', b"\xff\xfe{}"],
    ids=["empty", "quotes", "truncated", "not UTF-8"],
)
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [("[]", "list"), ('"x"', "str"), ("3", "int"), ("null", "NoneType")],
    ids=["list", "string", "number", "null"],
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str, kind: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"must hold a JSON object; got {kind}"):
        ModelConfig.from_directory(tmp_path)


def test_two_spellings_in_one_file_must_agree():
    linear = {"rope_type": "linear", "factor": 4.0}
    both = config_fields(
        rope_parameters=linear | {"rope_theta": 5e4}, rope_scaling={"type": "linear", "factor": 4.0}
    )
    assert ModelConfig.from_dict(both).rope.factor == 4.0
    both["rope_scaling"] = {"type": "linear", "factor": 8.0}
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling must agree"):
        ModelConfig.from_dict(both)
