"""Launches: grids, block sizes and strides. Callers have validated; nothing here looks at values.

Importing this module imports Triton.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage0_reference.latent_cache import Bf16LatentPages
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import QuantizedRows
from stage3_dataflow.execution_path import is_interpreting
from stage3_dataflow.kernels.combine import combine_kernel
from stage3_dataflow.kernels.fetch_dequant import fetch_dequant_kernel, readable_lengths_kernel
from stage3_dataflow.kernels.fused_k_append import fused_k_append_kernel
from stage3_dataflow.kernels.fused_q_quant import fused_q_quant_kernel
from stage3_dataflow.kernels.launch_cache import launch, places
from stage3_dataflow.kernels.longest_first import longest_first_kernel
from stage3_dataflow.kernels.split_kv_decode import split_kv_decode_kernel
from stage3_dataflow.split_plan import SPLIT_GRANULE, SplitRule

FUSED_Q_QUANT_UNSPECIALIZED = places(fused_q_quant_kernel, "num_rows", "s_q")
FUSED_K_APPEND_UNSPECIALIZED = places(fused_k_append_kernel, "num_tokens", "num_slots")
READABLE_LENGTHS_UNSPECIALIZED = places(
    readable_lengths_kernel, "num_pages", "table_stride", "table_width"
)
FETCH_DEQUANT_UNSPECIALIZED = places(
    fetch_dequant_kernel, "num_rows", "batch", "steps", "num_pages", "table_stride"
)
SPLIT_KV_DECODE_UNSPECIALIZED = places(
    split_kv_decode_kernel, "num_pages", "capacity", "min_tokens", "max_splits", "table_stride"
)
COMBINE_UNSPECIALIZED = places(
    combine_kernel, "num_rows", "capacity", "min_tokens", "max_splits", "partial_splits"
)
LONGEST_FIRST_UNSPECIALIZED = places(
    longest_first_kernel, "batch", "capacity", "min_tokens", "max_splits", "grid_splits"
)

WRITE_ROWS = 4
"""Rows of a write program, one a warp: a row of 512 is 16 elements a thread."""

FETCH_ROWS, FETCH_WARPS = 4, 2

ORDER_REQUESTS = 32
"""Requests whose splits a program, of one warp, puts in their places, comparing each with all
others. One H200, 128 requests: 4.5 us; 64 at a time with four warps 10."""

COMBINE_SPLITS, COMBINE_WIDTH, COMBINE_LSES, COMBINE_WARPS = 16, 512, 64, 8
"""Partials joined at a time, channels of a program, lse read at a time, and warps: a tile is 32
registers a thread. Fixed, since other numbers would add a row's partials in another order."""


class DecodeBlocks(NamedTuple):
    """Tile sizes of the decode kernel.

    Attributes
    ----------
    rows, tokens
        Query rows and cached tokens of a tile.
    warps, stages
        Warps of a program, and tiles in flight.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def decode_blocks(
    num_rows: int, shared_memory: int, *, fp8_cache: bool, width: int = 576
) -> DecodeBlocks:
    """Choose tiles for a number of rows and a device's shared memory per block, in bytes.

    Sixteen rows are the least that a tensor core takes. The tile of a 512-wide FP8 cache is 32 KiB
    for 64 tokens, twice that in BF16, and the query's stays beside it; GPUs with about 100 KiB
    (consumer Ada and Blackwell) get smaller tiles, and so does a row of more than 512 + 64 in BF16
    (`width` is kv_lora_rank + qk_rope_head_dim).

    Measured on one H200 (triton 3.6.0), microseconds for 8,192 tokens of 128 requests: 128 heads,
    FP8 cache, 64 x 64 tiles 1348, 64 x 32 1679, 32 x 64 3188, three stages a quarter slower; BF16
    cache 1068 and 1632. 16 heads, two splits: 16 x 32 tiles with 4 warps 545, 16 x 64 with 8 warps
    670; BF16 cache, one split, 616 and 440.
    """
    small = shared_memory < 160 * 1024
    if num_rows <= 16:
        wide = not (fp8_cache or small)
        return DecodeBlocks(16, 64 if wide else 32, 8 if wide else 4, 1 if small else 2)
    if small:
        return DecodeBlocks(32, 32, 8, 1) if fp8_cache else DecodeBlocks(16, 32, 4, 1)
    return DecodeBlocks(64, 64 if fp8_cache or width <= 576 else 32, 8, 2)


@functools.cache
def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; the interpreter has no limit."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def launch_fused_q_quant(
    q_latent: Tensor,
    q_rope: Tensor,
    rotation: Rotation | None,
    result: QuantizedRows,
    *,
    interleaved: bool,
    pow2: bool,
) -> None:
    """Quantise queries into `result`."""
    batch, s_q, heads, latent = q_latent.shape
    cos, sin = _angles(rotation, q_rope)
    num_rows = batch * s_q * heads
    launch(
        fused_q_quant_kernel,
        (-(-num_rows // WRITE_ROWS),),
        (
            q_latent,
            q_rope,
            cos,
            sin,
            *result,
            num_rows,
            heads,
            s_q,
            *q_latent.stride()[:3],
            *q_rope.stride()[:3],
            q_rope.shape[-1] // 2,
        ),
        {
            "LATENT": latent,
            "ROPE": q_rope.shape[-1],
            "BLOCK_ROWS": WRITE_ROWS,
            "POW2": pow2,
            "ROTATE": rotation is not None,
            "INTERLEAVED": interleaved,
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=FUSED_Q_QUANT_UNSPECIALIZED,
        **_exact_arithmetic(),
    )


def launch_fused_k_append(
    c_kv: Tensor,
    k_rope: Tensor,
    cache: LatentPages | Bf16LatentPages,
    slot_mapping: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    rotation: Rotation | None,
    *,
    interleaved: bool,
    pow2: bool,
) -> None:
    """Write tokens into the planes."""
    tokens, latent = c_kv.shape
    fp8_cache = len(cache) == 3
    planes = cache if fp8_cache else (cache[0], cache[0], cache[1])  # no scale is written in BF16
    num_pages, page_size = cache[0].shape[:2]
    cos, sin = _angles(rotation, k_rope)
    launch(
        fused_k_append_kernel,
        (-(-tokens // WRITE_ROWS),),
        (
            c_kv,
            k_rope,
            slot_mapping,
            c_kv if norm_weight is None else norm_weight,
            cos,
            sin,
            *planes,
            tokens,
            num_pages * page_size,
            norm_eps,
            c_kv.stride(0),
            k_rope.stride(0),
            k_rope.shape[-1] // 2,
            *(stride for plane in planes for stride in plane.stride()[:2]),
        ),
        {
            "PAGE_SIZE": page_size,
            "LATENT": latent,
            "ROPE": k_rope.shape[-1],
            "BLOCK_TOKENS": WRITE_ROWS,
            "FP8_CACHE": fp8_cache,
            "POW2": pow2,
            "NORM": norm_weight is not None,
            "ROTATE": rotation is not None,
            "INTERLEAVED": interleaved,
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=FUSED_K_APPEND_UNSPECIALIZED,
        **_exact_arithmetic(),
    )


def launch_readable_lengths(
    block_table: Tensor, cache_seqlens: Tensor, lengths: Tensor, num_pages: int, page_size: int
) -> None:
    """Write the lengths of requests that can be read; 0 for the others."""
    launch(
        readable_lengths_kernel,
        (len(lengths),),
        (
            block_table,
            cache_seqlens,
            lengths,
            num_pages,
            block_table.stride(0),
            block_table.shape[1],
        ),
        {
            "PAGE_SIZE": page_size,
            "BLOCK_PAGES": 256,
        },
        unspecialized=READABLE_LENGTHS_UNSPECIALIZED,
        num_warps=4,
    )


def launch_fetch_dequant(
    cache: LatentPages, block_table: Tensor, lengths: Tensor, ends: Tensor, out: Tensor
) -> None:
    """Copy rows into `out`; `ends` [batch] is the running sum of `lengths` [batch]."""
    num_pages, page_size, latent = cache.codes.shape
    launch(
        fetch_dequant_kernel,
        (-(-len(out) // FETCH_ROWS),),
        (
            *cache,
            block_table,
            lengths,
            ends,
            out,
            len(out),
            len(ends),
            len(ends).bit_length(),
            num_pages,
            block_table.stride(0),
            *(stride for plane in cache for stride in plane.stride()[:2]),
        ),
        {
            "PAGE_SIZE": page_size,
            "LATENT": latent,
            "ROPE": cache.rope.shape[-1],
            "BLOCK_TOKENS": FETCH_ROWS,
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=FETCH_DEQUANT_UNSPECIALIZED,
        num_warps=FETCH_WARPS,
    )


def launch_split_kv_decode(
    query: QuantizedRows,
    cache: LatentPages | Bf16LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    causal: bool,
    fp8_p: bool,
    split_rule: SplitRule,
    blocks: DecodeBlocks | None = None,
) -> None:
    """Attend. `partial_lse` [batch, splits, rows] says how many splits the grid has.

    Over a BF16 cache the query's codes are the query itself, and its scale is not read.
    """
    batch, s_q, heads, latent = query.codes.shape
    fp8_cache = len(cache) == 3
    plane, rope_plane = cache[0], cache[-1]
    scale_plane = cache[1] if fp8_cache else plane
    num_pages, page_size = plane.shape[:2]
    num_rows = s_q * heads
    if blocks is None:
        memory = shared_memory_per_block(plane.device)
        width = latent + rope_plane.shape[-1]
        blocks = decode_blocks(num_rows, memory, fp8_cache=fp8_cache, width=width)
    grid = (-(-num_rows // blocks.rows), partial_lse.shape[1], batch)
    launch(
        split_kv_decode_kernel,
        grid,
        (
            query.codes,
            query.scale,
            query.rope,
            plane,
            scale_plane,
            rope_plane,
            block_table,
            cache_seqlens,
            out,
            lse,
            partial_out,
            partial_lse,
            softmax_scale,
            num_rows,
            heads,
            num_pages,
            block_table.shape[1] * page_size,
            *split_rule,
            *query.codes.stride()[:3],
            *query.rope.stride()[:3],
            *plane.stride()[:2],
            *scale_plane.stride()[:2],
            *rope_plane.stride()[:2],
            block_table.stride(0),
        ),
        {
            "PAGE_SIZE": page_size,
            "LATENT": latent,
            "ROPE": rope_plane.shape[-1],
            "BLOCK_ROWS": blocks.rows,
            "BLOCK_TOKENS": blocks.tokens,
            "SPLIT_GRANULE": SPLIT_GRANULE,
            "STAGES": blocks.stages,
            "CAUSAL": causal,
            "FP8_CACHE": fp8_cache,
            "FP8_P": fp8_p and fp8_cache,
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=SPLIT_KV_DECODE_UNSPECIALIZED,
        num_warps=blocks.warps,
        enable_fp_fusion=True,
    )


def launch_combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    cache_seqlens: Tensor,
    capacity: int,
    out: Tensor,
    lse: Tensor,
    *,
    split_rule: SplitRule,
) -> None:
    """Merge the partials of requests that were split."""
    batch, s_q, heads, latent = out.shape
    num_rows, block_width = s_q * heads, min(latent, COMBINE_WIDTH)
    launch(
        combine_kernel,
        (num_rows, batch, latent // block_width),
        (
            partial_out,
            partial_lse,
            cache_seqlens,
            out,
            lse,
            num_rows,
            capacity,
            *split_rule,
            partial_lse.shape[1],
        ),
        {
            "LATENT": latent,
            "BLOCK_WIDTH": block_width,
            "BLOCK_SPLITS": COMBINE_SPLITS,
            "BLOCK_LSES": COMBINE_LSES,
            "SPLIT_GRANULE": SPLIT_GRANULE,
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=COMBINE_UNSPECIALIZED,
        num_warps=COMBINE_WARPS,
    )


def launch_longest_first(
    cache_seqlens: Tensor,
    order: Tensor,
    counter: Tensor,
    capacity: int,
    min_tokens: int,
    max_splits: int,
    grid_splits: int,
) -> None:
    """Write `split_plan.longest_first_order` to `order`, int32 with room for it; 0 to `counter`."""
    (batch,) = cache_seqlens.shape
    launch(
        longest_first_kernel,
        (-(-batch // ORDER_REQUESTS),),
        (cache_seqlens, order, counter, batch, capacity, min_tokens, max_splits, grid_splits),
        {"BLOCK": ORDER_REQUESTS, "SPLIT_GRANULE": SPLIT_GRANULE},
        unspecialized=LONGEST_FIRST_UNSPECIALIZED,
        num_warps=1,
    )


def _angles(rotation: Rotation | None, placeholder: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin, contiguous; any pointer where none are read."""
    if rotation is None:
        return placeholder, placeholder
    return rotation.cos.contiguous(), rotation.sin.contiguous()


def _exact_arithmetic() -> dict[str, Any]:
    """Options of the write kernels: a fused multiply-add would round otherwise than PyTorch."""
    return {"num_warps": 4, "enable_fp_fusion": False}
