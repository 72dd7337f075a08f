"""The merge of partial results: exact up to rounding, and never a reader of what nobody wrote.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage0_reference.latent_attention import AttentionOutput
from stage2_pv_pipeline.rescaled_pv import merge_partials
from stage3_dataflow import SplitRule
from stage3_dataflow.split_plan import largest_split_count, splits_for
from tests.bounds import assert_within, attention_error, rounding_error
from tests.stage3.cached_requests import assert_same_bits, meets_nan
from tests.strategies import seeds

pytestmark = pytest.mark.stage3

BAD_PAGE = math.inf
"""What a split writes as its lse when it met a page outside the pool."""


@pytest.fixture(scope="module", params=["portable", "hopper", "hopper, bf16"])
def combine(request, device):
    """Merge partials [batch, splits, rows, .]; what the kernel does not write comes back NaN."""
    from stage3_dataflow.kernels.launch import launch_combine

    if request.param != "portable" and not torch.cuda.is_available():
        pytest.skip("the Hopper kernels need a GPU")

    def merge(partial_out, partial_lse, lengths, capacity, rule, *, dtype=torch.float32):
        batch, _, rows, width = partial_out.shape
        partial_out, partial_lse = partial_out.to(device), partial_lse.to(device)
        lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        wide = width if request.param == "portable" else 512
        out = torch.full((batch, 1, rows, wide), math.nan, dtype=dtype, device=device)
        lse = torch.full((batch, 1, rows), math.nan, device=device)
        if request.param == "portable":
            launch_combine(partial_out, partial_lse, lengths, capacity, out, lse, split_rule=rule)
        else:
            from stage3_dataflow.kernels.hopper_merge import launch_hopper_combine

            kept = torch.bfloat16 if request.param == "hopper, bf16" else torch.float32
            repeated = partial_out.repeat(1, 1, 1, 512 // width).to(kept)
            launch_hopper_combine(repeated, partial_lse, lengths, out, lse, capacity, *rule)
            copies = out.view(batch, rows, 512 // width, width)
            first = copies[:, :, :1].expand_as(copies)
            assert torch.equal(copies.nan_to_num(7.0), first.nan_to_num(7.0))
        return AttentionOutput(out[:, 0, :, :width].cpu(), lse[:, 0].cpu())

    merge.partial_dtype = torch.bfloat16 if request.param == "hopper, bf16" else torch.float32
    return merge


def drawn(combine, *shape, generator):
    """Normal numbers that the partials' dtype can hold."""
    return torch.randn(shape, generator=generator).to(combine.partial_dtype).float()


def merge_error(outs, lses):
    """Budget of one row. Partials are values whose scores are their lse: `attention_error`.

    A score is exact; its exponential multiplies it by a rounded log2(e): two roundings.
    """
    scores = lses.double()[None]
    return attention_error(
        scores,
        scores.abs().masked_fill(scores.isneginf(), 0.0),
        outs.double().abs(),
        score_roundings=2,
        value_roundings=2,
        dtype=torch.float32,
        steps=len(lses),
    )


@given(
    splits=st.one_of(st.integers(2, 20), st.sampled_from((64, 65, 130))),
    rows=st.integers(1, 3),
    width=st.sampled_from((32, 64)),
    spread=st.sampled_from((0.0, 3.0, 80.0, 1e4)),
    empty=st.sampled_from((0.0, 0.3)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=seeds(),
)
@settings(max_examples=12)
def test_merging_is_the_softmax_over_lse(combine, splits, rows, width, spread, empty, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    outs = drawn(combine, 1, splits, rows, width, generator=generator)
    lses = spread * torch.randn(1, splits, rows, generator=generator)
    absent = torch.rand(1, splits, rows, generator=generator) < empty
    lses[absent] = -math.inf
    outs[absent] = 0.0
    rule = SplitRule(64, splits)
    result = combine(outs, lses, [64 * splits], 64 * splits, rule, dtype=dtype)
    exact = merge_partials(outs[0].double(), lses[0].double())
    for row in range(rows):
        error = merge_error(outs[0, :, row], lses[0, :, row])
        off = error.out[0]
        if dtype != torch.float32:
            off = off + rounding_error(exact.out[row].abs() + off, dtype)
        if bool(absent[0, :, row].all()):
            off = torch.zeros_like(off)
        assert_within(result.out[0, row], exact.out[row], off)
        assert_within(result.lse[0, row : row + 1], exact.lse[row : row + 1], error.lse)


def test_logarithms_are_natural(combine):  # FR-24: Z = 2 and 8, outputs 0 and 10
    outs = torch.tensor([0.0, 10.0]).view(1, 2, 1, 1).expand(1, 2, 1, 32).contiguous()
    lses = torch.log(torch.tensor([2.0, 8.0])).view(1, 2, 1)
    result = combine(outs, lses, [128], 128, SplitRule(64, 2))
    u = 2.0**-24
    # two logarithms rounded, two exponentials, sum and quotient: below 32 roundings
    assert_within(result.out, torch.full((1, 1, 32), 8.0), 32 * u * 10)
    assert_within(result.lse, torch.full((1, 1), math.log(10.0)), 32 * u * math.log(10.0))


@pytest.mark.parametrize("garbage", [0.0, math.nan, 7.0])
@pytest.mark.parametrize("where", ["first", "last", "both sides"])
def test_an_empty_partial_is_the_identity(combine, where, garbage):
    """FR-23: (0, -inf) on either side changes no bit, and its output is not even read."""
    generator = torch.Generator().manual_seed(0)
    out, lse = drawn(combine, 1, 1, 2, 32, generator=generator), torch.randn(1, 1, 2)
    none = torch.full_like(out, garbage), torch.full_like(lse, -math.inf)
    order = {"first": (1, 0), "last": (0, 1), "both sides": (1, 0, 1)}[where]
    outs, lses = (
        torch.cat([pair[which] for which in order], 1) for pair in ((out, none[0]), (lse, none[1]))
    )
    splits = len(order)
    result = combine(outs, lses, [64 * splits], 64 * splits, SplitRule(64, splits))
    assert_same_bits(result, (out[:, 0], lse[:, 0]))


def test_nothing_but_empty_partials_is_empty(combine):
    outs, lses = torch.full((1, 3, 2, 32), math.nan), torch.full((1, 3, 2), -math.inf)
    result = combine(outs, lses, [192], 192, SplitRule(64, 3))
    assert_same_bits(result, (torch.zeros(1, 2, 32), torch.full((1, 2), -math.inf)))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3e38])
@given(length=st.integers(0, 1100), min_tokens=st.integers(1, 300), max_splits=st.integers(2, 20))
@settings(max_examples=6)
def test_only_the_splits_of_the_length_are_read(combine, garbage, length, min_tokens, max_splits):
    """FR-23, FR-27: the length alone says how many; a row of one split is left alone."""
    rule, capacity = SplitRule(min_tokens, max_splits), 1100
    grid = largest_split_count(capacity, rule)
    wanted = len(splits_for(length, rule))
    generator = torch.Generator().manual_seed(length)
    outs = drawn(combine, 1, grid, 1, 32, generator=generator)
    lses = torch.randn(1, grid, 1, generator=generator)
    clean = combine(outs, lses, [length], capacity, rule)
    outs[:, wanted:] = garbage
    lses[:, wanted:] = garbage
    dirty = combine(outs, lses, [length], capacity, rule)
    assert_same_bits(dirty, clean)
    if wanted == 1:
        assert bool(clean.out.isnan().all())
        assert bool(clean.lse.isnan().all())
    else:
        exact = merge_partials(outs[0, :wanted].double(), lses[0, :wanted].double())
        error = merge_error(outs[0, :wanted, 0], lses[0, :wanted, 0])
        assert_within(dirty.out[0], exact.out, error.out)
        assert_within(dirty.lse[0], exact.lse, error.lse)


@meets_nan
@pytest.mark.parametrize("split", [0, 2, 8])
@pytest.mark.parametrize("company", [math.nan, 1.0, -math.inf])
def test_the_mark_of_a_bad_page_empties_the_row(combine, split, company):
    """Whatever the other splits hold, before or behind it: nine splits are two blocks of lse."""
    outs, lses = torch.full((2, 9, 1, 32), company), torch.full((2, 9, 1), company)
    outs[1], lses[1] = 1.0, 0.0
    lses[0, split] = BAD_PAGE
    outs[0, split] = math.nan
    result = combine(outs, lses, [576, 576], 576, SplitRule(64, 9))
    assert_same_bits(
        (result.out[0], result.lse[0]), (torch.zeros(1, 32), torch.full((1,), -math.inf))
    )
    assert torch.equal(result.out[1], torch.ones(1, 32))


@meets_nan
def test_a_nan_that_a_split_has_seen_stays(combine):
    outs, lses = torch.ones(1, 3, 1, 32), torch.zeros(1, 3, 1)
    outs[0, 1], lses[0, 1] = math.nan, math.nan
    result = combine(outs, lses, [192], 192, SplitRule(64, 3))
    assert bool(result.out.isnan().all())
    assert bool(result.lse.isnan().all())


@pytest.mark.parametrize("length", [-1, 577, 2**31 - 1, -(2**31)])
def test_a_length_that_cannot_be_is_the_decode_kernels_to_write(combine, length):
    """It counts as 0 tokens, one split: the decode kernel has written (0, -inf) already."""
    outs, lses = torch.ones(1, 9, 1, 32), torch.zeros(1, 9, 1)
    result = combine(outs, lses, [length], 576, SplitRule(64, 9))
    assert bool(result.out.isnan().all())
