"""Pages spread over ranks: attention is the merge of what each rank's pages give."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import AttentionBackend, load_backend
from stage0_reference.generation import TextGenerator
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.page_allocator import pages_for
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from stage0_reference.tokenizer import load_tokenizer
from stage3_dataflow import merge_partials, use_path
from stage3_dataflow.context_parallel import (
    ContextParallelBackend,
    local_length,
    local_pages,
    merge,
    merge_over_ranks,
)
from stage3_dataflow.triton_backend import Bf16KernelBackend, FusedBackend
from tests.bounds import (
    AttentionError,
    assert_within,
    attention_error,
    gamma,
    kernel_attention_error,
    latent_attention_error,
    rounding_error,
)
from tests.model_factory import random_decoder, tiny_config
from tests.stage3.cached_requests import (
    Operands,
    as_bytes,
    assert_same_bits,
    meets_nan,
    operands_of,
    poison,
)
from tests.stage3.ranks import ThreadRanks, errors_on_threads, on_threads, under_torchrun
from tests.stage3.test_combine import merge_error as partials_error
from tests.strategies import DecodeCase, decode_cases, kernel_cases, seeds

pytestmark = pytest.mark.stage3

SIZES = st.integers(1, 4)
CASE = DecodeCase(
    heads=2,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    page_size=16,
    token_counts=(100, 0, 17, 1, 48),
    s_q=3,
    regime="normal",
    spread=5.0,
    dtype=torch.float32,
    seed=3,
)


def filled(case: DecodeCase, backend: ContextParallelBackend | AttentionBackend):
    """One layer with the case's tokens; NaN in every other slot."""
    config = tiny_config(kv_lora_rank=case.kv_lora_rank, qk_rope_head_dim=case.qk_rope_head_dim)
    pages = case.pages()
    cache = backend.make_cache(config, pages.num_pages, case.page_size)[0]
    poison(cache)
    backend.append(*case.rows(), cache, pages.slot_mapping)
    return cache


def attend(case: DecodeCase, backend, cache, causal: bool) -> AttentionOutput:
    pages = case.pages()
    return backend.attend(
        *case.queries(),
        cache,
        pages.block_table,
        pages.cache_seqlens,
        case.softmax_scale(),
        causal=causal,
    )


def merge_error(
    exact: AttentionOutput, error: AttentionError, dtype: torch.dtype
) -> AttentionError:
    """Error of merging partials that are off by so much: attention over the partials as keys.

    Their scores are the lse, off by `error.lse`, and their values the partial outputs. An error e
    of a score counts in `attention_error` as a magnitude of ``e / gamma(1)``. Values that are off
    bring their error at the weights as computed, which are exact ones and the error of attention
    whose values are unit vectors.
    """
    parts = exact.lse.shape[0]
    scores = exact.lse.movedim(0, -1)[..., None, :]  # [rows, 1, parts]
    off = error.lse.movedim(0, -1)[..., None, :] / gamma(1, dtype)
    values = exact.out.abs().movedim(0, -2)  # [rows, parts, width]

    def over(values: Tensor) -> AttentionError:
        return attention_error(
            scores, off, values, score_roundings=1, value_roundings=0, dtype=dtype
        )

    own = over(values)
    hidden = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    computed = weights + over(torch.eye(parts, dtype=torch.float64)).out
    from_values = (computed @ error.out.movedim(0, -2)) * (1.0 + gamma(parts + 3, dtype))
    return AttentionError((own.out + from_values).squeeze(-2), own.lse.squeeze(-1))


def expected(
    operands: Operands, case: DecodeCase, request: int, size: int, causal: bool, part_error
) -> tuple[AttentionOutput, AttentionError]:
    """Exact attention of one request, and what `size` ranks may be off, both [s_q, heads, .].

    Every query token is looked at by itself, with the plain list of tokens that a rank has of what
    it sees; a rank's own two parts are told apart as in the module under test.
    """
    pages, scale, length = case.pages(), case.softmax_scale(), case.token_counts[request]
    page_ids = pages.block_table[request]
    rank_of = [int(page_ids[t // case.page_size]) % size for t in range(length)]
    outs, errors = [], []
    for query in range(case.s_q):
        nope, rope = operands.q_latent[query : query + 1], operands.q_rope[query : query + 1]

        def take(tokens: Sequence[int], nope=nope, rope=rope):
            keys = torch.tensor(tokens, dtype=torch.long)
            own = Operands(nope, rope, *(x[keys] for x in operands[2:]))
            exact = latent_attention(*own[:4], scale, causal=False)
            return exact, part_error(own, scale)

        def visible(at: int) -> int:
            return max(0, length - case.s_q + at + 1) if causal else length

        ranks = []
        for rank in range(size):
            mine = [t for t in range(visible(query)) if rank_of[t] == rank]
            if causal and case.s_q > 1:
                first = sum(rank_of[t] == rank for t in range(visible(0)))
                shared = first // case.page_size * case.page_size
                halves = [take(mine[:shared]), take(mine[shared:])]
                ranks.append(merged(halves, case.dtype))
            else:
                ranks.append(take(mine))
        exact, error = merged(ranks, case.dtype) if size > 1 else ranks[0]
        outs.append(exact)
        errors.append(error)
    exact = AttentionOutput(*(torch.cat(x) for x in zip(*outs, strict=True)))
    error = AttentionError(*(torch.cat(x) for x in zip(*errors, strict=True)))
    if case.dtype in (torch.bfloat16, torch.float16):
        rounded = rounding_error(exact.out.abs() + error.out, case.dtype)
        error = error._replace(out=error.out + rounded.masked_fill(error.out == 0.0, 0.0))
    return exact, error


def merged(parts, dtype: torch.dtype) -> tuple[AttentionOutput, AttentionError]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = AttentionOutput(*(torch.stack(x) for x in zip(*(p[0] for p in parts), strict=True)))
    error = AttentionError(*(torch.stack(x) for x in zip(*(p[1] for p in parts), strict=True)))
    bound = merge_error(exact, error, wide)
    reference = merge_error(exact, AttentionError(*(0.0 * x for x in error)), torch.float64)
    bound = AttentionError(*(x + y for x, y in zip(bound, reference, strict=True)))
    return merge_partials(*exact), bound


def assert_ranks_attend(case: DecodeCase, size: int, causal: bool, make, operands, part_error):
    def program(ranks):
        backend = ContextParallelBackend(make(), ranks)
        return attend(case, backend, filled(case, backend), causal)

    results = on_threads(size, program)
    for result in results:
        assert_same_bits(result, results[0])
    assert results[0].out.dtype == case.dtype
    for request in range(len(case.token_counts)):
        exact, error = expected(operands[request], case, request, size, causal, part_error)
        about = (request, size, causal, case)
        assert_within(results[0].out[request], exact.out, error.out, about=("out", *about))
        assert_within(results[0].lse[request], exact.lse, error.lse, about=("lse", *about))


@settings(max_examples=40)
@given(
    case=decode_cases(longest=90, largest_batch=3, largest_s_q=5),
    size=SIZES,
    causal=st.booleans(),
)
@example(case=CASE, size=3, causal=True)
def test_ranks_attend_like_one_over_a_bf16_cache(case, size, causal):
    """Each part within stage 0's bound (its blocks: one), merged within `merge_error`."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    rows = [x.double().split(case.token_counts) for x in case.rows()]
    operands = [
        Operands(*(q[i].double() for q in case.queries()), rows[0][i], rows[1][i], rows[0][i][:, 0])
        for i in range(len(case.token_counts))
    ]

    def part_error(own: Operands, scale: float) -> AttentionError:
        both = [
            latent_attention_error(*own[:4], scale, dtype=dtype, causal=False)
            for dtype in (wide, torch.float64)
        ]
        return AttentionError(*(x + y for x, y in zip(*both, strict=True)))

    assert_ranks_attend(case, size, causal, AbsorbedBackend, operands, part_error)


@settings(max_examples=25)
@given(case=kernel_cases(longest=90), size=SIZES, causal=st.booleans(), fp8=st.booleans())
@example(case=CASE, size=4, causal=True, fp8=True)
def test_ranks_attend_like_one_through_the_library(case, size, causal, fp8):
    """The same of stage 3's entry points, by their twins; P is rounded to BF16 there."""
    with use_path("pytorch"):
        assert_library_attends(case, size, causal, fp8)


def assert_library_attends(case, size, causal, fp8):
    scale_format = FusedBackend().scale_format if fp8 else None
    operands = operands_of(case, scale_format)

    def part_error(own: Operands, scale: float) -> AttentionError:
        kernel = kernel_attention_error(*own, scale, p_format="bf16", causal=False, splits=4)
        wide = latent_attention_error(*own[:4], scale, dtype=torch.float64, causal=False)
        return AttentionError(kernel.out + wide.out, kernel.lse + wide.lse)

    make = FusedBackend if fp8 else Bf16KernelBackend
    assert_ranks_attend(case, size, causal, make, operands, part_error)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, bench_parallel does this on GPUs"
)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_ranks_attend_like_one_through_the_kernels(fp8, monkeypatch):
    """The kernels' own code, a launch at a time: Triton's interpreter has global state."""
    from stage3_dataflow.kernels import launch, launch_ranks

    alone, launched = threading.Lock(), set()

    def launch_alone(kernel, *arguments, real=launch.launch, **choices):
        with alone:
            launched.add(kernel.fn.__name__)
            real(kernel, *arguments, **choices)

    for module in (launch, launch_ranks):
        monkeypatch.setattr(module, "launch", launch_alone)
    for changed in ({"token_counts": (70, 3), "s_q": 2}, {"token_counts": (40, 0, 17), "s_q": 1}):
        case = DecodeCase(**(vars(CASE) | changed | {"dtype": torch.bfloat16}))
        assert_library_attends(case, 2, True, fp8)
    assert {"local_pages_kernel", "merge_ranks_kernel"} <= launched


# Identities


@given(case=decode_cases(longest=30, largest_batch=2, largest_s_q=1), size=st.integers(2, 5))
def test_ranks_without_a_page_change_no_bit(case, size):
    """All pages of the pool are one rank's: the others bring (0, -inf)."""
    pages = case.pages()
    owner = size - 1
    table = torch.where(  # page p of the pool of one is page p * size + owner of the pool of all
        pages.block_table.clamp(0, pages.num_pages) == pages.block_table,
        pages.block_table * size + owner,
        pages.block_table,
    )
    slots = pages.slot_mapping
    slots = (slots // case.page_size * size + owner) * case.page_size + slots % case.page_size
    config = tiny_config(kv_lora_rank=case.kv_lora_rank, qk_rope_head_dim=case.qk_rope_head_dim)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    queries = tuple(x.to(wide) for x in case.queries())
    where = (pages.cache_seqlens, case.softmax_scale())

    def program(ranks):
        backend = ContextParallelBackend(AbsorbedBackend(), ranks)
        cache = backend.make_cache(config, pages.num_pages * size, case.page_size)[0]
        poison(cache)
        backend.append(*case.rows(), cache, slots)
        partial = backend.attend_local(*queries, cache, table, *where)
        return partial, backend.attend(*queries, cache, table, *where), cache

    one = AbsorbedBackend()
    cache = filled(case, one)
    alone = one.attend(*queries, cache, pages.block_table, *where)
    for rank, (partial, together, planes) in enumerate(on_threads(size, program)):
        assert_same_bits(together, alone)
        if rank == owner:
            assert_same_bits(planes, cache)
        else:
            assert bool((partial.out == 0.0).all()) and bool(partial.lse.isneginf().all())
            assert all(bool(plane.isnan().all()) for plane in planes)  # nothing was written


@given(size=st.integers(1, 5), seed=st.integers(0, 99), empty=st.integers(0, 4))
def test_the_merge_is_stage_2s_in_the_order_of_ranks(size, seed, empty):
    stream = torch.Generator().manual_seed(seed)
    outs = torch.randn(size, 2, 1, 3, 8, generator=stream)
    lses = 30.0 * torch.randn(size, 2, 1, 3, generator=stream)
    if empty < size:
        lses[empty], outs[empty] = -torch.inf, 0.0

    def program(ranks):
        partial = AttentionOutput(outs[ranks.rank], lses[ranks.rank])
        return merge_over_ranks(ranks, partial, torch.float32)

    for result in on_threads(size, program):
        if size == 1:
            assert_same_bits(result, (outs[0], lses[0]))
        else:
            assert_same_bits(result, merge_partials(outs, lses))


@settings(max_examples=30)
@given(case=kernel_cases(longest=60, largest_batch=3), size=SIZES, stage=st.integers(0, 3))
def test_a_prefix_is_read_back_bit_by_bit_on_every_rank(case, size, stage):
    pages = case.pages()
    with use_path("pytorch"):
        one = load_backend(stage)
        where = (pages.block_table, pages.cache_seqlens)
        rows = one.read_prefix(filled(case, one), *where)

        def program(ranks):
            backend = ContextParallelBackend(load_backend(stage), ranks)
            return backend.read_prefix(filled(case, backend), *where)

        for read in on_threads(size, program):
            assert_same_bits(read, rows)


@given(
    case=decode_cases(longest=90, largest_batch=3),
    size=SIZES,
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_rank_writes_its_pages_tokens_only(case, size, dtype):
    pages = case.pages()
    rows = case.rows()
    cache_of_one = filled(case, AbsorbedBackend())

    def program(ranks):
        backend = ContextParallelBackend(AbsorbedBackend(), ranks)
        cache = filled(case, backend)
        before = [plane.clone() for plane in cache]
        nowhere = torch.full_like(pages.slot_mapping, -1).to(dtype)
        backend.append(*rows, cache, nowhere)
        assert_same_bits(cache, before)
        return cache

    for rank, cache in enumerate(on_threads(size, program)):
        assert len(cache.c_kv) == -(-pages.num_pages // size)
        for plane, whole in zip(cache, cache_of_one, strict=True):
            own = whole[rank::size]
            assert torch.equal(as_bytes(plane[: len(own)]), as_bytes(own))


@given(
    data=st.data(),
    size=st.integers(1, 5),
    page_size=st.integers(1, 5),
    pages_per_rank=st.integers(1, 4),
    max_pages=st.integers(1, 6),
)
def test_local_pages_and_lengths_are_what_a_loop_finds(
    data, size, page_size, pages_per_rank, max_pages
):
    """Bad pages and lengths included: on a GPU nobody can refuse them, and the request is empty."""
    pool = pages_per_rank * size
    row = st.lists(st.integers(-1, pool), min_size=max_pages, max_size=max_pages)
    table = data.draw(st.lists(row, min_size=1, max_size=3))
    capacity = max_pages * page_size
    lengths = [data.draw(st.integers(-2, capacity + 1)) for _ in table]
    visible = [[data.draw(st.integers(-1, max(0, n))) for _ in range(2)] for n in lengths]

    found = [[[] for _ in seen] for seen in visible]
    for rank in range(size):
        pages = local_pages(
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            ThreadRanks(rank, size),
            pages_per_rank,
            page_size,
        )
        counts = local_length(pages, torch.tensor(visible, dtype=torch.int32), page_size)
        assert pages.block_table.dtype == counts.dtype == torch.int32
        for request, queries in enumerate(counts.tolist()):
            for query, count in enumerate(queries):
                for token in range(count):
                    local = int(pages.block_table[request, token // page_size])
                    slot = (local * size + rank) * page_size + token % page_size
                    found[request][query].append(slot)
    for request, (row, length) in enumerate(zip(table, lengths, strict=True)):
        needed = row[: -(-length // page_size)] if 0 < length <= capacity else []
        bad = not 0 <= length <= capacity or any(not 0 <= page < pool for page in needed)
        for query, seen in enumerate(visible[request]):
            tokens = [] if bad else range(seen)
            slots = [row[t // page_size] * page_size + t % page_size for t in tokens]
            assert sorted(found[request][query]) == sorted(slots)


def test_a_length_that_the_table_cannot_hold_makes_the_request_empty():
    """Where the host does not see it."""
    lengths = torch.tensor([8, 9, -1], dtype=torch.int32)
    pages = local_pages(
        torch.tensor([[0, 1]] * 3, dtype=torch.int32), lengths, ThreadRanks(0, 2), 1, 4
    )
    assert pages.readable.tolist() == [True, False, False]
    assert local_length(pages, lengths, 4).tolist() == [4, 0, 0]


# Kernels


def tables_and_lengths(data, size, page_size, pages_per_rank, max_pages):
    """Requests whose pages or length are bad or fine: a table row of either, and a length."""
    pool = pages_per_rank * size
    batch = data.draw(st.integers(1, 4))
    stream = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    table = torch.randint(0, pool, (batch, max_pages), generator=stream, dtype=torch.int32)
    capacity = max_pages * page_size
    lengths = []
    for row in table:
        bad = st.tuples(
            st.integers(0, max_pages - 1), st.sampled_from((-1, -size, pool, 2**31 - 1))
        )
        for column, page in data.draw(st.lists(bad, max_size=1)):
            row[column] = page
        edges = (0, 1, capacity - 1, capacity, capacity + 1, -1, 2**31 - 1, -(2**31))
        lengths.append(data.draw(st.sampled_from(edges) | st.integers(0, capacity)))
    return table, torch.tensor(lengths, dtype=torch.int32)


def assert_finds_what_its_twins_find(
    device, table, seqlens, *, size, pages_per_rank, page_size, queries
):
    """On every rank the same lengths, and the same local table as far as they reach."""
    from stage3_dataflow.kernels.launch_ranks import launch_local_pages

    wide = torch.nn.functional.pad(table, (0, 3), value=-7)  # rows further apart
    visible = seqlens.long()[:, None] + torch.arange(1 - queries, 1)
    for rank in range(size):
        pages = local_pages(table, seqlens, ThreadRanks(rank, size), pages_per_rank, page_size)
        expected = local_length(pages, visible, page_size)
        local_table = torch.full(table.shape, -9, dtype=torch.int32, device=device)
        lengths = torch.full((len(table), queries), -9, dtype=torch.int32, device=device)
        launch_local_pages(
            wide.to(device)[:, : table.shape[1]],
            seqlens.to(device),
            local_table,
            lengths,
            rank=rank,
            ranks=size,
            pages_per_rank=pages_per_rank,
            page_size=page_size,
        )
        assert_same_bits([lengths.cpu()], [expected])
        for row, twin, length in zip(
            local_table.cpu(), pages.block_table, expected[:, -1].tolist(), strict=True
        ):
            used = pages_for(length, page_size)
            assert torch.equal(row[:used], twin[:used])


@given(
    data=st.data(),
    size=st.integers(1, 5),
    page_size=st.sampled_from((1, 3, 16, 64)),
    pages_per_rank=st.integers(1, 40),
    max_pages=st.integers(1, 40),
    queries=st.integers(1, 4),
)
@settings(max_examples=40)
def test_the_kernel_finds_its_twins_pages_and_lengths(
    device, data, size, page_size, pages_per_rank, max_pages, queries
):
    table, seqlens = tables_and_lengths(data, size, page_size, pages_per_rank, max_pages)
    sizes = {"size": size, "pages_per_rank": pages_per_rank, "page_size": page_size}
    assert_finds_what_its_twins_find(device, table, seqlens, **sizes, queries=queries)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 4097])
def test_the_kernel_counts_on_from_block_to_block(device, beyond):
    """Tables of about one block and of more than two, full; a bad page early, late, or none."""
    from stage3_dataflow.kernels.launch_ranks import LOCAL_COLUMNS

    columns = LOCAL_COLUMNS + beyond
    table = torch.randint(0, 30, (4, columns), dtype=torch.int32)
    table[1, 0], table[2, -1], table[3, -1] = -1, 30, 30
    seqlens = torch.tensor([3, 3, 3, 3], dtype=torch.int32) * columns
    seqlens[3] -= 3  # the bad page is behind this one
    sizes = {"size": 3, "pages_per_rank": 10, "page_size": 3}
    assert_finds_what_its_twins_find(device, table, seqlens, **sizes, queries=2)


def test_the_kernel_writes_local_pages_and_nothing_else(device):
    """Rank 1 of two has pages 3 and 5 of the first request, whose length needs four columns."""
    from stage3_dataflow.kernels.launch_ranks import launch_local_pages

    table = torch.tensor([[3, 0, 5, 2, 7, 7], [1, 8, 1, 1, 1, 1]], dtype=torch.int32, device=device)
    local_table, lengths = torch.full_like(table, -9), table.new_full((2, 2), -9)
    seqlens = table.new_tensor([13, 24])  # page 8 is outside the pool of eight
    launch_local_pages(
        table, seqlens, local_table, lengths, rank=1, ranks=2, pages_per_rank=4, page_size=4
    )
    assert lengths.tolist() == [[8, 8], [0, 0]]
    assert local_table[0].tolist() == [1, 2, -9, -9, -9, -9]


def merge_by_kernel(outs, lses, dtype, device):
    """Parts as they lie in what was gathered, [parts, rows, width + 1]."""
    gathered = torch.cat((outs, lses[..., None]), dim=-1).to(device)
    parts = gathered[..., :-1], gathered[..., -1]
    return AttentionOutput(*(x.cpu() for x in merge(*parts, dtype, by_kernel=True)))


@given(
    size=st.integers(2, 8),
    rows=st.integers(1, 3),
    width=st.sampled_from((24, 32, 64)),
    spread=st.sampled_from((0.0, 3.0, 80.0, 1e4)),
    empty=st.sampled_from((0.0, 0.4)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=seeds(),
)
@settings(max_examples=25)
def test_the_kernels_merge_is_stage_2s_within_rounding(
    device, size, rows, width, spread, empty, dtype, seed
):
    stream = torch.Generator().manual_seed(seed)
    outs = torch.randn(size, 1, 1, rows, width, generator=stream)
    lses = spread * torch.randn(size, 1, 1, rows, generator=stream)
    absent = torch.rand(lses.shape, generator=stream) < empty
    lses[absent], outs[absent] = -torch.inf, torch.nan  # and what stands there is not read
    result = merge_by_kernel(outs, lses, dtype, device)
    assert result.out.dtype == dtype
    exact = merge_partials(outs.double(), lses.double())
    for row in range(rows):
        values = outs[:, 0, 0, row].masked_fill(absent[:, 0, 0, row, None], 0.0)
        error = partials_error(values, lses[:, 0, 0, row])
        off = error.out[0]
        if dtype != torch.float32:
            off = off + rounding_error(exact.out[0, 0, row].abs() + off, dtype)
        if bool(absent[..., row].all()):
            off = torch.zeros_like(off)
        assert_within(result.out[0, 0, row], exact.out[0, 0, row], off)
        assert_within(result.lse[0, 0, row : row + 1], exact.lse[0, 0, row : row + 1], error.lse)


@given(size=st.integers(2, 5), owner=st.integers(0, 4), seed=seeds())
@settings(max_examples=10)
def test_the_kernels_merge_with_empty_parts_changes_no_bit(device, size, owner, seed):
    stream = torch.Generator().manual_seed(seed)
    outs = torch.full((size, 2, 1, 3, 32), torch.nan)
    lses = torch.full((size, 2, 1, 3), -torch.inf)
    nothing = merge_by_kernel(outs, lses, torch.float32, device)
    assert_same_bits(nothing, (torch.zeros(2, 1, 3, 32), lses[0]))
    owner = owner % size
    outs[owner] = torch.randn(outs[0].shape, generator=stream)
    lses[owner] = 30.0 * torch.randn(lses[0].shape, generator=stream)
    result = merge_by_kernel(outs, lses, torch.float32, device)
    assert_same_bits(result, (outs[owner], lses[owner]))


@meets_nan
def test_a_nan_that_a_rank_has_seen_stays(device):
    outs, lses = torch.ones(3, 1, 1, 2, 32), torch.zeros(3, 1, 1, 2)
    outs[1, ..., 0, :], lses[1, ..., 0] = torch.nan, torch.nan
    out, lse = merge_by_kernel(outs, lses, torch.float32, device)
    assert bool(out[0, 0, 0].isnan().all()) and bool(lse[0, 0, 0].isnan())
    assert torch.equal(out[0, 0, 1], torch.ones(32))


# Generation


@pytest.mark.parametrize("form", ["absorbed", "auto"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_decoder_generates_what_it_generates_on_one_rank(size, form):
    """In float64 over a float64 cache, so that no rounding can decide; 'auto' reads prefixes."""
    decoder = random_decoder(tiny_config(), dtype=torch.float64)
    prompts = [[5, 17, 3, 44, 8, 1, 2, 3, 4, 5, 6, 7], [9, 9, 1]]
    pool = {"num_pages": 13, "page_size": 4, "prefill_chunk": 16, "attention_form": form}

    def generate(backend):
        generator = TextGenerator(decoder, backend, **pool)
        return generator.generate(prompts, SamplingParams(max_new_tokens=6))

    alone = generate(AbsorbedBackend(torch.float64))

    def program(ranks):
        return generate(ContextParallelBackend(AbsorbedBackend(torch.float64), ranks))

    assert on_threads(size, program) == [alone] * size


@pytest.mark.processes
def test_torchrun_runs_the_demo(tmp_path):
    """The command of the module's docstring, both ways, against one decoder in this process."""
    tokenizer = load_tokenizer(shipped_checkpoint())
    prompt = "def main():\n    return "
    decoder = load_decoder(shipped_checkpoint(), dtype=torch.float64)
    generator = TextGenerator(decoder, AbsorbedBackend(), num_pages=4, page_size=16)
    (alone,) = generator.generate([tokenizer.encode(prompt)], SamplingParams(max_new_tokens=5))
    printed = under_torchrun(
        *("stage3_dataflow.parallel_demo", "context", "--device", "cpu", prompt, "--json"),
        *("--page-size", "16", "--max-new-tokens", "5", "--dtype", "float64", "--timeout", "60"),
        limit_seconds=120,
    )
    report = json.loads(printed)
    assert report["token_ids"] == alone.token_ids
    assert report["text"] == tokenizer.decode(alone.token_ids)
    assert (report["ranks"], report["pages_on_a_rank"], report["pages"]) == (2, 1, 2)


# Refusals


def test_every_rank_refuses_what_one_would():
    case = DecodeCase(**(vars(CASE) | {"token_counts": (20,), "s_q": 1}))
    pages = case.pages()

    def attend_over(table, lengths):
        def program(ranks):
            backend = ContextParallelBackend(AbsorbedBackend(), ranks)
            where = (torch.tensor(table, dtype=torch.int32), torch.tensor(lengths).int())
            backend.attend(*case.queries(), filled(case, backend), *where, 1.0)

        return errors_on_threads(3, program)

    assert pages.num_pages == 4  # rounded up to six, two on each of three ranks
    for error in attend_over([[0, 6]], [20]):
        message = "block_table[0, 1] must be below num_pages = 6; got 6"
        assert re.search(re.escape(message), str(error))
    for error in attend_over([[0, 1]], [33]):
        assert "cache_seqlens[0] must be between 0 and 32" in str(error)

    def append(ranks):
        backend = ContextParallelBackend(AbsorbedBackend(), ranks)
        rows = [x[:1] for x in case.rows()]
        backend.append(*rows, filled(case, backend), torch.tensor([6 * 16 + ranks.size]))

    for error in errors_on_threads(3, append):
        assert "slot_mapping must stay below" in str(error)


def test_pools_and_stages_that_differ_are_refused():
    def another_pool(ranks):
        backend = ContextParallelBackend(AbsorbedBackend(), ranks)
        backend.make_cache(tiny_config(), 4 + ranks.rank, 16)

    for error in errors_on_threads(2, another_pool):
        assert "num_pages must be the same on all ranks; got 4 on rank 0 and 5" in str(error)
    for error in errors_on_threads(
        2, lambda ranks: ContextParallelBackend(load_backend(ranks.rank), ranks)
    ):
        assert "stage must be the same on all ranks; got 0 on rank 0 and 1 on rank 1" in str(error)


def test_a_negative_page_makes_the_whole_request_empty():
    """On every rank, also on those whose pages are fine: half an answer is none."""
    case = DecodeCase(**(vars(CASE) | {"token_counts": (40, 20), "s_q": 1}))
    pages = case.pages()
    table = pages.block_table.clone()
    table[0, 1] = -1

    def program(ranks):
        backend = ContextParallelBackend(AbsorbedBackend(), ranks)
        where = (table, pages.cache_seqlens, 1.0)
        return backend.attend(*case.queries(), filled(case, backend), *where)

    for out, lse in on_threads(2, program):
        assert bool((out[0] == 0.0).all()) and bool(lse[0].isneginf().all())
        assert bool(lse[1].isfinite().all())


def test_it_says_what_it_is_and_needs():
    def program(ranks):
        backend = ContextParallelBackend(FusedBackend(), ranks)
        assert isinstance(backend, AttentionBackend) and backend.stage == 3
        assert backend.capturable is True
        assert backend.description.endswith("; pages spread, ranks: 2")
        inner = FusedBackend().workspace_bytes(2, 1, 8, 64, 1024)
        assert backend.workspace_bytes(2, 1, 8, 64, 1024) == inner + 6 * 4 * 16 * 65
        plain = ContextParallelBackend(AbsorbedBackend(), ranks)
        assert plain.capturable is False
        assert plain.workspace_bytes(2, 1, 8, 64, 1024) == 6 * 4 * 16 * 65

    on_threads(2, program)
