"""Stage 0's attention backend: absorbed MLA over BF16 pages, exact and plain."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import (
    Bf16LatentPages,
    LatentRows,
    allocate_pages,
    check_table,
    gather_packed,
    gather_rows,
    paged_latent_attention,
    write_rows,
)
from stage0_reference.model_config import ModelConfig


class AbsorbedBackend:
    """Exact attention over a paged latent cache.

    Parameters
    ----------
    cache_dtype
        Dtype of the planes. BF16 is what a server keeps; float64 serves proofs.
    """

    stage = 0
    description = "exact attention over a BF16 latent cache"

    def __init__(self, cache_dtype: torch.dtype = torch.bfloat16) -> None:
        self.cache_dtype = cache_dtype

    def make_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> list[Bf16LatentPages]:
        """Allocate the planes of every layer."""
        return [
            allocate_pages(
                num_pages,
                page_size,
                config.kv_lora_rank,
                config.qk_rope_head_dim,
                dtype=self.cache_dtype,
                device=device,
            )
            for _ in range(config.num_hidden_layers)
        ]

    def append(
        self,
        c_kv: Float[Tensor, "tokens kv_lora_rank"],
        k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
        cache: Bf16LatentPages,
        slot_mapping: Int[Tensor, " tokens"],
    ) -> None:
        """Round tokens to the cache's dtype and write them. Raises as `write_rows`."""
        write_rows(cache, (c_kv, k_rope), slot_mapping)

    def attend(
        self,
        q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
        q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
        cache: Bf16LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
        softmax_scale: float,
        *,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend over one layer's cache. Raises as `check_table`.

        Returns
        -------
        AttentionOutput
            `out` [batch, s_q, heads, kv_lora_rank] in q_latent's dtype, `lse` [batch, s_q, heads].
            A request of length 0, or with a negative page id below its length, gives 0 and -inf.
        """
        lengths = check_table(block_table, cache_seqlens, *cache.c_kv.shape[:2])
        return paged_latent_attention(
            q_latent,
            q_rope,
            partial(gather_rows, cache, block_table),
            lengths,
            softmax_scale,
            causal=causal,
        )

    def read_prefix(
        self,
        cache: Bf16LatentPages,
        block_table: Int[Tensor, "batch max_pages"],
        cache_seqlens: Int[Tensor, " batch"],
    ) -> LatentRows:
        """Give back cached rows, packed [sum of cache_seqlens, .]. Raises as `check_table`.

        A request with a negative page id below its length has no rows here.
        """
        lengths = check_table(block_table, cache_seqlens, *cache.c_kv.shape[:2])
        return LatentRows(*gather_packed(cache, block_table, lengths))
