"""The merge of splits behind the Hopper decode kernel: partial results, weighted by their lse.

A request's own number of splits decides the order of its sums, and so its bits. Requests of one
split wrote their output themselves and are passed over. Its meaning is
`stage2_pv_pipeline.rescaled_pv.merge_partials`.
"""

import math
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from stage3_dataflow.kernels.gluon_api import load_words, reinterpret, thread_barrier
from stage3_dataflow.kernels.launch_cache import launch, places

BLOCK_TOKENS = gl.constexpr(64)
"""Splits are whole blocks of so many tokens."""
WIDTH = gl.constexpr(512)
HALF_WIDTH = gl.constexpr(256)
MANY_PARTIALS = gl.constexpr(64)
"""Partial rows that a program fetches at a time: of one row, or of several with fewer splits."""
FEW_PARTIALS = gl.constexpr(16)
"""... where there are few rows, so that more programs have some. No row's sum depends on it."""
ENOUGH_PROGRAMS = 128
"""With as many, about one a multiprocessor, programs are not made smaller."""
SHARED_BYTES = gl.constexpr(96 * 1024)
"""What a program with many partials reserves of shared memory: two fit a multiprocessor. This
launch begins while decodes still run, and without a limit the multiprocessors that are free by then
would take all of its programs."""
COPIED = gl.constexpr(4)
"""Partial rows that a warpgroup's four warps copy side by side."""

TILE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0]))
"""[rows, 256 dimensions], two dimensions a thread."""
TILE_ROWS = gl.constexpr(gl.SliceLayout(1, TILE.value))
TILE_DIMS = gl.constexpr(gl.SliceLayout(0, TILE.value))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def split_of_request(length, split, min_tokens, max_splits):
    """Blocks of one split of a request, from its length alone: (number of splits, first, end)."""
    blocks = (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    splits = gl.minimum((length - 1) // min_tokens + 1, max_splits)
    blocks_a_split = gl.maximum((blocks + splits - 1) // gl.maximum(splits, 1), 1)
    splits = (blocks + blocks_a_split - 1) // blocks_a_split
    first = split * blocks_a_split
    return splits, first, gl.minimum(first + blocks_a_split, blocks)


@gluon.jit(do_not_specialize=["rows", "capacity", "min_tokens", "max_splits", "partial_splits"])
def hopper_combine_kernel(
    partial_out, partial_lse, cache_seqlens, out, lse, rows, capacity, min_tokens, max_splits,
    partial_splits, MERGE_SPLITS: gl.constexpr, PARTIALS: gl.constexpr,
):  # fmt: skip
    """Merge some rows of a request that was split. Grid: (groups of rows, 2 halves, batch).

    A request with fewer splits than `MERGE_SPLITS`, a power of two that none has more of (or 128),
    takes more rows to a program, and leaves the last programs without any.
    """
    request = gl.program_id(2)
    length = gl.load(cache_seqlens + request)
    length = gl.where((length < 0) | (length > capacity), 0, length)
    splits, _first, _end = split_of_request(length, 0, min_tokens, max_splits)
    wait_for_launch_before()
    DTYPE: gl.constexpr = partial_out.dtype.element_ty
    BYTES: gl.constexpr = PARTIALS * HALF_WIDTH * DTYPE.primitive_bitwidth // 8
    RESERVED: gl.constexpr = SHARED_BYTES // BYTES if PARTIALS == MANY_PARTIALS else 1
    memory = gl.allocate_shared_memory(DTYPE, [RESERVED, PARTIALS, HALF_WIDTH], FLAT_ROWS).index(0)
    weight_memory = gl.allocate_shared_memory(gl.float32, [PARTIALS], FLAT)
    out_row, partial_row = request * rows, request * partial_splits * rows
    tensors = (out, lse, partial_out, partial_lse, memory, weight_memory)
    places = (out_row, partial_row, rows, splits, gl.program_id(0), gl.program_id(1))
    if (splits > 1) & (splits <= 4):
        merge_rows(tensors, places, 4, PARTIALS)
    if MERGE_SPLITS > 4:
        if (splits > 4) & (splits <= 8):
            merge_rows(tensors, places, 8, PARTIALS)
    if MERGE_SPLITS > 8:
        if (splits > 8) & (splits <= 16):
            merge_rows(tensors, places, 16, PARTIALS)
    if MERGE_SPLITS > 16:
        if (splits > 16) & (splits <= 32):
            merge_rows(tensors, places, 32, PARTIALS)
    if MERGE_SPLITS > 32:
        if splits > 32:
            merge_rows(tensors, places, MERGE_SPLITS, PARTIALS)


@gluon.jit
def let_merge_start():
    """Let the merge's launch begin, once every program of the decode has said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_launch_before():
    """Return once what the launch before this one writes is there: this one began as it ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def merge_rows(tensors, places, MERGE_SPLITS: gl.constexpr, PARTIALS: gl.constexpr):
    """Merge a group of rows, 256 dimensions of each; four warps.

    Loops, not unrolled: a multiprocessor runs this once or twice, and fetching an instruction for
    the first time takes longer than executing it. The partials come through shared memory, where no
    registers limit how many are on their way.

    Parameters
    ----------
    tensors
        `out`, `lse`, and the partials; shared memory for `PARTIALS` of 256 dimensions, and for a
        float32 of each.
    places
        The request's first row in `out` and in its first partial; its rows and its splits; which
        group of rows, and which 256 of the 512 dimensions.
    MERGE_SPLITS
        A power of two, at least the request's splits; or 128 for any number.
    PARTIALS
        Partial rows to fetch at a time.
    """
    out, lse, partial_out, partial_lse, memory, weight_memory = tensors
    out_row, partial_row, rows, splits, group, half = places
    CHUNK: gl.constexpr = MERGE_SPLITS if MERGE_SPLITS < PARTIALS else PARTIALS
    CHUNKED: gl.constexpr = MERGE_SPLITS > PARTIALS
    NUMBER: gl.constexpr = PARTIALS // CHUNK
    UNROLL: gl.constexpr = 4 // NUMBER if NUMBER < 4 else 1  # so that whole copies are summed
    LANES: gl.constexpr = CHUNK if CHUNK < 32 else 32
    PLACES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, PLACES)
    values = reinterpret(
        memory, partial_out.dtype.element_ty, [CHUNK, NUMBER, HALF_WIDTH], FLAT_ROWS
    )
    weights = reinterpret(weight_memory, gl.float32, [CHUNK, NUMBER], FLAT)
    start = group * NUMBER
    end = gl.minimum(start + NUMBER, rows)
    if start < end:
        row = start + gl.arange(0, NUMBER, BY_ROW)
        place = partial_row + gl.minimum(row, end - 1)
        row_max = gl.full([NUMBER], float("-inf"), gl.float32, BY_ROW)
        total = gl.zeros([NUMBER], gl.float32, BY_ROW)
        bad_page = gl.zeros([NUMBER], gl.int32, BY_ROW)
        merged = gl.zeros([NUMBER, HALF_WIDTH], gl.float32, TILE)
        for base in range(0, splits if CHUNKED else 1, CHUNK):
            if CHUNKED:
                thread_barrier()  # what was in memory has been read
            count = gl.minimum((splits - base + UNROLL - 1) // UNROLL * UNROLL, CHUNK)
            copy_partials(
                partial_out, memory, partial_row, start, end, rows, base, splits, half, count,
                NUMBER, PARTIALS,
            )  # fmt: skip
            split = base + gl.arange(0, CHUNK, gl.SliceLayout(0, PLACES))
            address = partial_lse + (gl.minimum(split, splits - 1) * rows)[None, :] + place[:, None]
            lses = gl.where((split < splits)[None, :], gl.load(address), float("-inf"))
            bad_page |= gl.max((lses == float("inf")).to(gl.int32), 1)
            lses = gl.where(lses == float("inf"), float("-inf"), lses)
            new_max = gl.maximum(row_max, gl.max(lses, 1))
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            weight = gl.exp(lses - shift[:, None])
            weight_memory.store(weight.permute((1, 0)).reshape([PARTIALS]))
            if CHUNKED:
                ratio = gl.exp(row_max - shift)
                total = total * ratio + gl.sum(weight, 1)
                merged = merged * gl.convert_layout(ratio, TILE_ROWS)[:, None]
                row_max = new_max
            else:
                total, row_max = gl.sum(weight, 1), shift
            async_copy.wait_group(0)
            thread_barrier()
            for i in range(0, count, UNROLL):
                for j in gl.static_range(UNROLL):
                    factor = weights.index(i + j).load(TILE_ROWS)[:, None]
                    value = values.index(i + j).load(TILE).to(gl.float32)
                    # Of a split that saw no token, whatever stands there.
                    merged = merged + factor * gl.where(factor == 0.0, 0.0, value)
        empty = (total == 0.0) | (bad_page > 0)
        if half == 0:
            row_lse = gl.where(empty, float("-inf"), row_max + gl.log(total))
            gl.store(lse + out_row + row, row_lse, mask=row < end)
        inverse = gl.convert_layout(gl.where(empty, 0.0, 1.0 / total), TILE_ROWS)[:, None]
        merged = gl.where(inverse == 0.0, 0.0, merged * inverse)  # behind a bad page, anything
        row = start + gl.arange(0, NUMBER, TILE_ROWS)
        dim = half * HALF_WIDTH + gl.arange(0, HALF_WIDTH, TILE_DIMS)
        address = out + out_row.to(gl.int64) * WIDTH + (row[:, None] * WIDTH + dim[None, :])
        gl.store(address, merged.to(out.dtype.element_ty), mask=(row < end)[:, None])


@gluon.jit
def copy_partials(
    partial_out, memory, partial_row, first_row, end, rows, first_split, splits, half, count,
    NUMBER: gl.constexpr, PARTIALS: gl.constexpr,
):  # fmt: skip
    """Start copying partial rows: of `count` splits in turn, `NUMBER` rows.

    Behind the last row and the last split the last ones are copied again, with weights of zero:
    what nobody wrote is never read.
    """
    DTYPE: gl.constexpr = partial_out.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 128 // DTYPE.primitive_bitwidth], [1, 32], [COPIED, 1], [1, 0]
    )
    target = reinterpret(memory, DTYPE, [PARTIALS // COPIED, COPIED, HALF_WIDTH], FLAT_ROWS)
    dim = half * HALF_WIDTH + gl.arange(0, HALF_WIDTH, gl.SliceLayout(0, LAYOUT))
    for i in range(count * NUMBER // COPIED):
        place = i * COPIED + gl.arange(0, COPIED, gl.SliceLayout(1, LAYOUT))
        split = gl.minimum(first_split + place // NUMBER, splits - 1)
        row = partial_row + split * rows + gl.minimum(first_row + place % NUMBER, end - 1)
        address = partial_out + row.to(gl.int64)[:, None] * WIDTH + dim[None, :]
        load_words(target.index(i), address)
    async_copy.commit_group()


UNSPECIALIZED = places(
    hopper_combine_kernel, "rows", "capacity", "min_tokens", "max_splits", "partial_splits"
)


class MergeGrid(NamedTuple):
    """How a merge is cut into programs.

    Attributes
    ----------
    merge_splits
        A power of two, at least the splits of any request; or 128 for any number.
    partials
        Partial rows that a program fetches at a time.
    programs
        The grid: groups of rows, halves of the latent dimensions, requests.
    """

    merge_splits: int
    partials: int
    programs: tuple[int, int, int]


def merge_grid(batch: int, splits: int, rows: int) -> MergeGrid:
    """Cut the merge of at most `splits` splits of each row into programs."""
    merge_splits = next((number for number in (4, 8, 16, 32, 64) if splits <= number), 128)
    for partials in (MANY_PARTIALS.value, FEW_PARTIALS.value):
        groups = -(-rows // max(partials // merge_splits, 1))
        grid = MergeGrid(merge_splits, partials, (groups, 2, batch))
        if merge_splits > FEW_PARTIALS.value or math.prod(grid.programs) >= ENOUGH_PROGRAMS:
            break
    return grid


def launch_hopper_combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    cache_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    capacity: int,
    min_tokens: int,
    max_splits: int,
) -> None:
    """Merge the partials of requests that were split.

    Parameters
    ----------
    partial_out, partial_lse
        [batch, splits, rows, 512], BF16 or f32, and f32 [batch, splits, rows].
    cache_seqlens
        Int32 [batch]: they say how many splits a request has.
    out, lse
        [batch, s_q, heads, 512] and f32 [batch, s_q, heads], rows being s_q heads.
    capacity, min_tokens, max_splits
        Longest length that counts as one, and the split rule.
    """
    batch, partial_splits, rows = partial_lse.shape
    merge_splits, partials, programs = merge_grid(batch, partial_splits, rows)
    plan = (capacity, min_tokens, max_splits, partial_splits)
    launch(
        hopper_combine_kernel,
        programs,
        (partial_out, partial_lse, cache_seqlens, out, lse, rows, *plan),
        {"MERGE_SPLITS": merge_splits, "PARTIALS": partials},
        unspecialized=UNSPECIALIZED,
        num_warps=4,
        launch_pdl=True,  # what comes before `wait_for_launch_before` may overlap the decode's end
    )
