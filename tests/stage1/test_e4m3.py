"""The cast to e4m3, byte for byte, against a table of what its 256 codes stand for.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stage1_quant.e4m3 import E4M3_MAX, E4M3_ROUNDS_TO_MAX, decode_e4m3, encode_e4m3
from tests.strategies import layouts, seeds, with_layout

pytestmark = pytest.mark.stage1

NAN_CODE = 0x7F


@functools.cache
def magnitudes() -> tuple[Fraction, ...]:
    """Values of the codes 0x00 to 0x7E: 4 bits of exponent with bias 7, 3 of mantissa."""
    return tuple(
        Fraction(mantissa, 2**9)
        if exponent == 0
        else (8 + mantissa) * Fraction(2) ** (exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # NaN
    )


def value_of(code: int) -> float:
    """Value of a byte: the sign in its top bit."""
    if code & 0x7F == NAN_CODE:
        return math.nan
    return math.copysign(float(magnitudes()[code & 0x7F]), -1 if code & 0x80 else 1)


def nearest_code(x: float) -> int:
    """Byte of the nearest value, of two equally near ones the even byte, in exact arithmetic.

    Neighbouring values have consecutive codes, so the even code is the even mantissa.
    """
    if math.isnan(x):
        return NAN_CODE
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    table = magnitudes()
    size = table[-1] if math.isinf(x) else min(Fraction(abs(x)), table[-1])
    above = bisect.bisect_left(table, size)
    if table[above] == size:
        return sign | above
    down, up = size - table[above - 1], table[above] - size
    if down == up:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if up < down else above - 1)


def to_bytes(codes: Tensor) -> list[int]:
    assert codes.dtype == torch.float8_e4m3fn
    return codes.view(torch.uint8).flatten().tolist()


def assert_rounds_to_nearest(x: Tensor) -> None:
    for value, got in zip(x.flatten().tolist(), to_bytes(encode_e4m3(x)), strict=True):
        want = nearest_code(value)
        assert got == want, (
            f"{value!r} must become {want:#04x} = {value_of(want)}; "
            f"got {got:#04x} = {value_of(got)}"
        )


def with_neighbours(values: Iterable[Fraction]) -> Tensor:
    """Float32 values of both signs, each with the next float32 below and above."""
    exact = np.array([float(value) for value in values], dtype=np.float32)
    three = (
        exact,
        np.nextafter(exact, np.float32(-np.inf)),
        np.nextafter(exact, np.float32(np.inf)),
    )
    return torch.from_numpy(np.concatenate([*three, *(-x for x in three)]))


def midpoints() -> list[Fraction]:
    table = magnitudes()
    return [(low + high) / 2 for low, high in zip(table, table[1:], strict=False)]


def test_the_table_is_what_the_format_says():
    table = magnitudes()
    assert len(table) == 127
    assert list(table) == sorted(set(table))
    assert (table[1], table[8], table[-1]) == (Fraction(1, 512), Fraction(1, 64), Fraction(448))
    assert E4M3_MAX == 448
    assert E4M3_ROUNDS_TO_MAX == (448 + 480) / 2  # 480 is where 0x7F would be, were it not NaN


def test_decoding_gives_the_value_of_every_code():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    decoded = decode_e4m3(codes)
    assert decoded.dtype == torch.float32
    for code, value in enumerate(decoded.tolist()):
        expected = value_of(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), hex(code)
        assert math.isnan(value) or math.copysign(1, value) == math.copysign(1, expected)


def test_every_code_round_trips():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = list(range(256))
    expected[0xFF] = NAN_CODE  # both NaNs are written as the positive one
    assert to_bytes(encode_e4m3(decode_e4m3(codes))) == expected


def test_midpoints_tie_to_even_and_their_neighbours_do_not():  # FR-20
    points = with_neighbours(midpoints())
    assert len(points) == 6 * 126
    assert_rounds_to_nearest(points)


def test_values_and_their_neighbours_round_to_the_value():
    assert_rounds_to_nearest(with_neighbours(magnitudes()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(126.24, 128.0), (124.0, 128.0), (1.0625, 1.0), (1.0625001, 1.125), (2.0**-10, 0.0)],
)
def test_carries_ties_and_subnormals_round_once(value, expected):  # FR-20
    assert decode_e4m3(encode_e4m3(torch.tensor([value, -value]))).tolist() == [expected, -expected]


def test_values_above_448_clamp_and_nan_stays_nan():  # FR-12
    values = [448, 464, 464.01, 465, -1000, math.inf, -math.inf, math.nan, -math.nan]
    codes = to_bytes(encode_e4m3(torch.tensor(values)))
    assert codes == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, NAN_CODE, NAN_CODE]


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0x7FFFFFFF], ids=hex)
@pytest.mark.parametrize("sign", [0, 1 << 31], ids=["positive", "negative"])
def test_nan_is_one_byte_whatever_its_payload(payload, sign):
    bits = torch.tensor([payload | sign], dtype=torch.int64).to(torch.int32)
    assert to_bytes(encode_e4m3(bits.view(torch.float32))) == [NAN_CODE]


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@example([0.0, -0.0, 1e-45, -1e-45])
def test_any_float32_rounds_to_nearest(values):
    assert_rounds_to_nearest(torch.tensor(values))


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=40))
def test_any_float32_in_range_rounds_to_nearest(values):
    assert_rounds_to_nearest(torch.tensor(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_all_16_bit_numbers_round_to_nearest(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    codes = to_bytes(encode_e4m3(numbers))
    assert codes == [nearest_code(value) for value in numbers.tolist()]


@given(layout=layouts(), seed=seeds(), shape=st.tuples(*[st.integers(1, 5)] * 3))
def test_memory_layout_changes_no_byte(layout, seed, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 200
    view = with_layout(x, layout)
    codes = encode_e4m3(view)
    assert codes.shape == x.shape
    assert to_bytes(codes.contiguous()) == to_bytes(encode_e4m3(x))
    assert torch.equal(decode_e4m3(codes), decode_e4m3(encode_e4m3(x)))


def test_the_input_is_left_as_it_was():
    x = torch.tensor([1000.0, math.nan, 1.0625])
    encode_e4m3(x)
    assert x.tolist()[::2] == [1000.0, 1.0625]
    assert math.isnan(x[1])


def test_float64_is_refused():
    with pytest.raises(TypeError, match=r"x must be float32 or narrower; got float64.*x\.float\("):
        encode_e4m3(torch.ones(1, dtype=torch.float64))


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bytes():
    generator = torch.Generator().manual_seed(0)
    binades = torch.randint(-30, 30, (10**6,), generator=generator)
    x = torch.cat(
        (
            with_neighbours(midpoints()),
            with_neighbours(magnitudes()),
            torch.tensor([464, 464.01, 465, math.inf, -math.inf, math.nan, -math.nan, -0.0, 1e-45]),
            torch.ldexp(torch.randn(10**6, generator=generator), binades),
        )
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = x.to(dtype)
        on_gpu = encode_e4m3(numbers.cuda()).view(torch.uint8).cpu()
        assert torch.equal(on_gpu, encode_e4m3(numbers).view(torch.uint8))
