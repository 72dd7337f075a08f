"""A rank's pages of every request, and how many of the visible tokens they hold.

A program scans the columns that its request needs, `BLOCK_COLUMNS` at a time, and keeps count of
the rank's pages before the block. What is behind them in the local table is not written. Its
meaning is that of `local_pages` and `local_length` in `stage3_dataflow.context_parallel`.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_pages", "rank", "queries", "table_stride", "table_width"],
)
def local_pages_kernel(
    table_ptr,
    seqlens_ptr,
    local_table_ptr,
    lengths_ptr,
    num_pages,
    rank,
    queries,
    table_stride,
    table_width,
    RANKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Count for a query; the first one writes the table too. Grid: (requests * queries,).

    The last of `queries` sees all tokens, each one before it one fewer. A page outside the pool
    anywhere below the request's length, or a length beyond the table, makes every count 0.
    """
    query = tl.program_id(0) % queries
    request = (tl.program_id(0) // queries).to(tl.int64)
    length = tl.load(seqlens_ptr + request)
    visible = length - (queries - 1 - query)
    readable = (length >= 0) & (length <= table_width * PAGE_SIZE)
    needed = tl.where(readable, tl.cdiv(length, PAGE_SIZE), 0)
    pages_before = 0
    bad_pages = tl.zeros([BLOCK_COLUMNS], tl.int32)
    tokens = tl.zeros([BLOCK_COLUMNS], tl.int32)
    for start in range(0, needed, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < needed
        page = tl.load(table_ptr + request * table_stride + column, mask=inside, other=0)
        outside = (page < 0) | (page >= num_pages)
        bad_pages += (inside & outside).to(tl.int32)
        local = inside & (outside == 0) & (page % RANKS == rank)
        count = local.to(tl.int32)
        if query == 0:
            place = pages_before + tl.cumsum(count, axis=0) - count
            tl.store(local_table_ptr + request * table_width + place, page // RANKS, mask=local)
        in_page = tl.minimum(tl.maximum(visible - column * PAGE_SIZE, 0), PAGE_SIZE)
        tokens += tl.where(local, in_page, 0)
        pages_before += tl.sum(count, axis=0)
    readable = readable & (tl.sum(bad_pages, axis=0) == 0)
    found = tl.where(readable, tl.sum(tokens, axis=0), 0)
    tl.store(lengths_ptr + request * queries + query, found)
