"""The decode kernel for Hopper, in Gluon: TMA, mbarriers and FP8 wgmma written out.

The mathematics is stage 2's, block by block of 64 tokens; what is new is who does what. A program
has a multiprocessor to itself and attends for one item after another: a tile of rows (a row is a
query token and a head) over one split of a request. Its warps have roles, and hand each other tiles
through shared memory:

================  =====  =========  ==============================================================
role              warps  registers  work
================  =====  =========  ==============================================================
`manage_items`    1      24         finds the next item; each one's log-sum-exp, and 1 / l
`load_blocks`     1      24         TMA: tokens' codes, scale and rope, a ring of four; queries
`prepare_blocks`  1      24         logarithms of the scales; what lies behind the end is cleared
`weigh_blocks`    4      88         scores (FP8 latent, then BF16 rope product), online softmax, P
`add_values`      4 + 4  200        P @ V, 256 of the 512 latent dimensions each, and the output
================  =====  =========  ==============================================================

(128 and 176 registers for a tile of at most 32 rows: its O is half as large, and its scores are
turned, so that they need no padding to 64 rows.) Everybody waits for `weigh_blocks`, so what could
be taken from it was; and while one item's output leaves, the blocks of the next one are already
being fetched and weighed.

Three things shape it.

*V lies the wrong way round.* FP8 wgmma contracts along contiguous memory; V is the cached latent,
token by token. So the product is turned, O^T = V^T P^T: V^T comes from registers, read by the
transposing loads for 16-bit matrices. Each then holds two tokens of two dimensions, and one byte
permutation a register gives the even and the odd dimensions apart.

*The FP8 accumulator forgets.* It keeps about 14 bits, so products much smaller than what has been
summed vanish. Every block's P @ V starts from zero and joins O in float32, `O = O ratio + block`:
the multiplication the online softmax needs anyway.

*Sigma by logarithms.* With score_log2 the score in units of log2, u = score_log2 + log2(scale) is
the logarithm of P x scale but for the row's maximum. R = max u over the block (at least the running
maximum - 60) makes 2^(u - R) 448 *the* e4m3 weight, whose largest is 448 exactly: stage 2's sigma
is 2^R / 448, and there is no division. ratio = 2^(R_before - R), at most 2^60.

The roles fit: nothing is spilled where it would cost, in the loops over blocks, and no wgmma waits
for another's registers. A test compiles the kernel without a GPU and asserts both, because neither
is an error to a compiler. (Triton 3.9's assembler reads up to two words from the stack in a loop.)

References
----------
SnapMLA (arXiv 2602.10718), sections 3.2 and 3.3.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import QuantizedRows
from stage3_dataflow.kernels.gluon_api import (
    arrive_after_words,
    device_record,
    load_tile,
    load_words,
    reinterpret,
    relabel_accumulator,
)
from stage3_dataflow.kernels.hopper_merge import (
    BLOCK_TOKENS,
    FLAT,
    launch_hopper_combine,
    let_merge_start,
    split_of_request,
    wait_for_launch_before,
)
from stage3_dataflow.kernels.launch import launch_longest_first
from stage3_dataflow.kernels.launch_cache import launch, places
from stage3_dataflow.workspace import DecodeWorkspace

KV_LORA_RANK = gl.constexpr(512)
QK_ROPE_HEAD_DIM = gl.constexpr(64)
HALF_RANK = gl.constexpr(256)
"""Latent dimensions of one of the two `add_values` warpgroups."""
CODE_CHUNK = gl.constexpr(128)
"""Codes in a row of a TMA box: 128 bytes, the widest swizzle."""
CHUNKS = gl.constexpr(512 // 128)
SCALES_OF_TMA = gl.constexpr(32)
"""Scales of 128 bytes: the TMA writes to multiples of that in shared memory only."""
STAGES = gl.constexpr(4)
"""Blocks in the ring: 164 KB of the 227 KB of shared memory a program can have."""
WEIGHT_SLOTS = gl.constexpr(2)
THREADS = gl.constexpr(128)
"""Of a warpgroup."""
LANES = gl.constexpr(32)
"""Threads of a warp."""

LOG2_E4M3_MAX = gl.constexpr(math.log2(448.0))
LN2 = gl.constexpr(math.log(2.0))
UNIT_FLOOR = gl.constexpr(60.0)
"""A block whose P x scale lies this many powers of two below the running maximum is quantised in
the maximum's unit, where it adds nothing that float32 would keep; the ratio stays within 2^60."""
LOWEST_LOG2 = gl.constexpr(-3.0e38)
"""Where maxima start: under every score but finite, so that a row's difference to it is a number
while everything seen so far is masked (-inf)."""

PER_LANE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

SWIZZLED_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
SWIZZLED_ROPE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
FLAT_SCALE = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))


@device_record
class BlockRing:
    """Blocks of 64 tokens on their way from the cache.

    A block that has arrived is `full`, and `ready` once `prepare_blocks` has been over it.
    """

    codes: gl.shared_memory_descriptor  # [STAGES, 64, 512] e4m3
    rope: gl.shared_memory_descriptor  # [STAGES, 64, 64] bf16
    scale: gl.shared_memory_descriptor  # [STAGES, 64] f32
    log2_scale: gl.shared_memory_descriptor  # [STAGES, 64] f32, -inf behind the split's end
    inverse_scale: gl.shared_memory_descriptor  # [STAGES, 64] f32
    full: gl.shared_memory_descriptor  # [STAGES, 1], by the TMA (and each lane, for its scales)
    ready: gl.shared_memory_descriptor  # [STAGES, 1], by `prepare_blocks`
    empty: gl.shared_memory_descriptor  # [STAGES, 1], by both `add_values`


@device_record
class WeightQueue:
    """P of one block on its way to P @ V, with the ratio that O takes before it."""

    weights: gl.shared_memory_descriptor  # [WEIGHT_SLOTS, rows, 64 tokens] e4m3
    ratio: gl.shared_memory_descriptor  # [WEIGHT_SLOTS, rows] f32
    full: gl.shared_memory_descriptor  # [WEIGHT_SLOTS, 1], by every thread of `weigh_blocks`
    empty: gl.shared_memory_descriptor  # [WEIGHT_SLOTS, 1], by both `add_values`


@device_record
class QueryTile:
    """An item's queries, which `weigh_blocks` alone reads."""

    codes: gl.shared_memory_descriptor  # [1, rows, 512] e4m3
    rope: gl.shared_memory_descriptor  # [rows, 64] bf16
    scale: gl.shared_memory_descriptor  # [rows] f32
    visible: gl.shared_memory_descriptor  # [rows] i32: tokens that a row sees, from the program's
    # first block on
    full: gl.shared_memory_descriptor  # by the TMA, and each lane, for its scales (for the first
    # item's, one thread for all lanes)
    empty: gl.shared_memory_descriptor  # by `weigh_blocks`


@device_record
class ItemQueue:
    """What a program attends for, and what becomes of it: a tile of rows over a split of a request.

    Two slots are used in turn. One is free again when all roles are through with its item.
    """

    words: gl.shared_memory_descriptor  # [ITEM_SLOTS, ITEM_WORDS] i32
    full: gl.shared_memory_descriptor  # [ITEM_SLOTS, 1], by `manage_items`: the words are there
    empty: gl.shared_memory_descriptor  # [ITEM_SLOTS, 1], by each of the six roles
    bad_page: gl.shared_memory_descriptor  # [ITEM_SLOTS, 1] i32: some page id is no page
    total: gl.shared_memory_descriptor  # [ITEM_SLOTS, rows] f32: l, in the last block's unit
    unit: gl.shared_memory_descriptor  # [ITEM_SLOTS, rows] f32: that unit R
    summed: gl.shared_memory_descriptor  # [ITEM_SLOTS, 1], by `load_blocks` and `weigh_blocks`:
    # these three are there
    normalizer: gl.shared_memory_descriptor  # [ITEM_SLOTS, rows] f32: 1 / l, 0 for an empty row
    normalized: gl.shared_memory_descriptor  # [ITEM_SLOTS, 1], by `manage_items`: that is there
    asked: gl.shared_memory_descriptor  # by `load_blocks`: the item is nearly fetched, the next one
    # is wanted


ASKED_AHEAD = gl.constexpr(3)
"""Blocks of an item that are still to be fetched when the next item is asked for. Until these and
the ring's have been used, the next one has been found."""

ROLES = gl.constexpr(6)
ITEM_SLOTS = gl.constexpr(2)
ITEM_WORDS = gl.constexpr(8)
BLOCKS = gl.constexpr(0)  # of the split; -1 behind the last item
FIRST_BLOCK = gl.constexpr(1)  # in the request
TOKENS = gl.constexpr(2)  # of the request, from the split's first on
REQUEST = gl.constexpr(3)
SPLITS = gl.constexpr(4)  # that the request has
QUERY_ROW = gl.constexpr(5)  # the tile's first row in the query, `out` and `lse`
PARTIAL_ROW = gl.constexpr(6)  # ... and in the partials
LIVE_ROWS = gl.constexpr(7)  # of the tile: the request may end within it


@gluon.jit
def slot_of(turn, SLOTS: gl.constexpr):
    """Say which of a ring's slots is used in this turn; not by `%`, which looks after a sign."""
    return turn & (SLOTS - 1)


@gluon.jit
def phase_of(turn, SLOTS: gl.constexpr):
    """Parity of the slot's barriers in this turn."""
    return (turn & SLOTS) // SLOTS


@gluon.jit
def read_word(items, n, WORD: gl.constexpr):
    """Read what item n says."""
    words = reinterpret(items.words, gl.int32, [ITEM_SLOTS * ITEM_WORDS, 1], FLAT)
    return read_scalar(words.index(slot_of(n, ITEM_SLOTS) * ITEM_WORDS + WORD))


@gluon.jit
def wait_for_item(items, n):
    """Wait for item n; return its number of blocks, -1 behind the last item."""
    mbarrier.wait(items.full.index(slot_of(n, ITEM_SLOTS)), phase_of(n, ITEM_SLOTS))
    return read_word(items, n, BLOCKS)


@gluon.jit
def release_item(items, n, MANY: gl.constexpr):
    """Say that a role needs item n no more."""
    if MANY:
        mbarrier.arrive(items.empty.index(slot_of(n, ITEM_SLOTS)), count=1)


@gluon.jit
def for_each_item(do: gl.constexpr, arguments, items, MANY: gl.constexpr):
    """Do a role's part of one item after another, in the order in which they come.

    `do` gets the item's number, how many blocks the ones before it had, how many it has, and
    `arguments`.
    """
    n = gl.to_tensor(0)
    first = n
    if MANY:
        blocks = wait_for_item(items, n)
        while blocks >= 0:
            do(n, first, blocks, *arguments)
            first += blocks
            n += 1
            blocks = wait_for_item(items, n)
    else:
        do(0, 0, read_word(items, n, BLOCKS), *arguments)


@gluon.jit
def place_of(index, number, order, plan):
    """Find item `index` of `number`: the tiles of a split come first, then the next split.

    Returns the tile, the split and the request; behind the last item, those of any.
    """
    tiles, _capacity, _min_tokens, _max_splits, partial_splits = plan
    part = index // tiles
    if order is not None:
        part = gl.where(index < number, gl.load(order + 1 + part), 0)
    return index % tiles, part % partial_splits, part // partial_splits


@gluon.jit
def blocks_of(length, split, plan):
    """Say which part of a request a split is.

    Returns its number of blocks, its first block, the request's tokens from there on, the number of
    the request's splits, and whether the split is one of them: a grid has a program for each that
    the longest request could have. A request without tokens has one split, without blocks.
    """
    _tiles, capacity, min_tokens, max_splits, _partial_splits = plan
    length = gl.where((length < 0) | (length > capacity), 0, length)
    splits, first_block, end_block = split_of_request(length, split, min_tokens, max_splits)
    exists = (first_block < end_block) | ((length == 0) & (split == 0))
    blocks = gl.maximum(end_block - first_block, 0)
    return blocks, first_block, length - first_block * BLOCK_TOKENS, splits, exists


@gluon.jit
def write_item(items, n, place, extent, rows, plan, BLOCK_ROWS: gl.constexpr):
    """Put item n where the roles read it."""
    tile, split, request = place
    blocks, first_block, tokens, splits, _exists = extent
    first_row = tile * BLOCK_ROWS
    live_rows = gl.minimum(rows - first_row, BLOCK_ROWS)
    word = gl.arange(0, ITEM_WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    words = (request * plan[4] + split) * rows + first_row  # PARTIAL_ROW
    words = gl.where(word == BLOCKS, blocks, words)
    words = gl.where(word == FIRST_BLOCK, first_block, words)
    words = gl.where(word == TOKENS, tokens, words)
    words = gl.where(word == REQUEST, request, words)
    words = gl.where(word == SPLITS, splits, words)
    words = gl.where(word == QUERY_ROW, request * rows + first_row, words)
    items.words.index(slot_of(n, ITEM_SLOTS)).store(gl.where(word == LIVE_ROWS, live_rows, words))


@gluon.jit
def manage_items(
    items, cache_seqlens, order, counter, lse, partial_lse, number, rows, plan,
    BLOCK_ROWS: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Write each item's log-sum-exp, and find the next item; one warp.

    A program's first item has its own number. Where there are more items than programs, each
    further one is whoever's comes to ask for it; the counter is left at 0. Asked for early, an item
    would wait behind a long one while other programs are idle.
    """
    if MANY:
        programs = gl.num_programs(0)
        n = gl.to_tensor(1)
        mbarrier.wait(items.asked, 0)
        index = programs + gl.atomic_add(counter, 1)
        while index < number:
            place = place_of(index, number, order, plan)
            extent = blocks_of(gl.load(cache_seqlens + place[2]), place[1], plan)
            slot = slot_of(n, ITEM_SLOTS)
            mbarrier.wait(items.empty.index(slot), phase_of(n, ITEM_SLOTS) ^ 1)
            write_item(items, n, place, extent, rows, plan, BLOCK_ROWS)
            mbarrier.arrive(items.full.index(slot), count=1)
            finish_item(items, n - 1, lse, partial_lse, MANY)
            mbarrier.wait(items.asked, n & 1)
            n += 1
            index = programs + gl.atomic_add(counter, 1)
        # Every program that had an item asks in vain once; nobody asks after the last of them.
        if index == number + programs - 1:
            gl.store(counter, 0)
        slot = slot_of(n, ITEM_SLOTS)
        mbarrier.wait(items.empty.index(slot), phase_of(n, ITEM_SLOTS) ^ 1)
        items.words.index(slot).store(gl.full([ITEM_WORDS], -1, gl.int32, PER_LANE))
        mbarrier.arrive(items.full.index(slot), count=1)
        finish_item(items, n - 1, lse, partial_lse, MANY)
    else:
        finish_item(items, 0, lse, partial_lse, MANY)


@gluon.jit
def finish_item(items, n, lse, partial_lse, MANY: gl.constexpr):
    """Once an item has been summed: its log-sum-exp, and what its output is divided by."""
    slot = slot_of(n, ITEM_SLOTS)
    mbarrier.wait(items.summed.index(slot), phase_of(n, ITEM_SLOTS))
    bad_page = read_scalar(items.bad_page.index(slot)) != 0
    total = items.total.index(slot).load(PER_LANE)
    unit = items.unit.index(slot).load(PER_LANE)
    empty = (total == 0.0) | bad_page
    items.normalizer.index(slot).store(gl.where(empty, 0.0, 1.0 / total))
    mbarrier.arrive(items.normalized.index(slot), count=1)
    splits = read_word(items, n, SPLITS)
    # A split tells the merge of a bad page by a log-sum-exp no attention can have.
    mark = gl.where(bad_page & (splits > 1), float("inf"), float("-inf"))
    row_lse = (unit - LOG2_E4M3_MAX + gl.log2(total)) * LN2
    row_lse = gl.where(empty, mark, row_lse)
    row = gl.arange(0, total.shape[0], PER_LANE)
    live = row < read_word(items, n, LIVE_ROWS)
    if splits > 1:
        gl.store(partial_lse + read_word(items, n, PARTIAL_ROW) + row, row_lse, mask=live)
    else:
        gl.store(lse + read_word(items, n, QUERY_ROW) + row, row_lse, mask=live)
    release_item(items, n, MANY)


@gluon.jit
def prefetch(address):
    """Have a word in L2 by the time it is asked for."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_blocks(
    queries, codes_plane, rope_plane, scale_plane, block_table, table_stride, num_pages,
    rows_per_page, query, ring, items, PAGE_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    MANY: gl.constexpr,
):  # fmt: skip
    """Fetch the items' blocks in order, and all queries but the first; the producer, one warp.

    It runs ahead into the next item as far as the ring has room.
    """
    for_each_item(
        load_item,
        (
            queries, codes_plane, rope_plane, scale_plane, block_table, table_stride, num_pages,
            rows_per_page, query, ring, items, PAGE_SIZE, BLOCK_ROWS, MANY,
        ),
        items,
        MANY,
    )  # fmt: skip


@gluon.jit
def load_item(
    n, loaded, blocks, queries, codes_plane, rope_plane, scale_plane, block_table, table_stride,
    num_pages, rows_per_page, query, ring, items, PAGE_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Fetch an item's blocks.

    A page id that is no page is replaced by page 0, and the whole item is marked: nothing outside
    the planes is read, and nobody waits for a block that never comes.
    """
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK_TOKENS else BLOCK_TOKENS
    BOXES: gl.constexpr = BLOCK_TOKENS // BOX
    codes = reinterpret(
        ring.codes, gl.float8e4nv, [STAGES * CHUNKS * BOXES, BOX, CODE_CHUNK], SWIZZLED_CODES
    )
    rope = reinterpret(
        ring.rope, gl.bfloat16, [STAGES * BOXES, BOX, QK_ROPE_HEAD_DIM], SWIZZLED_ROPE
    )
    SCALE_BY_TMA: gl.constexpr = BOX >= SCALES_OF_TMA
    BYTES: gl.constexpr = BLOCK_TOKENS * (
        KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM + (4 if SCALE_BY_TMA else 0)
    )
    scale = reinterpret(ring.scale, gl.float32, [STAGES * BOXES, BOX], FLAT_SCALE)
    codes_rows_per_page, rope_rows_per_page, scale_rows_per_page = rows_per_page
    tokens = gl.minimum(read_word(items, n, TOKENS), blocks * BLOCK_TOKENS)
    first_token = read_word(items, n, FIRST_BLOCK) * BLOCK_TOKENS
    request = read_word(items, n, REQUEST)
    table = block_table + request.to(gl.int64) * table_stride
    last_column = (first_token + tokens - 1) // PAGE_SIZE
    if MANY:
        query_row = read_word(items, n, QUERY_ROW)
        if blocks == 0:
            mbarrier.arrive(items.asked, count=1)
            if n > 0:
                load_next_query(queries, query_row, n, query, BLOCK_ROWS)
    bad_page = blocks * 0
    for i in range(blocks):
        g = loaded + i
        stage = slot_of(g, STAGES)
        if MANY:
            mbarrier.arrive(items.asked, count=1, pred=i == gl.maximum(blocks - ASKED_AHEAD, 0))
        barrier = ring.full.index(stage)
        for box in range(BOXES):
            token = first_token + i * BLOCK_TOKENS + box * BOX
            # Entries behind the request's end are not followed: its last page is fetched again.
            page = gl.load(table + gl.minimum(token // PAGE_SIZE, last_column))
            if box == 0:
                mbarrier.wait(ring.empty.index(stage), phase_of(g, STAGES) ^ 1)
                if not SCALE_BY_TMA:
                    load_scales(
                        scale_plane, table, num_pages, scale_rows_per_page, ring.scale.index(stage),
                        barrier, first_token + i * BLOCK_TOKENS, last_column, PAGE_SIZE,
                    )  # fmt: skip
                mbarrier.expect(barrier, BYTES)
            bad = (page < 0) | (page >= num_pages)
            bad_page = bad_page | bad.to(gl.int32)
            page = gl.where(bad, 0, page)
            slot = token % PAGE_SIZE
            for chunk in gl.static_range(CHUNKS):
                load_tile(
                    codes_plane, [page * codes_rows_per_page + slot, chunk * CODE_CHUNK], barrier,
                    codes.index((stage * CHUNKS + chunk) * BOXES + box),
                )  # fmt: skip
            load_tile(
                rope_plane, [page * rope_rows_per_page + slot, 0], barrier,
                rope.index(stage * BOXES + box),
            )  # fmt: skip
            if SCALE_BY_TMA:
                load_tile(
                    scale_plane, [page * scale_rows_per_page + slot], barrier,
                    scale.index(stage * BOXES + box),
                )  # fmt: skip
        if MANY:
            # The tile is free once the item before has its last scores. By then there is room in
            # the ring for a block or two, which therefore come first.
            if (n > 0) & (i == gl.minimum(blocks - 1, 1)):
                load_next_query(queries, query_row, n, query, BLOCK_ROWS)
    slot = slot_of(n, ITEM_SLOTS)
    store_scalar(items.bad_page.index(slot), bad_page)
    mbarrier.arrive(items.summed.index(slot), count=1)
    release_item(items, n, MANY)


@gluon.jit
def scale_addresses(queries, query_row, BLOCK_ROWS: gl.constexpr):
    """Say where the scales of a tile's rows lie; behind the last row of all, that one's."""
    _codes_plane, _rope_plane, scale_plane, query_rows = queries
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = query_row + gl.arange(0, BLOCK_ROWS, LAYOUT)
    return scale_plane + gl.minimum(row, query_rows - 1)


@gluon.jit
def load_next_query(queries, query_row, n, query, BLOCK_ROWS: gl.constexpr):
    """Start fetching item n's queries, once the ones before have been used; one warp."""
    mbarrier.wait(query.empty, (n & 1) ^ 1)
    load_words(query.scale, scale_addresses(queries, query_row, BLOCK_ROWS))
    arrive_each(query.full)
    load_query(queries, query_row, query, BLOCK_ROWS)


@gluon.jit
def load_query(queries, query_row, query, BLOCK_ROWS: gl.constexpr):
    """Start fetching a tile's queries, but for their scales.

    Rows behind the request's last are the next request's: computed, never stored.
    """
    codes_plane, rope_plane, _scale_plane, _query_rows = queries
    codes = reinterpret(
        query.codes, gl.float8e4nv, [CHUNKS, BLOCK_ROWS, CODE_CHUNK], SWIZZLED_CODES
    )
    mbarrier.expect(query.full, BLOCK_ROWS * (KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM))
    for chunk in gl.static_range(CHUNKS):
        load_tile(codes_plane, [query_row, chunk * CODE_CHUNK], query.full, codes.index(chunk))
    load_tile(rope_plane, [query_row, 0], query.full, query.rope)


@gluon.jit
def prepare_blocks(ring, items, MANY: gl.constexpr):
    """Work out each block's terms of the scale, and clear what lies behind the end; one warp.

    A lane has two tokens here; in the scores' layout every thread would need those of 16. Nobody
    waits for it but at the start: it is blocks ahead of `weigh_blocks`, which everybody waits for.
    A token behind the end has the logarithm -inf, and so the weight 0, without a comparison.
    """
    for_each_item(prepare_item, (ring, items, MANY), items, MANY)


@gluon.jit
def prepare_item(n, prepared, blocks, ring, items, MANY: gl.constexpr):
    """Prepare an item's blocks."""
    token = gl.arange(0, BLOCK_TOKENS, PER_LANE)
    tokens = read_word(items, n, TOKENS)
    for i in range(blocks):
        stage = slot_of(prepared + i, STAGES)
        mbarrier.wait(ring.full.index(stage), phase_of(prepared + i, STAGES))
        scale = ring.scale.index(stage).load(PER_LANE)
        live = token < tokens - i * BLOCK_TOKENS
        ring.log2_scale.index(stage).store(gl.where(live, approximate("lg2", scale), float("-inf")))
        ring.inverse_scale.index(stage).store(gl.where(live, approximate("rcp", scale), 1.0))
        if i * BLOCK_TOKENS + BLOCK_TOKENS > tokens:
            clear_slots(ring, stage, tokens % BLOCK_TOKENS)
            fence_async_shared()
        mbarrier.arrive(ring.ready.index(stage), count=1)
    release_item(items, n, MANY)


@gluon.jit
def load_scales(
    plane, table, num_pages, rows_per_page, destination, barrier, first_token, last_column,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch a block's scales word by word, from a pointer; the barrier's phase waits for them."""
    token = first_token + gl.arange(0, BLOCK_TOKENS, PER_LANE)
    page = gl.load(table + gl.minimum(token // PAGE_SIZE, last_column))
    page = gl.where((page < 0) | (page >= num_pages), 0, page)
    row = page.to(gl.int64) * rows_per_page + token % PAGE_SIZE
    load_words(destination, plane + row)
    arrive_each(barrier)


@gluon.jit
def clear_slots(ring, stage, first):
    """Make slots `first` to 63 of a stage tokens of zeros with scale 1.

    Unwritten slots may hold NaN, and a weight of zero does not silence it: 0 x NaN is NaN. The
    128 bytes of a row stay within it under the swizzle, so clearing needs no regard for that.
    """
    codes = reinterpret(ring.codes, gl.int32, [STAGES * CHUNKS * BLOCK_TOKENS, 32], FLAT)
    rope = reinterpret(ring.rope, gl.int32, [STAGES * BLOCK_TOKENS, 32], FLAT)
    scale = reinterpret(ring.scale, gl.float32, [STAGES * BLOCK_TOKENS, 1], FLAT)
    zeros = gl.zeros([32], gl.int32, PER_LANE)
    for slot in range(first, BLOCK_TOKENS):
        for chunk in gl.static_range(CHUNKS):
            codes.index((stage * CHUNKS + chunk) * BLOCK_TOKENS + slot).store(zeros)
        rope.index(stage * BLOCK_TOKENS + slot).store(zeros)
        scale.index(stage * BLOCK_TOKENS + slot).store(gl.full([1], 1.0, gl.float32, PER_LANE))


@gluon.jit
def store_scalar(memory, value):
    """Write an int32 that all threads have to shared memory [1]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory.store(gl.zeros([1], gl.int32, layout) + value)


@gluon.jit
def read_scalar(memory):
    """Read it back."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(memory.load(layout), 0)


@gluon.jit
def unknown_zero():
    """Return 0, unknown to the compiler: what it is part of, it does not keep in registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def weigh_blocks(
    query, ring, queue, items, score_scale_log2, rows, heads, BLOCK_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Scores, online softmax and P of every block; one warpgroup.

    P of block i is stored before the scores of block i + 1 are started, and published once they
    are finished: published earlier, the P @ V warpgroups' products queue in front of the scores
    that everybody waits for next. A tile of few rows has short products, and publishes at once.

    Registers are short, so what an item ends with is left to `manage_items`.
    """
    for_each_item(
        weigh_item,
        (query, ring, queue, items, score_scale_log2, rows, heads, BLOCK_ROWS, CAUSAL, MANY),
        items,
        MANY,
    )


@gluon.jit
def weigh_item(
    n, first, blocks, query, ring, queue, items, score_scale_log2, rows, heads,
    BLOCK_ROWS: gl.constexpr, CAUSAL: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Weigh an item's blocks, which are the program's from `first` on."""
    end = first + blocks
    FEW: gl.constexpr = BLOCK_ROWS < 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 32])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0 if FEW else 1, SCORES)
    running_max = gl.full([BLOCK_ROWS], LOWEST_LOG2, gl.float32, ROW_LAYOUT)
    unit = gl.full([BLOCK_ROWS], LOWEST_LOG2, gl.float32, ROW_LAYOUT)
    partial_sum = sum_in_thread(gl.zeros([64, BLOCK_ROWS], gl.float32, SCORES), FEW)
    mbarrier.wait(query.full, n & 1)
    row_scale = query.scale.load(ROW_LAYOUT) * score_scale_log2
    if CAUSAL:
        first_row = read_word(items, n, QUERY_ROW) - read_word(items, n, REQUEST) * rows
        row = first_row + gl.arange(0, BLOCK_ROWS, ROW_LAYOUT)
        seen_first = read_word(items, n, TOKENS) - rows // heads + 1
        # By the program's count of tokens, as the blocks are counted.
        query.visible.store(first * BLOCK_TOKENS + seen_first + row // heads)
    for g in range(first, end):
        running_max, unit, partial_sum = weigh_block(
            g, first, end, running_max, unit, partial_sum, row_scale, query, ring, queue,
            SCORES, BLOCK_ROWS, CAUSAL,
        )  # fmt: skip
    mbarrier.arrive(query.empty, count=1)
    if not FEW:
        if end > first:
            arrive_each(queue.full.index(slot_of(end + 1, WEIGHT_SLOTS)))
    slot = slot_of(n, ITEM_SLOTS)
    total = gl.sum(partial_sum, 0 if FEW else 1)
    items.total.index(slot).store(gl.convert_layout(total, ROW_LAYOUT))
    items.unit.index(slot).store(unit)
    mbarrier.arrive(items.summed.index(slot), count=1)
    release_item(items, n, MANY)


@gluon.jit
def score_block(
    g, query, ring, SCORES: gl.constexpr, BLOCK_ROWS: gl.constexpr, CAUSAL: gl.constexpr
):
    """Multiply a block's [rows, 64 tokens] scores; with them its scales, and their log2.

    The latent product comes first: a large rotary score in the FP8 accumulator would cost the
    latent's small products.

    A tile of few rows has its scores turned, [64 tokens, rows]: a wgmma computes 64 by any multiple
    of 8, so that nothing is multiplied, weighed or kept in shared memory for rows that are none.
    """
    BF16_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 16])
    FEW: gl.constexpr = BLOCK_ROWS < 64
    TOKEN_LAYOUT: gl.constexpr = gl.SliceLayout(1 if FEW else 0, SCORES)
    stage = slot_of(g, STAGES)
    mbarrier.wait(ring.ready.index(stage), phase_of(g, STAGES))
    # A place unknown until now: else the descriptors of its parts are kept, and take registers.
    query_codes = query.codes.index(unknown_zero())
    key_codes, key_rope = ring.codes.index(stage), ring.rope.index(stage)
    zeros = gl.zeros([64, BLOCK_ROWS], gl.float32, SCORES)
    if FEW:
        scores = warpgroup_mma(
            key_codes, query_codes.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = relabel_accumulator(scores, BF16_SCORES)
        scores = warpgroup_mma(key_rope, query.rope.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(
            query_codes, key_codes.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = relabel_accumulator(scores, BF16_SCORES)
        scores = warpgroup_mma(query.rope, key_rope.permute((1, 0)), scores, is_async=True)
    scores = relabel_accumulator(scores, SCORES)
    # Loaded meanwhile: behind the wait, everything would wait for them. What hides tokens takes the
    # registers that the second one needs.
    scale = ring.scale.index(stage).load(TOKEN_LAYOUT)
    if CAUSAL:
        scores = warpgroup_mma_wait(0, deps=[scores])
        log2_scale = ring.log2_scale.index(stage).load(TOKEN_LAYOUT)
    else:
        log2_scale = ring.log2_scale.index(stage).load(TOKEN_LAYOUT)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, scale, log2_scale


@gluon.jit
def by_row(x, FEW: gl.constexpr):
    """Numbers of rows, as they meet scores."""
    return x[None, :] if FEW else x[:, None]


@gluon.jit
def by_token(x, FEW: gl.constexpr):
    """Numbers of tokens, as they meet scores."""
    return x[:, None] if FEW else x[None, :]


@gluon.jit
def arrive_each(barrier):
    """Let every thread arrive, once the words that it has asked for are there.

    Without such words at once, for what it has written itself, and fenced: `mbarrier.arrive` lets
    one thread do so for all, behind a barrier among them, and has Triton put another before
    whatever touches shared memory next.
    """
    arrive_after_words(barrier, increment_count=False)


@gluon.jit
def weigh_block(
    g, first, end, running_max, unit, partial_sum, row_scale, query, ring, queue,
    SCORES: gl.constexpr, BLOCK_ROWS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One block's scores and its step of the online softmax, up to P in shared memory.

    See "Sigma by logarithms" above. Returns the running maximum and the block's unit R, both log2
    of P x scale, and the sum l of unquantised weights in units of 2^R / 448, still spread over the
    threads of a row.
    """
    FEW: gl.constexpr = BLOCK_ROWS < 64
    TOKEN_LAYOUT: gl.constexpr = gl.SliceLayout(1 if FEW else 0, SCORES)
    scores, scale, log2_scale = score_block(g, query, ring, SCORES, BLOCK_ROWS, CAUSAL)
    if not FEW:
        if g > first:
            arrive_each(queue.full.index(slot_of(g + 1, WEIGHT_SLOTS)))
    # The scales' product first: either alone could push a finite score past float32.
    weighted_log2 = scores * (by_token(scale, FEW) * by_row(row_scale, FEW))
    weighted_log2 += by_token(log2_scale, FEW)
    if CAUSAL:
        if g + 2 >= end:  # with s_q at most 65, every row sees the others whole
            weighted_log2 = hide_tokens(weighted_log2, g, query, SCORES, FEW)
    block_max = gl.convert_layout(
        max_over_tokens(weighted_log2, FEW), running_max.type.layout, assert_trivial=True
    )
    running_max = gl.maximum(running_max, block_max)
    new_unit = gl.maximum(block_max, running_max - UNIT_FLOOR)
    weights = gl.exp2(weighted_log2 - by_row(new_unit - LOG2_E4M3_MAX, FEW))
    ratio = gl.exp2(unit - new_unit)
    # The sum before P: P waits for the next scores anyway, and the registers don't hold more.
    inverse_scale = ring.inverse_scale.index(slot_of(g, STAGES)).load(TOKEN_LAYOUT)
    thread_ratio = gl.convert_layout(
        ratio, gl.SliceLayout(0 if FEW else 1, partial_sum.type.layout), assert_trivial=True
    )
    partial_sum = partial_sum * by_row(thread_ratio, FEW) + sum_in_thread(
        weights * by_token(inverse_scale, FEW), FEW
    )

    slot = slot_of(g, WEIGHT_SLOTS)
    mbarrier.wait(queue.empty.index(slot), phase_of(g, WEIGHT_SLOTS) ^ 1)
    queue.weights.index(slot).store(weights_operand(weights.to(gl.float8e4nv), FEW))
    queue.ratio.index(slot).store(ratio)
    fence_async_shared()
    if FEW:
        arrive_each(queue.full.index(slot))
    return running_max, new_unit, partial_sum


@gluon.jit
def weights_operand(codes, FEW: gl.constexpr):
    """P as [rows, 64 tokens], the tokens in the order in which `load_values` has V."""
    if FEW:
        rows: gl.constexpr = codes.shape[1]
        turned = codes.reshape([4, 2, 4, 2, rows]).permute((4, 0, 2, 1, 3))
    else:
        rows: gl.constexpr = codes.shape[0]
        turned = codes.reshape([rows, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return turned.reshape([rows, 64])


@gluon.jit
def hide_tokens(weighted_log2, g, query, SCORES: gl.constexpr, FEW: gl.constexpr):
    """Make -inf of the tokens of a block that a row does not see."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0 if FEW else 1, SCORES)
    TOKEN_LAYOUT: gl.constexpr = gl.SliceLayout(1 if FEW else 0, SCORES)
    visible = query.visible.load(ROW_LAYOUT) - g * BLOCK_TOKENS
    token = gl.arange(0, 64, TOKEN_LAYOUT)
    return gl.where(by_token(token, FEW) < by_row(visible, FEW), weighted_log2, float("-inf"))


@gluon.jit
def by_thread(x):
    """[64 rows, 64 tokens] with the tokens' axis taken apart: axis 4 lies across four threads.

    A reduction axis by axis is a tree; over the whole axis it is a chain of 16 instructions, each
    waiting for the one before.
    """
    return x.reshape([64, 2, 2, 2, 4, 2])


@gluon.jit
def max_over_tokens(x, FEW: gl.constexpr):
    """Maximum of every row. Of few, 32 threads of all four warps have two tokens each."""
    if FEW:
        x = gl.max(x, 0)
    else:
        x = gl.max(gl.max(gl.max(gl.max(by_thread(x), 5), 3), 2), 1)
        x = gl.max(x, 1)
    return x


@gluon.jit
def sum_in_thread(x, FEW: gl.constexpr):
    """Sum of a row's elements within each thread that has some: [64 rows, 4], or [32, rows]."""
    if FEW:
        x = gl.sum(x.reshape([4, 2, 8, x.shape[1]]), 1).reshape([32, x.shape[1]])
    else:
        x = gl.sum(gl.sum(gl.sum(gl.sum(by_thread(x), 5), 3), 2), 1)
    return x


@gluon.jit
def approximate(FUNCTION: gl.constexpr, x):
    """Base-2 logarithm ("lg2") or reciprocal ("rcp") by the hardware's own instruction."""
    return gl.inline_asm_elementwise(
        FUNCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def add_values(
    out, partial_out, ring, queue, items, HALF: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    MANY: gl.constexpr,
):  # fmt: skip
    """O^T of half the latent dimensions over all blocks, then the output; one warpgroup.

    O lies in four tiles of 64 dimensions, taken in turn, so that one block's product needs 32
    registers a thread beside O's 128.
    """
    for_each_item(
        add_item, (out, partial_out, ring, queue, items, HALF, BLOCK_ROWS, MANY), items, MANY
    )
    if MANY:
        let_merge_start()


@gluon.jit
def add_item(
    n, first, blocks, out, partial_out, ring, queue, items, HALF: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Add up an item's blocks, which are the program's from `first` on."""
    end = first + blocks
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 32])
    o0 = gl.zeros([64, BLOCK_ROWS], gl.float32, ACCUMULATOR)
    o1 = gl.zeros([64, BLOCK_ROWS], gl.float32, ACCUMULATOR)
    o2 = gl.zeros([64, BLOCK_ROWS], gl.float32, ACCUMULATOR)
    o3 = gl.zeros([64, BLOCK_ROWS], gl.float32, ACCUMULATOR)
    for g in range(first, end):
        stage = slot_of(g, STAGES)
        slot = slot_of(g, WEIGHT_SLOTS)
        codes = ring.codes.index(stage)
        mbarrier.wait(ring.ready.index(stage), phase_of(g, STAGES))
        even, odd = load_values(codes, HALF, 0, ACCUMULATOR)
        mbarrier.wait(queue.full.index(slot), phase_of(g, WEIGHT_SLOTS))
        weights = queue.weights.index(slot).permute((1, 0))
        block = start_product(even, weights, ACCUMULATOR, BLOCK_ROWS)
        ratio = queue.ratio.index(slot).load(gl.SliceLayout(0, ACCUMULATOR))
        o0 = o0 * ratio[None, :] + warpgroup_mma_wait(0, deps=[block])
        block = start_product(odd, weights, ACCUMULATOR, BLOCK_ROWS)
        o1 = o1 * ratio[None, :] + warpgroup_mma_wait(0, deps=[block])
        even, odd = load_values(codes, HALF, 1, ACCUMULATOR)
        block = start_product(even, weights, ACCUMULATOR, BLOCK_ROWS)
        # Behind the product that takes the last values from registers. A barrier right behind
        # their load would let the next block overwrite what has not arrived yet.
        mbarrier.arrive(ring.empty.index(stage), count=1)
        o2 = o2 * ratio[None, :] + warpgroup_mma_wait(0, deps=[block])
        block = start_product(odd, weights, ACCUMULATOR, BLOCK_ROWS)
        o3 = o3 * ratio[None, :] + warpgroup_mma_wait(0, deps=[block])
        mbarrier.arrive(queue.empty.index(slot), count=1)

    if not MANY:
        let_merge_start()
    slot = slot_of(n, ITEM_SLOTS)
    mbarrier.wait(items.normalized.index(slot), phase_of(n, ITEM_SLOTS))
    normalizer = items.normalizer.index(slot).load(gl.SliceLayout(0, ACCUMULATOR))
    tiles = (o0, o1, o2, o3)
    row = read_word(items, n, QUERY_ROW)
    if out.dtype == partial_out.dtype:
        split = read_word(items, n, SPLITS) > 1
        row = gl.where(split, read_word(items, n, PARTIAL_ROW), row)
        target = gl.where(split, partial_out, out)
        write_output(target, row, items, n, tiles, normalizer, HALF)
    elif read_word(items, n, SPLITS) > 1:
        row = read_word(items, n, PARTIAL_ROW)
        write_output(partial_out, row, items, n, tiles, normalizer, HALF)
    else:
        write_output(out, row, items, n, tiles, normalizer, HALF)
    release_item(items, n, MANY)


@gluon.jit
def write_output(out, first_row, items, n, tiles, normalizer, HALF: gl.constexpr):
    """Divide an item's O by l and write it: 256 dimensions of the rows that the request has."""
    o0, o1, o2, o3 = tiles
    live_rows = read_word(items, n, LIVE_ROWS)
    out += first_row.to(gl.int64) * KV_LORA_RANK + HALF * HALF_RANK
    # Both in `out`'s dtype first: half as many registers.
    first = normalized_rows(o0, o1, normalizer).to(out.dtype.element_ty)
    second = normalized_rows(o2, o3, normalizer).to(out.dtype.element_ty)
    store_held(out, first, live_rows)
    store_held(out + 128, second, live_rows)


@gluon.jit
def store_held(out, values, live_rows):
    """Write 128 dimensions of the tile's rows: only those that the request has.

    A thread has two neighbouring dimensions of many rows, eight threads together 32 bytes of a row.
    Through shared memory they would leave in wider stores, which gained nothing.
    """
    LAYOUT: gl.constexpr = values.type.layout
    row = unknown_zero() + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    offset = (row * KV_LORA_RANK)[:, None] + dim[None, :]
    if live_rows == values.shape[0]:
        gl.store(out + offset, values)
    else:
        gl.store(out + offset, values, mask=(row < live_rows)[:, None])


@gluon.jit
def load_values(codes, HALF: gl.constexpr, PAIR_GROUP: gl.constexpr, ACCUMULATOR: gl.constexpr):
    """V^T of 128 dimensions as two wgmma operands [64 dims, 64 tokens]: the even and the odd ones.

    Pairs of codes are read as 16-bit numbers in a layout that the transposing loads serve: a
    register then holds pair d of tokens t and t + 1. A byte permutation collects the first codes
    of each pair of pairs, another the second ones. The rest renames: the tokens, in the order
    (bits 5, 4; 2, 1; 3, 0) of their number, are where a wgmma operand has its contraction.
    """
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [0, 8], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[64, 64],
    )
    pairs = reinterpret(codes, gl.int16, [BLOCK_TOKENS, KV_LORA_RANK // 2], SWIZZLED_ROPE)
    pairs = pairs.slice(HALF * 128 + PAIR_GROUP * 64, 64, dim=1).load(PAIRS)
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420;\nprmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [pairs],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    return values_operand(even, ACCUMULATOR), values_operand(odd, ACCUMULATOR)


@gluon.jit
def values_operand(codes, ACCUMULATOR: gl.constexpr):
    """[64 tokens, 64 dims] as loaded to [64 dims, 64 tokens] as multiplied; no data moves."""
    turned = codes.reshape([4, 2, 4, 2, 64]).permute((4, 0, 2, 1, 3)).reshape([64, 64])
    return gl.convert_layout(turned, gl.DotOperandLayout(0, ACCUMULATOR, 4), assert_trivial=True)


@gluon.jit
def start_product(values, weights, ACCUMULATOR: gl.constexpr, BLOCK_ROWS: gl.constexpr):
    """Start V^T @ P^T of one block from zero: [64 dims, rows]."""
    zeros = gl.zeros([64, BLOCK_ROWS], gl.float32, ACCUMULATOR)
    return warpgroup_mma(values, weights, zeros, use_acc=False, is_async=True)


@gluon.jit
def normalized_rows(even, odd, normalizer):
    """Even and odd dimensions [64, rows] each to the output's [rows, 128]; 0 where nothing is seen.

    Multiplying by zero would not do: behind a bad page stands anything, NaN included.
    """
    even = gl.where((normalizer == 0.0)[None, :], 0.0, even * normalizer[None, :])
    odd = gl.where((normalizer == 0.0)[None, :], 0.0, odd * normalizer[None, :])
    joined = gl.join(even, odd).permute((1, 0, 2))
    return joined.reshape([joined.shape[0], 128])


@gluon.jit(
    do_not_specialize=[
        "number", "tiles", "rows", "heads", "query_rows", "num_pages", "codes_rows_per_page",
        "rope_rows_per_page", "scale_rows_per_page", "table_stride", "capacity", "min_tokens",
        "max_splits", "partial_splits",
    ]
)  # fmt: skip
def hopper_decode_kernel(
    query_codes,  # TMA descriptor of [batch rows, 512] e4m3, boxes of [BLOCK_ROWS, 128]
    query_rope,  # ... of [batch rows, 64] bf16, boxes of [BLOCK_ROWS, 64]
    codes_plane,  # ... of [row, 512] e4m3, in boxes of [BOX, 128]; page p from p rows_per_page
    rope_plane,  # ... of [row, 64] bf16, boxes of [BOX, 64]
    scale_plane,  # ... of [row] f32, boxes of [BOX]; the plane itself where BOX is 16
    query_scale,  # [batch, rows] f32
    block_table,  # [batch, max_pages] i32
    cache_seqlens,  # [batch] i32
    order,  # i32, the splits as they are taken up (`split_plan.longest_first_order`); or None: as
    # they stand, and each request has one
    counter,  # [1] i32, 0: items that have been taken beside the programs' first
    out,  # [batch, rows, 512]
    lse,  # [batch, rows] f32
    partial_out,  # [batch, partial_splits, rows, 512]
    partial_lse,  # [batch, partial_splits, rows] f32
    score_scale_log2,
    number,  # of items, where `order` does not say it
    tiles,  # of rows
    rows,
    heads,
    query_rows,  # batch x rows
    num_pages,
    codes_rows_per_page,
    rope_rows_per_page,
    scale_rows_per_page,
    table_stride,
    capacity,
    min_tokens,
    max_splits,
    partial_splits,
    PAGE_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MANY: gl.constexpr,
):
    """Attend for tiles of rows over splits of requests; see the module's docstring.

    The tiles of a request run side by side and share its blocks in L2. Grid: (tiles, splits, batch)
    or, for `MANY` items, as many programs as multiprocessors.
    """
    plan = (tiles, capacity, min_tokens, max_splits, partial_splits)
    queries = (query_codes, query_rope, query_scale, query_rows)
    if not MANY:
        place = (gl.program_id(0), gl.program_id(1), gl.program_id(2))
        length = gl.load(cache_seqlens + place[2])
        query_row = place[2] * rows + place[0] * BLOCK_ROWS
        row_scale = gl.load(scale_addresses(queries, query_row, BLOCK_ROWS))
    # These take a while to come; meanwhile, what does not depend on them.
    ring = BlockRing(
        gl.allocate_shared_memory(
            gl.float8e4nv, [STAGES, BLOCK_TOKENS, KV_LORA_RANK], SWIZZLED_CODES
        ),
        gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, BLOCK_TOKENS, QK_ROPE_HEAD_DIM], SWIZZLED_ROPE
        ),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], FLAT_SCALE),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], FLAT),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], FLAT),
        new_barriers(STAGES, 1 if PAGE_SIZE >= SCALES_OF_TMA else 1 + LANES),
        new_barriers(STAGES, 1),
        new_barriers(STAGES, 2),
    )
    queue = WeightQueue(
        gl.allocate_shared_memory(
            gl.float8e4nv, [WEIGHT_SLOTS, BLOCK_ROWS, BLOCK_TOKENS], SWIZZLED_WEIGHTS
        ),
        gl.allocate_shared_memory(gl.float32, [WEIGHT_SLOTS, BLOCK_ROWS], FLAT),
        new_barriers(WEIGHT_SLOTS, THREADS),
        new_barriers(WEIGHT_SLOTS, 2),
    )
    query = QueryTile(
        gl.allocate_shared_memory(gl.float8e4nv, [1, BLOCK_ROWS, KV_LORA_RANK], SWIZZLED_CODES),
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK_ROWS, QK_ROPE_HEAD_DIM], SWIZZLED_ROPE),
        gl.allocate_shared_memory(gl.float32, [BLOCK_ROWS], FLAT),
        gl.allocate_shared_memory(gl.int32, [BLOCK_ROWS], FLAT),
        new_barriers(1, 1 + LANES).index(0),
        new_barriers(1, 1).index(0),
    )
    normalized = new_barriers(ITEM_SLOTS, 1)
    items = ItemQueue(
        gl.allocate_shared_memory(gl.int32, [ITEM_SLOTS, ITEM_WORDS], FLAT),
        # What one item does without is not made: in the place of a barrier that nobody uses Triton
        # puts something else, and a barrier's memory is for its own instructions alone.
        new_barriers(ITEM_SLOTS, 1) if MANY else normalized,
        new_barriers(ITEM_SLOTS, ROLES) if MANY else normalized,
        gl.allocate_shared_memory(gl.int32, [ITEM_SLOTS, 1], FLAT),
        gl.allocate_shared_memory(gl.float32, [ITEM_SLOTS, BLOCK_ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ITEM_SLOTS, BLOCK_ROWS], FLAT),
        new_barriers(ITEM_SLOTS, 2),
        gl.allocate_shared_memory(gl.float32, [ITEM_SLOTS, BLOCK_ROWS], FLAT),
        normalized,
        new_barriers(1, 1).index(0) if MANY else normalized,
    )
    fence_async_shared()
    if MANY:
        if order is not None:
            wait_for_launch_before()
            number = gl.load(order) * tiles
        place = place_of(gl.program_id(0), number, order, plan)
        length = gl.load(cache_seqlens + place[2])
        query_row = place[2] * rows + place[0] * BLOCK_ROWS
        row_scale = gl.load(scale_addresses(queries, query_row, BLOCK_ROWS))
    _tile, split, request = place
    extent = blocks_of(length, split, plan)
    # The first `add_values` gets what is left of 512, for a thread of each warpgroup: at least what
    # its twin here has.
    WORKER_REGISTERS: gl.constexpr = (
        [88, 200, 24, 24, 24] if BLOCK_ROWS == 64 else [128, 176, 24, 24, 24]
    )
    has_item = gl.program_id(0) < number if MANY else extent[4]
    if has_item:
        first_column = extent[1] * BLOCK_TOKENS // PAGE_SIZE
        prefetch(block_table + request.to(gl.int64) * table_stride + first_column)
        query.scale.store(row_scale)
        mbarrier.arrive(query.full, count=LANES)
        load_query(queries, query_row, query, BLOCK_ROWS)
        write_item(items, 0, place, extent, rows, plan, BLOCK_ROWS)
        if MANY:
            mbarrier.arrive(items.full.index(0), count=1)
        rows_per_page = (codes_rows_per_page, rope_rows_per_page, scale_rows_per_page)
        gl.warp_specialize(
            [
                (add_values, (out, partial_out, ring, queue, items, 0, BLOCK_ROWS, MANY)),
                (
                    weigh_blocks,
                    (
                        query, ring, queue, items, score_scale_log2, rows, heads, BLOCK_ROWS,
                        CAUSAL, MANY,
                    ),
                ),
                (add_values, (out, partial_out, ring, queue, items, 1, BLOCK_ROWS, MANY)),
                (
                    load_blocks,
                    (
                        queries, codes_plane, rope_plane, scale_plane, block_table, table_stride,
                        num_pages, rows_per_page, query, ring, items, PAGE_SIZE, BLOCK_ROWS,
                        MANY,
                    ),
                ),
                (prepare_blocks, (ring, items, MANY)),
                (
                    manage_items,
                    (
                        items, cache_seqlens, order, counter, lse, partial_lse, number, rows, plan,
                        BLOCK_ROWS, MANY,
                    ),
                ),
            ],
            [4, 4, 1, 1, 1],
            WORKER_REGISTERS,
        )  # fmt: skip


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers whose phase ends after as many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


class Geometry(NamedTuple):
    """Where a tensor lies, and how. A kept TMA descriptor has it as its base: no cache stays alive.

    Attributes
    ----------
    address, dtype, shape, strides
        As the tensor's; the address of its first element.
    """

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def data_ptr(self) -> int:
        """Address of the first element, as of a tensor."""
        return self.address

    @property
    def rows_per_page(self) -> int:
        """Distance of a plane's pages in tokens' strides: page_size, or more in a view."""
        return 0 if self.shape[0] == 1 else self.strides[0] // self.strides[1]

    @property
    def rows(self) -> int:
        """Rows from a plane's first token to its last: those between the pages of a view too."""
        return (self.shape[0] - 1) * self.rows_per_page + self.shape[1]


def geometry(part: Tensor) -> Geometry:
    """Where a tensor lies."""
    return Geometry(part.data_ptr(), part.dtype, part.shape, part.stride())


def query_descriptor(
    part: Geometry, block_rows: int, box_width: int, layout: gl.constexpr
) -> TensorDescriptor:
    """Describe a contiguous [batch, s_q, heads, width] as rows, in boxes of a tile's."""
    width = part.shape[-1]
    rows = math.prod(part.shape[:-1])
    return TensorDescriptor(part, [rows, width], [width, 1], [block_rows, box_width], layout.value)


def plane_descriptor(plane: Geometry, box_width: int, layout: gl.constexpr) -> TensorDescriptor:
    """Describe a plane [num_pages, page_size, (width)] as rows, in boxes of one page's tokens.

    Rows between the pages of a view, another layer's perhaps, are described too and never fetched.
    """
    box = [min(plane.shape[1], BLOCK_TOKENS.value), box_width][: len(plane.shape) - 1]
    shape = [plane.rows, *plane.shape[2:]]
    return TensorDescriptor(plane, shape, list(plane.strides[1:]), box, layout.value)


class TileDescriptors(NamedTuple):
    """The kernel's first arguments. `scale` is None where the kernel takes the plane itself."""

    query_codes: TensorDescriptor
    query_rope: TensorDescriptor
    codes: TensorDescriptor
    rope: TensorDescriptor
    scale: TensorDescriptor | None


@lru_cache(maxsize=1024)
def tile_descriptors(
    block_rows: int,
    query_codes: Geometry,
    query_rope: Geometry,
    codes: Geometry,
    scale: Geometry,
    rope: Geometry,
) -> TileDescriptors:
    """Describe a call's tensors to the TMA; kept, because it takes as long as a short launch."""
    return TileDescriptors(
        query_descriptor(query_codes, block_rows, CODE_CHUNK.value, SWIZZLED_CODES),
        query_descriptor(query_rope, block_rows, QK_ROPE_HEAD_DIM.value, SWIZZLED_ROPE),
        plane_descriptor(codes, CODE_CHUNK.value, SWIZZLED_CODES),
        plane_descriptor(rope, QK_ROPE_HEAD_DIM.value, SWIZZLED_ROPE),
        plane_descriptor(scale, 0, FLAT_SCALE) if scale_by_tma(scale.shape[1]) else None,
    )


def scale_by_tma(page_size: int) -> bool:
    """Say whether a page's scales fill the 128 bytes between two addresses the TMA writes to."""
    return page_size >= SCALES_OF_TMA.value


LARGEST_INDEX = 2**31 - 1
"""TMA coordinates are int32."""
LARGEST_S_Q = 65
"""With more query tokens a causal mask reaches a third block from the end."""


def why_unsupported(
    query: QuantizedRows,
    cache: LatentPages,
    block_table: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
) -> str | None:
    """Say why this kernel can't serve a call whose arguments are valid; None if it can.

    The portable kernel takes everything that is refused here.
    """
    if not query.codes.is_cuda:
        return "the tensors are not on a CUDA device"
    if not is_hopper(query.codes.device):
        return "the device is not a Hopper GPU (compute capability 9.x)"
    # Of an address only the alignment matters, so that a step's fresh tensors are known already.
    parts = [
        Geometry(part.data_ptr() % 16, part.dtype, part.shape, part.stride())
        for part in (*query, *cache, block_table, out, lse)
    ]
    return why_geometry_unsupported(causal, *parts)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time: one fills a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Say whether a CUDA device is a Hopper GPU."""
    return torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=1024)
def why_geometry_unsupported(
    causal: bool,
    query_codes: Geometry,
    query_scale: Geometry,
    query_rope: Geometry,
    codes: Geometry,
    scale: Geometry,
    rope: Geometry,
    block_table: Geometry,
    out: Geometry,
    lse: Geometry,
) -> str | None:
    """Do the work of `why_unsupported`."""
    batch, s_q, heads, kv_lora_rank = query_codes.shape
    num_pages, page_size = scale.shape
    if (kv_lora_rank, query_rope.shape[-1]) != (KV_LORA_RANK.value, QK_ROPE_HEAD_DIM.value):
        widths = f"{kv_lora_rank} and {query_rope.shape[-1]}"
        return f"kv_lora_rank and qk_rope_head_dim are {widths}, not 512 and 64"
    if page_size not in (16, 32, 64, 128):
        return f"page_size is {page_size}, not 16, 32, 64 or 128"
    if causal and s_q > LARGEST_S_Q:
        return f"s_q is {s_q}, more than {LARGEST_S_Q} under a causal mask"
    if batch > 65535 or min(batch, s_q, heads, num_pages, block_table.shape[1]) == 0:
        return f"batch is {batch}, s_q {s_q}, heads {heads}, num_pages {num_pages}"
    whole = {
        "query.codes": query_codes,
        "query.scale": query_scale,
        "query.rope": query_rope,
        "out": out,
        "lse": lse,
    }
    for name, part in whole.items():
        if not is_contiguous(part) or part.address % 16:
            return f"{name} is not contiguous from a 16-byte boundary"
    if block_table.strides[1] != 1 or block_table.strides[0] > LARGEST_INDEX:
        return f"a row of block_table is not contiguous: strides {tuple(block_table.strides)}"
    for name, plane in {"codes": codes, "scale": scale, "rope": rope}.items():
        token_stride = plane.strides[1]
        bytes_between = [stride * plane.dtype.itemsize for stride in plane.strides[:-1]]
        if plane.strides[-1] != 1 or plane.address % 16 or any(b % 16 for b in bytes_between):
            return f"strides {plane.strides} or the address of cache.{name} don't suit the TMA"
        if token_stride < (plane.shape[2] if len(plane.shape) == 3 else 1) or (
            num_pages > 1 and plane.strides[0] % token_stride
        ):
            return f"pages of cache.{name} don't lie whole tokens apart: strides {plane.strides}"
        if plane.rows > LARGEST_INDEX:
            return f"cache.{name} spans more than 2^31 - 1 tokens"
    return None


def is_contiguous(part: Geometry) -> bool:
    """As `Tensor.is_contiguous`."""
    expected = 1
    for size, stride in zip(reversed(part.shape), reversed(part.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def rows_in_tile(rows: int) -> int:
    """Rows of a program's tile: as few as hold the request's, for nothing is computed by halves."""
    return next((tile for tile in (16, 32) if rows <= tile), 64)


def launch_hopper_decode(
    query: QuantizedRows,
    cache: LatentPages,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    split_rule: tuple[int, int],
    out: Tensor,
    lse: Tensor,
    workspace: DecodeWorkspace,
    num_splits_grid: int,
) -> None:
    """Attend; the arguments are valid and `why_unsupported` is None for them.

    Parameters
    ----------
    query, cache, block_table, cache_seqlens, softmax_scale, causal
        As `stage3_dataflow.decode.decode_quantized`.
    split_rule
        (min_tokens, max_splits), see `stage3_dataflow.split_plan`.
    out, lse
        [batch, s_q, heads, 512], and f32 [batch, s_q, heads]: written for requests of one split.
    workspace
        Where the splits' results go in between: normalised, with natural log-sum-exps, where +inf
        marks a split with a page id that is no page.
    num_splits_grid
        Splits that the longest possible request has.
    """
    batch, s_q, heads, _ = query.codes.shape
    rows = s_q * heads
    page_size = cache.scale.shape[1]
    block_rows = rows_in_tile(rows)
    number_of_tiles = -(-rows // block_rows)
    programs = multiprocessors(out.device)
    number = number_of_tiles * num_splits_grid * batch
    many = number > programs
    capacity = min(block_table.shape[1] * page_size, LARGEST_INDEX - BLOCK_TOKENS.value)
    min_tokens, max_splits = (min(part, LARGEST_INDEX) for part in split_rule)
    if num_splits_grid == 1:
        partial_out, partial_lse = out, lse  # never written
    else:
        partial_out, partial_lse = workspace.partials(
            batch, num_splits_grid, rows, out.shape[-1], partial_dtype(out.dtype)
        )
    plan = (capacity, min_tokens, max_splits, num_splits_grid)
    counter = workspace.counter() if many else None
    order = None
    if many and num_splits_grid > 1:
        order = workspace.order(batch * num_splits_grid)
        launch_longest_first(cache_seqlens, order, counter, *plan)
    planes = tuple(geometry(plane) for plane in cache)
    tiles = tile_descriptors(block_rows, geometry(query.codes), geometry(query.rope), *planes)
    codes, scale, rope = planes
    launch(
        hopper_decode_kernel,
        (programs,) if many else (number_of_tiles, num_splits_grid, batch),
        (
            tiles.query_codes,
            tiles.query_rope,
            tiles.codes,
            tiles.rope,
            cache.scale if tiles.scale is None else tiles.scale,
            query.scale,
            block_table,
            cache_seqlens,
            order,
            counter,
            out,
            lse,
            partial_out,
            partial_lse,
            softmax_scale * math.log2(math.e),
            number,
            number_of_tiles,
            rows,
            heads,
            batch * rows,
            scale.shape[0],
            codes.rows_per_page,
            rope.rows_per_page,
            scale.rows_per_page,
            block_table.stride(0),
            *plan,
        ),
        {
            "PAGE_SIZE": page_size,
            "BLOCK_ROWS": block_rows,
            "CAUSAL": causal and s_q > 1,
            "MANY": many,
        },
        device=out.device,
        unspecialized=UNSPECIALIZED,
        num_warps=4,
        # What comes before `wait_for_launch_before` may overlap the ordering.
        launch_pdl=order is not None,
    )
    if num_splits_grid > 1:
        launch_hopper_combine(partial_out, partial_lse, cache_seqlens, out, lse, *plan[:3])


UNSPECIALIZED = places(
    hopper_decode_kernel,
    "number", "tiles", "rows", "heads", "query_rows", "num_pages", "codes_rows_per_page",
    "rope_rows_per_page", "scale_rows_per_page", "table_stride", "capacity", "min_tokens",
    "max_splits", "partial_splits",
)  # fmt: skip


def partial_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """BF16 where the output is: half as much to write and read again.

    Each partial result is then rounded once more, as coarsely as the output will be. Float16 has
    not the range for it.
    """
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
