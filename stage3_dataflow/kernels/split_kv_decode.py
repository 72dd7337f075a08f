"""Split-KV decode attention over a paged cache: the portable kernel, written to be read.

One program attends `BLOCK_ROWS` query rows of one request (a row is one query token's head) over
one split of its tokens, block by block, with the pipeline of `stage2_pv_pipeline.rescaled_pv`:

    scores   FP8 latent product first, BF16 rotary product added to it, then the scales
    softmax  running maximum and sum in base 2
    P        V's scale fused in; in FP8 also a scale sigma per row and block
    O        started from zero for every block in FP8, joined in float32

The same source serves three switches. `FP8_CACHE` off reads a BF16 cache with a BF16 query: the
honest baseline. `FP8_P` on quantises P to e4m3, as the paper does; off multiplies P in BF16 by
codes widened to BF16, which is exact for the codes and several times faster through `tl.dot`,
because an 8-bit V has to be transposed byte by byte there.

Lengths and the table are read here, on the device, so a captured CUDA graph follows them. Nothing a
request does not own is followed: table columns past its end, slots past its length (which may hold
NaN in every plane), pages outside the pool.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import (
    E4M3_MAX,
    operand,
    snap_to_e4m3,
    to_e4m3,
    to_float,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_UNIT = tl.constexpr(2.0**-60)
"""As in the pipeline: sigma never falls below this share of the largest contribution so far."""
BAD_PAGE = tl.constexpr(float("inf"))
"""lse of a split that met a page outside the pool; the combine makes the whole row empty."""


@triton.jit
def split_bounds(length, split, min_tokens, max_splits, GRANULE: tl.constexpr):
    """First and last token of a split, and how many splits this length has. Own length only.

    The tokens of all splits but the last are a multiple of `GRANULE`.
    """
    wanted = tl.minimum(max_splits, tl.cdiv(length, min_tokens))
    granules = tl.cdiv(tl.cdiv(length, GRANULE), tl.maximum(wanted, 1))
    split_tokens = tl.maximum(granules, 1) * GRANULE
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, length)
    return start, end, tl.maximum(tl.cdiv(length, split_tokens), 1)


@triton.jit
def readable_length(seqlens_ptr, request, capacity):
    """Read the cached tokens of a request; 0 where the length is not one the table could hold."""
    length = tl.load(seqlens_ptr + request)
    return tl.where((length < 0) | (length > capacity), 0, length)


@triton.jit
def load_page(page_ptr, live, num_pages):
    """Load page ids; what lies outside the pool becomes page 0, and is told."""
    page = tl.load(page_ptr, mask=live, other=0)
    outside = (page < 0) | (page >= num_pages)
    # 64 bits before it meets a stride: a pool may pass 2^31 elements.
    return tl.where(outside, 0, page).to(tl.int64), outside


@triton.jit
def online_softmax_update(max_log2, denominator, score_log2):
    """Take a block's scores in: new maximum and sum, decay of the old, probabilities."""
    new_max = tl.maximum(max_log2, tl.max(score_log2, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    decay = tl.exp2(max_log2 - shift)
    p = tl.exp2(score_log2 - shift[:, None])
    return new_max, denominator * decay + tl.sum(p, axis=1), decay, p


@triton.jit
def rescale_probabilities(u, sigma, largest_unit, decay):
    """Choose the block's sigma; give u in units of it, and O's ratio to the new unit."""
    block_unit = tl.max(u, axis=1) / E4M3_MAX
    largest_unit = tl.maximum(largest_unit * decay, block_unit)
    nothing = block_unit == 0.0
    new_sigma = tl.where(nothing, sigma, tl.maximum(block_unit, largest_unit * SMALLEST_UNIT))
    ratio = tl.where(decay > 0.0, decay * (sigma / new_sigma), 0.0)
    ratio = tl.where(nothing, decay, ratio)
    return u / new_sigma[:, None], new_sigma, largest_unit, ratio


@triton.jit(do_not_specialize=["num_pages", "capacity", "min_tokens", "max_splits", "table_stride"])
def split_kv_decode_kernel(
    q_latent_ptr,
    q_scale_ptr,
    q_rope_ptr,
    latent_ptr,
    scale_ptr,
    rope_ptr,
    table_ptr,
    seqlens_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    softmax_scale,
    num_rows,
    heads,
    num_pages,
    capacity,
    min_tokens,
    max_splits,
    q_latent_stride_batch,
    q_latent_stride_query,
    q_latent_stride_head,
    q_rope_stride_batch,
    q_rope_stride_query,
    q_rope_stride_head,
    latent_stride_page,
    latent_stride_token,
    scale_stride_page,
    scale_stride_token,
    rope_stride_page,
    rope_stride_token,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT_GRANULE: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    FP8_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend one tile of rows over one split.

    Grid: (row tiles, splits, requests). Row tiles come first, so that those of one request run
    together and share its tokens in L2. The query's scale, out and lse are contiguous.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    live_row = row < num_rows
    query, head = row // heads, row % heads
    s_q = num_rows // heads

    length = readable_length(seqlens_ptr, request, capacity)
    start, end, num_splits = split_bounds(length, split, min_tokens, max_splits, SPLIT_GRANULE)
    if split >= num_splits:
        return
    last_visible = tl.zeros_like(query) + (length - 1)  # [BLOCK_ROWS] token positions
    if CAUSAL:
        last_visible = length - s_q + query

    column, pair = tl.arange(0, LATENT), tl.arange(0, ROPE if ROPE > 0 else 1)
    q_offsets = (
        request * q_latent_stride_batch
        + query * q_latent_stride_query
        + head * q_latent_stride_head
    )
    q_latent = tl.load(
        q_latent_ptr + q_offsets[:, None] + column[None, :], mask=live_row[:, None], other=0.0
    )  # [BLOCK_ROWS, LATENT] e4m3 codes, or the query itself
    if ROPE > 0:
        q_offsets = (
            request * q_rope_stride_batch + query * q_rope_stride_query + head * q_rope_stride_head
        )
        q_rope = tl.load(
            q_rope_ptr + q_offsets[:, None] + pair[None, :], mask=live_row[:, None], other=0.0
        )
        q_rope = operand(q_rope, INTERPRETED)
    q_scale = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if FP8_CACHE:
        q_scale = tl.load(q_scale_ptr + request * num_rows + row, mask=live_row, other=0.0)
    else:
        q_latent = operand(q_latent, INTERPRETED)

    max_log2 = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    accumulator = tl.zeros([BLOCK_ROWS, LATENT], tl.float32)
    sigma = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    largest_unit = tl.zeros([BLOCK_ROWS], tl.float32)
    met_bad_page = False

    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_TOKENS == 0
    table_row_ptr = table_ptr + request * table_stride
    for block_start in tl.range(start, end, BLOCK_TOKENS, num_stages=STAGES):
        token = block_start + tl.arange(0, BLOCK_TOKENS)
        live = token < end  # what lies behind a request's end may be NaN, in every plane
        if ONE_PAGE:  # the whole block: addresses are one pointer and 32-bit offsets
            page, outside = load_page(
                table_row_ptr + block_start // PAGE_SIZE, block_start < end, num_pages
            )
            offset = block_start % PAGE_SIZE + tl.arange(0, BLOCK_TOKENS)
            latent_page_ptr = latent_ptr + page * latent_stride_page
            rope_page_ptr = rope_ptr + page * rope_stride_page
        else:
            page, outside = load_page(table_row_ptr + token // PAGE_SIZE, live, num_pages)
            offset = token % PAGE_SIZE
            latent_page_ptr = (latent_ptr + page * latent_stride_page)[:, None]
            rope_page_ptr = (rope_ptr + page * rope_stride_page)[:, None]
            outside = tl.max(outside.to(tl.int32), axis=0) > 0
        met_bad_page = met_bad_page | outside
        latent = tl.load(
            latent_page_ptr + (offset * latent_stride_token)[:, None] + column[None, :],
            mask=live[:, None],
            other=0.0,
        )  # [BLOCK_TOKENS, LATENT]

        if FP8_CACHE:
            score = tl.dot(q_latent, tl.trans(latent))  # [BLOCK_ROWS, BLOCK_TOKENS] f32
        else:
            score = tl.dot(q_latent, tl.trans(operand(latent, INTERPRETED)))
        if ROPE > 0:
            # After the latent product: a large sum in the FP8 accumulator would swallow its terms.
            rope = tl.load(
                rope_page_ptr + (offset * rope_stride_token)[:, None] + pair[None, :],
                mask=live[:, None],
                other=0.0,
            )
            score = tl.dot(q_rope, tl.trans(operand(rope, INTERPRETED)), score)
        if FP8_CACHE:
            scale = tl.load(
                scale_ptr + page * scale_stride_page + offset * scale_stride_token,
                mask=live,
                other=0.0,
            )  # [BLOCK_TOKENS] f32
            # The scales' product first: either alone could push a finite score past float32.
            score *= q_scale[:, None] * scale[None, :] * softmax_scale
        else:
            score *= softmax_scale
        visible = live[None, :] & (token[None, :] <= last_visible[:, None])
        score_log2 = tl.where(visible, score * LOG2_E, float("-inf"))

        max_log2, denominator, decay, p = online_softmax_update(max_log2, denominator, score_log2)
        if FP8_CACHE:
            p *= scale[None, :]  # V's scale, fused
        if FP8_P:
            p, sigma, largest_unit, ratio = rescale_probabilities(p, sigma, largest_unit, decay)
            if INTERPRETED:
                tile = tl.dot(snap_to_e4m3(p), latent.to(tl.float32))
            else:
                tile = tl.dot(to_e4m3(p, INTERPRETED), latent)
            accumulator = accumulator * ratio[:, None] + tile
        else:
            accumulator *= decay[:, None]
            values = operand(latent.to(tl.float32).to(tl.bfloat16), INTERPRETED)
            p = operand(to_float(p, tl.bfloat16, INTERPRETED), INTERPRETED)
            accumulator = tl.dot(p, values, accumulator)

    seen = denominator != 0.0  # a NaN that a row has seen stays a NaN
    denominator = tl.where(seen, denominator, 1.0)
    accumulator *= (sigma / denominator)[:, None]
    lse = tl.where(seen, (max_log2 + tl.log2(denominator)) * LN_2, float("-inf"))

    if num_splits > 1:
        place = (request * tl.num_programs(1) + split) * num_rows + row
        lse = tl.where(met_bad_page, BAD_PAGE, lse)
        tl.store(partial_lse_ptr + place, lse, mask=live_row)
        tl.store(
            partial_out_ptr + place[:, None] * LATENT + column[None, :],
            accumulator,
            mask=live_row[:, None],
        )
    else:
        # A bad page makes the row empty; a NaN that came along goes too.
        accumulator = tl.where(met_bad_page, 0.0, accumulator)
        lse = tl.where(met_bad_page, float("-inf"), lse)
        place = request * num_rows + row
        tl.store(lse_ptr + place, lse, mask=live_row)
        tl.store(
            out_ptr + place[:, None] * LATENT + column[None, :],
            to_float(accumulator, out_ptr.dtype.element_ty, INTERPRETED),
            mask=live_row[:, None],
        )
