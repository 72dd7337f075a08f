"""Rounding to FP8 and BF16 inside a kernel, right on a GPU and under Triton's interpreter.

A GPU has instructions for it: ``cvt.rn.satfinite.e4m3x2.f32`` rounds to nearest even, saturating.
The interpreter (``TRITON_INTERPRET=1``) casts through NumPy code of its own, which truncates to
BF16, loses carries into the next binade of e4m3 (31.0 becomes 16.0) and wraps above 448. So each
helper takes `INTERPRETED` and then works on the float32 bits instead. All values of both ways are
equal, which the tests of this module show over every code and every midpoint.

NaN goes through all of them. `tl.max` and `tl.minimum` drop it unless told otherwise.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
E4M3_ROUNDS_TO_MAX = tl.constexpr(464.0)
E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
E4M3_NAN_CODE = tl.constexpr(0x7F)
SMALLEST_SCALE = tl.constexpr(2.0**-40)
BF16_MAX = tl.constexpr(3.3895313892515355e38)  # (2 - 2^-7) 2^127
LATENT_MAX = tl.constexpr(240.0 * 2.0**120)
RINT_MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds a float32 below 2^22 to an integer, ties to even."""


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """Limit to +-LIMIT; NaN stays NaN."""
    low = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def snap_to_e4m3(x):
    """Give the e4m3 number nearest to x (ties to even) as float32; clamped first, NaN stays."""
    x = clamp(x, E4M3_MAX)
    # The leading power of two, at least that of subnormals: exponent bits of |x|, mantissa cut.
    magnitude = tl.maximum(tl.abs(x), E4M3_SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.NONE)
    binade = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = binade * 0.125  # three mantissa bits
    size = (tl.abs(x) / step + RINT_MAGIC - RINT_MAGIC) * step
    sign = x.to(tl.int32, bitcast=True) & -0x80000000  # that of zero too
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """Give the e4m3 byte of a float32 that is an e4m3 number already, as uint8 bits in int32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    normal = ((bits >> 20) & 0x7FF) - ((127 - 7) << 3)  # exponent and three mantissa bits, rebased
    is_subnormal = tl.abs(x) < E4M3_SMALLEST_NORMAL  # not where x is NaN, which no integer can be
    subnormal = (tl.where(is_subnormal, tl.abs(x), 0.0) * 512.0).to(tl.int32)
    code = sign | tl.where(is_subnormal, subnormal, normal)
    return tl.where(x != x, E4M3_NAN_CODE, code)


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """Round float32 to float8e4nv: nearest, ties to even, saturating at 448; NaN stays NaN."""
    if INTERPRETED:
        return e4m3_code(snap_to_e4m3(x)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def to_float(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to a float dtype, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        # A NaN could carry into infinity, or lose all the bits that make it one: make it quiet.
        rounded = tl.where(x != x, bits | 0x00400000, rounded)
        return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(DTYPE)


@triton.jit
def operand(x, INTERPRETED: tl.constexpr):
    """Widen an operand of a BF16 dot for the interpreter, whose BF16 dot is wrong."""
    if INTERPRETED:
        return x.to(tl.float32)
    return x


@triton.jit
def row_amax(x):
    """Largest magnitude along the last axis; NaN where the row has one.

    Magnitudes are ordered as their bits are, and every NaN is above infinity there.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=-1).to(tl.float32, bitcast=True)


@triton.jit
def token_scale(amax, POW2: tl.constexpr):
    """Scale of a row from its largest magnitude, as `stage1_quant.quantize.token_scale`."""
    if POW2:
        floor = E4M3_ROUNDS_TO_MAX * SMALLEST_SCALE
        amax = tl.maximum(amax, floor, propagate_nan=tl.PropagateNan.ALL)
        # Rounded up to a power of two: any mantissa bit carries into the exponent.
        ratio = tl.div_rn(amax, tl.full(amax.shape, E4M3_ROUNDS_TO_MAX, tl.float32))
        bits = (ratio.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        return tl.where(amax != amax, amax, bits.to(tl.float32, bitcast=True))
    floor = E4M3_MAX * SMALLEST_SCALE
    amax = tl.maximum(amax, floor, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))


@triton.jit
def divide_rows(x, scale, POW2: tl.constexpr):
    """Divide each row by its scale, correctly rounded.

    By a power of two as a product, which rounds alike: a division takes about ten instructions.
    """
    if POW2:
        return x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    x, scale = tl.broadcast(x, scale[:, None])
    return tl.div_rn(x, scale)
