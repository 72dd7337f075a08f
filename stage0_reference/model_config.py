"""What a checkpoint's ``config.json`` says about the model, checked and in one spelling.

The hub writes the same facts in several ways: rotary scaling as ``rope_theta`` + ``rope_scaling``
(with ``type`` or ``rope_type``) in older files and as ``rope_parameters`` since transformers 5;
expert routing spelled out (``topk_method``, ``scoring_func``) in DeepSeek's own files and implied
by the model type in transformers'. This module reads all of them into one frozen ``ModelConfig``
and refuses, by name, what the decoder would otherwise compute wrongly.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
SUPPORTED_ROPE_TYPES = ("default", "linear", "yarn")
SUPPORTED_TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SUPPORTED_SCORING_FUNCTIONS = ("softmax", "sigmoid")


_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "q_lora_rank": 1,
    "kv_lora_rank": 1,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 0,
    "v_head_dim": 1,
    "max_position_embeddings": 1,
    "n_routed_experts": 1,
    "n_shared_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 0,
    "num_nextn_predict_layers": 0,
}
"""Least value of the fields that count something."""


class UnsupportedModelError(NotImplementedError):
    """The configuration asks for something that this decoder does not compute."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction ``0.1 mscale ln(factor) + 1`` (1 where nothing is stretched).

    References
    ----------
    YaRN (arXiv 2309.00071), section 3.4; DeepSeek-V3 ``inference/model.py``.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how positions are stretched.

    Attributes
    ----------
    rope_type
        "default" (no stretching), "linear" (positions / factor) or "yarn".
    theta
        Base of the frequencies ``theta^(-2 i / qk_rope_head_dim)``.
    factor
        Ratio of the stretched context to the pretrained one.
    original_max_position_embeddings
        Pretrained context in tokens; YaRN's ramp is placed from it.
    beta_fast, beta_slow
        Rotations over the pretrained context above which a frequency is kept, and below which it
        is fully interpolated.
    mscale, mscale_all_dim
        YaRN's two magnitude fields: their ratio scales cos and sin, the second alone (squared)
        scales the softmax.
    attention_factor
        Overrides the cos/sin amplitude when the checkpoint gives it outright.
    truncate
        Whether YaRN's ramp ends are rounded to whole dimensions.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin (1 except under YaRN)."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_correction(self) -> float:
        """Factor on the softmax scale: ``yarn_mscale(factor, mscale_all_dim)`` squared."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every number that changes what the decoder computes. Names are the hub's.

    Attributes
    ----------
    q_lora_rank
        Width of the query's low-rank bottleneck, or None for a direct projection.
    kv_lora_rank
        Width of the latent that is cached, shared by all heads.
    qk_rope_head_dim
        Width of the rotary key that is cached beside it; 0 means no rotary part at all.
    rope_interleave
        Whether the checkpoint's projections emit rotary pairs as adjacent elements (2i, 2i + 1).
        They are rotated as (i, i + d/2) either way; see `rope.py`.
    n_routed_experts
        Experts of a mixture layer, or None for a dense model.
    topk_method
        "greedy", "group_limited_greedy" (a group counts by its best expert) or "noaux_tc"
        (bias-corrected choice; a group counts by the sum of its best two).
    num_nextn_predict_layers
        Multi-token-prediction layers that a checkpoint carries behind the last layer; not used.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    rope_interleave: bool = True
    n_routed_experts: int | None = None
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key in the naive form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim^-0.5`` times YaRN's correction; the absorbed form keeps this width."""
        return self.qk_head_dim**-0.5 * self.rope.softmax_correction

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether layer `layer_index` has routed experts instead of one dense MLP."""
        return (
            self.n_routed_experts is not None
            and layer_index >= self.first_k_dense_replace
            and layer_index % self.moe_layer_freq == 0
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory.

        Raises
        ------
        FileNotFoundError
            No ``config.json`` there.
        ValueError
            Not JSON, or a needed field is missing or has an impossible value.
        UnsupportedModelError
            A model type, rope type, routing or activation that is not supported.
        """
        path = Path(directory) / "config.json"
        if not Path(directory).is_dir():
            kind = "is a file" if Path(directory).exists() else "does not exist"
            raise FileNotFoundError(f"checkpoint directory {directory} {kind}")
        if not path.is_file():
            raise FileNotFoundError(
                f"no config.json in {directory}: expected a checkpoint directory laid out as on "
                "the Hugging Face hub (config.json, *.safetensors, tokenizer files)"
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path} must hold a JSON object; got {type(fields).__name__}")
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed ``config.json``. Raises as `from_directory`."""
        model_type = fields.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModelError(
                f"model_type {model_type!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        needed = (
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
        missing = [name for name in needed if fields.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}, needed for {model_type}")
        activation = fields.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(
                f"hidden_act {activation!r} is not supported; supported: silu"
            )

        # transformers leaves routing implicit in the model type; DeepSeek's own files spell it out.
        second_generation = model_type == "deepseek_v2"
        optional = {
            name: fields[name]
            for name in (
                "q_lora_rank",
                "max_position_embeddings",
                "rms_norm_eps",
                "attention_bias",
                "mlp_bias",
                "tie_word_embeddings",
                "n_routed_experts",
                "n_shared_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "first_k_dense_replace",
                "moe_layer_freq",
                "n_group",
                "topk_group",
                "norm_topk_prob",
                "routed_scaling_factor",
                "num_nextn_predict_layers",
                "bos_token_id",
            )
            if fields.get(name) is not None
        }
        if not second_generation:
            # What transformers' DeepseekV3Config assumes where a file is silent.
            assumed = {
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
            }
            optional = assumed | optional
        eos = fields.get("eos_token_id")
        config = cls(
            model_type=model_type,
            **{name: fields[name] for name in needed},
            **optional,
            rope=_read_rope(fields),
            # transformers and the hub both treat DeepSeek-V2's projections as interleaved.
            rope_interleave=bool(fields.get("rope_interleave", True)),
            topk_method=fields.get("topk_method")
            or ("greedy" if second_generation else "noaux_tc"),
            scoring_func=fields.get("scoring_func")
            or ("softmax" if second_generation else "sigmoid"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )
        config._check()
        return config

    def _check(self) -> None:
        """Refuse impossible values here, where the field's name is at hand."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("q_lora_rank", "n_routed_experts"):
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                "qk_rope_head_dim must be even and at least 0 (it holds rotary pairs); "
                f"got {self.qk_rope_head_dim}"
            )
        if not any(self.is_moe_layer(layer) for layer in range(self.num_hidden_layers)):
            return
        if self.topk_method not in SUPPORTED_TOPK_METHODS:
            raise UnsupportedModelError(
                f"topk_method {self.topk_method!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_TOPK_METHODS)}"
            )
        if self.scoring_func not in SUPPORTED_SCORING_FUNCTIONS:
            raise UnsupportedModelError(
                f"scoring_func {self.scoring_func!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_SCORING_FUNCTIONS)}"
            )
        experts = self.n_routed_experts or 0
        if self.moe_intermediate_size < 1:
            raise ValueError(
                f"moe_intermediate_size must be at least 1; got {self.moe_intermediate_size}"
            )
        if experts % self.n_group:
            raise ValueError(
                f"n_routed_experts must divide into n_group equal groups; got {experts} experts "
                f"in {self.n_group} groups"
            )
        grouped = self.topk_method != "greedy"
        if grouped and not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"topk_group must be between 1 and n_group ({self.n_group}); got {self.topk_group}"
            )
        reachable = experts // self.n_group * self.topk_group if grouped else experts
        if not 1 <= self.num_experts_per_tok <= reachable:
            raise ValueError(
                f"num_experts_per_tok must be between 1 and the {reachable} experts that routing "
                f"can reach; got {self.num_experts_per_tok}"
            )


def _read_rope(fields: Mapping[str, Any]) -> RopeConfig:
    """Read rotary settings in transformers 5's spelling, or else in the hub's older one."""
    spelling = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    parameters = fields.get(spelling) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{spelling} must be an object; got {parameters!r}")
    other = fields.get("rope_scaling")
    if isinstance(other, Mapping) and _one_spelling(other) != _one_spelling(parameters):
        raise ValueError(
            "rope_parameters and rope_scaling must agree where both are given; got "
            f"{dict(parameters)} and {dict(other)}. Keep the one that the weights were trained with"
        )
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    for name in (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ):
        value = parameters.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} of {spelling} must be a number; got {value!r}")
    theta = parameters.get("rope_theta", fields.get("rope_theta"))
    if theta is not None and not (isinstance(theta, int | float) and theta > 0.0):
        raise ValueError(f"rope_theta must be a positive number; got {theta!r}")
    original = parameters.get("original_max_position_embeddings")
    longest = fields.get("max_position_embeddings") or 4096
    factor = parameters.get("factor")
    if factor is None:
        if rope_type == "linear" or (rope_type == "yarn" and original is None):
            raise ValueError(f"rope type {rope_type!r} needs a factor; config.json gives none")
        factor = longest / original if rope_type == "yarn" and original else 1.0
    if factor < 1.0:
        raise ValueError(f"rope factor must be at least 1; got {factor}")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(10000.0 if theta is None else theta),
        factor=float(factor),
        original_max_position_embeddings=int(original or longest),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        attention_factor=parameters.get("attention_factor"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _one_spelling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without rope_theta, whose place differs, and with `type` as `rope_type`."""
    settings = {name: value for name, value in parameters.items() if name != "rope_theta"}
    settings["rope_type"] = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings.pop("type", None)
    return settings
