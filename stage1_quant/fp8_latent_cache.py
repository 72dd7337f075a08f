"""The paged FP8 latent cache: three planes a layer that always move together.

=====  =============================================  =============  =========================
bytes  plane                                          dtype          why
=====  =============================================  =============  =========================
512    `codes`  [num_pages, page_size, kv_lora_rank]  float8_e4m3fn  the latent: key *and* value
4      `scale`  [num_pages, page_size]                float32        one per token
128    `rope`   [num_pages, page_size, rope]          bfloat16       rotary key / scale
=====  =============================================  =============  =========================

(for kv_lora_rank 512 and qk_rope_head_dim 64: 644 bytes a token and layer against 1152 in BF16.)

Copying, exporting and importing pages are stage 0's functions: they treat whatever planes a cache
has alike, so a scale can't be left behind. A reader needs no scale format; the scale says all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput
from stage0_reference.latent_cache import (
    LatentRows,
    ScoredBlock,
    check_pool_size,
    check_table,
    gather_packed,
    gather_planes,
    online_attention,
    write_rows,
)
from stage1_quant.e4m3 import decode_e4m3
from stage1_quant.quantize import (
    BF16_MAX,
    DEFAULT_SCALE_FORMAT,
    QuantizedRows,
    ScaleFormat,
    dequantize_rows,
    quantize_q,
    quantize_rows,
)


class LatentPages(NamedTuple):
    """One layer's planes, see the module's table. Views of larger buffers are welcome.

    Attributes
    ----------
    codes
        float8_e4m3fn [num_pages, page_size, kv_lora_rank].
    scale
        float32 [num_pages, page_size].
    rope
        bfloat16 [num_pages, page_size, qk_rope_head_dim], divided by the scale.
    """

    codes: Tensor
    scale: Tensor
    rope: Tensor


def allocate_latent_pages(
    num_pages: int,
    page_size: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    device: torch.device | str = "cpu",
) -> LatentPages:
    """Allocate one layer's planes, uninitialised: a slot means nothing until it is written."""
    check_pool_size(num_pages, page_size)
    pool = (num_pages, page_size)
    return LatentPages(
        torch.empty(*pool, kv_lora_rank, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(*pool, dtype=torch.float32, device=device),
        torch.empty(*pool, qk_rope_head_dim, dtype=torch.bfloat16, device=device),
    )


def append_kv(
    c_kv: Float[Tensor, "tokens kv_lora_rank"],
    k_rope: Float[Tensor, "tokens qk_rope_head_dim"],
    cache: LatentPages,
    slot_mapping: Int[Tensor, " tokens"],
    *,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> None:
    """Quantise tokens and write all three planes; a negative slot writes nothing.

    Raises
    ------
    ValueError
        As `stage0_reference.latent_cache.write_rows`; nothing is written then.
    """
    write_rows(cache, quantize_rows(c_kv, k_rope, scale_format), slot_mapping)


def widen(rows: QuantizedRows) -> QuantizedRows:
    """Give codes and rotary parts as float32, unscaled: what a tensor core multiplies."""
    return QuantizedRows(decode_e4m3(rows.codes), rows.scale, rows.rope.float())


def query_rows(query: QuantizedRows) -> QuantizedRows:
    """Lay a quantised query's tokens and heads out as rows, widened: [batch, s_q heads, .]."""
    return QuantizedRows(*(part.flatten(1, 2) for part in widen(query)))


def quantized_scores(
    query: QuantizedRows, block: QuantizedRows, softmax_scale: float
) -> Float[Tensor, "batch rows tokens"]:
    """Softmax logits of widened query rows against a widened block of tokens.

    Notes
    -----
    ``(q_codes . codes + q_rope' . rope) q_scale scale softmax_scale``. Products of e4m3 codes are
    exact in float32. The latent product comes first and the rotary product is added to it.
    """
    aligned = query.codes @ block.codes.mT + query.rope @ block.rope.mT
    # The scales' product first: either alone could push a finite score past float32.
    return aligned * (query.scale[..., None] * block.scale[:, None, :] * softmax_scale)


def fp8_latent_attention(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    lengths: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> AttentionOutput:
    """Attention whose scores come from FP8 codes; values are dequantised.

    Parameters
    ----------
    q_latent, q_rope
        The query before quantisation.
    cache, block_table, lengths
        Where the tokens are, and how many each request has.
    softmax_scale, causal
        As in stage 0.
    scale_format
        Of the query's scales; the cache's are read.

    Returns
    -------
    AttentionOutput
        As `stage0_reference.latent_cache.paged_latent_attention`.
    """
    query = query_rows(quantize_q(q_latent, q_rope, scale_format))

    def read_block(positions: Int[Tensor, " tokens"]) -> ScoredBlock:
        block = widen(QuantizedRows(*gather_planes(cache, block_table, positions)))
        values = block.codes * block.scale[..., None]
        return ScoredBlock(quantized_scores(query, block, softmax_scale), values)

    attended = online_attention(read_block, q_latent.float(), lengths, causal=causal)
    return AttentionOutput(attended.out.to(q_latent.dtype), attended.lse)


def checked_lengths(
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
) -> list[int]:
    """`check_table` for this cache: the requests' lengths on the host."""
    return check_table(block_table, cache_seqlens, *cache.codes.shape[:2])


def fetch_dequant(
    cache: LatentPages,
    block_table: Int[Tensor, "batch max_pages"],
    cache_seqlens: Int[Tensor, " batch"],
) -> Float[Tensor, "total_tokens width"]:
    """Give back the cached rows of every request in BF16, one request after the other.

    A request with a negative page id below its length has no rows here.

    Returns
    -------
    Tensor
        bfloat16 [sum of cache_seqlens, kv_lora_rank + qk_rope_head_dim]: the latent, then the
        rotary key with its scale multiplied back. `latent_rows` takes the two apart.

    Raises
    ------
    ValueError
        A length that its table row cannot hold, or a page outside the pool.
    """
    lengths = checked_lengths(cache, block_table, cache_seqlens)
    packed = QuantizedRows(*gather_packed(cache, block_table, lengths))
    rows = torch.cat(dequantize_rows(packed), dim=-1)
    # Rounding up near BF16's end must not bring an infinity back.
    return rows.clamp(-BF16_MAX, BF16_MAX).bfloat16()


def latent_rows(packed: Float[Tensor, "total_tokens width"], cache: LatentPages) -> LatentRows:
    """Take packed rows of this cache apart: views of their latents and rotary keys."""
    return LatentRows(*packed.split((cache.codes.shape[-1], cache.rope.shape[-1]), dim=-1))
