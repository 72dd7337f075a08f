"""Fused-K-Append: norm, rotate, quantise, align and write a token into its slot, in one launch.

One program takes `BLOCK_TOKENS` tokens. A token whose slot is negative, or past the pool, writes
nothing. Norm and rotation can each be left out by a caller that has done them. With `FP8_CACHE` off
the same kernel writes a BF16 cache, for the baseline. Its meaning is
`stage3_dataflow.write_references.fused_k_append_reference`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rotary import load_rotated
from stage3_dataflow.kernels.rounding import (
    BF16_MAX,
    LATENT_MAX,
    clamp,
    divide_rows,
    row_amax,
    to_e4m3,
    to_float,
    token_scale,
)


@triton.jit
def rms_norm(x, weight, eps, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``x / rms(x) * weight``, rounded to the input's dtype as the unfused layer rounds it."""
    mean_square = tl.sum(x * x, axis=1) / x.shape[1]
    normed = x * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :]
    return to_float(normed, DTYPE, INTERPRETED).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def fused_k_append_kernel(
    c_kv_ptr,
    k_rope_ptr,
    slot_ptr,
    norm_weight_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scale_ptr,
    rope_ptr,
    num_tokens,
    num_slots,
    norm_eps,
    c_kv_stride,
    k_rope_stride,
    angle_stride,
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
    FP8_CACHE: tl.constexpr,
    POW2: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Append tokens to one layer's three planes."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = token < num_tokens
    slot = tl.load(slot_ptr + token, mask=live, other=-1).to(tl.int64)
    written = (slot >= 0) & (slot < num_slots)
    slot = tl.where(written, slot, 0)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE

    column = tl.arange(0, LATENT)
    latent = tl.load(
        c_kv_ptr + token[:, None] * c_kv_stride + column[None, :],
        mask=written[:, None],
        other=0.0,
    ).to(tl.float32)  # [BLOCK_TOKENS, LATENT]
    # All loads before what waits for the first.
    if ROPE > 0:
        first, second = load_rotated(
            k_rope_ptr,
            token * k_rope_stride,
            written,
            cos_ptr,
            sin_ptr,
            token * angle_stride,
            ROPE,
            ROTATE,
            INTERLEAVED,
            INTERPRETED,
        )

    if NORM:
        weight = tl.load(norm_weight_ptr + column).to(tl.float32)
        latent = rms_norm(latent, weight, norm_eps, c_kv_ptr.dtype.element_ty, INTERPRETED)
    scale = tl.full([BLOCK_TOKENS], 1.0, tl.float32)
    if FP8_CACHE:
        latent = clamp(latent, LATENT_MAX)
        scale = token_scale(row_amax(latent), POW2)
        codes = to_e4m3(divide_rows(latent, scale, POW2), INTERPRETED)
    else:
        codes = to_float(latent, tl.bfloat16, INTERPRETED)
    place = page * codes_stride_page + offset * codes_stride_token
    tl.store(codes_ptr + place[:, None] + column[None, :], codes, mask=written[:, None])
    if FP8_CACHE:
        place = page * scale_stride_page + offset * scale_stride_token
        tl.store(scale_ptr + place, scale, mask=written)

    if ROPE > 0:
        pair = tl.arange(0, ROPE // 2)
        place = page * rope_stride_page + offset * rope_stride_token
        target = rope_ptr + place[:, None] + pair[None, :]
        if FP8_CACHE:
            first = clamp(divide_rows(clamp(first, BF16_MAX), scale, POW2), BF16_MAX)
            second = clamp(divide_rows(clamp(second, BF16_MAX), scale, POW2), BF16_MAX)
        tl.store(target, to_float(first, tl.bfloat16, INTERPRETED), mask=written[:, None])
        tl.store(
            target + ROPE // 2, to_float(second, tl.bfloat16, INTERPRETED), mask=written[:, None]
        )
