"""The FP8 format e4m3, and one honest way into it.

e4m3fn has 4 exponent bits, 3 mantissa bits and no infinity. Its numbers are

=================  ===========================================================
448                the largest; 464 is the largest that still rounds to it
2^-6               the smallest normal
2^-9               the smallest subnormal, and the spacing below 2^-6
2^-4               unit roundoff: half the spacing between 1 and the next, 1.125
=================  ===========================================================

What a cast does above 448 differs: NaN in one stack, 448 in another, and PyTorch's own CPU cast
changed between versions. So every value is clamped before it is cast. What remains, rounding to
nearest with ties to even, is the same everywhere.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
"""448."""

E4M3_ROUNDS_TO_MAX = 464.0
"""The largest value that rounding to nearest takes to 448: the tie between 448 and 480."""

E4M3_NAN_CODE = 0x7F
"""The one byte that NaN is written as (e4m3fn has two, which differ in sign)."""


def encode_e4m3(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round to e4m3: clamp to +-448, then nearest with ties to even. NaN stays NaN.

    Parameters
    ----------
    x
        Float32 or narrower (a float64 value would be rounded twice). Infinities clamp to +-448.

    Returns
    -------
    Tensor
        float8_e4m3fn. The same bytes on CPU and GPU.

    Raises
    ------
    TypeError
        `x` is float64.
    """
    if x.dtype == torch.float64:
        raise TypeError("x must be float32 or narrower; got float64. Use x.float()")
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    as_bytes = codes.view(torch.uint8)
    return as_bytes.masked_fill(x.isnan(), E4M3_NAN_CODE).view(torch.float8_e4m3fn)


def decode_e4m3(codes: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Give the values of e4m3 codes, exactly, as float32."""
    return codes.float()
