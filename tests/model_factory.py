"""Small models for tests: config.json fields, decoders with random weights, checkpoints, pages.

Sizes are all different from one another where they may be, so that a swapped axis or a forgotten
width is an error of shape or a wrong number, never a coincidence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from stage0_reference.checkpoint import save_safetensors
from stage0_reference.decoder import Decoder
from stage0_reference.model_config import ModelConfig

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""A mixture model of about 60,000 parameters; field names as in config.json."""


_DENSE: dict[str, Any] = dict.fromkeys(
    (
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
    ),
    ...,
)
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    # model type: how it differs from TINY_SIZES; ``...`` leaves a field out
    "glm4_moe_lite": {"v_head_dim": 22, "first_k_dense_replace": ..., "norm_topk_prob": True},
    "minicpm3": _DENSE | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 20},
    "longcat_flash": _DENSE
    | {
        "intermediate_size": ...,
        "num_hidden_layers": ...,
        "num_layers": 2,
        "ffn_hidden_size": 40,
        "expert_ffn_hidden_size": 14,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "moe_topk": 4,
    },
    "youtu": _DENSE,
    "mistral4": {"n_group": ..., "topk_group": ..., "norm_topk_prob": True},
}


def config_fields(model_type: str = "deepseek_v3", **changes: Any) -> dict[str, Any]:
    """Fields of a tiny model's config.json; a change to ``...`` leaves the field out."""
    sizes = TINY_SIZES | FAMILY_SIZES.get(model_type, {})
    fields = {"model_type": model_type, **sizes, **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def tiny_config(model_type: str = "deepseek_v3", **changes: Any) -> ModelConfig:
    """`config_fields`, read."""
    return ModelConfig.from_dict(config_fields(model_type, **changes))


@torch.no_grad()
def randomise(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill named weights so that activations, scores and biases all are of order 1.

    With an initialiser's usual 0.02 the attention of a tiny model is flat and a branch adds next
    to nothing to the residual stream: most mistakes would hide below the tolerance. Values are
    drawn in float32 and in the order of the names, whatever the model's dtype.
    """
    stream = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        tensor = tensors[name]
        value = torch.randn(tensor.shape, generator=stream)
        if "norm" in name:
            value = 1.0 + 0.2 * value
        elif name.endswith("bias"):
            value = 0.2 * value
        elif "embed_tokens" not in name:
            value = value * tensor.shape[-1] ** -0.5
        tensor.copy_(value)


def random_decoder(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Build a decoder with weights from `randomise`, ready to run."""
    decoder = Decoder(config, dtype=dtype)
    randomise(decoder.checkpoint_tensors(), seed)
    return decoder.eval().requires_grad_(False)


def write_checkpoint(
    directory: str | Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write config.json and model.safetensors."""
    directory = Path(directory)
    save_safetensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def shuffled_block_table(
    lengths: Sequence[int], page_size: int, *, seed: int = 0, num_spare: int = 2
) -> tuple[Int[Tensor, "batch max_pages"], int]:
    """Give every request its pages in random order out of one pool.

    Returns
    -------
    block_table
        int32. Columns behind a request's last page hold an absurd id, which nobody may follow.
    num_pages
        Size of the pool, `num_spare` unused pages included.
    """
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + num_spare
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max(counts)), 2**31 - 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        for column in range(count):
            table[row, column] = order.pop()
    return table, num_pages


def slots_of(
    block_table: Int[Tensor, "batch max_pages"], request: int, start: int, end: int, page_size: int
) -> list[int]:
    """Slots of a request's tokens ``start`` to ``end``."""
    return [
        int(block_table[request, position // page_size]) * page_size + position % page_size
        for position in range(start, end)
    ]
