"""The device helpers round as stage 1 does: every code, every midpoint, what does not fit, NaN.

Interpreted without a GPU, where Triton's own casts are wrong (FR-20); by instructions of the GPU
otherwise. FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage1_quant.e4m3 import decode_e4m3, encode_e4m3
from stage1_quant.quantize import token_scale
from stage3_dataflow.execution_path import is_interpreting
from tests.stage3.cached_requests import as_bytes, meets_nan

pytestmark = pytest.mark.stage3

BLOCK, ROWS = 1024, 64


def rounded(values, device):
    """E4m3 codes, their values by `snap_to_e4m3`, and BF16 of float32 values, on the CPU."""
    from tests.stage3.rounding_probe import round_kernel

    x = values.float().contiguous().to(device)
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    snapped, narrow = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    round_kernel[(-(-len(x) // BLOCK),)](
        x, codes, snapped, narrow, len(x), BLOCK=BLOCK, INTERPRETED=is_interpreting()
    )
    return codes.cpu(), snapped.cpu(), narrow.cpu()


def neighbours(x):
    """Float32 numbers, with those next to them on either side."""
    bits = x.view(torch.int32)
    return torch.cat((x, *((bits + by).view(torch.float32) for by in (-1, 1))))


def assert_rounds(values, device):
    codes, snapped, narrow = rounded(values, device)
    expected = encode_e4m3(values.float())
    is_nan = values.isnan()
    # NaN has two bytes, which differ in sign, and on a GPU keeps its sign
    same = (as_bytes(codes) == as_bytes(expected)) | (is_nan & decode_e4m3(codes).isnan())
    assert bool(same.all()), (values[~same][:5], as_bytes(codes)[~same][:5])
    assert torch.equal(snapped.nan_to_num(nan=1e9), decode_e4m3(expected).nan_to_num(nan=1e9))
    wanted = values.float().bfloat16()
    assert torch.equal(narrow.isnan(), wanted.isnan())
    assert torch.equal(as_bytes(narrow[~is_nan]), as_bytes(wanted[~is_nan]))


@meets_nan
def test_all_codes_are_their_own_rounding(device):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = decode_e4m3(codes)
    assert_rounds(values, device)
    number = ~values.isnan()
    assert torch.equal(as_bytes(rounded(values[number], device)[0]), as_bytes(codes)[number])


def test_all_midpoints_and_their_neighbours(device):
    """FR-20: ties to even; a carry into the next binade; the smallest subnormal's half is 0."""
    values = decode_e4m3(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    midpoints = neighbours((values[1:] + values[:-1]) / 2)
    near = neighbours(values[1:])
    both = torch.cat((midpoints, near))
    assert_rounds(torch.cat((both, -both)), device)
    named = torch.tensor([126.24, 124.0, 1.0625, 1.0625001, 2.0**-10, 31.0])
    assert rounded(named, device)[1].tolist() == [128.0, 128.0, 1.0, 1.125, 0.0, 32.0]


def test_what_does_not_fit_is_the_largest_number(device):  # FR-12
    values = torch.tensor(
        [448.0, 456.0, 463.99, 464.0, 464.01, 465.0, 480.0, 1000.0, 1e30, 3.4e38, math.inf]
    )
    for sign in (1.0, -1.0):
        assert_rounds(sign * values, device)
        assert rounded(sign * values, device)[1].tolist() == [sign * 448.0] * len(values)


@meets_nan
def test_nan_stays_nan(device):
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32)
    codes, snapped, narrow = rounded(bits.view(torch.float32), device)
    for part in (decode_e4m3(codes), snapped, narrow):
        assert bool(part.isnan().all())


def test_zeros_and_subnormals_of_float32(device):
    smallest = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-30, 2.0**-11])
    assert_rounds(torch.cat((smallest[3:], -smallest[3:])), device)
    codes, snapped, _ = rounded(torch.cat((smallest, -smallest)), device)
    assert not bool(snapped.any())
    assert as_bytes(codes).tolist() == [0x00] * 6 + [0x80] * 6  # the sign of zero


def test_all_bf16_midpoints_of_some_binades(device):
    mantissa = torch.arange(128, dtype=torch.int32) << 16
    exponents = torch.tensor([1, 2, 100, 127, 128, 253, 254], dtype=torch.int32) << 23
    numbers = (exponents[:, None] + mantissa).flatten()
    midpoints = (numbers + 0x8000).view(torch.float32)
    values = neighbours(midpoints)
    _, _, narrow = rounded(torch.cat((values, -values)), device)
    wanted = torch.cat((values, -values)).bfloat16()
    assert torch.equal(as_bytes(narrow), as_bytes(wanted))


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=200))
@settings(max_examples=20)
def test_any_number(device, values):
    normal = torch.tensor(values)
    # a GPU's multiplications may flush what is below float32's normal numbers; e4m3's 0 either way
    assert_rounds(normal.masked_fill(normal.abs() < 2.0**-126, 0.0), device)


# Scales


def scaled(rows, pow2, device):
    from tests.stage3.rounding_probe import scale_kernel

    x = rows.float().contiguous().to(device)
    amax, scale = torch.empty(2, len(x), device=device)
    quotient = torch.empty_like(x)
    grid = (-(-len(x) // ROWS),)
    scale_kernel[grid](x, amax, scale, quotient, len(x), ROWS=ROWS, WIDTH=x.shape[1], POW2=pow2)
    return amax.cpu(), scale.cpu(), quotient.cpu()


@pytest.mark.parametrize("pow2", [False, True])
def test_scales_at_every_power_of_two_and_around(device, pow2):
    """The scale changes right behind 464 times a power of two, or is a division that rounds."""
    edges = [448.0 * 2.0**k for k in range(-44, 60)] + [464.0 * 2.0**k for k in range(-44, 60)]
    edges = neighbours(torch.tensor([*edges, 1.0, 3.0, 2.0**127, 2.0**-126]))
    edges = torch.cat((torch.zeros(1), edges, torch.tensor([240.0 * 2.0**120])))
    rows = torch.zeros(len(edges), 16)
    rows[:, 5] = -edges
    rows[:, 6] = edges / 3
    amax, scale, quotient = scaled(rows, pow2, device)
    assert torch.equal(amax, edges)
    wanted = token_scale(edges, "pow2" if pow2 else "amax")
    assert torch.equal(scale, wanted)
    assert torch.equal(quotient, rows / wanted[:, None])


@given(seed=st.integers(0, 2**32 - 1), pow2=st.booleans())
@settings(max_examples=10)
def test_scales_and_quotients_of_any_rows(device, seed, pow2):
    generator = torch.Generator().manual_seed(seed)
    binades = torch.randint(-45, 100, (8, 1), generator=generator).double()
    rows = (torch.randn(8, 16, generator=generator) * torch.exp2(binades)).float()
    amax, scale, quotient = scaled(rows, pow2, device)
    assert torch.equal(amax, rows.abs().amax(-1))
    wanted = token_scale(rows.abs().amax(-1), "pow2" if pow2 else "amax")
    assert torch.equal(scale, wanted)
    # correctly rounded; below float32's normal numbers a GPU keeps what PyTorch keeps
    assert torch.equal(quotient, rows / wanted[:, None])


@meets_nan
@pytest.mark.parametrize("pow2", [False, True])
def test_a_nan_anywhere_makes_the_scale_nan(device, pow2):
    rows = torch.ones(17, 16)
    rows[torch.arange(16), torch.arange(16)] = math.nan
    amax, scale, _ = scaled(rows, pow2, device)
    assert amax.isnan().tolist() == scale.isnan().tolist() == [True] * 16 + [False]
