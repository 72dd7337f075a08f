"""Per-token quantisation: its error bounds, its scales, and what rows may not do to each other.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stage1_quant.e4m3 import E4M3_MAX, E4M3_ROUNDS_TO_MAX, decode_e4m3
from stage1_quant.quantize import (
    BF16_MAX,
    DEFAULT_SCALE_FORMAT,
    SMALLEST_SCALE,
    QuantizedRows,
    ScaleFormat,
    dequantize_rows,
    quantize_q,
    quantize_rows,
    token_scale,
)
from tests.bounds import (
    assert_within,
    dot_error,
    quantization_error,
    rounding_error,
    unit_roundoff,
)
from tests.strategies import draw_values, layouts, regimes, seeds, with_layout

pytestmark = pytest.mark.stage1

FORMATS: tuple[ScaleFormat, ...] = ("amax", "pow2")
formats = st.sampled_from(FORMATS)
NAN_BYTE = 0x7F

numbers = st.floats(-BF16_MAX, BF16_MAX, width=32)
"""Every finite float32 in BF16's range, denormals included."""

rotary_numbers = st.floats(-(2.0**16), 2.0**16, width=32)
"""What the floor under the scale is made for: at most 2^16 even where the latent is dead."""


def rows_of(numbers: st.SearchStrategy[float], width: int) -> st.SearchStrategy[list[list[float]]]:
    row = st.lists(numbers, min_size=width, max_size=width)
    return st.lists(row, min_size=1, max_size=4)


def tensor_of(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), width)


def as_bytes(rows: QuantizedRows) -> list[Tensor]:
    """Bytes of every part, [tokens, bytes]: NaN equals NaN, and 0 differs from -0."""
    tokens = rows.scale.numel()
    parts = (part.reshape(tokens, part.numel() // max(tokens, 1)) for part in rows)
    return [part.contiguous().view(torch.uint8) for part in parts]


def assert_same_bytes(actual: QuantizedRows, expected: QuantizedRows) -> None:
    for name, one, other in zip(
        QuantizedRows._fields, as_bytes(actual), as_bytes(expected), strict=True
    ):
        assert torch.equal(one, other), name


def quantize_within_bounds(
    c_kv: Tensor, k_rope: Tensor, scale_format: ScaleFormat
) -> QuantizedRows:
    """Quantise, check what comes back against the bounds, and return the rows."""
    rows = quantize_rows(c_kv, k_rope, scale_format)
    assert [part.dtype for part in rows] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]
    assert rows.codes.shape == c_kv.shape
    assert rows.scale.shape == c_kv.shape[:-1]
    assert rows.rope.shape == k_rope.shape
    back = dequantize_rows(rows)
    error = quantization_error(c_kv, k_rope, rows.scale, exact_scaling=scale_format == "pow2")
    assert_within(back.c_kv, c_kv.double(), error.c_kv, about=("latent", scale_format, rows.scale))
    assert_within(back.k_rope, k_rope.double(), error.k_rope, about=("rope", scale_format))
    return rows


# Error of a row


@given(latents=rows_of(numbers, 4), rope=st.lists(rotary_numbers, min_size=2, max_size=2))
@example([[0.0] * 4], [1.0, 2.0**16])
@example([[1e-45, -1e-45, 0.0, 0.0]], [1e-45, 1.0])
@example([[448.0, 464.0, 464.00003, 1.0]], [1.0, 0.0])
@example([[1.0, -(2.0**-9), 2.0**-10, 1.5 * 2.0**-10]], [1.0, 0.0])
@example([[BF16_MAX, 1.0, -BF16_MAX, 1e-45]], [1.0, 0.0])
def test_a_dequantised_row_is_within_the_formats_rounding(latents, rope):
    c_kv = tensor_of(latents, 4)
    for scale_format in FORMATS:
        quantize_within_bounds(c_kv, torch.tensor(rope).expand(len(c_kv), 2), scale_format)


@given(
    scale_format=formats,
    regime=regimes(),
    seed=seeds(),
    tokens=st.integers(0, 40),
    widths=st.sampled_from([(512, 64), (256, 32), (512, 0), (1, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_whose_sizes_span_many_binades_are_within_the_formats_rounding(
    scale_format, regime, seed, tokens, widths, dtype
):
    generator = torch.Generator().manual_seed(seed)
    c_kv = draw_values((tokens, widths[0]), regime, generator, torch.float32)
    k_rope = draw_values((tokens, widths[1]), "many binades", generator, dtype)
    by_token = torch.randint(-40, 41, (tokens, 1), generator=generator)
    c_kv = torch.ldexp(c_kv, by_token).to(dtype)
    quantize_within_bounds(c_kv, k_rope, scale_format)


def test_the_bound_is_the_one_that_the_format_promises():
    """max(2^-4 |x|, 2^-10 scale), to which four float32 roundings of |x| may add a little."""
    c_kv = torch.logspace(-6, 2.6, 300)[:, None]  # up to 398
    error = quantization_error(c_kv, c_kv, torch.ones(300), exact_scaling=False)
    stated = (c_kv.double() / 16).clamp(min=2.0**-10)
    assert bool((error.c_kv >= stated).all())
    assert bool((error.c_kv <= stated * (1 + 4 * 16 * 2.0**-24)).all())


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("latent_size", [0.05, 1e-30, 0.0, 1.0, 1e4])
def test_rotary_parts_keep_bf16_rounding_whatever_the_latents_size(latent_size, scale_format):
    """FR-14: a scale from the latent alone would saturate rotary values tens of times larger."""
    generator = torch.Generator().manual_seed(0)
    c_kv = (2 * torch.rand(64, 512, generator=generator) - 1) * latent_size
    k_rope = 2 * torch.rand(64, 64, generator=generator) - 1
    back = dequantize_rows(quantize_rows(c_kv, k_rope, scale_format)).k_rope
    # quotient and product in float32 as well, except where the scale is a power of two
    roundings = unit_roundoff(torch.bfloat16) + (3 * 2.0**-24 if scale_format == "amax" else 0.0)
    assert_within(back, k_rope.double(), roundings * k_rope.double().abs())


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_zero_latent_has_zero_codes_and_a_live_rotary_part(scale_format):  # FR-13
    c_kv = torch.tensor([[1.0, -2.0, 3.0], [0.0, -0.0, 0.0], [4.0, 5.0, 6.0]])
    k_rope = torch.ones(3, 2)
    rows = quantize_rows(c_kv, k_rope, scale_format)
    assert decode_e4m3(rows.codes[1]).tolist() == [0.0, 0.0, 0.0]
    assert rows.scale[1] == SMALLEST_SCALE == 2.0**-40
    assert dequantize_rows(rows).k_rope[1].tolist() == [1.0, 1.0]
    for row in (0, 2):
        alone = quantize_rows(c_kv[row], k_rope[row], scale_format)
        assert_same_bytes(QuantizedRows(*(part[row] for part in rows)), alone)


@given(
    query=st.lists(rotary_numbers, min_size=64, max_size=64),
    key=st.lists(rotary_numbers, min_size=64, max_size=64),
    scale_format=formats,
)
@example([2.0**16] * 64, [2.0**16] * 64, "pow2")
@example([2.0**16] * 64, [-(2.0**16)] * 64, "amax")
def test_dead_latents_on_both_sides_leave_a_finite_and_right_rotary_score(query, key, scale_format):
    dead = torch.zeros(1, 512)
    q = quantize_rows(dead, torch.tensor([query]), scale_format)
    k = quantize_rows(dead, torch.tensor([key]), scale_format)
    accumulator = (q.rope.float() * k.rope.float()).sum()
    assert bool(accumulator.isfinite())
    score = accumulator * (q.scale * k.scale)
    exact_q, exact_k = (rows.rope.double() * rows.scale.double()[..., None] for rows in (q, k))
    magnitude = (exact_q.abs() * exact_k.abs()).sum()
    # the sum, and three products; what underflowed in the scaled domain comes back times 2^-80
    assert_within(
        score.squeeze(), (exact_q * exact_k).sum(), dot_error(magnitude, 64 + 3, torch.float32)
    )


# Scales


amaxes = st.one_of(
    st.floats(0, BF16_MAX, width=32),
    st.builds(  # the powers of two where a pow2 scale changes, and both neighbours
        lambda exponent, neighbour: math.ldexp(464 + neighbour * 2.0**-15, exponent),
        st.integers(-60, 118),
        st.sampled_from([-1, 0, 1]),
    ),
)


@given(st.lists(amaxes, min_size=1, max_size=8))
@example([0.0, 1e-45, math.ldexp(464.0, -40), math.ldexp(464 + 2.0**-15, -40)])
def test_a_pow2_scale_is_the_smallest_power_of_two_that_rounds_to_448_at_most(values):
    for amax, scale in zip(values, token_scale(torch.tensor(values), "pow2").tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert amax / scale <= E4M3_ROUNDS_TO_MAX  # exact: a power of two, in float64
        assert scale >= SMALLEST_SCALE
        assert scale == SMALLEST_SCALE or amax / (scale / 2) > E4M3_ROUNDS_TO_MAX


def test_every_pow2_scale_of_every_vector_length_is_an_exact_power_of_two():
    exponents = torch.arange(-40, 119)
    amax = torch.ldexp(torch.full((len(exponents),), 464.0, dtype=torch.float64), exponents)
    expected = torch.ldexp(torch.ones(len(exponents), dtype=torch.float64), exponents)
    assert torch.equal(token_scale(amax.float(), "pow2").double(), expected)
    for one, scale in zip(amax.float(), expected, strict=True):  # may take another code path
        assert token_scale(one, "pow2") == scale


@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=8))
@example([0.0, 448.0 * 2.0**-40, 447.0 * 2.0**-40, 449.0 * 2.0**-40])
def test_an_amax_scale_is_amax_over_448_rounded_and_not_below_the_floor(values):
    scales = token_scale(torch.tensor(values), "amax").tolist()
    for amax, scale in zip(values, scales, strict=True):
        exact = max(amax, E4M3_MAX * SMALLEST_SCALE) / E4M3_MAX
        assert abs(scale - exact) <= 2.0**-24 * exact  # nearest; exact is off by 2^-53 at most
        assert scale >= SMALLEST_SCALE


@given(latents=rows_of(st.floats(-(2.0**127), 2.0**127, width=32), 5))
def test_with_an_amax_scale_the_largest_element_becomes_448(latents):
    c_kv = tensor_of(latents, 5)
    rows = quantize_rows(c_kv, torch.zeros(len(c_kv), 0), "amax")
    live = c_kv.abs().amax(-1) >= E4M3_MAX * SMALLEST_SCALE
    largest = c_kv.abs().argmax(-1, keepdim=True)
    codes = decode_e4m3(rows.codes).gather(1, largest)[live]
    assert torch.equal(codes, E4M3_MAX * c_kv.gather(1, largest)[live].sign())


@given(latents=rows_of(numbers, 5))
def test_with_a_pow2_scale_the_largest_element_uses_the_top_binade(latents):
    """Half of the largest, 232, would fit the next smaller scale: above it, codes start at 240."""
    c_kv = tensor_of(latents, 5)
    rows = quantize_rows(c_kv, torch.zeros(len(c_kv), 0), "pow2")
    live = c_kv.abs().amax(-1) > E4M3_ROUNDS_TO_MAX * SMALLEST_SCALE
    largest = decode_e4m3(rows.codes).abs().amax(-1)
    assert bool((largest[live] >= 240).all())
    assert bool((largest <= E4M3_MAX).all())


def test_the_default_format_is_one_of_the_two():
    assert DEFAULT_SCALE_FORMAT in FORMATS
    amax = torch.tensor([1.0, 300.0])
    assert torch.equal(token_scale(amax), token_scale(amax, DEFAULT_SCALE_FORMAT))


# What a power of two buys


bf16_numbers = st.integers(-(2**15), 2**15 - 1).map(
    lambda bits: torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item()
)
finite_bf16 = bf16_numbers.filter(math.isfinite)


@given(latents=rows_of(numbers, 3), rope=st.lists(finite_bf16, min_size=6, max_size=6))
def test_dividing_a_bf16_rotary_part_by_a_pow2_scale_loses_nothing(latents, rope):
    c_kv = tensor_of(latents, 3)
    k_rope = torch.tensor(rope, dtype=torch.bfloat16).expand(len(c_kv), 6)
    rows = quantize_rows(c_kv, k_rope, "pow2")
    unit = rows.scale.double()[:, None]
    aligned = (k_rope.double() / unit).clamp(-BF16_MAX, BF16_MAX)
    # below bf16's normal range the quotient is rounded to a multiple of the smallest subnormal
    normal = aligned.abs() >= torch.finfo(torch.bfloat16).smallest_normal
    error = rounding_error(aligned, torch.bfloat16).masked_fill(normal, 0.0)
    assert_within(rows.rope, aligned, error)


def requantized(rows: QuantizedRows, *, through_bf16: bool) -> QuantizedRows:
    back = dequantize_rows(rows)
    if through_bf16:
        return quantize_rows(back.c_kv.bfloat16(), back.k_rope.bfloat16(), "pow2")
    return quantize_rows(*back, "pow2")


@given(
    latents=rows_of(numbers, 4),
    rope=st.lists(finite_bf16, min_size=3, max_size=3),
    through_bf16=st.booleans(),
)
@example([[0.0] * 4], [1.0, 2.0**16, 1e-38], True)
@example([[BF16_MAX, -BF16_MAX, 0.0, 1.0]], [1.0, 0.0, 0.0], True)
@example([[232.0, 232.00002, 464.0, 464.00003]], [1.0, 0.0, 0.0], True)
def test_quantising_a_dequantised_row_gives_the_same_bytes(latents, rope, through_bf16):
    """Prefix re-use, offload and re-append lose nothing, also by way of BF16 rows."""
    c_kv = tensor_of(latents, 4)
    # beyond this a rotary part over the smallest scale would not fit bf16
    k_rope = torch.tensor(rope).clamp(-(2.0**87), 2.0**87).bfloat16().expand(len(c_kv), 3)
    rows = quantize_rows(c_kv, k_rope, "pow2")
    assert_same_bytes(requantized(rows, through_bf16=through_bf16), rows)


@given(regime=regimes(), seed=seeds(), through_bf16=st.booleans())
def test_quantising_dequantised_rows_of_real_width_gives_the_same_bytes(regime, seed, through_bf16):
    generator = torch.Generator().manual_seed(seed)
    c_kv = draw_values((20, 512), regime, generator, torch.float32)
    k_rope = draw_values((20, 64), "many binades", generator, torch.float32)
    rows = quantize_rows(c_kv, k_rope, "pow2")
    assert_same_bytes(requantized(rows, through_bf16=through_bf16), rows)


# Rows, one by one


@given(
    scale_format=formats,
    regime=regimes(),
    seed=seeds(),
    tokens=st.integers(1, 12),
    width=st.sampled_from([1, 7, 64, 512]),
)
def test_a_rows_bytes_do_not_depend_on_other_rows(scale_format, regime, seed, tokens, width):
    generator = torch.Generator().manual_seed(seed)
    c_kv = draw_values((tokens, width), regime, generator, torch.float32)
    k_rope = draw_values((tokens, 6), "many binades", generator, torch.float32)
    together = quantize_rows(c_kv, k_rope, scale_format)
    order = torch.randperm(tokens, generator=generator)
    shuffled = quantize_rows(c_kv[order], k_rope[order], scale_format)
    for place, token in enumerate(order.tolist()):
        alone = quantize_rows(c_kv[token], k_rope[token], scale_format)
        for part, moved, own in zip(
            as_bytes(together), as_bytes(shuffled), as_bytes(alone), strict=True
        ):
            assert torch.equal(part[token], own[0])
            assert torch.equal(moved[place], own[0])


@pytest.mark.parametrize("scale_format", FORMATS)
def test_nan_stays_in_its_row(scale_format):
    generator = torch.Generator().manual_seed(0)
    c_kv, k_rope = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
    clean = as_bytes(quantize_rows(c_kv, k_rope, scale_format))
    c_kv[1, 3] = math.nan
    k_rope[2, 1] = math.nan
    rows = quantize_rows(c_kv, k_rope, scale_format)
    for part, expected in zip(as_bytes(rows), clean, strict=True):
        for row in (0, 3):
            assert torch.equal(part[row], expected[row])
    back = dequantize_rows(rows)
    # a latent's NaN reaches its whole token: the scale is its row's largest magnitude
    assert bool(back.c_kv[1].isnan().all())
    assert bool(rows.scale[1].isnan())
    assert bool((rows.codes[1].view(torch.uint8) == NAN_BYTE).all())
    # a rotary NaN stays in its element
    assert torch.equal(as_bytes(rows)[0][2], clean[0][2])
    assert rows.scale[2].isfinite()
    assert back.k_rope[2].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("sign", [1, -1], ids=["+inf", "-inf"])
def test_an_infinite_latent_counts_as_bf16s_largest_number(sign, scale_format):
    c_kv = torch.tensor([[1.0, 2.0], [sign * math.inf, 1.0], [sign * BF16_MAX, 1.0]])
    rows = quantize_rows(c_kv, torch.ones(3, 2), scale_format)
    for part in as_bytes(rows):
        assert torch.equal(part[1], part[2])
    back = dequantize_rows(rows)
    assert bool(back.c_kv.isfinite().all())
    assert_within(back.c_kv[1, 0], torch.tensor(sign * BF16_MAX), BF16_MAX / 16)
    assert bool(back.c_kv.bfloat16().isfinite().all())


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("latent", [1.0, 700.0, 12345.0, 0.0, BF16_MAX])
def test_an_infinite_rotary_part_stays_finite(latent, scale_format):
    k_rope = torch.tensor([[math.inf, -math.inf, 1.0]])
    rows = quantize_rows(torch.full((1, 4), latent), k_rope, scale_format)
    back = dequantize_rows(rows).k_rope
    for part in (rows.rope, back):
        assert bool(part.isfinite().all())
        assert part[0, 0] > 0 > part[0, 1]
    assert_within(back[0, 2], torch.tensor(1.0), 2.0**-8 + 3 * 2.0**-24 if latent < 1e30 else 1.0)


@given(layout=layouts(), scale_format=formats, seed=seeds())
def test_memory_layout_changes_no_byte(layout, scale_format, seed):
    generator = torch.Generator().manual_seed(seed)
    c_kv, k_rope = torch.randn(5, 9, generator=generator), torch.randn(5, 4, generator=generator)
    assert_same_bytes(
        quantize_rows(with_layout(c_kv, layout), with_layout(k_rope, layout), scale_format),
        quantize_rows(c_kv, k_rope, scale_format),
    )


def test_the_inputs_are_left_as_they_were():
    c_kv, k_rope = torch.tensor([[math.inf, 1.0]]), torch.tensor([[math.inf, 3.0]])
    quantize_rows(c_kv, k_rope)
    assert c_kv.tolist() == [[math.inf, 1.0]]
    assert k_rope.tolist() == [[math.inf, 3.0]]


# Queries


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 20)),
    scale_format=formats,
    regime=regimes(),
    seed=seeds(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_query_is_quantised_per_token_and_head_like_a_row(
    shape, scale_format, regime, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    q_latent = draw_values((*shape, 24), regime, generator, dtype)
    q_rope = draw_values((*shape, 6), "normal", generator, dtype)
    query = quantize_q(q_latent, q_rope, scale_format)
    assert query.codes.shape == q_latent.shape
    assert query.scale.shape == shape
    assert query.rope.shape == q_rope.shape
    flat = quantize_rows(q_latent.reshape(-1, 24), q_rope.reshape(-1, 6), scale_format)
    assert_same_bytes(query, flat)


# Refusals


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["fp8", "AMAX", ""])
def test_an_unknown_scale_format_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"scale_format must be one of amax, pow2; got '{name}'"):
        quantize_rows(torch.ones(1, 2), torch.ones(1, 2), name)
    with pytest.raises(ValueError, match="scale_format must be one of amax, pow2"):
        token_scale(torch.ones(1), name)


@pytest.mark.unchecked
@pytest.mark.parametrize("rotary_tokens", [0, 1, 2])
def test_rotary_parts_of_other_tokens_are_refused_not_broadcast(rotary_tokens):
    with pytest.raises(ValueError, match="k_rope"):
        quantize_rows(torch.ones(3, 8), torch.ones(rotary_tokens, 4))


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", FORMATS)
def test_cpu_and_gpu_give_the_same_bytes(scale_format):
    generator = torch.Generator().manual_seed(0)
    by_token = torch.randint(-44, 110, (4000, 1), generator=generator)
    c_kv = torch.ldexp(torch.randn(4000, 512, generator=generator), by_token)
    k_rope = draw_values((4000, 64), "many binades", generator, torch.float32)
    c_kv[0], c_kv[1, 5], c_kv[2, 6] = 0.0, math.inf, math.nan
    k_rope[3, 1], k_rope[4, 2] = math.inf, math.nan
    on_gpu = quantize_rows(c_kv.cuda(), k_rope.cuda(), scale_format)
    on_cpu = quantize_rows(c_kv, k_rope, scale_format)
    assert torch.equal(on_gpu.codes.cpu().view(torch.uint8), on_cpu.codes.view(torch.uint8))
    assert torch.equal(on_gpu.scale.cpu().nan_to_num(), on_cpu.scale.nan_to_num())
    assert torch.equal(on_gpu.rope.cpu().nan_to_num(), on_cpu.rope.nan_to_num())
    assert torch.equal(on_gpu.rope.cpu().isnan(), on_cpu.rope.isnan())
