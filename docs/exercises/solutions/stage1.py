"""Answers for stage 1."""

from __future__ import annotations

import torch
from torch import Tensor

from stage1_quant import decode_e4m3, encode_e4m3


def pow2_scale(amax: Tensor) -> Tensor:
    """Take the exponent from the number itself: frexp is exact where log2 is not."""
    mantissa, exponent = torch.frexp(amax.clamp(min=464.0 * 2.0**-40) / 464.0)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(amax), exponent)


def quantize_row(c_kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take the scale from the latent alone; rope is only divided by it."""
    scale = pow2_scale(c_kv.float().abs().amax(-1))
    codes = encode_e4m3(c_kv.float() / scale[:, None])
    return codes, scale, (k_rope.float() / scale[:, None]).bfloat16()


def scaled_score(
    query: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Latent product first, rotary product after it, scales last."""
    aligned = decode_e4m3(query[0]) @ decode_e4m3(key[0]).T
    aligned = aligned + query[2].float() @ key[2].float().T
    return aligned * (query[1][:, None] * key[1][None, :])


def read_back(codes: Tensor, scale: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply in float32; with a power of two the result is a BF16 number."""
    factor = scale[:, None]
    return (decode_e4m3(codes) * factor).bfloat16(), (rope.float() * factor).bfloat16()
