"""Stage 2's attention backend: stage 1's cache, read by the rescaled FP8 PV product."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.fp8_latent_cache import LatentPages
from stage2_pv_pipeline.decode import mla_decode
from stage2_pv_pipeline.rescaled_pv import BLOCK_TOKENS


class Fp8PipelineBackend(Fp8CacheBackend):
    """Attention with FP8 operands in both products; only `attend` differs from stage 1."""

    stage = 2
    description = "per-token FP8 latent cache, FP8 scores and FP8 PV product"
    block_tokens = BLOCK_TOKENS

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
        return mla_decode(
            q_latent,
            q_rope,
            cache,
            block_table,
            cache_seqlens,
            softmax_scale,
            causal=causal,
            scale_format=self.scale_format,
            block_tokens=self.block_tokens,
        )
