"""What is true of a right answer, a property an exercise.

A property takes the candidate function and returns, or raises where an example contradicts it.
Inputs are drawn by Hypothesis, which shows the smallest one that fails. The draws are the same each
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.latent_attention import causal_mask
from stage1_quant import decode_e4m3, dequantize_rows, quantize_rows, token_scale
from stage1_quant.quantize import QuantizedRows
from stage2_pv_pipeline import merge_partials
from stage2_pv_pipeline.tensor_core_accumulator import (
    accumulation_error_bound,
    draw_case,
    promoted_product,
)
from stage3_dataflow.split_plan import SplitRule
from stage3_dataflow.split_plan import splits_for as library_splits

Candidate = Callable[..., Any]
Property = Callable[[Candidate], None]

EXERCISES: dict[str, dict[str, Property]] = {}

repeatable = settings(max_examples=30, derandomize=True, database=None, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def exercise(stage: str, name: str) -> Callable[[Property], Property]:
    """Register a property under the stage and the function that it judges."""

    def register(judge: Property) -> Property:
        EXERCISES.setdefault(stage, {})[name] = judge
        return judge

    return register


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _same(got: Any, expected: Tensor, what: str) -> None:
    assert isinstance(got, Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    assert got.shape == expected.shape, f"{what}: {list(got.shape)} for {list(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} for {expected.dtype}"
    assert torch.equal(got, expected), f"{what}: {got.flatten()[:8]} for {expected.flatten()[:8]}"


def _close(got: Any, expected: Tensor, relative: float, what: str) -> None:
    """Within `relative` of the largest expected number; NaN is never close."""
    assert isinstance(got, Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    assert got.shape == expected.shape, f"{what}: {list(got.shape)} for {list(expected.shape)}"
    limit = relative * max(float(expected.abs().max()), 1e-30) if expected.numel() else 0.0
    off = (got.double() - expected.double()).abs()
    assert bool((off <= limit).all()), f"{what}: off by {float(off.max()):.2g}, at most {limit:.2g}"


@exercise("stage0", "absorb_query")
def scores_are_those_of_expanded_keys(candidate: Candidate) -> None:
    """Float64 sums of up to 8 x 12 terms agree to 1e-12."""

    @repeatable
    @given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 8), st.integers(1, 12))
    def holds(seed: int, s_q: int, heads: int, nope: int, latent: int) -> None:
        q_nope, w_uk = _normal(seed, s_q, heads, nope), _normal(seed + 1, heads, nope, latent)
        c_kv = _normal(seed + 2, 5, latent)
        keys = torch.einsum("hdc,tc->htd", w_uk, c_kv)
        expected = torch.einsum("qhd,htd->qht", q_nope, keys)
        _close(candidate(q_nope, w_uk) @ c_kv.T, expected, 1e-12, "scores")

    holds()


@exercise("stage0", "visible")
def the_mask_hangs_on_the_end(candidate: Candidate) -> None:
    """Equal to the library's mask, for requests shorter than their queries too."""

    @repeatable
    @given(st.integers(1, 6), st.integers(0, 10))
    @example(4, 2)
    def holds(s_q: int, length: int) -> None:
        _same(candidate(s_q, length), causal_mask(s_q, length), f"s_q {s_q}, length {length}")

    holds()


@exercise("stage0", "slots")
def slots_follow_the_table(candidate: Candidate) -> None:
    """Equal to a loop, past 2^31 too."""

    @repeatable
    @given(st.integers(1, 128), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    @example(64, [2**31 - 1])
    def holds(page_size: int, pages: list[int]) -> None:
        table = torch.tensor(pages, dtype=torch.int32)
        positions = torch.arange(0, len(pages) * page_size, max(1, page_size // 3))
        loop = [pages[p // page_size] * page_size + p % page_size for p in positions.tolist()]
        _same(candidate(table, positions, page_size), torch.tensor(loop), "slots")

    holds()


@exercise("stage0", "online_step")
def blocks_one_by_one_are_the_softmax(candidate: Candidate) -> None:
    """Any cut gives the softmax over all tokens (to 1e-12); an empty block changes nothing."""

    @repeatable
    @given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from((1.0, 50.0)))
    def holds(seed: int, blocks: list[int], spread: float) -> None:
        rows, width, tokens = 3, 4, sum(blocks)
        scores, values = spread * _normal(seed, rows, tokens), _normal(seed + 1, tokens, width)
        scores[0, : blocks[0]] = -math.inf  # the first row sees nothing of the first block
        state = (
            torch.full((rows,), -math.inf, dtype=torch.float64),
            torch.zeros(rows, dtype=torch.float64),
            torch.zeros(rows, width, dtype=torch.float64),
        )
        for part, value in zip(scores.split(blocks, 1), values.split(blocks), strict=True):
            state = candidate(*state, part, value)
        hidden = torch.full((rows, 2), -math.inf, dtype=torch.float64)
        after = candidate(*state, hidden, values[:1].repeat(2, 1))
        for name, old, new in zip(("max", "sum", "accumulator"), state, after, strict=True):
            _same(new, old, f"{name} after an empty block")
        seen = ~state[0].isneginf()
        expected = torch.softmax(scores[seen], -1) @ values
        _close(state[2][seen] / state[1][seen, None], expected, 1e-12, "output")
        assert bool((state[2][~seen] == 0).all()), "a row that saw nothing has output 0"

    holds()


@exercise("stage1", "pow2_scale")
def the_scale_is_the_librarys(candidate: Candidate) -> None:
    """Equal to the last bit, on both sides of every power of two."""

    @repeatable
    @given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=5), st.integers(-40, 90))
    def holds(sizes: list[float], power: int) -> None:
        edge = torch.tensor(464.0 * 2.0**power)
        amax = torch.cat(
            (
                torch.tensor([*sizes, 0.0, 1.0]),
                edge[None],
                torch.nextafter(edge, torch.tensor(math.inf))[None],
                torch.nextafter(edge, torch.tensor(0.0))[None],
            )
        )
        _same(candidate(amax), token_scale(amax, "pow2"), f"scales of {amax.tolist()}")

    holds()


@exercise("stage1", "quantize_row")
def a_row_has_the_librarys_bytes(candidate: Candidate) -> None:
    """Give equal codes, scale and rope, for rows of any size and a dead latent with live rope."""

    @repeatable
    @given(seeds, st.integers(-12, 12), st.integers(-6, 10), st.booleans())
    def holds(seed: int, size: int, rope_size: int, dead: bool) -> None:
        c_kv = (_normal(seed, 4, 32) * 2.0**size).bfloat16()
        c_kv[:2] *= 2.0**-8
        if dead:
            c_kv[1] = 0.0
        k_rope = (_normal(seed + 1, 4, 8) * 2.0**rope_size).bfloat16()
        codes, scale, rope = candidate(c_kv, k_rope)
        expected = quantize_rows(c_kv, k_rope, "pow2")
        _same(scale, expected.scale, "scale")
        assert codes.dtype == torch.float8_e4m3fn, f"codes: {codes.dtype} for float8_e4m3fn"
        _same(codes.view(torch.uint8), expected.codes.view(torch.uint8), "codes")
        _same(rope, expected.rope, "rope")

    holds()


@exercise("stage1", "scaled_score")
def scores_are_those_of_what_the_codes_stand_for(candidate: Candidate) -> None:
    """Float32 against float64: 40 products and three scales, each off by at most 2^-23 or so."""

    @repeatable
    @given(seeds, st.integers(-10, 10), st.integers(-10, 10))
    def holds(seed: int, query_size: int, key_size: int) -> None:
        query, key = (
            quantize_rows(
                _normal(seed + 2 * index, 3, 32) * 2.0**size, _normal(seed + 2 * index + 1, 3, 8)
            )
            for index, size in enumerate((query_size, key_size))
        )
        meaning = [[part.double() for part in dequantize_rows(rows)] for rows in (query, key)]
        expected = meaning[0][0] @ meaning[1][0].T + meaning[0][1] @ meaning[1][1].T
        magnitude = sum(a.abs() @ b.abs().T for a, b in zip(*meaning, strict=True))
        got = candidate(tuple(query), tuple(key))
        assert got.dtype == torch.float32, f"scores: {got.dtype} for float32"
        limit = 48 * 2.0**-23 * magnitude
        off = (got.double() - expected).abs()
        assert bool((off <= limit).all()), f"scores off by {float((off / magnitude).max()):.2g}"

    holds()


@exercise("stage1", "read_back")
def what_is_read_back_can_be_appended_again(candidate: Candidate) -> None:
    """Give the meaning of the codes exactly, and the same bytes the second time."""

    @repeatable
    @given(seeds, st.integers(-12, 12))
    def holds(seed: int, size: int) -> None:
        rows = quantize_rows(
            (_normal(seed, 4, 32) * 2.0**size).bfloat16(),
            _normal(seed + 1, 4, 8).bfloat16(),
            "pow2",
        )
        latent, rope = candidate(*rows)
        meaning = dequantize_rows(rows)
        _same(latent, meaning.c_kv.bfloat16(), "latent")
        _same(rope, meaning.k_rope.bfloat16(), "rope")
        again: QuantizedRows = quantize_rows(latent, rope, "pow2")
        _same(again.codes.view(torch.uint8), rows.codes.view(torch.uint8), "codes, second time")

    holds()


@exercise("stage2", "fuse_and_quantize")
def p_keeps_its_size_in_units_of_sigma(candidate: Candidate) -> None:
    """Half an ulp of e4m3 an element, the largest one exact (but for float32's own rounding)."""

    @repeatable
    @given(seeds, st.integers(1, 64), st.sampled_from((0, 3, 8)))
    def holds(seed: int, block: int, binades: int) -> None:
        p = torch.softmax(_normal(seed, 3, block, dtype=torch.float32) * 4, -1)
        scale = torch.exp2(binades * _normal(seed + 1, block, dtype=torch.float32))
        p8, sigma = candidate(p, scale)
        u = p.double() * scale.double()
        largest = u.amax(-1)
        _close(sigma, largest / 448, 2.0**-20, "sigma")
        assert bool((p8.amax(-1) == 448).all()), f"largest codes {p8.amax(-1).tolist()}, not 448"
        codes = p8.float().to(torch.float8_e4m3fn)
        assert torch.equal(decode_e4m3(codes), p8.float()), "p8 must hold e4m3 values"
        bound = torch.maximum(2.0**-4 * u, 2.0**-10 * largest[:, None] / 448) * (1 + 2.0**-18)
        off = (p8.double() * sigma.double()[:, None] - u).abs()
        assert bool((off <= bound).all()), (
            f"an element uses {float((off / bound).max()):.3g} bounds"
        )

    holds()


@exercise("stage2", "rescaled_step")
def the_pipeline_is_attention(candidate: Candidate) -> None:
    """Within P's rounding of exact attention, for scales and maxima that jump between blocks."""

    @repeatable
    @given(seeds, st.lists(st.integers(1, 16), min_size=1, max_size=4), st.sampled_from((0, 6)))
    def holds(seed: int, blocks: list[int], binades: int) -> None:
        rows, width, tokens = 3, 4, sum(blocks)
        scores = 3 * _normal(seed, rows, tokens, dtype=torch.float32)
        codes = _normal(seed + 1, tokens, width, dtype=torch.float32) * 100
        jumps = _normal(seed + 2, len(blocks), dtype=torch.float32) * binades
        scale = torch.exp2(torch.repeat_interleave(jumps, torch.tensor(blocks)))
        state = (
            torch.full((rows,), -math.inf),
            torch.zeros(rows),
            torch.zeros(rows, width),
            torch.ones(rows),
        )
        parts = (scores.split(blocks, 1), codes.split(blocks), scale.split(blocks))
        for block in zip(*parts, strict=True):
            state = candidate(state, *block)
        out = state[2] * (state[3] / state[1])[:, None]
        weights = torch.softmax(scores.double(), -1) * scale.double()
        expected, magnitude = weights @ codes.double(), weights @ codes.double().abs()
        # 2^-4 of every weight; below e4m3's normals 2^-10 of the block's largest u / 448.
        largest = torch.stack([part.amax(-1) for part in weights.split(blocks, 1)], -1)
        sigma = torch.repeat_interleave(largest / 448, torch.tensor(blocks), -1)
        bound = 2.0**-4 * magnitude + 2.0**-10 * sigma @ codes.double().abs()
        off = (out.double() - expected).abs()
        slack = bound * 1.001 + 2.0**-18 * magnitude
        assert bool((off <= slack).all()), f"output off by {float((off / slack).max()):.3g} bounds"
        lse = state[0].double() + state[1].double().log()
        _close(lse, torch.logsumexp(scores.double(), -1), 1e-5, "lse (P is summed unquantised)")

    holds()


@exercise("stage2", "merge")
def merging_is_attention_over_all_keys(candidate: Candidate) -> None:
    """Equal to the library's merge (to 1e-12), with empty partials that hold NaN."""

    @repeatable
    @given(seeds, st.lists(st.integers(0, 4), min_size=1, max_size=5))
    @example(0, [0, 0])
    def holds(seed: int, sizes: list[int]) -> None:
        outs, lses = _normal(seed, len(sizes), 2, 3), _normal(seed + 1, len(sizes), 2) * 20
        for split, size in enumerate(sizes):
            if size == 0:
                outs[split], lses[split] = math.nan, -math.inf
        out, lse = candidate(outs.clone(), lses.clone())
        expected = merge_partials(outs, lses)
        _close(out, expected.out, 1e-12, "out")
        empty = expected.lse.isneginf()
        assert torch.equal(lse.isneginf(), empty), f"lse {lse.tolist()} for {expected.lse.tolist()}"
        _close(lse[~empty], expected.lse[~empty], 1e-12, "lse")

    holds()


@exercise("stage2", "promoted")
def promotion_keeps_the_derived_bound(candidate: Candidate) -> None:
    """Equal to the library's policy, and so within its bound."""
    for promote_every in (64, 256):
        p, codes = draw_case("flat, V = 1 + N(0, 0.5)", 1024, columns=4)
        got = candidate(p, codes, promote_every)
        expected = promoted_product(p, codes, promote_every=promote_every)
        bound = accumulation_error_bound(p.abs() @ codes.abs(), 1024, promote_every)
        off = (got.double() - p @ codes).abs()
        assert bool((off <= bound).all()), f"every {promote_every}: outside the bound"
        _close(got, expected, 2.0**-22, f"every {promote_every}")


@exercise("stage3", "splits_for")
def splits_are_the_kernels(candidate: Candidate) -> None:
    """Equal to what the kernels compute on the device."""

    @repeatable
    @given(st.integers(0, 20_000), st.integers(1, 5_000), st.integers(1, 70))
    @example(0, 64, 8)
    @example(130, 64, 2)
    def holds(length: int, min_tokens: int, max_splits: int) -> None:
        got = candidate(length, min_tokens, max_splits)
        expected = library_splits(length, SplitRule(min_tokens, max_splits))
        assert got == expected, f"{got} for {expected}"

    holds()


@exercise("stage3", "element_offset")
def offsets_do_not_wrap(candidate: Candidate) -> None:
    """Equal to Python's integers, past 2^31."""

    @repeatable
    @given(st.integers(0, 2**31 - 1), st.integers(0, 127), st.integers(1, 2**26))
    @example(65_536, 0, 64 * 512)
    def holds(page: int, offset: int, page_stride: int) -> None:
        tensors = (torch.tensor([value], dtype=torch.int32) for value in (page, offset))
        expected = torch.tensor([page * page_stride + offset * 512])
        _same(candidate(*tensors, page_stride, 512), expected, f"page {page}")

    holds()


@exercise("stage3", "pad_batch")
def unused_rows_are_empty(candidate: Candidate) -> None:
    """Live rows as given; everything else -1 and 0."""

    @repeatable
    @given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5), st.integers(0, 3))
    def holds(tables: list[list[int]], unused: int) -> None:
        rows, lengths = len(tables) + unused, [16 * len(table) for table in tables]
        filled = [table + [-1] * (4 - len(table)) for table in tables] + [[-1] * 4] * unused
        table, seqlens = candidate(tables, lengths, rows, 4)
        expected = torch.tensor(filled, dtype=torch.int32).view(rows, 4)
        _same(table, expected, "block_table")
        _same(seqlens, torch.tensor(lengths + [0] * unused, dtype=torch.int32), "cache_seqlens")

    holds()


@exercise("stage3", "rows_to_read")
def every_cached_token_once_in_order(candidate: Candidate) -> None:
    """Equal to a loop over requests; what stands behind a request's end is not followed."""

    @repeatable
    @given(seeds, st.lists(st.integers(0, 40), max_size=4), st.sampled_from((1, 4, 16)))
    def holds(seed: int, lengths: list[int], page_size: int) -> None:
        columns = 41
        draw = torch.Generator().manual_seed(seed)
        table = torch.randperm(columns * max(len(lengths), 1), generator=draw).int()
        table = table[: columns * len(lengths)].view(len(lengths), columns)
        loop = [
            int(row[token // page_size]) * page_size + token % page_size
            for row, length in zip(table, lengths, strict=True)
            for token in range(length)
        ]
        expected = torch.tensor(loop, dtype=torch.int64)
        got = candidate(table, torch.tensor(lengths, dtype=torch.int32), page_size)
        _same(got, expected, "slots")

    holds()
