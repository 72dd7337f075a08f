"""Three planes that move as one, and attention over them, with its two errors apart.

*Arithmetic*: against float64 over what codes and scales stand for, within float32's rounding.
*Format*: against exact attention over the rows before quantisation, within e4m3's.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.attention_backend import cache_bytes_per_token
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import BLOCK_TOKENS, copy_pages, export_pages, import_pages
from stage0_reference.page_allocator import OutOfPages, PageAllocator, SequencePages
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.fp8_latent_cache import (
    LatentPages,
    allocate_latent_pages,
    append_kv,
    fetch_dequant,
    fp8_latent_attention,
    latent_rows,
)
from stage1_quant.quantize import BF16_MAX, QuantizedRows, ScaleFormat, quantize_q, quantize_rows
from tests.bounds import (
    AttentionError,
    assert_within,
    fetch_error,
    fp8_attention_error,
    latent_attention_error,
    perturbed_attention_error,
    quantization_error,
    rounding_error,
)
from tests.strategies import (
    DecodeCase,
    Pages,
    decode_cases,
    layouts,
    page_sizes,
    with_layout,
)

pytestmark = pytest.mark.stage1

FORMATS: tuple[ScaleFormat, ...] = ("amax", "pow2")
formats = st.sampled_from(FORMATS)
bf16_cases = decode_cases(dtypes=st.just(torch.bfloat16))

DEFAULT_CASE = DecodeCase(
    heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    page_size=16,
    token_counts=(130,),
    s_q=1,
    regime="normal",
    spread=20.0,
    dtype=torch.float32,
    seed=0,
)


def as_bytes(plane: Tensor) -> Tensor:
    """Bytes of each slot, [pages, page_size, bytes]."""
    slots = plane.reshape(*plane.shape[:2], plane.shape[2:].numel())
    return slots.contiguous().view(torch.uint8)


def snapshot(planes: Sequence[Tensor]) -> list[Tensor]:
    return [as_bytes(plane).clone() for plane in planes]


def assert_same_bytes(planes: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, plane, before in zip(LatentPages._fields, planes, expected, strict=True):
        assert torch.equal(as_bytes(plane), before), name


def assert_same_bits(actual: AttentionOutput, expected: AttentionOutput) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def fill_slots(plane: Tensor, where: Tensor, value: float) -> None:
    """Write a value (in e4m3 an infinite one is NaN) into the slots of a bool mask."""
    one = torch.tensor([value]).to(plane.dtype).view(torch.uint8)
    contents = as_bytes(plane)
    contents[where] = one.repeat(plane.shape[2:].numel())
    raw = plane.view(torch.uint8)
    raw.copy_(contents.view(raw.shape))


def filled_cache(
    case: DecodeCase, pages: Pages, scale_format: ScaleFormat, fill: float = math.nan
) -> LatentPages:
    """Append a case's rows to a pool; `fill` is in every slot that holds no token."""
    cache = allocate_latent_pages(
        pages.num_pages, case.page_size, case.kv_lora_rank, case.qk_rope_head_dim
    )
    for plane in cache:
        plane.fill_(fill)
    append_kv(*case.rows(), cache, pages.slot_mapping, scale_format=scale_format)
    return cache


def attend(
    case: DecodeCase, cache: LatentPages, pages: Pages, scale_format: ScaleFormat
) -> AttentionOutput:
    """Attend with the backend, as the decoder would."""
    return Fp8CacheBackend(scale_format).attend(
        *case.queries(), cache, pages.block_table, pages.cache_seqlens, case.softmax_scale()
    )


Pair = tuple[Tensor, Tensor]
"""Latents (or absorbed queries) and their rotary parts."""


def each(function: Callable[[Tensor], Tensor], pair: Pair) -> Pair:
    return function(pair[0]), function(pair[1])


def meaning(rows: QuantizedRows) -> Pair:
    """Latents and rotary parts that quantised rows stand for: products that float64 holds."""
    scale = rows.scale.double()[..., None]
    return rows.codes.double() * scale, rows.rope.double() * scale


class Request(NamedTuple):
    """One request of a case: as drawn, and as quantised."""

    query: Pair
    rows: Pair
    quantized_query: QuantizedRows
    quantized_rows: QuantizedRows


def requests_of(case: DecodeCase, scale_format: ScaleFormat) -> list[Request]:
    queries, rows = case.queries(), case.rows()
    quantized_queries = quantize_q(*queries, scale_format)
    quantized = quantize_rows(*rows, scale_format)
    split_rows = list(
        zip(rows[0].split(case.token_counts), rows[1].split(case.token_counts), strict=True)
    )
    split_quantized = zip(*(part.split(case.token_counts) for part in quantized), strict=True)
    return [
        Request(
            (queries.q_latent[request], queries.q_rope[request]),
            split_rows[request],
            QuantizedRows(*(part[request] for part in quantized_queries)),
            QuantizedRows(*own),
        )
        for request, own in enumerate(split_quantized)
    ]


def rounded_to(dtype: torch.dtype, exact: AttentionOutput, error: AttentionError) -> AttentionError:
    """Add the rounding of the output to the dtype it is given back in."""
    if dtype != torch.bfloat16:
        return error
    return AttentionError(error.out + rounding_error(exact.out.abs() + error.out, dtype), error.lse)


def assert_arithmetic_is_float32(
    case: DecodeCase,
    result: AttentionOutput,
    scale_format: ScaleFormat,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    steps: int = 1,
) -> None:
    """Compare with float64 attention over the dequantised cache and query, request by request."""
    scale = case.softmax_scale() if softmax_scale is None else softmax_scale
    for index, request in enumerate(requests_of(case, scale_format)):
        operands = (*meaning(request.quantized_query), *meaning(request.quantized_rows))
        exact = latent_attention(*operands, scale, causal=causal)
        own = fp8_attention_error(*operands, scale, causal=causal, steps=steps)
        wide = latent_attention_error(*operands, scale, dtype=torch.float64, causal=causal)
        error = AttentionError(own.out + wide.out, own.lse + wide.lse)
        error = rounded_to(case.dtype, exact, error)
        about = (index, scale_format, case)
        assert_within(result.out[index], exact.out, error.out, about=("out", *about))
        assert_within(result.lse[index], exact.lse, error.lse, about=("lse", *about))


# Arithmetic


@given(case=decode_cases(), scale_format=formats)
def test_attention_equals_float64_attention_over_the_dequantised_cache(case, scale_format):
    pages = case.pages()
    result = attend(case, filled_cache(case, pages, scale_format), pages, scale_format)
    assert result.out.dtype == case.dtype
    assert result.lse.dtype == torch.float32
    assert_arithmetic_is_float32(case, result, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_lengths_beyond_one_block_take_several_steps(scale_format):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(2 * BLOCK_TOKENS + 70, 3), s_q=2)
    pages = case.pages()
    result = attend(case, filled_cache(case, pages, scale_format), pages, scale_format)
    assert_arithmetic_is_float32(case, result, scale_format, steps=3)


@pytest.mark.parametrize("causal", [True, False])
def test_causal_is_passed_on(causal):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(20, 3), s_q=4)
    pages = case.pages()
    cache = filled_cache(case, pages, "pow2")
    result = fp8_latent_attention(
        *case.queries(), cache, pages.block_table, [20, 3], 0.3, causal=causal, scale_format="pow2"
    )
    assert_arithmetic_is_float32(case, result, "pow2", softmax_scale=0.3, causal=causal)


@given(case=decode_cases(largest_batch=2), cache_format=formats, query_format=formats)
@settings(max_examples=20)
def test_a_reader_needs_no_scale_format_of_the_cache(case, cache_format, query_format):
    """Whatever format wrote the cache, its scales say all; only the query's scale is chosen."""
    pages = case.pages()
    cache = filled_cache(case, pages, cache_format)
    result = attend(case, cache, pages, query_format)
    scale = case.softmax_scale()
    for index, (written, asked) in enumerate(
        zip(requests_of(case, cache_format), requests_of(case, query_format), strict=True)
    ):
        operands = (*meaning(asked.quantized_query), *meaning(written.quantized_rows))
        exact = latent_attention(*operands, scale)
        own = fp8_attention_error(*operands, scale)
        wide = latent_attention_error(*operands, scale, dtype=torch.float64)
        error = rounded_to(
            case.dtype, exact, AttentionError(own.out + wide.out, own.lse + wide.lse)
        )
        assert_within(result.out[index], exact.out, error.out)
        assert_within(result.lse[index], exact.lse, error.lse)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("query_scale", [0.01, 7.0])
@pytest.mark.parametrize("spread", [5.0, 300.0])
def test_any_pattern_of_scales_agrees_with_the_dequantised_reference(
    spread, query_scale, scale_format
):
    """FR-15: token scales from 1e-3 to 1e3 in one page; none may be lost or applied twice."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 64, 3
    scales = torch.logspace(-3, 3, tokens)[torch.randperm(tokens, generator=generator)]
    c_kv = torch.randn(tokens, 512, generator=generator)
    c_kv = c_kv / c_kv.abs().amax(-1, keepdim=True) * 448 * scales[:, None]
    k_rope = torch.randn(tokens, 64, generator=generator)
    q_latent = torch.randn(1, 1, heads, 512, generator=generator)
    q_latent = q_latent / q_latent.abs().amax(-1, keepdim=True) * 448 * query_scale
    q_rope = torch.randn(1, 1, heads, 64, generator=generator)

    cache = allocate_latent_pages(1, tokens, 512, 64)
    append_kv(c_kv, k_rope, cache, torch.arange(tokens), scale_format=scale_format)
    ratio = cache.scale[0] / scales
    assert bool((ratio > 0.5).all() and (ratio < 2.0).all())
    query, rows = (
        quantize_q(q_latent, q_rope, scale_format),
        QuantizedRows(*(plane[0] for plane in cache)),
    )
    operands = (*each(lambda part: part[0], meaning(query)), *meaning(rows))
    largest = torch.einsum("qhc,tc->qht", operands[0].abs(), operands[2].abs()).max()
    softmax_scale = spread / float(largest)
    result = fp8_latent_attention(
        q_latent,
        q_rope,
        cache,
        torch.zeros(1, 1, dtype=torch.int32),
        [tokens],
        softmax_scale,
        scale_format=scale_format,
    )
    exact = latent_attention(*operands, softmax_scale)
    error = fp8_attention_error(*operands, softmax_scale)
    assert_within(result.out[0], exact.out, error.out)
    assert_within(result.lse[0], exact.lse, error.lse)
    # and the bound is tight enough to tell a lost scale: the largest output is of the order 448e3
    assert float(error.out.max()) < 0.05 * float(exact.out.abs().max())


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("rope_size", [1.0, 2.0**16])
def test_dead_latents_with_live_rotary_parts_are_finite_and_right(rope_size, scale_format):  # FR-13
    generator = torch.Generator().manual_seed(0)
    tokens = 10
    c_kv = torch.randn(tokens, 32, generator=generator)
    c_kv[3:7] = 0.0
    k_rope = rope_size * (2 * torch.rand(tokens, 64, generator=generator) - 1)
    k_rope[3] = rope_size
    q_latent = torch.zeros(1, 1, 2, 32)
    q_rope = rope_size * (2 * torch.rand(1, 1, 2, 64, generator=generator) - 1)
    q_rope[..., 1, :] = rope_size
    softmax_scale = 20.0 / (64 * rope_size**2)
    cache = allocate_latent_pages(1, tokens, 32, 64)
    append_kv(c_kv, k_rope, cache, torch.arange(tokens), scale_format=scale_format)
    table = torch.zeros(1, 1, dtype=torch.int32)
    result = fp8_latent_attention(
        q_latent, q_rope, cache, table, [tokens], softmax_scale, scale_format=scale_format
    )
    query = quantize_q(q_latent, q_rope, scale_format)
    rows = QuantizedRows(*(plane[0] for plane in cache))
    operands = (*each(lambda part: part[0], meaning(query)), *meaning(rows))
    exact = latent_attention(*operands, softmax_scale)
    error = fp8_attention_error(*operands, softmax_scale)
    assert_within(result.out[0], exact.out, error.out)
    assert_within(result.lse[0], exact.lse, error.lse)


# Format


@given(
    case=decode_cases(dtypes=st.sampled_from((torch.bfloat16, torch.float32))),
    scale_format=formats,
    spread=st.sampled_from((0.1, 0.5, 5.0)),
)
def test_attention_is_within_the_formats_rounding_of_unquantised_attention(
    case, scale_format, spread
):
    case = dataclasses.replace(case, spread=spread)
    pages = case.pages()
    result = attend(case, filled_cache(case, pages, scale_format), pages, scale_format)
    scale, exact_scaling = case.softmax_scale(), scale_format == "pow2"
    for index, request in enumerate(requests_of(case, scale_format)):
        query, rows = each(Tensor.double, request.query), each(Tensor.double, request.rows)
        exact = latent_attention(*query, *rows, scale)
        format_error = perturbed_attention_error(
            query,
            rows,
            quantization_error(
                *request.query, request.quantized_query.scale, exact_scaling=exact_scaling
            ),
            quantization_error(
                *request.rows, request.quantized_rows.scale, exact_scaling=exact_scaling
            ),
            scale,
        )
        operands = (*meaning(request.quantized_query), *meaning(request.quantized_rows))
        own = fp8_attention_error(*operands, scale)
        wide = latent_attention_error(*query, *rows, scale, dtype=torch.float64)
        error = AttentionError(
            format_error.out + own.out + wide.out, format_error.lse + own.lse + wide.lse
        )
        error = rounded_to(case.dtype, exact, error)
        assert_within(result.out[index], exact.out, error.out, about=("out", index, case))
        assert_within(result.lse[index], exact.lse, error.lse, about=("lse", index, case))


# Layout of pages, and what they may hold


@given(
    case=decode_cases(largest_batch=3),
    sizes=st.lists(page_sizes(), min_size=1, max_size=3),
    scale_format=formats,
)
@example(DEFAULT_CASE, [1, 16, 64, 128], "pow2")  # FR-08
@settings(max_examples=20)
def test_page_size_and_order_change_no_bit(case, sizes, scale_format):
    results = []
    for page_size in (case.page_size, *sizes):
        case = dataclasses.replace(case, page_size=page_size)
        pages = case.pages()
        cache = filled_cache(case, pages, scale_format)
        results.append(attend(case, cache, pages, scale_format))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("plane", LatentPages._fields)
@given(case=bf16_cases)
@example(dataclasses.replace(DEFAULT_CASE, page_size=4, token_counts=(13,)))  # FR-01
@settings(max_examples=8)
def test_what_unused_slots_hold_never_matters(plane, garbage, case):
    pages = case.pages()
    cache = filled_cache(case, pages, "amax", fill=0.0)
    clean = attend(case, cache, pages, "amax")
    clean_rows = fetch_dequant(cache, pages.block_table, pages.cache_seqlens)
    used = torch.zeros(pages.num_pages * case.page_size, dtype=torch.bool)
    used[pages.slot_mapping] = True
    fill_slots(getattr(cache, plane), ~used.view(pages.num_pages, case.page_size), garbage)
    assert_same_bits(attend(case, cache, pages, "amax"), clean)
    rows = fetch_dequant(cache, pages.block_table, pages.cache_seqlens)
    assert torch.equal(rows, clean_rows)


def test_all_planes_of_unused_slots_may_be_nan_at_once():
    case = dataclasses.replace(DEFAULT_CASE, page_size=4, token_counts=(13, 6))
    pages = case.pages()
    results = [
        attend(case, filled_cache(case, pages, "pow2", fill), pages, "pow2")
        for fill in (0.0, math.nan)
    ]
    assert_same_bits(*results)


@pytest.mark.parametrize("plane", LatentPages._fields)
def test_nan_in_one_request_stays_in_it(plane):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(20, 33, 16))
    pages = case.pages()
    cache = filled_cache(case, pages, "pow2")
    clean = attend(case, cache, pages, "pow2")
    where = torch.zeros(pages.num_pages * case.page_size, dtype=torch.bool)
    where[pages.slot_mapping[20 + 5]] = True  # of request 1
    fill_slots(getattr(cache, plane), where.view(pages.num_pages, -1), math.nan)
    dirty = attend(case, cache, pages, "pow2")
    assert bool(dirty.out[1].isnan().all())
    for request in (0, 2):
        for one, other in zip(dirty, clean, strict=True):
            assert torch.equal(one[request], other[request])


@pytest.mark.parametrize("scale_format", FORMATS)
def test_an_infinite_latent_leaves_attention_finite(scale_format):
    """It counts as BF16's largest number. Its weight here is small, but 0.0 x inf would be NaN."""
    c_kv = torch.tensor([[1.0, 0.0], [-math.inf, 0.0], [1.0, 1.0]])
    cache = allocate_latent_pages(1, 4, 2, 0)
    append_kv(c_kv, torch.zeros(3, 0), cache, torch.arange(3), scale_format=scale_format)
    query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    result = fp8_latent_attention(
        query, torch.zeros(1, 1, 1, 0), cache, torch.zeros(1, 1, dtype=torch.int32), [3], 1.0
    )
    assert bool(result.out.isfinite().all())
    assert bool(result.lse.isfinite().all())


def test_length_zero_gives_zero_and_minus_infinity_and_leaves_other_rows_alone():  # FR-02
    results = []
    for middle in (0, 7):
        case = dataclasses.replace(DEFAULT_CASE, page_size=4, token_counts=(5, middle, 64))
        pages = dataclasses.replace(case, token_counts=(5, 7, 64)).pages()
        seqlens = torch.tensor([5, middle, 64], dtype=torch.int32)
        whole = dataclasses.replace(case, token_counts=(5, 7, 64))
        cache = filled_cache(whole, pages, "pow2")
        results.append(
            Fp8CacheBackend("pow2").attend(*whole.queries(), cache, pages.block_table, seqlens, 0.2)
        )
    empty, full = results
    assert bool((empty.out[1] == 0).all())
    assert bool((empty.lse[1] == -math.inf).all())
    for request in (0, 2):
        for one, other in zip(empty, full, strict=True):
            assert torch.equal(one[request], other[request])


def test_negative_page_below_the_length_gives_an_empty_row():  # FR-26
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(40, 33, 20), s_q=2)
    pages = case.pages()
    cache = filled_cache(case, pages, "amax")
    clean, before = attend(case, cache, pages, "amax"), snapshot(cache)
    pages.block_table[1, 1] = -1
    result = attend(case, cache, pages, "amax")
    assert bool((result.out[1] == 0).all())
    assert bool((result.lse[1] == -math.inf).all())
    assert_same_bytes(cache, before)
    for request in (0, 2):
        for one, other in zip(result, clean, strict=True):
            assert torch.equal(one[request], other[request])


@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ([9], [[0, 1]], r"cache_seqlens\[0\] must be between 0 and 8"),
        ([5], [[0, 3]], r"block_table\[0, 1\] must be below num_pages = 3; got 3"),
        ([-1], [[0, 1]], r"cache_seqlens\[0\] must be between 0 and 8"),
    ],
    ids=["length past the table", "page past the pool", "negative length"],
)
def test_a_table_that_points_outside_is_refused_by_every_reader(lengths, table, message):
    cache = allocate_latent_pages(3, 4, 6, 2)
    where = (torch.tensor(table, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        fetch_dequant(cache, *where)
    with pytest.raises(ValueError, match=message):
        Fp8CacheBackend().attend(torch.ones(1, 1, 1, 6), torch.ones(1, 1, 1, 2), cache, *where, 1.0)


# Geometry


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("widths", [(256, 32), (256, 64), (512, 0), (512, 64)], ids=str)
def test_any_width_is_right(widths, scale_format):  # FR-06
    case = dataclasses.replace(
        DEFAULT_CASE, kv_lora_rank=widths[0], qk_rope_head_dim=widths[1], token_counts=(70,)
    )
    pages = case.pages()
    cache = filled_cache(case, pages, scale_format)
    assert cache.rope.shape == (pages.num_pages, case.page_size, widths[1])
    assert_arithmetic_is_float32(case, attend(case, cache, pages, scale_format), scale_format)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 32, 40, 64, 128])
def test_any_head_count_is_right(heads):  # FR-07
    case = dataclasses.replace(
        DEFAULT_CASE, heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, token_counts=(70,)
    )
    pages = case.pages()
    result = attend(case, filled_cache(case, pages, "pow2"), pages, "pow2")
    assert_arithmetic_is_float32(case, result, "pow2")


def test_padded_heads_may_hold_nan():  # FR-07
    case = dataclasses.replace(DEFAULT_CASE, heads=8, token_counts=(70, 9))
    pages = case.pages()
    cache = filled_cache(case, pages, "pow2")
    lengths = [70, 9]
    queries = case.queries()
    clean = fp8_latent_attention(*queries, cache, pages.block_table, lengths, 0.2)
    for part in queries:
        part[:, :, 5:] = math.nan
    dirty = fp8_latent_attention(*queries, cache, pages.block_table, lengths, 0.2)
    assert torch.equal(dirty.out[:, :, :5], clean.out[:, :, :5])
    assert torch.equal(dirty.lse[:, :, :5], clean.lse[:, :, :5])


def test_published_geometry_takes_644_bytes_a_token():
    assert cache_bytes_per_token([allocate_latent_pages(1, 64, 512, 64)]) == 644
    assert cache_bytes_per_token([allocate_latent_pages(2, 16, 512, 0)] * 3) == 3 * 516


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_a_pool_without_slots_is_refused(name):
    pool = {"num_pages": 3, "page_size": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        allocate_latent_pages(pool["num_pages"], pool["page_size"], 8, 4)


# Strides


def packed_views(num_pages: int, page_size: int, width: int, rope: int) -> LatentPages:
    """Lay the three planes out in one buffer, one token's bytes next to each other."""
    token_bytes = width + 4 + 2 * rope
    buffer = torch.zeros(num_pages, page_size, token_bytes, dtype=torch.uint8)
    return LatentPages(
        buffer[..., :width].view(torch.float8_e4m3fn),
        buffer[..., width : width + 4].view(torch.float32)[..., 0],
        buffer[..., width + 4 :].view(torch.bfloat16),
    )


def layer_views(num_pages: int, page_size: int, width: int, rope: int) -> LatentPages:
    """Give layer 1 of three-layer allocations."""
    return LatentPages(
        *(
            plane.unflatten(0, (3, -1))[1]
            for plane in allocate_latent_pages(3 * num_pages, page_size, width, rope)
        )
    )


def interleaved_views(num_pages: int, page_size: int, width: int, rope: int) -> LatentPages:
    """Give layer 1 of allocations whose pages hold all three layers."""
    return LatentPages(
        *(
            plane.unflatten(0, (-1, 3))[:, 1]
            for plane in allocate_latent_pages(3 * num_pages, page_size, width, rope)
        )
    )


@pytest.mark.parametrize("make", [packed_views, layer_views, interleaved_views])
def test_a_cache_may_be_views_of_larger_buffers(make):  # FR-09
    case = dataclasses.replace(
        DEFAULT_CASE, kv_lora_rank=512, qk_rope_head_dim=64, token_counts=(70, 0, 33)
    )
    pages = case.pages()
    plain = filled_cache(case, pages, "pow2", fill=0.0)
    views = make(pages.num_pages, case.page_size, 512, 64)
    assert make is layer_views or not views.codes.is_contiguous()
    for plane in views:
        plane.fill_(0.0)
    append_kv(*case.rows(), views, pages.slot_mapping, scale_format="pow2")
    assert_same_bytes(views, snapshot(plain))
    assert_same_bits(attend(case, views, pages, "pow2"), attend(case, plain, pages, "pow2"))
    assert torch.equal(
        fetch_dequant(views, pages.block_table, pages.cache_seqlens),
        fetch_dequant(plain, pages.block_table, pages.cache_seqlens),
    )
    copies = [(int(pages.block_table[0, 0]), int(pages.block_table[2, 0]))]
    for planes in (views, plain):
        copy_pages(planes, copies)
    assert_same_bytes(views, snapshot(plain))


def test_queries_may_be_views_of_one_projection():  # FR-09
    case = dataclasses.replace(
        DEFAULT_CASE, kv_lora_rank=512, qk_rope_head_dim=64, token_counts=(70, 5)
    )
    pages = case.pages()
    cache = filled_cache(case, pages, "pow2")
    joined = torch.cat(case.queries(), dim=-1)  # [batch, s_q, heads, 576]
    result = Fp8CacheBackend("pow2").attend(
        joined[..., :512],
        joined[..., 512:],
        cache,
        pages.block_table,
        pages.cache_seqlens,
        case.softmax_scale(),
    )
    assert_same_bits(result, attend(case, cache, pages, "pow2"))


@given(case=bf16_cases, layout=layouts())
@settings(max_examples=20)
def test_memory_layout_of_queries_and_rows_changes_no_bit(case, layout):
    pages = case.pages()
    plain = filled_cache(case, pages, "pow2", fill=0.0)
    other = allocate_latent_pages(
        pages.num_pages, case.page_size, case.kv_lora_rank, case.qk_rope_head_dim
    )
    for plane in other:
        plane.fill_(0.0)
    rows = each(lambda part: with_layout(part, layout), case.rows())
    append_kv(*rows, other, pages.slot_mapping, scale_format="pow2")
    assert_same_bytes(other, snapshot(plain))
    result = Fp8CacheBackend("pow2").attend(
        *each(lambda part: with_layout(part, layout), case.queries()),
        other,
        pages.block_table,
        pages.cache_seqlens,
        case.softmax_scale(),
    )
    assert_same_bits(result, attend(case, plain, pages, "pow2"))


# Writing


TOKENS = 300
WIDTHS = (6, 4)


def numbered_rows() -> list[Tensor]:
    """Quantised bytes of token 0, 1, ..., each with a scale of its own binade and mantissa."""
    generator = torch.Generator().manual_seed(3)
    c_kv = torch.randn(TOKENS, WIDTHS[0], generator=generator)
    c_kv = torch.ldexp(c_kv, torch.randint(-20, 20, (TOKENS, 1), generator=generator))
    k_rope = torch.randn(TOKENS, WIDTHS[1], generator=generator)
    return [
        c_kv,
        k_rope,
        *(as_bytes(p[None])[0] for p in quantize_rows(c_kv, k_rope, "pow2")),
    ]


C_KV, K_ROPE, *EXPECTED = numbered_rows()


def append_tokens(cache: LatentPages, tokens: Sequence[int], slots: Sequence[int]) -> None:
    index = torch.tensor(tokens, dtype=torch.int64)
    append_kv(
        C_KV[index],
        K_ROPE[index],
        cache,
        torch.tensor(slots, dtype=torch.int64),
        scale_format="pow2",
    )


def assert_holds(cache: LatentPages, tokens_at: dict[tuple[int, int], int]) -> None:
    """All three parts in a slot are those of the token that the model has there."""
    for name, plane, expected in zip(LatentPages._fields, cache, EXPECTED, strict=True):
        contents = as_bytes(plane)
        for (page, offset), token in tokens_at.items():
            assert torch.equal(contents[page, offset], expected[token]), (name, page, offset, token)


POOL_PAGES, PAGE_SIZE = 4, 3
pool_ids = st.integers(0, 1)
page_ids = st.integers(0, POOL_PAGES - 1)
pool_slots = st.one_of(st.integers(0, POOL_PAGES * PAGE_SIZE - 1), st.integers(-2, -1))
different_pages = st.lists(page_ids, min_size=1, max_size=POOL_PAGES, unique=True)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("append"), pool_ids, st.lists(pool_slots, max_size=5, unique=True)),
        st.tuples(
            st.just("copy"),
            pool_ids,
            st.lists(st.tuples(page_ids, page_ids), max_size=3, unique_by=lambda copy: copy[1]),
        ),
        st.tuples(
            st.just("send"),
            pool_ids,
            st.lists(st.tuples(page_ids, page_ids), max_size=3, unique_by=lambda copy: copy[1]),
        ),
    ),
    max_size=8,
)


@given(moves=moves)
@example([("append", 0, [0, 4, -1, 11]), ("copy", 0, [(0, 1), (1, 0)]), ("send", 0, [(1, 3)])])
def test_planes_move_as_one_whatever_is_done_with_pages(moves):
    """A dict from slot to token says where everything should be; every slot starts with a token."""
    caches = [allocate_latent_pages(POOL_PAGES, PAGE_SIZE, *WIDTHS) for _ in range(2)]
    places = [(page, offset) for page in range(POOL_PAGES) for offset in range(PAGE_SIZE)]
    models = []
    fresh = iter(range(TOKENS))
    for cache in caches:
        tokens = [next(fresh) for _ in places]
        append_tokens(cache, tokens, range(len(places)))
        models.append(dict(zip(places, tokens, strict=True)))
    for what, pool, arguments in moves:
        cache, model = caches[pool], models[pool]
        if what == "append":
            tokens = [next(fresh) for _ in arguments]
            append_tokens(cache, tokens, arguments)
            for token, slot in zip(tokens, arguments, strict=True):
                if slot >= 0:
                    model[divmod(slot, PAGE_SIZE)] = token
            continue
        before = dict(model)
        if what == "copy":
            copy_pages(cache, arguments)
            target = model
        else:
            exported = export_pages(cache, [source for source, _ in arguments])
            import_pages(caches[1 - pool], [page for _, page in arguments], exported)
            target = models[1 - pool]
        for source, destination in arguments:
            for offset in range(PAGE_SIZE):
                target[destination, offset] = before[source, offset]
    for cache, model in zip(caches, models, strict=True):
        assert_holds(cache, model)


sequence_steps = st.lists(
    st.tuples(
        st.sampled_from(("append", "append", "fork", "truncate", "release", "swap")),
        st.integers(0, 5),
        st.integers(0, 7),
    ),
    max_size=14,
)


@given(steps=sequence_steps, page_size=st.sampled_from((1, 3, 4)))
@example([("append", 0, 5), ("fork", 0, 0), ("append", 0, 2), ("append", 1, 3), ("swap", 1, 0)], 4)
def test_forked_and_swapped_sequences_keep_their_tokens(steps, page_size):
    """Copy-on-write and offload on the allocator's plans: a list of tokens per sequence."""
    allocator = PageAllocator(12, page_size)
    cache = allocate_latent_pages(12, page_size, *WIDTHS)
    sequences = [SequencePages(allocator)]
    models: list[list[int]] = [[]]
    fresh = iter(range(TOKENS))
    for what, which, amount in steps:
        which %= len(sequences)
        sequence, model = sequences[which], models[which]
        if what == "append":
            try:
                writes = sequence.extend(amount)
            except OutOfPages:
                continue
            copy_pages(cache, writes.copies)
            tokens = [next(fresh) for _ in writes.slots]
            append_tokens(cache, tokens, writes.slots)
            model.extend(tokens)
        elif what == "fork":
            sequences.append(sequence.fork())
            models.append(list(model))
        elif what == "truncate":
            sequence.truncate(max(0, sequence.length - amount))
            del model[sequence.length :]
        elif what == "release":
            sequence.release()
            model.clear()
        else:  # to the host and back into other pages
            exported = export_pages(cache, sequence.pages)
            back = SequencePages(allocator)
            try:
                back.extend(sequence.length)
            except OutOfPages:
                continue
            import_pages(cache, back.pages, exported)
            sequence.release()
            sequences[which] = back
        for sequence, model in zip(sequences, models, strict=True):
            assert sequence.length == len(model)
            places = [
                (sequence.pages[i // page_size], i % page_size) for i in range(sequence.length)
            ]
            assert_holds(cache, dict(zip(places, model, strict=True)))


@given(
    slots=st.lists(st.one_of(st.integers(0, 11), st.integers(-3, -1)), max_size=9, unique=True),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_negative_slots_write_nothing(slots, slot_dtype):  # FR-26
    cache = allocate_latent_pages(3, 4, *WIDTHS)
    for byte, plane in zip((0x11, 0x22, 0x33), cache, strict=True):
        plane.view(torch.uint8).fill_(byte)
    expected = snapshot(cache)
    for contents, rows in zip(expected, EXPECTED, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                contents[slot // 4, slot % 4] = rows[token]
    count = len(slots)
    append_kv(
        C_KV[:count],
        K_ROPE[:count],
        cache,
        torch.tensor(slots, dtype=slot_dtype),
        scale_format="pow2",
    )
    assert_same_bytes(cache, expected)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 12, 3])}, "slot_mapping must stay below 3 pages x 4"),
        ({"slot_mapping": torch.tensor([0, 1])}, r"rows must be \[2, 6\]"),
        ({"c_kv": torch.ones(3, 7)}, r"rows must be \[3, 6\].*got \[3, 7\]"),
        ({"k_rope": torch.ones(3, 5)}, r"rows must be \[3, 4\].*got \[3, 5\]"),
        ({"k_rope": torch.ones(1, 4)}, "k_rope"),
        ({"k_rope": torch.ones(2, 4)}, "k_rope"),
        ({"c_kv": torch.ones(1, 6)}, "k_rope|rows must be"),
        ({"scale_format": "e8m0"}, "scale_format must be one of amax, pow2; got 'e8m0'"),
    ],
    ids=[
        "slot past the pool",
        "too few slots",
        "latent width",
        "rotary width",
        "one rotary row for all",
        "too few rotary rows",
        "one latent for all",
        "scale format",
    ],
)
def test_what_is_refused_leaves_all_planes_untouched(changes, message):
    arguments = {
        "c_kv": torch.ones(3, 6),
        "k_rope": torch.ones(3, 4),
        "cache": allocate_latent_pages(3, 4, *WIDTHS),
        "slot_mapping": torch.tensor([0, 1, 2]),
    } | changes
    before = snapshot(arguments["cache"])
    with pytest.raises(ValueError, match=message):
        append_kv(**arguments)
    assert_same_bytes(arguments["cache"], before)


# Reading back


@given(case=bf16_cases, scale_format=formats)
@settings(max_examples=25)
def test_fetched_rows_are_packed_by_request_with_the_scale_multiplied_back(case, scale_format):
    pages = case.pages()
    cache = filled_cache(case, pages, scale_format)
    packed = fetch_dequant(cache, pages.block_table, pages.cache_seqlens)
    fetched = latent_rows(packed, cache)
    c_kv, k_rope = case.rows()
    quantized = quantize_rows(c_kv, k_rope, scale_format)
    exact_scaling = scale_format == "pow2"
    for got, want in zip(fetched, meaning(quantized), strict=True):
        assert got.dtype == torch.bfloat16
        assert_within(got, want, fetch_error(want, exact_scaling=exact_scaling), about=case)
    # and, with the format's own error, the rows that were appended
    errors = quantization_error(c_kv, k_rope, quantized.scale, exact_scaling=exact_scaling)
    for got, drawn, error in zip(fetched, (c_kv, k_rope), errors, strict=True):
        bound = error + rounding_error(drawn.double().abs() + error, torch.bfloat16)
        assert_within(got, drawn, bound)


@given(case=bf16_cases)
@settings(max_examples=20)
def test_re_appending_fetched_rows_gives_the_same_bytes(case):
    """With power-of-two scales a prefix survives any number of trips through BF16."""
    pages = case.pages()
    cache = filled_cache(case, pages, "pow2", fill=0.0)
    packed = fetch_dequant(cache, pages.block_table, pages.cache_seqlens)
    fetched = latent_rows(packed, cache)
    again = allocate_latent_pages(
        pages.num_pages, case.page_size, case.kv_lora_rank, case.qk_rope_head_dim
    )
    for plane in again:
        plane.fill_(0.0)
    append_kv(*fetched, again, pages.slot_mapping, scale_format="pow2")
    assert_same_bytes(again, snapshot(cache))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_fetched_infinities_are_bf16s_largest_number(scale_format):
    """Rounding up under an amax scale must not bring an infinity back."""
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.rand(200, 4, generator=generator) * 1e5 + 448
    k_rope = torch.full((200, 2), math.inf)
    k_rope[:, 1] = -BF16_MAX
    cache = allocate_latent_pages(1, 200, 4, 2)
    append_kv(c_kv, k_rope, cache, torch.arange(200), scale_format=scale_format)
    table, seqlens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([200], dtype=torch.int32)
    fetched = latent_rows(fetch_dequant(cache, table, seqlens), cache)
    assert bool(fetched.k_rope.isfinite().all())
    limit = torch.tensor([BF16_MAX, -BF16_MAX], dtype=torch.float64).expand(200, 2)
    assert_within(fetched.k_rope, limit, 2 * 2.0**-8 * BF16_MAX)


def test_fetching_from_no_request_is_empty():
    cache = allocate_latent_pages(2, 4, 6, 2)
    fetched = fetch_dequant(
        cache, torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    )
    assert fetched.shape == (0, 8)
    assert [part.shape for part in latent_rows(fetched, cache)] == [(0, 6), (0, 2)]


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_attention_on_a_gpu_equals_float64_attention_over_the_dequantised_cache(
    heads, scale_format
):
    case = dataclasses.replace(
        DEFAULT_CASE,
        heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        token_counts=(1500, 0, 65),
        s_q=2,
    )
    pages = case.pages()
    cache = LatentPages(*(p.cuda() for p in filled_cache(case, pages, scale_format)))
    on_gpu = allocate_latent_pages(pages.num_pages, 64, 512, 64, device="cuda")
    for plane in on_gpu:
        plane.fill_(math.nan)
    append_kv(
        *each(Tensor.cuda, case.rows()),
        on_gpu,
        pages.slot_mapping.cuda(),
        scale_format=scale_format,
    )
    assert_same_bytes(on_gpu, snapshot(cache))
    result = Fp8CacheBackend(scale_format).attend(
        *each(Tensor.cuda, case.queries()),
        on_gpu,
        pages.block_table.cuda(),
        pages.cache_seqlens.cuda(),
        case.softmax_scale(),
    )
    result = AttentionOutput(*(part.cpu() for part in result))
    assert_arithmetic_is_float32(case, result, scale_format, steps=3)
