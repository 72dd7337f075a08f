"""Stage 1: put a token into 644 bytes.

Replace each ``raise NotImplementedError`` and ask

    python -m docs.exercises.check stage1

You may use ``stage1_quant.encode_e4m3``, which clamps and rounds, and ``decode_e4m3``. Chapter 20
has the ideas.
"""

from __future__ import annotations

from torch import Tensor


def pow2_scale(amax: Tensor) -> Tensor:
    """Smallest power of two under which a row still fits, float32.

    `amax` is float32, at least 0. The largest element, divided by the scale, must round to at most
    448; 464 is the largest number that does. No scale is below 2^-40. Beware of logarithms: at an
    exact power of two they may fall on either side.
    """
    raise NotImplementedError


def quantize_row(c_kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens [tokens, latent] and [tokens, rope]: codes, scale and aligned rope.

    codes are float8_e4m3fn, scale float32 [tokens] (as `pow2_scale`), rope bfloat16 and in the
    units of the codes.
    """
    raise NotImplementedError


def scaled_score(
    query: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Score quantised queries against quantised keys, float32 [queries, keys].

    Both are (codes, scale, rope) as `quantize_row` gives them. Widen codes and rope to float32, add
    both products in one accumulator, and apply the scales once, behind it.
    """
    raise NotImplementedError


def read_back(codes: Tensor, scale: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Latent and rotary key that quantised tokens stand for, bfloat16.

    Appending them again must give the same bytes.
    """
    raise NotImplementedError
