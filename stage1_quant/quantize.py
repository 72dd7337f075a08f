"""RoPE-aware per-token quantisation: the latent to e4m3 with one scale, the rotary part aligned.

A token's latent is quantised with its own scale, known the moment the token exists: appending
never touches another token. Its rotary key keeps BF16, because rotary dimensions reach values tens
of times the latent's and would saturate or starve a shared grid, and because the softmax is most
sensitive to them. It is *divided by the latent's scale* before it is stored (domain alignment):

    q . k = q_scale * scale * (q_codes . codes + q_rope' . rope')

and one accumulator serves both products, with the scales applied once behind it.

The query is quantised the same way, per token and head.

References
----------
SnapMLA (arXiv 2602.10718), section 3.1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from stage0_reference.latent_cache import LatentRows
from stage1_quant.e4m3 import E4M3_MAX, E4M3_ROUNDS_TO_MAX, decode_e4m3, encode_e4m3

ScaleFormat = Literal["amax", "pow2"]
DEFAULT_SCALE_FORMAT: ScaleFormat = "pow2"
"""Chosen by the sensitivity study; its README says why."""

SMALLEST_SCALE = 2.0**-40
"""Floor under the scale. A token whose latent is all zero may still have a live rotary key, which
is divided by this: rotary values up to 2^16 on both sides become 2^56, their product over 64
dimensions 2^118, inside float32. A floor near 1e-29 would overflow to infinity there, and NaN."""

BF16_MAX = torch.finfo(torch.bfloat16).max

LATENT_MAX = 240.0 * 2.0**120
"""Latents are clamped to this, 15/16 of BF16's largest number. Under the scale 2^120 the next code
up is 256, which stands for 2^128: dequantised, it would be infinite in float32."""


class QuantizedRows(NamedTuple):
    """Some tokens (or a query's tokens and heads) in the scaled domain.

    Attributes
    ----------
    codes
        float8_e4m3fn [..., kv_lora_rank].
    scale
        float32 [...]; ``codes * scale`` gives the latent, ``rope * scale`` the rotary part.
    rope
        bfloat16 [..., qk_rope_head_dim], divided by the scale.
    """

    codes: Tensor
    scale: Tensor
    rope: Tensor


def check_scale_format(scale_format: str) -> None:
    """Refuse an unknown scale format by name."""
    if scale_format not in get_args(ScaleFormat):
        raise ValueError(
            f"scale_format must be one of {', '.join(get_args(ScaleFormat))}; got {scale_format!r}"
        )


def token_scale(
    amax: Float[Tensor, " *tokens"], scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT
) -> Float[Tensor, " *tokens"]:
    """Scale of a token from the largest magnitude of its latent.

    Parameters
    ----------
    amax
        float32, at least 0; NaN gives NaN.
    scale_format
        "amax" (the paper's): ``max(amax, 448 x 2^-40) / 448``, so the largest element becomes
        448. "pow2": ``2^ceil(log2(amax / 464))``, at least 2^-40: the smallest power of two with
        which the largest element still rounds to at most 448. Dividing by it is exact, and
        quantising a dequantised row gives the same bytes back.

    Returns
    -------
    Tensor
        float32, positive.
    """
    check_scale_format(scale_format)
    if scale_format == "amax":
        return divide(amax.clamp(min=E4M3_MAX * SMALLEST_SCALE), E4M3_MAX)
    # frexp gives ratio = mantissa * 2^exponent with mantissa in [0.5, 1): exact, unlike log2.
    ratio = divide(amax.clamp(min=E4M3_ROUNDS_TO_MAX * SMALLEST_SCALE), E4M3_ROUNDS_TO_MAX)
    finite = ratio.nan_to_num(nan=1.0)
    mantissa, exponent = torch.frexp(finite)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(finite), exponent)
    return scale.masked_fill(amax.isnan(), float("nan"))


def divide(x: Float[Tensor, "*shape"], divisor: float) -> Float[Tensor, "*shape"]:
    """Divide by a number, rounding once: on CUDA ``x / 448.0`` multiplies by a rounded 1 / 448."""
    return x / torch.full_like(x, divisor)


def quantize_rows(
    c_kv: Float[Tensor, "*tokens kv_lora_rank"],
    k_rope: Float[Tensor, "*tokens qk_rope_head_dim"],
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> QuantizedRows:
    """Quantise tokens, RoPE-aware.

    Parameters
    ----------
    c_kv, k_rope
        Latents (normed) and rotary parts (rotated), any float dtype; computed in float32.
        Infinities count as the largest number: `LATENT_MAX` in a latent, BF16's in a rotary part.
        A NaN in a latent makes that token NaN, one in its rotary part stays there; no other token
        changes.
    scale_format
        See `token_scale`.

    Returns
    -------
    QuantizedRows
        ``|codes * scale - c_kv| <= max(2^-4 |c_kv|, 2^-10 scale)`` up to float32 rounding, and
        ``rope * scale`` within BF16's rounding of k_rope, for ``|k_rope| <= 2^16`` and any latent
        (an aligned value beyond BF16's range saturates).

    Raises
    ------
    ValueError
        `c_kv` and `k_rope` are not of the same tokens, or an unknown scale format.
    """
    if k_rope.shape[:-1] != c_kv.shape[:-1]:
        raise ValueError(
            f"k_rope must have c_kv's tokens, {list(c_kv.shape[:-1])}; "
            f"got {list(k_rope.shape[:-1])}"
        )
    latent = c_kv.float().clamp(-LATENT_MAX, LATENT_MAX)
    rotary = k_rope.float().clamp(-BF16_MAX, BF16_MAX)
    scale = token_scale(latent.abs().amax(dim=-1), scale_format)
    aligned = (rotary / scale[..., None]).clamp(-BF16_MAX, BF16_MAX)
    return QuantizedRows(encode_e4m3(latent / scale[..., None]), scale, aligned.to(torch.bfloat16))


def dequantize_rows(rows: QuantizedRows) -> LatentRows:
    """Latents and rotary parts that the codes stand for, float32."""
    scale = rows.scale[..., None]
    return LatentRows(decode_e4m3(rows.codes) * scale, rows.rope.float() * scale)


def quantize_q(
    q_latent: Float[Tensor, "batch s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "batch s_q heads qk_rope_head_dim"],
    scale_format: ScaleFormat = DEFAULT_SCALE_FORMAT,
) -> QuantizedRows:
    """Quantise an absorbed query per token and head, by the same rule as the cache.

    Returns
    -------
    QuantizedRows
        q_codes [batch, s_q, heads, kv_lora_rank], q_scale [batch, s_q, heads] and the rotary query
        divided by it.
    """
    return quantize_rows(q_latent, q_rope, scale_format)
