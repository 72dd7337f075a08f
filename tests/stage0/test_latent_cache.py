"""The paged cache and attention over it: every layout of pages, and every hostile content.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import cache_bytes_per_token
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import (
    BLOCK_TOKENS,
    Bf16LatentPages,
    allocate_pages,
    check_table,
    copy_pages,
    export_pages,
    gather_rows,
    import_pages,
    locate_tokens,
    paged_latent_attention,
    write_rows,
)
from tests.bounds import (
    AttentionError,
    assert_within,
    latent_attention_error,
    latent_scores,
    perturbation_error,
    rounding_error,
)
from tests.model_factory import tiny_config
from tests.strategies import (
    DecodeCase,
    Pages,
    decode_cases,
    lay_out_pages,
    layouts,
    page_sizes,
    seeds,
    with_layout,
)

pytestmark = pytest.mark.stage0

BACKEND = AbsorbedBackend()
float32_cases = decode_cases(dtypes=st.just(torch.float32))
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


def empty_pool(case: DecodeCase, num_pages: int, page_size: int, fill: float) -> Bf16LatentPages:
    """Allocate the planes of a case and fill every slot."""
    pool = allocate_pages(num_pages, page_size, case.kv_lora_rank, case.qk_rope_head_dim)
    for plane in pool:
        plane.fill_(fill)
    return pool


def filled_pool(case: DecodeCase, pages: Pages, fill: float = math.nan) -> Bf16LatentPages:
    """Write a case's rows into a pool; `fill` is in every slot that holds no token."""
    pool = empty_pool(case, pages.num_pages, case.page_size, fill)
    write_rows(pool, case.rows(), pages.slot_mapping)
    return pool


def attend(case: DecodeCase, pool: Bf16LatentPages, pages: Pages) -> AttentionOutput:
    """Attend with the backend, as the decoder would."""
    return BACKEND.attend(
        *case.queries(), pool, pages.block_table, pages.cache_seqlens, case.softmax_scale()
    )


def reference(case: DecodeCase, *, steps: int = 1) -> tuple[AttentionOutput, AttentionError]:
    """Unpaged attention of each request in float64 over the cached rows, and what to allow.

    The bound is the error in the case's own arithmetic, the reference's own error, and one
    rounding to the case's dtype.
    """
    scale = case.softmax_scale()
    computing = torch.float64 if case.dtype == torch.float64 else torch.float32
    q_latent, q_rope = case.queries()
    c_kv, k_rope = (plane.split(case.token_counts) for plane in case.rows())
    exact: list[AttentionOutput] = []
    allowed: list[AttentionError] = []
    for request in zip(q_latent, q_rope, c_kv, k_rope, strict=True):
        q, r, c, k = (part.double() for part in request)
        exact.append(latent_attention(q, r, c, k, scale))
        own = latent_attention_error(q, r, c, k, scale, dtype=computing, steps=steps)
        wide = latent_attention_error(q, r, c, k, scale, dtype=torch.float64)
        out, lse = own.out + wide.out, own.lse + wide.lse
        if case.dtype == torch.bfloat16:
            out = out + rounding_error(exact[-1].out.abs() + out, case.dtype)
        allowed.append(AttentionError(out, lse))
    return (
        AttentionOutput(*(torch.stack(part) for part in zip(*exact, strict=True))),
        AttentionError(*(torch.stack(part) for part in zip(*allowed, strict=True))),
    )


def assert_close(
    actual: AttentionOutput, expected: AttentionOutput, allowed: AttentionError, about: object = ""
) -> None:
    assert_within(actual.out, expected.out, allowed.out, about=("out", about))
    assert_within(actual.lse, expected.lse, allowed.lse, about=("lse", about))


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def row_of(result: AttentionOutput, request: int) -> AttentionOutput:
    return AttentionOutput(*(part[request : request + 1] for part in result))


def snapshot(planes: Sequence[Tensor]) -> list[Tensor]:
    return [plane.clone() for plane in planes]


@given(case=decode_cases())
def test_paged_attention_equals_unpaged_attention_in_float64(case):
    pages = case.pages()
    actual = attend(case, filled_pool(case, pages), pages)
    assert actual.out.dtype == case.dtype
    assert actual.lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_close(actual, *reference(case), case)


@given(
    case=decode_cases(dtypes=st.sampled_from((torch.float32, torch.float64)), largest_batch=2),
    block_tokens=st.one_of(st.integers(1, 300), st.sampled_from((1, 7, 64))),
)
def test_block_tokens_changes_rounding_only(case, block_tokens):
    pages = case.pages()
    pool = filled_pool(case, pages)
    actual = paged_latent_attention(
        *case.queries(),
        partial(gather_rows, pool, pages.block_table),
        case.token_counts,
        case.softmax_scale(),
        block_tokens=block_tokens,
    )
    steps = -(-max(case.token_counts) // block_tokens)
    assert_close(actual, *reference(case, steps=steps), case)


def test_lengths_beyond_one_block_take_several_steps():
    lengths = (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 5, 3)
    case = dataclasses.replace(DEFAULT_CASE, token_counts=lengths, s_q=3)
    pages = case.pages()
    steps = -(-max(lengths) // BLOCK_TOKENS)
    assert_close(attend(case, filled_pool(case, pages), pages), *reference(case, steps=steps))


@given(case=decode_cases(largest_batch=2), causal=st.booleans())
def test_causal_is_passed_on(case, causal):
    pages = case.pages()
    scale = case.softmax_scale()
    computing = torch.float64 if case.dtype == torch.float64 else torch.float32
    q_latent, q_rope = (query.to(computing) for query in case.queries())
    actual = BACKEND.attend(
        q_latent,
        q_rope,
        filled_pool(case, pages),
        pages.block_table,
        pages.cache_seqlens,
        scale,
        causal=causal,
    )
    rows = (plane.split(case.token_counts) for plane in case.rows())
    for request, operands in enumerate(zip(q_latent, q_rope, *rows, strict=True)):
        exact = latent_attention(*(part.double() for part in operands), scale, causal=causal)
        own, wide = (
            latent_attention_error(*operands, scale, dtype=dtype, causal=causal)
            for dtype in (computing, torch.float64)
        )
        allowed = AttentionError(own.out + wide.out, own.lse + wide.lse)
        assert_close(AttentionOutput(actual.out[request], actual.lse[request]), exact, allowed)


@given(case=decode_cases(largest_batch=3), sizes=st.lists(page_sizes(), min_size=1, max_size=3))
@example(DEFAULT_CASE, [1, 16, 64, 128])  # FR-08
def test_page_size_changes_no_bit(case, sizes):
    results = []
    for page_size in (case.page_size, *sizes):
        case = dataclasses.replace(case, page_size=page_size)
        pages = case.pages()
        results.append(attend(case, filled_pool(case, pages), pages))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@given(case=decode_cases(), other_seed=seeds())
def test_permuting_physical_pages_changes_no_bit(case, other_seed):
    first = case.pages()
    second = lay_out_pages(case.token_counts, case.page_size, other_seed)
    assert_same_bits(
        attend(case, filled_pool(case, first), first),
        attend(case, filled_pool(case, second), second),
    )


@pytest.mark.parametrize("plane", Bf16LatentPages._fields)
@given(case=float32_cases, garbage=st.sampled_from((math.nan, math.inf, -math.inf, 3e38)))
@example(dataclasses.replace(DEFAULT_CASE, page_size=4, token_counts=(13,)), math.nan)  # FR-01
def test_what_unused_slots_hold_never_matters(plane, case, garbage):
    pages = case.pages()
    clean = filled_pool(case, pages, fill=0.0)
    used = torch.zeros(pages.num_pages * case.page_size, dtype=torch.bool)
    used[pages.slot_mapping] = True
    unused = ~used.view(pages.num_pages, case.page_size)
    dirty = Bf16LatentPages(*snapshot(clean))
    getattr(dirty, plane)[unused] = garbage
    assert_same_bits(attend(case, dirty, pages), attend(case, clean, pages))


def test_nan_in_one_request_stays_in_it():
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(20, 33, 16))
    pages = case.pages()
    pool = filled_pool(case, pages)
    clean = attend(case, pool, pages)
    slot = int(pages.slot_mapping[20 + 5])  # of request 1
    pool.c_kv[slot // case.page_size, slot % case.page_size] = math.nan
    dirty = attend(case, pool, pages)
    assert bool(dirty.out[1].isnan().all())
    for request in (0, 2):
        assert_same_bits(row_of(dirty, request), row_of(clean, request))


@pytest.mark.parametrize("token_counts", ((5, 0, 64), (0,), (0, 0, 0)), ids=str)  # FR-02
def test_length_zero_gives_zero_and_minus_infinity(token_counts):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=token_counts)
    pages = case.pages()
    result = attend(case, filled_pool(case, pages), pages)
    for request, count in enumerate(token_counts):
        if count == 0:
            assert bool((result.out[request] == 0).all())
            assert bool(result.lse[request].isneginf().all())
    assert_close(result, *reference(case))


def test_length_zero_leaves_the_other_rows_as_they_are():
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(5, 7, 64))
    pages = case.pages()
    pool = filled_pool(case, pages)
    full = attend(case, pool, pages)
    pages.cache_seqlens[1] = 0
    emptied = attend(case, pool, pages)
    for request in (0, 2):
        assert_same_bits(row_of(emptied, request), row_of(full, request))


@pytest.mark.parametrize("widths", ((256, 32), (256, 64), (512, 0), (1, 2)), ids=str)  # FR-06
def test_any_width_is_right(widths):
    rank, rope = widths
    case = dataclasses.replace(
        DEFAULT_CASE, kv_lora_rank=rank, qk_rope_head_dim=rope, token_counts=(70,), s_q=2
    )
    pages = case.pages()
    pool = filled_pool(case, pages)
    assert cache_bytes_per_token([pool]) == 2 * (rank + rope)
    assert_close(attend(case, pool, pages), *reference(case))


@pytest.mark.parametrize("heads", (1, 4, 8, 16, 20, 32, 40, 64, 128))  # FR-07
def test_any_head_count_equals_the_heads_one_by_one(heads):
    case = dataclasses.replace(
        DEFAULT_CASE, heads=heads, token_counts=(70, 9), kv_lora_rank=64, s_q=2
    )
    pages = case.pages()
    pool = filled_pool(case, pages)
    together = attend(case, pool, pages)
    _, allowed = reference(case)
    q_latent, q_rope = case.queries()
    for head in range(heads):
        only = (slice(None), slice(None), slice(head, head + 1))
        alone = BACKEND.attend(
            q_latent[only],
            q_rope[only],
            pool,
            pages.block_table,
            pages.cache_seqlens,
            case.softmax_scale(),
        )
        # Both are within the bound of the same exact result.
        twice = AttentionError(2 * allowed.out[only], 2 * allowed.lse[only])
        assert_close(AttentionOutput(together.out[only], together.lse[only]), alone, twice)


def test_padded_heads_may_hold_nan():
    case = dataclasses.replace(DEFAULT_CASE, heads=5)
    pages = case.pages()
    pool = filled_pool(case, pages)
    q_latent, q_rope = case.queries()
    arguments = (pool, pages.block_table, pages.cache_seqlens, case.softmax_scale())
    zeros, nans = (
        BACKEND.attend(
            q_latent.index_fill(2, torch.tensor([4]), pad),
            q_rope.index_fill(2, torch.tensor([4]), pad),
            *arguments,
        )
        for pad in (0.0, math.nan)
    )
    assert_same_bits([part[:, :, :4] for part in zeros], [part[:, :, :4] for part in nans])


def test_cache_may_be_a_layer_of_one_allocation():  # FR-09
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(70, 13), page_size=8)
    pages = case.pages()
    rank, rope = case.kv_lora_rank, case.qk_rope_head_dim
    whole = torch.full((pages.num_pages, 3, 8, rank + rope), math.nan, dtype=torch.bfloat16)
    before = whole.clone()
    view = Bf16LatentPages(whole[:, 1, :, :rank], whole[:, 1, :, rank:])
    write_rows(view, case.rows(), pages.slot_mapping)
    assert_same_bits(view, filled_pool(case, pages))
    assert_same_bits((whole[:, 0], whole[:, 2]), (before[:, 0], before[:, 2]))
    assert_same_bits(attend(case, view, pages), attend(case, filled_pool(case, pages), pages))


def test_queries_may_be_views_of_one_projection():  # FR-09
    case = dataclasses.replace(
        DEFAULT_CASE, heads=20, kv_lora_rank=512, qk_rope_head_dim=64, token_counts=(70, 13, 9)
    )
    pages = case.pages()
    pool = filled_pool(case, pages)
    projected = torch.cat(case.queries(), dim=-1)[:, 0]  # [batch, heads, 576]
    q_latent, q_rope = projected[:, None].split((512, 64), dim=-1)
    assert not q_latent.is_contiguous()
    arguments = (pool, pages.block_table, pages.cache_seqlens, case.softmax_scale())
    _, allowed = reference(case)
    assert_close(
        BACKEND.attend(q_latent, q_rope, *arguments),
        BACKEND.attend(q_latent.contiguous(), q_rope.contiguous(), *arguments),
        AttentionError(2 * allowed.out, 2 * allowed.lse),
    )


@given(case=decode_cases(), layout=layouts(), table_layout=layouts())
def test_any_memory_layout_is_right(case, layout, table_layout):
    pages = case.pages()
    pool = Bf16LatentPages(*(with_layout(plane, layout) for plane in filled_pool(case, pages)))
    table = pages.block_table
    if table_layout == "transposed":
        table = table.T.contiguous().T
    elif table_layout == "every other":
        table = table.repeat_interleave(2, dim=1)[:, ::2]
    actual = BACKEND.attend(
        *(with_layout(query, layout) for query in case.queries()),
        pool,
        table,
        pages.cache_seqlens,
        case.softmax_scale(),
    )
    assert_close(actual, *reference(case), (case, layout))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_tables_and_lengths_may_be_int32_or_int64(dtype):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(70, 13))
    pages = case.pages()
    pool = filled_pool(case, pages)
    result = BACKEND.attend(
        *case.queries(),
        pool,
        pages.block_table.to(dtype),
        pages.cache_seqlens.to(dtype),
        case.softmax_scale(),
    )
    assert_same_bits(result, attend(case, pool, pages))


@given(case=decode_cases(s_q=st.integers(2, 8), largest_batch=2))
@example(dataclasses.replace(DEFAULT_CASE, s_q=4, token_counts=(65, 2)))  # FR-30, FR-19
def test_each_query_equals_its_own_single_token_call(case):
    pages = case.pages()
    pool = filled_pool(case, pages)
    together = attend(case, pool, pages)
    _, allowed = reference(case)
    q_latent, q_rope = case.queries()
    for query in range(case.s_q):
        only = (slice(None), slice(query, query + 1))
        alone = BACKEND.attend(
            q_latent[only],
            q_rope[only],
            pool,
            pages.block_table,
            (pages.cache_seqlens - case.s_q + query + 1).clamp(min=0),
            case.softmax_scale(),
        )
        twice = AttentionError(2 * allowed.out[only], 2 * allowed.lse[only])
        assert_close(AttentionOutput(together.out[only], together.lse[only]), alone, twice, case)


@given(case=decode_cases(largest_batch=1), others=st.tuples(*[st.integers(0, 700)] * 2))
def test_the_other_rows_of_a_batch_change_no_bit(case, others):
    """Same number of rows, other requests in them: longer ones, shorter ones, none at all."""
    (count,) = case.token_counts
    scale = case.softmax_scale()
    results = []
    for counts in ((count, 0, 0), (count, *others)):
        batch = dataclasses.replace(case, token_counts=counts)
        pages = batch.pages()
        pool = empty_pool(batch, pages.num_pages, batch.page_size, math.nan)
        rows = [plane.clone() for plane in batch.rows()]
        for plane, own in zip(rows, case.rows(), strict=True):
            plane[:count] = own[:count]
        write_rows(pool, rows, pages.slot_mapping)
        q_latent, q_rope = batch.queries()
        for query, own in zip((q_latent, q_rope), case.queries(), strict=True):
            query[0] = own[0]
        results.append(
            BACKEND.attend(q_latent, q_rope, pool, pages.block_table, pages.cache_seqlens, scale)
        )
    assert_same_bits(row_of(results[0], 0), row_of(results[1], 0))


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with that many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", ((7, 16, 8), (16, 64, 16), (16, 512, 64)), ids=str)
def test_a_request_has_the_same_bits_alone_and_at_any_place_among_33(threads, sizes):  # FR-29
    """Alone means among padding: the number of rows is the same.

    With widths such that a row's queries start at an aligned address, as all published ones do;
    matrix libraries round differently elsewhere.
    """
    heads, rank, rope = sizes
    case = dataclasses.replace(
        DEFAULT_CASE,
        heads=heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        token_counts=tuple((37 * request) % 213 for request in range(33)),
    )
    pages = case.pages()
    pool = filled_pool(case, pages)
    full = attend(case, pool, pages)
    scale = case.softmax_scale()
    for request in (1, 5, 32):
        table = torch.full_like(pages.block_table, -1)
        table[0] = pages.block_table[request]
        lengths = torch.zeros_like(pages.cache_seqlens)
        lengths[0] = pages.cache_seqlens[request]
        queries = [torch.zeros_like(query) for query in case.queries()]
        for query, own in zip(queries, case.queries(), strict=True):
            query[0] = own[request]
        alone = BACKEND.attend(*queries, pool, table, lengths, scale)
        assert_same_bits(row_of(alone, 0), row_of(full, request))
        assert bool((alone.out[1:] == 0).all())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("block_tokens", (1, 8, 512))
@pytest.mark.parametrize("order", ("rising", "falling", "mixed"))
def test_scores_spread_over_ten_thousands_stay_finite_and_right(order, block_tokens, dtype):
    """exp(score) would overflow at 89, or 710: only differences to the maximum are exponentiated.

    Scores are multiples of 1000 here, exact in either dtype. The weight of a key 1000 below the
    maximum underflows even in float64, so that exactly one key is left.
    """
    length = 21
    steps = torch.arange(length) - length // 2  # scores 1000 apart, from -1e4 to 1e4
    steps = {
        "rising": steps,
        "falling": steps.flip(0),
        "mixed": steps[torch.randperm(length, generator=torch.Generator().manual_seed(0))],
    }[order]
    latents = torch.stack((steps.double(), torch.arange(length).double()), dim=-1)
    pool = allocate_pages(length, 1, 2, 0)
    write_rows(pool, (latents, latents[:, :0]), torch.arange(length))
    query = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 1, 1, 2)
    result = paged_latent_attention(
        query,
        query[..., :0],
        partial(gather_rows, pool, torch.arange(length)[None]),
        [length],
        1000.0,
        block_tokens=block_tokens,
    )
    best = int(steps.argmax())
    assert_same_bits([result.out.flatten()], [latents[best].to(dtype)])
    assert result.lse.item() == 1e4


@given(case=decode_cases(dtypes=st.just(torch.float64)))
def test_rounding_the_cache_to_bf16_costs_no_more_than_its_roundoff(case):
    """Against rows that were never rounded: the error of the format, apart from arithmetic.

    With u = 2^-8 each cached element is off by u times its size at most. A score is then off by u
    times its magnitude, and `perturbation_error` says what that does.
    """
    pages = case.pages()
    actual = attend(case, filled_pool(case, pages), pages)
    scale = case.softmax_scale()
    unrounded = (plane.split(case.token_counts) for plane in case.rows(torch.float64))
    for request, (q_latent, q_rope, c_kv, k_rope) in enumerate(
        zip(*case.queries(), *unrounded, strict=True)
    ):
        exact = latent_attention(q_latent, q_rope, c_kv, k_rope, scale)
        scores, _ = latent_scores(q_latent, q_rope, c_kv, k_rope, scale)
        latent_off, rope_off = (rounding_error(row, torch.bfloat16) for row in (c_kv, k_rope))
        moved = latent_scores(q_latent, q_rope, latent_off, rope_off, scale).magnitude
        format_error = (
            AttentionError(torch.zeros(()), torch.zeros(()))
            if len(c_kv) == 0
            else perturbation_error(scores, moved, c_kv.abs(), latent_off)
        )
        # float64 arithmetic, twice; rounded rows are at most twice as large as the exact ones
        computed = latent_attention_error(
            2 * q_latent, 2 * q_rope, 2 * c_kv, 2 * k_rope, scale, dtype=torch.float64
        )
        seen = ~exact.lse.isneginf()
        assert_within(
            actual.out[request],
            exact.out,
            (format_error.out + 2 * computed.out).masked_fill(~seen[..., None], 0.0),
            about=case,
        )
        assert_within(
            actual.lse[request],
            exact.lse,
            (format_error.lse + 2 * computed.lse).masked_fill(~seen, 0.0),
            about=case,
        )


@given(
    case=float32_cases,
    row_dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
    layout=layouts(),
)
def test_written_rows_come_back_rounded_to_bf16(case, row_dtype, slot_dtype, layout):
    pages = case.pages()
    pool = empty_pool(case, pages.num_pages, case.page_size, math.nan)
    rows = case.rows(row_dtype)
    views = [with_layout(plane, layout) for plane in rows]
    write_rows(pool, views, pages.slot_mapping.to(slot_dtype))
    start = 0
    for request, count in enumerate(case.token_counts):
        back = gather_rows(pool, pages.block_table[request : request + 1], torch.arange(count))
        for plane, row in zip(back, rows, strict=True):
            own = row[start : start + count]
            assert_same_bits([plane[0]], [own.to(torch.bfloat16)])
            assert_within(plane[0], own.double(), rounding_error(own, torch.bfloat16))
        start += count
    untouched = pool.c_kv.flatten(0, 1).isnan().all(-1)
    assert int((~untouched).sum()) == sum(case.token_counts)


@given(
    slots=st.lists(st.one_of(st.integers(0, 11), st.integers(-3, -1)), max_size=9, unique=True),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_negative_slots_write_nothing(slots, slot_dtype):  # FR-26
    pool = allocate_pages(3, 4, 2, 2)
    generator = torch.Generator().manual_seed(0)
    for plane in pool:
        plane.copy_(torch.randn(plane.shape, generator=generator))
    expected = snapshot(pool)
    rows = [torch.randn(len(slots), 2, generator=generator) for _ in pool]
    for plane, row in zip(expected, rows, strict=True):
        for slot, value in zip(slots, row, strict=True):
            if slot >= 0:
                plane[slot // 4, slot % 4] = value.to(torch.bfloat16)
    write_rows(pool, rows, torch.tensor(slots, dtype=slot_dtype))
    assert_same_bits(pool, expected)


def test_negative_page_below_the_length_gives_an_empty_row():  # FR-26
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(40, 33, 20), s_q=2)
    pages = case.pages()
    pool = filled_pool(case, pages)
    before = snapshot(pool)
    full = attend(case, pool, pages)
    for column in (0, 1, 2):  # any page that the row needs
        table = pages.block_table.clone()
        table[1, column] = -1
        result = BACKEND.attend(
            *case.queries(), pool, table, pages.cache_seqlens, case.softmax_scale()
        )
        assert bool((result.out[1] == 0).all())
        assert bool(result.lse[1].isneginf().all())
        for request in (0, 2):
            assert_same_bits(row_of(result, request), row_of(full, request))
    assert_same_bits(pool, before)


def test_pad_row_survives_an_increment_of_its_length():  # FR-26
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(40, 1))
    pages = case.pages()
    pool = filled_pool(case, pages)
    pages.block_table[1] = -1
    for length in (0, 1):
        pages.cache_seqlens[1] = length
        result = attend(case, pool, pages)
        assert bool((result.out[1] == 0).all())
        assert bool(result.lse[1].isneginf().all())


SLOTS = torch.tensor([0, 5, 1])
WRITE_REFUSALS = {
    "slot-past-the-pool": (
        {"slots": torch.tensor([0, 12, 1])},
        r"slot_mapping must stay below 3 pages x 4 tokens = 12; got slot 12",
    ),
    "slot-far-past-the-pool": (
        {"slots": torch.tensor([0, 2**40, 1])},
        rf"slot_mapping must stay below .* got slot {2**40}",
    ),
    "first-plane-too-narrow": ({"c_kv": torch.ones(3, 4)}, r"rows must be \[3, 5\].*\[3, 4\]"),
    "last-plane-too-wide": ({"k_rope": torch.ones(3, 3)}, r"rows must be \[3, 2\].*\[3, 3\]"),
    "fewer-rows-than-slots": (
        {"c_kv": torch.ones(2, 5), "k_rope": torch.ones(2, 2)},
        r"rows must be \[3, 5\].*\[2, 5\]",
    ),
    "fewer-rows-in-the-last-plane": (
        {"k_rope": torch.ones(1, 2)},
        r"rows must be \[3, 2\].*\[1, 2\]",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize(("changes", "message"), WRITE_REFUSALS.values(), ids=WRITE_REFUSALS)
def test_write_is_refused_with_nothing_written(changes, message):
    pool = Bf16LatentPages(
        torch.zeros(3, 4, 5, dtype=torch.bfloat16), torch.zeros(3, 4, 2, dtype=torch.bfloat16)
    )
    arguments = {"c_kv": torch.ones(3, 5), "k_rope": torch.ones(3, 2), "slots": SLOTS} | changes
    with pytest.raises(ValueError, match=message):
        write_rows(pool, (arguments["c_kv"], arguments["k_rope"]), arguments["slots"])
    assert all(bool((plane == 0).all()) for plane in pool)


TABLE_REFUSALS = {
    "length-past-the-row": (
        {"cache_seqlens": torch.tensor([3, 9])},
        r"cache_seqlens\[1\] must be between 0 and 8 \(block_table has 2 columns of 4 tokens\); "
        r"got 9",
    ),
    "negative-length": (
        {"cache_seqlens": torch.tensor([-1, 2])},
        r"cache_seqlens\[0\] must be between 0 and 8 .*; got -1",
    ),
    "page-past-the-pool": (
        {"block_table": torch.tensor([[0, 1], [2, 3]])},
        r"block_table\[1, 1\] must be below num_pages = 3; got 3",
    ),
    "absurd-page": (
        {"block_table": torch.tensor([[2**31 - 1, 1], [2, 0]])},
        rf"block_table\[0, 0\] must be below num_pages = 3; got {2**31 - 1}",
    ),
    "fewer-rows-than-lengths": (
        {"block_table": torch.tensor([[0, 1]])},
        r"block_table and cache_seqlens must have one row per request; got 1 and 2",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("reader", ("check_table", "attend", "read_prefix"))
@pytest.mark.parametrize(("changes", "message"), TABLE_REFUSALS.values(), ids=TABLE_REFUSALS)
def test_table_that_points_outside_is_refused(reader, changes, message):
    pool = Bf16LatentPages(
        torch.zeros(3, 4, 5, dtype=torch.bfloat16), torch.zeros(3, 4, 2, dtype=torch.bfloat16)
    )
    arguments = {
        "block_table": torch.tensor([[0, 1], [2, 0]]),
        "cache_seqlens": torch.tensor([3, 8]),
    } | changes
    with pytest.raises(ValueError, match=message):
        if reader == "check_table":
            check_table(**arguments, num_pages=3, page_size=4)
        elif reader == "attend":
            BACKEND.attend(
                torch.zeros(2, 1, 2, 5), torch.zeros(2, 1, 2, 2), pool, **arguments,
                softmax_scale=1.0,
            )  # fmt: skip
        else:
            BACKEND.read_prefix(pool, **arguments)


@given(case=float32_cases)
def test_check_table_ignores_what_stands_behind_the_end(case):
    pages = case.pages()
    lengths = check_table(pages.block_table, pages.cache_seqlens, pages.num_pages, case.page_size)
    assert lengths == list(case.token_counts)


@given(page_size=page_sizes(), columns=st.integers(1, 5), seed=seeds())
def test_tokens_are_where_slot_arithmetic_says(page_size, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 99, (2, columns), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, columns * page_size, (7,), generator=generator)
    page, offset = locate_tokens(table, positions, page_size)
    for request in range(2):
        for token, position in enumerate(positions.tolist()):
            assert int(page[request, token]) == int(table[request, position // page_size])
            assert int(offset[token]) == position % page_size
    behind, _ = locate_tokens(table, torch.tensor([columns * page_size, 10**6]), page_size)
    assert torch.equal(behind, table[:, -1:].long().expand(2, 2))


@given(case=float32_cases)
def test_read_prefix_packs_one_request_after_the_other(case):
    pages = case.pages()
    pool = filled_pool(case, pages)
    packed = BACKEND.read_prefix(pool, pages.block_table, pages.cache_seqlens)
    assert_same_bits(packed, case.rows())


def test_read_prefix_of_no_request_is_empty():
    pool = allocate_pages(3, 4, 5, 2)
    none = torch.zeros(0, dtype=torch.int32)
    packed = BACKEND.read_prefix(pool, none.view(0, 2), none)
    assert [row.shape for row in packed] == [(0, 5), (0, 2)]
    assert {row.dtype for row in packed} == {torch.bfloat16}


def test_attention_of_no_request_is_empty():
    pool = allocate_pages(3, 4, 5, 2)
    none = torch.zeros(0, dtype=torch.int32)
    result = BACKEND.attend(
        torch.zeros(0, 1, 2, 5), torch.zeros(0, 1, 2, 2), pool, none.view(0, 2), none, 1.0
    )
    assert result.out.shape == (0, 1, 2, 5)
    assert result.lse.shape == (0, 1, 2)


@pytest.mark.unchecked
def test_queries_of_another_batch_size_are_refused():
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(20,))
    pages = case.pages()
    q_latent, q_rope = (query.expand(3, -1, -1, -1) for query in case.queries())
    with pytest.raises(ValueError, match="block_table"):
        BACKEND.attend(
            q_latent,
            q_rope,
            filled_pool(case, pages),
            pages.block_table,
            pages.cache_seqlens,
            case.softmax_scale(),
        )


def hostile_planes(num_pages: int = 5) -> list[Tensor]:
    """Planes of every rank that a stage has, NaN and the bits of 8-bit codes among the values."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (num_pages, 3, 4), generator=generator, dtype=torch.uint8)
    scale = torch.randn(num_pages, 3, generator=generator)
    scale[0, 1] = math.nan
    return [codes.view(torch.float8_e4m3fn), scale, torch.zeros(num_pages, 3, 0)]


@given(
    num_pages=st.integers(1, 6),
    destinations=st.permutations(range(6)),
    sources=st.lists(st.integers(0, 5), max_size=6),
)
def test_copied_pages_equal_their_sources_and_the_rest_stays(num_pages, destinations, sources):
    copies = [
        (source % num_pages, destination)
        for source, destination in zip(sources, destinations, strict=False)
        if destination < num_pages
    ]
    planes = hostile_planes(num_pages)
    comes_from = list(range(num_pages))
    for source, destination in copies:
        comes_from[destination] = source
    expected = [torch.stack([plane[page] for page in comes_from]) for plane in planes]
    copy_pages(planes, copies)
    assert_same_bits(planes, expected)


@pytest.mark.parametrize("copy", ((0, 3), (3, 0), (-1, 0), (0, -1)), ids=str)
def test_copy_outside_the_pool_is_refused_with_nothing_copied(copy):
    pool = Bf16LatentPages(torch.arange(3.0)[:, None, None].repeat(1, 4, 5), torch.zeros(3, 4, 2))
    before = snapshot(pool)
    with pytest.raises(ValueError, match=r"must be between 0 and 2; got (3|-1)"):
        copy_pages(pool, [(1, 2), copy])
    assert_same_bits(pool, before)


@given(pages=st.lists(st.integers(0, 4), max_size=5, unique=True), seed=seeds())
def test_exported_pages_come_back_byte_for_byte_anywhere(pages, seed):
    planes, target = hostile_planes(), hostile_planes()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
    places = order[: len(pages)]
    exported = export_pages(planes, pages)
    expected = [as_bytes(plane).clone() if plane.numel() else plane.clone() for plane in planes]
    for plane in planes:
        as_bytes(plane).zero_()  # what was exported is a copy
    import_pages(target, places, exported)
    for original, plane in zip(expected, target, strict=True):
        if plane.numel():
            for page, place in zip(pages, places, strict=True):
                assert torch.equal(as_bytes(plane)[place], original[page])
            for untouched in order[len(pages) :]:
                assert torch.equal(as_bytes(plane)[untouched], original[untouched])


IMPORT_REFUSALS = {
    "page-past-the-pool": ([0, 5], lambda pages: pages, r"page_ids must be between 0 and 4; got 5"),
    "negative-page": ([-1, 0], lambda pages: pages, r"page_ids must be between 0 and 4; got -1"),
    "page-given-twice": ([2, 2], lambda pages: pages, r"page_ids must be different .*\[2, 2\]"),
    "fewer-pages": ([0, 1], lambda pages: [p[:1] for p in pages], r"exported must hold"),
    "a-plane-missing": ([0, 1], lambda pages: pages[:-1], r"exported must hold every plane"),
    "another-dtype": (
        [0, 1],
        lambda pages: [pages[0], pages[1].double(), pages[2]],
        r"exported must hold .*float32 \[2, 3\].*; got .*float64 \[2, 3\]",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("page_ids", "change", "message"), IMPORT_REFUSALS.values(), ids=IMPORT_REFUSALS
)
def test_import_is_refused_with_nothing_written(page_ids, change, message):
    planes = hostile_planes()
    exported = export_pages(planes, [3, 4])
    before = snapshot(planes)
    with pytest.raises(ValueError, match=message):
        import_pages(planes, page_ids, change(exported))
    assert_same_bits(planes, before)


@pytest.mark.parametrize("page", (-1, 5))
def test_export_outside_the_pool_is_refused(page):
    with pytest.raises(ValueError, match=rf"page_ids must be between 0 and 4; got {page}"):
        export_pages(hostile_planes(), [0, page])


@given(seed=seeds(), tail=st.integers(0, 3))
def test_a_copied_page_serves_like_the_original(seed, tail):
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(8 - tail,), page_size=4, seed=seed)
    pages = case.pages()
    pool = filled_pool(case, pages)
    expected = attend(case, pool, pages)
    used = pages.block_table[0, :2].tolist()
    spare = [page for page in range(pages.num_pages) if page not in used]
    copy_pages(pool, list(zip(used, spare, strict=True)))
    for plane in pool:
        plane[used] = math.nan
    pages.block_table[0, :2] = torch.tensor(spare, dtype=torch.int32)
    assert_same_bits(attend(case, pool, pages), expected)


@pytest.mark.parametrize("name", ("num_pages", "page_size"))
def test_a_pool_without_slots_is_refused(name):
    arguments = {"num_pages": 2, "page_size": 4} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name} must be at least 1; got 0"):
        allocate_pages(**arguments, kv_lora_rank=8, qk_rope_head_dim=2)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("rope", (0, 16))
def test_make_cache_allocates_every_layer(rope, dtype):
    config = tiny_config(qk_rope_head_dim=rope)
    cache = AbsorbedBackend(dtype).make_cache(config, num_pages=5, page_size=4)
    assert len(cache) == config.num_hidden_layers
    for planes in cache:
        assert planes.c_kv.shape == (5, 4, config.kv_lora_rank)
        assert planes.k_rope.shape == (5, 4, rope)
        assert {plane.dtype for plane in planes} == {dtype}
    storages = {plane.untyped_storage().data_ptr() for planes in cache for plane in planes}
    assert len(storages) >= config.num_hidden_layers * (1 if rope == 0 else 2)
    width = config.kv_lora_rank + rope
    assert cache_bytes_per_token(cache) == len(cache) * width * dtype.itemsize


def test_published_geometry_takes_1152_bytes_a_token():
    assert cache_bytes_per_token([allocate_pages(1, 1, 512, 64)]) == 1152


@given(case=decode_cases(dtypes=st.just(torch.float64)))
def test_append_and_attend_on_a_float64_cache_is_exact(case):
    """A cache wide enough for its rows adds nothing to float64 arithmetic."""
    backend = AbsorbedBackend(torch.float64)
    pages = case.pages()
    config = tiny_config(
        num_hidden_layers=1,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
    )
    pool = backend.make_cache(config, pages.num_pages, case.page_size)[0]
    rows = case.rows(torch.float64)
    backend.append(*rows, pool, pages.slot_mapping)
    scale = case.softmax_scale()
    actual = backend.attend(*case.queries(), pool, pages.block_table, pages.cache_seqlens, scale)
    split = (row.split(case.token_counts) for row in rows)
    for request, operands in enumerate(zip(*case.queries(), *split, strict=True)):
        exact = latent_attention(*operands, scale)
        error = latent_attention_error(*operands, scale, dtype=torch.float64)
        assert_close(
            AttentionOutput(actual.out[request], actual.lse[request]),
            exact,
            AttentionError(2 * error.out, 2 * error.lse),
            case,
        )
