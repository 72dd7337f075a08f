"""Launches of context parallelism's kernels. Callers have validated; nothing here looks at values.

Importing this module imports Triton.
"""

from __future__ import annotations

from torch import Tensor

from stage3_dataflow.execution_path import is_interpreting
from stage3_dataflow.kernels.launch_cache import launch, places
from stage3_dataflow.kernels.local_pages import local_pages_kernel
from stage3_dataflow.kernels.merge_ranks import merge_ranks_kernel

LOCAL_PAGES_UNSPECIALIZED = places(
    local_pages_kernel, "num_pages", "rank", "queries", "table_stride", "table_width"
)
MERGE_RANKS_UNSPECIALIZED = places(merge_ranks_kernel, "outs_stride_part", "lses_stride_part")

LOCAL_COLUMNS, LOCAL_WARPS = 4096, 16
"""Columns scanned at a time, eight a thread: 262,144 tokens in pages of 64."""

MERGE_WARPS = 4


def launch_local_pages(
    block_table: Tensor,
    cache_seqlens: Tensor,
    local_table: Tensor,
    lengths: Tensor,
    *,
    rank: int,
    ranks: int,
    pages_per_rank: int,
    page_size: int,
) -> None:
    """Write the local table, and `lengths` [batch, queries] of what each query sees of it."""
    batch, queries = lengths.shape
    if lengths.numel() == 0:
        return
    launch(
        local_pages_kernel,
        (batch * queries,),
        (
            block_table,
            cache_seqlens,
            local_table,
            lengths,
            pages_per_rank * ranks,
            rank,
            queries,
            block_table.stride(0),
            block_table.shape[1],
        ),
        {"RANKS": ranks, "PAGE_SIZE": page_size, "BLOCK_COLUMNS": LOCAL_COLUMNS},
        unspecialized=LOCAL_PAGES_UNSPECIALIZED,
        num_warps=LOCAL_WARPS,
    )


def launch_merge_ranks(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge `outs` [parts, *rows, width] and `lses` [parts, *rows], float32, into contiguous ones.

    A part's rows are one stride apart, however many axes they have.
    """
    parts, width = outs.shape[0], outs.shape[-1]
    if out.numel() == 0:
        return
    launch(
        merge_ranks_kernel,
        (lse.numel(),),
        (
            outs,
            lses,
            out,
            lse,
            outs.stride(0),
            outs.stride(-2),
            lses.stride(0),
            lses.stride(-1),
        ),
        {
            "PARTS": parts,
            "WIDTH": width,
            "BLOCK_WIDTH": 1 << (width - 1).bit_length(),
            "INTERPRETED": is_interpreting(),
        },
        unspecialized=MERGE_RANKS_UNSPECIALIZED,
        num_warps=MERGE_WARPS,
    )
