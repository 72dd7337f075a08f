"""Fused-Fetch-Dequant: rows of a cached prefix to BF16, for chunked prefill over it.

The grid covers the rows asked for, not the pool. Its meaning is
`stage1_quant.fp8_latent_cache.fetch_dequant`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import BF16_MAX, clamp, to_float


@triton.jit(do_not_specialize=["num_pages", "table_stride", "table_width"])
def readable_lengths_kernel(
    table_ptr,
    seqlens_ptr,
    lengths_ptr,
    num_pages,
    table_stride,
    table_width,
    PAGE_SIZE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Write each request's length; 0 where it or a page it needs is not one the pool could have."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seqlens_ptr + request)
    readable = (length >= 0) & (length <= table_width * PAGE_SIZE)
    needed = tl.where(readable, tl.cdiv(length, PAGE_SIZE), 0)
    for start in range(0, needed, BLOCK_PAGES):
        column = start + tl.arange(0, BLOCK_PAGES)
        page = tl.load(table_ptr + request * table_stride + column, mask=column < needed, other=0)
        outside = (page < 0) | (page >= num_pages)
        readable = readable & (tl.max(outside.to(tl.int32), axis=0) == 0)
    tl.store(lengths_ptr + request, tl.where(readable, length, 0))


@triton.jit
def request_of_rows(ends_ptr, row, batch, steps):
    """Find the request that each packed row belongs to, by bisection; `batch` behind the last.

    Not unrolled: Triton 3.6 fails to compile some numbers of unrolled steps.
    """
    low = tl.zeros(row.shape, tl.int32)
    high = low + batch
    for _ in range(steps):
        middle = (low + high) // 2
        open_interval = low < high
        behind = tl.load(ends_ptr + middle, mask=open_interval, other=0) <= row
        low = tl.where(open_interval & behind, middle + 1, low)
        high = tl.where(open_interval & (behind == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["num_rows", "batch", "steps", "num_pages", "table_stride"])
def fetch_dequant_kernel(
    codes_ptr,
    scale_ptr,
    rope_ptr,
    table_ptr,
    lengths_ptr,
    ends_ptr,
    out_ptr,
    num_rows,
    batch,
    steps,
    num_pages,
    table_stride,
    codes_stride_page,
    codes_stride_token,
    scale_stride_page,
    scale_stride_token,
    rope_stride_page,
    rope_stride_token,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Copy a block of packed rows; `ends` is the running sum of `lengths`.

    A row of no request (behind the last one) comes out 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = row < num_rows
    request = request_of_rows(ends_ptr, row, batch, steps).to(tl.int64)
    live = inside & (request < batch)
    end = tl.load(ends_ptr + request, mask=live, other=0)
    token = row - end + tl.load(lengths_ptr + request, mask=live, other=0)
    page = tl.load(table_ptr + request * table_stride + token // PAGE_SIZE, mask=live, other=0).to(
        tl.int64
    )
    live = live & (page >= 0) & (page < num_pages)
    page = tl.where(live, page, 0)
    offset = token % PAGE_SIZE
    target = row * (LATENT + ROPE)

    scale = tl.load(
        scale_ptr + page * scale_stride_page + offset * scale_stride_token, mask=live, other=0.0
    )  # [BLOCK_TOKENS] f32
    column = tl.arange(0, LATENT)
    place = page * codes_stride_page + offset * codes_stride_token
    codes = tl.load(codes_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0)
    latent = clamp(codes.to(tl.float32) * scale[:, None], BF16_MAX)
    tl.store(
        out_ptr + target[:, None] + column[None, :],
        to_float(latent, tl.bfloat16, INTERPRETED),
        mask=inside[:, None],
    )
    if ROPE > 0:
        column = tl.arange(0, ROPE)
        place = page * rope_stride_page + offset * rope_stride_token
        aligned = tl.load(
            rope_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0
        )
        rotary = clamp(aligned.to(tl.float32) * scale[:, None], BF16_MAX)
        tl.store(
            out_ptr + target[:, None] + LATENT + column[None, :],
            to_float(rotary, tl.bfloat16, INTERPRETED),
            mask=inside[:, None],
        )
