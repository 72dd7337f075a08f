"""Decode attention over the FP8 cache by the rescaled PV pipeline: the meaning of the fused kernel.

Same name, arguments and result as the library's `mla_decode`. It reads lengths on the host, walks
the blocks in Python and is in no hurry; the kernels are tested against what it computes.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import gather_planes
from stage1_quant.fp8_latent_cache import (
    LatentPages,
    checked_lengths,
    quantized_scores,
    query_rows,
    widen,
)
from stage1_quant.quantize import DEFAULT_SCALE_FORMAT, QuantizedRows, ScaleFormat, quantize_q
from stage2_pv_pipeline.rescaled_pv import (
    BLOCK_TOKENS,
    PFormat,
    QuantizedBlock,
    rescaled_pv_attention,
)


def mla_decode(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    softmax_scale: float,
    *,
    causal: bool = True,
    out: Float[Tensor, "batch s_q heads kv_lora_rank"] | None = None,
    lse: Float[Tensor, "batch s_q heads"] | None = None,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
    p_format: PFormat = "e4m3",
    block_tokens: int = BLOCK_TOKENS,
) -> AttentionOutput:
    """Attend over one layer's FP8 cache.

    Parameters
    ----------
    q_latent, q_rope
        Absorbed and rotated queries of each request's last s_q tokens, before quantisation.
    cache, block_table, cache_seqlens
        Planes, page ids (int32) and cached tokens of each request.
    softmax_scale
        Factor on the scores.
    causal
        Query i sees the keys before ``cache_seqlens - s_q + i + 1``; otherwise all keys.
    out, lse
        Written instead of fresh tensors where given.
    scale_format
        Of the query's scales; the cache's are read.
    p_format, block_tokens
        See `stage2_pv_pipeline.rescaled_pv`.

    Returns
    -------
    AttentionOutput
        `out` in q_latent's dtype and `lse` (natural, float32). A request of length 0, or with a
        negative page id below its length, gives 0 and -inf.

    Raises
    ------
    ValueError
        A length that its table row cannot hold, or a page outside the pool.

    References
    ----------
    SnapMLA (arXiv 2602.10718), sections 3.1 and 3.2.
    """
    query = quantize_q(q_latent, q_rope, scale_format)
    attended = decode_quantized(
        query,
        cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        causal=causal,
        p_format=p_format,
        block_tokens=block_tokens,
    )
    result = AttentionOutput(attended.out.to(q_latent.dtype), attended.lse)
    if out is not None:
        result = result._replace(out=out.copy_(result.out))
    if lse is not None:
        result = result._replace(lse=lse.copy_(result.lse))
    return result


def decode_quantized(
    query: QuantizedRows,
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
    softmax_scale: float,
    *,
    causal: bool = True,
    p_format: PFormat = "e4m3",
    block_tokens: int = BLOCK_TOKENS,
) -> AttentionOutput:
    """`mla_decode` of a query that is in the scaled domain already; `out` is float32."""
    lengths = checked_lengths(cache, block_table, cache_seqlens)
    rows = query_rows(query)

    def read_block(positions: Int[Tensor, " tokens"]) -> QuantizedBlock:
        block = widen(QuantizedRows(*gather_planes(cache, block_table, positions)))
        return QuantizedBlock(
            quantized_scores(rows, block, softmax_scale), block.codes, block.scale
        )

    return rescaled_pv_attention(
        read_block,
        rows.codes.view(query.codes.shape),
        lengths,
        causal=causal,
        p_format=p_format,
        block_tokens=block_tokens,
    )
