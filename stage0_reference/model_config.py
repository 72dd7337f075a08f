"""What a checkpoint's ``config.json`` says about the model, checked and in one spelling.

The hub writes the same facts in several ways: rotary scaling as ``rope_theta`` + ``rope_scaling``
(with ``type`` or ``rope_type``) in older files and as ``rope_parameters`` since transformers 5;
expert routing spelled out (``topk_method``, ``scoring_func``) in DeepSeek's own files and implied
by the model type in transformers'. This module reads all of them into one frozen ``ModelConfig``
and refuses, by name, what the decoder would otherwise compute wrongly. What a model type assumes,
spells or computes in its own way is in `families`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stage0_reference.families import FAMILIES, Family
from stage0_reference.families.family import UnsupportedModelError as UnsupportedModelError
from stage0_reference.hub_files import CONFIG_FILE, read_json_object

SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
SUPPORTED_ROPE_TYPES = ("default", "linear", "yarn", "longrope")
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
    "dim_model_base": 1,
    "zero_expert_num": 0,
}
"""Least value of the fields that count something."""


_READ_AS_IS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_layer_freq",
    "topk_method",
    "scoring_func",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_nextn_predict_layers",
    "bos_token_id",
)
"""Fields that any family may set and that mean what they say."""

_FACTORS = ("rms_norm_eps", "routed_scaling_factor", "scale_emb", "scale_depth")
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "llama_4_scaling_beta",
)


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
        "default" (no stretching), "linear" (positions / factor), "yarn" or "longrope".
    theta
        Base of the frequencies ``theta^(-2 i / qk_rope_head_dim)``.
    factor
        Ratio of the stretched context to the pretrained one.
    original_max_position_embeddings
        Pretrained context in tokens; YaRN's ramp is placed from it, and what LongRoPE multiplies
        cos and sin by.
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
    pair_factors
        LongRoPE's divisor of each pair's frequency: the file's ``long_factor`` if the model's
        context (`max_position_embeddings`) is longer than the pretrained one, else its
        ``short_factor``.
    llama_4_scaling_beta
        Growth of the queries with the position, see `rope.query_scale`; 0 means none.
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
    pair_factors: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin (1 except under YaRN and LongRoPE)."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            if self.factor <= 1.0:
                return 1.0
            pretrained = math.log(self.original_max_position_embeddings)
            return math.sqrt(1.0 + math.log(self.factor) / pretrained)
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
    num_hidden_layers
        Attentions, each with a cache of its own. LongCat-Flash has two in a layer.
    scale_emb, scale_depth, dim_model_base
        MiniCPM3's scales: of embeddings, and behind `residual_scale` and `logit_scale`.
    zero_expert_num
        Experts behind the routed ones that are the identity (LongCat-Flash).
    mla_scale_q_lora, mla_scale_kv_lora
        Whether queries and latents are rescaled for their narrow projections (LongCat-Flash).
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
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: int | None = None
    zero_expert_num: int = 0
    mla_scale_q_lora: bool = False
    mla_scale_kv_lora: bool = False

    @property
    def family(self) -> Family:
        """What this model type changes."""
        return FAMILIES[self.model_type]

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key in the naive form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim^-0.5`` times YaRN's correction; the absorbed form keeps this width.

        A factor on the whole query is one on every score, so LongCat-Flash's is in here too.
        """
        scale = self.qk_head_dim**-0.5 * self.rope.softmax_correction
        if self.mla_scale_q_lora and self.q_lora_rank is not None:
            scale *= math.sqrt(self.hidden_size / self.q_lora_rank)
        return scale

    @property
    def latent_scale(self) -> float:
        """Factor on the normed latent, and so on what is cached."""
        return math.sqrt(self.hidden_size / self.kv_lora_rank) if self.mla_scale_kv_lora else 1.0

    @property
    def residual_scale(self) -> float:
        """Factor on a branch before it is added to the residual stream."""
        if self.scale_depth is None:
            return 1.0
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_scale(self) -> float:
        """Factor on the head's input."""
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size

    @property
    def num_choices(self) -> int:
        """Experts that a router chooses from."""
        return (self.n_routed_experts or 0) + self.zero_expert_num

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
        path = Path(directory) / CONFIG_FILE
        if not Path(directory).is_dir():
            what = (
                "is a file; pass the directory that holds it"
                if Path(directory).exists()
                else "does not exist; `hf download ORGANISATION/MODEL --local-dir DIR` makes one"
            )
            raise FileNotFoundError(f"checkpoint directory {directory} {what}")
        if not path.is_file():
            raise FileNotFoundError(
                f"no config.json in {directory}: expected a checkpoint directory laid out as on "
                "the Hugging Face hub (config.json, *.safetensors, tokenizer files)"
            )
        fields = read_json_object(path)
        try:
            return cls.from_dict(fields)
        except (ValueError, UnsupportedModelError) as error:
            raise type(error)(f"{error} ({path})") from error

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed ``config.json``. Raises as `from_directory`."""
        model_type = fields.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModelError(
                f"model_type {model_type!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        family = FAMILIES[model_type]
        given = {name: value for name, value in fields.items() if value is not None}
        missing = [family.spelt(name) for name in family.needed if family.spelt(name) not in given]
        if missing:
            raise ValueError(
                f"config.json lacks {', '.join(missing)}, needed for {model_type}; take the file "
                "that came with the weights"
            )
        given = {family.spelt(name): value for name, value in family.assumed.items()} | given
        activation = given.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(
                f"hidden_act {activation!r} is not supported; supported: silu"
            )
        for name, least in _LEAST.items():
            value = given.get(family.spelt(name), least)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{family.spelt(name)} must be an integer of at least {least}; got {value!r}"
                )
        _check_numbers(given, _FACTORS, "config.json")

        values = {
            name: given[family.spelt(name)]
            for name in (*_READ_AS_IS, *family.own_fields)
            if family.spelt(name) in given
        }
        eos = given.get("eos_token_id")
        values |= {
            "first_k_dense_replace": _read_dense_layers(given),
            "rope": _read_rope(given),
            # transformers and the hub both treat DeepSeek-V2's projections as interleaved.
            "rope_interleave": bool(given.get("rope_interleave", True)),
            "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        }
        config = cls(model_type=model_type, **(values | family.derived(given)))
        config._check()
        return config

    def _check(self) -> None:
        """Refuse what does not go together here, where the fields' names are at hand."""
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
        experts = self.num_choices
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


def _check_numbers(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse what is given and is not a number."""
    for name in names:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} of {where} must be a number; got {value!r}")


def _read_dense_layers(fields: Mapping[str, Any]) -> int:
    """How many layers come before the mixtures: as a number, or as transformers' list of kinds."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return int(fields.get("first_k_dense_replace", 0))
    layers = fields["num_hidden_layers"]
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedModelError(
            f"mlp_layer_types must be 'dense' for the first layers and 'sparse' for the rest, "
            f"{layers} in all; got {kinds!r}"
        )
    return dense


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
    _check_numbers(parameters, _ROPE_NUMBERS, spelling)
    theta = parameters.get("rope_theta", fields.get("rope_theta"))
    if theta is not None and not (isinstance(theta, int | float) and theta > 0.0):
        raise ValueError(f"rope_theta must be a positive number; got {theta!r}")
    original = parameters.get("original_max_position_embeddings")
    longest = fields.get("max_position_embeddings") or 4096
    factor = parameters.get("factor")
    if factor is None:
        if rope_type == "linear" or (rope_type == "yarn" and original is None):
            raise ValueError(f"rope type {rope_type!r} needs a factor; config.json gives none")
        is_ratio = rope_type in ("yarn", "longrope")
        factor = longest / original if is_ratio and original else 1.0
    if factor < 1.0 and rope_type != "longrope":
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
        pair_factors=_read_pair_factors(fields, parameters) if rope_type == "longrope" else (),
        llama_4_scaling_beta=float(parameters.get("llama_4_scaling_beta") or 0.0),
    )


def _read_pair_factors(
    fields: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[float, ...]:
    """Choose and check LongRoPE's list: by the model's context, once and for all requests.

    transformers chooses by each call's longest request, so that one token's rotation would depend
    on the batch it is in, and a cache would be wrong from the token on that crosses the pretrained
    context. To use a longer model within its pretrained context only, set
    ``max_position_embeddings`` to that.
    """
    longest = fields.get("max_position_embeddings") or 4096
    original = parameters.get("original_max_position_embeddings") or longest
    name = "long_factor" if longest > original else "short_factor"
    factors, pairs = parameters.get(name), fields["qk_rope_head_dim"] // 2
    if (
        not isinstance(factors, list)
        or len(factors) != pairs
        or not all(type(factor) in (int, float) and factor > 0.0 for factor in factors)
    ):
        raise ValueError(
            f"{name} must be a list of {pairs} positive numbers, one a rotary pair; got {factors!r}"
        )
    return tuple(map(float, factors))


def _one_spelling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without rope_theta, whose place differs, and with `type` as `rope_type`."""
    settings = {name: value for name, value in parameters.items() if name != "rope_theta"}
    settings["rope_type"] = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings.pop("type", None)
    return settings
