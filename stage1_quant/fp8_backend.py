"""Stage 1's attention backend: stage 0's decoder on an FP8 latent cache."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import LatentRows
from stage0_reference.model_config import ModelConfig
from stage1_quant.fp8_latent_cache import (
    LatentPages,
    allocate_latent_pages,
    append_kv,
    checked_lengths,
    fetch_dequant,
    fp8_latent_attention,
    latent_rows,
)
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, ScaleFormat, check_scale_format


class Fp8CacheBackend:
    """Attention over a paged FP8 cache; scores from codes, values dequantised.

    Parameters
    ----------
    scale_format
        "amax" or "pow2", for cache and query; see `stage1_quant.quantize.token_scale`.
    """

    stage = 1
    description = "per-token FP8 latent cache, RoPE-aware"

    def __init__(self, scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT) -> None:
        check_scale_format(scale_format)
        self.scale_format = scale_format

    def make_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> list[LatentPages]:
        """Allocate the planes of every layer."""
        return [
            allocate_latent_pages(
                num_pages, page_size, config.kv_lora_rank, config.qk_rope_head_dim, device=device
            )
            for _ in range(config.num_hidden_layers)
        ]

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: LatentPages,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Quantise tokens into their slots. Raises as `append_kv`."""
        append_kv(c_kv, k_rope, cache, slot_mapping, scale_format=self.scale_format)

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over one layer's cache; shapes, empty rows and refusals as in stage 0."""
        return fp8_latent_attention(
            q_latent,
            q_rope,
            cache,
            block_table,
            checked_lengths(cache, block_table, cache_seqlens),
            softmax_scale,
            causal=causal,
            scale_format=self.scale_format,
        )

    def read_prefix(
        self,
        cache: LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
    ) -> LatentRows:
        """Give back cached rows in BF16, packed. Raises as `fetch_dequant`."""
        return latent_rows(fetch_dequant(cache, block_table, cache_seqlens), cache)
