"""Fused-Fetch-Dequant: rows of a cached prefix to BF16, for chunked prefill over it.

The grid covers the rows asked for, not the pool. Its meaning is
`stage1_quant.fp8_latent_cache.fetch_dequant`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import BF16_MAX, clamp, to_float


@triton.jit
def fetch_dequant_kernel(
    codes_ptr,
    scale_ptr,
    rope_ptr,
    table_ptr,
    request_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    batch,
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
    """Copy a block of packed rows.

    `request` names each row's request, `starts` where a request's rows begin. A row of no request
    (behind the last one) comes out 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = row < num_rows
    request = tl.load(request_ptr + row, mask=inside, other=batch).to(tl.int64)
    live = request < batch
    token = row - tl.load(starts_ptr + request, mask=live, other=0)
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
