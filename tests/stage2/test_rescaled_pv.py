"""The rescaled FP8 PV product is attention: exactly without its casts, within a bound with them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage2_pv_pipeline.rescaled_pv import (
    QuantizedBlock,
    apply_block,
    initial_state,
    merge_partials,
    rescaled_pv_attention,
)

pytestmark = pytest.mark.stage2

U64 = torch.finfo(torch.float64).eps / 2
U32 = torch.finfo(torch.float32).eps / 2


def draw(seed, batch, rows_shape, tokens, width, *, spread=3.0, binades=0.0, dtype=torch.float64):
    """Scores, codes and scales; `binades` is how far the scales wander from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    s_q, heads = rows_shape
    scores = spread * normal(batch, s_q * heads, tokens)
    codes = (64 * normal(batch, tokens, width)).clamp(-448, 448)
    codes = codes.float().to(torch.float8_e4m3fn).double()
    scale = torch.exp2((binades * normal(batch, tokens)).clamp(-40, 100))
    return QuantizedBlock(scores.to(dtype), codes.to(dtype), scale.to(dtype))


def attend(whole, lengths, rows_shape, *, dtype=torch.float64, **choices):
    batch, _, width = whole.codes.shape
    query = torch.empty(batch, *rows_shape, width, dtype=dtype)

    def read_block(positions):
        reach = positions.clamp(max=whole.codes.shape[1] - 1)
        return QuantizedBlock(
            whole.scores[..., reach], whole.codes[:, reach], whole.scale[:, reach]
        )

    return rescaled_pv_attention(read_block, query, lengths, **choices)


def exact(whole, lengths, rows_shape, causal=True):
    """Float64 softmax attention over the dequantised values, row by row."""
    batch, rows, _ = whole.scores.shape
    s_q, heads = rows_shape
    out = torch.zeros(batch, rows, whole.codes.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, rows), -math.inf, dtype=torch.float64)
    values = whole.codes.double() * whole.scale.double()[..., None]
    for request in range(batch):
        for row in range(rows):
            seen = lengths[request] - (s_q - 1 - row // heads if causal else 0)
            if seen > 0:
                scores = whole.scores[request, row, :seen].double()
                lse[request, row] = torch.logsumexp(scores, 0)
                out[request, row] = scores.softmax(0) @ values[request, :seen]
    shape = (batch, s_q, heads)
    return out.view(*shape, -1), lse.view(*shape)


def weight_sum(whole, lengths, rows_shape, causal=True):
    """Sum over keys of weight times magnitude of the value: what roundings are relative to."""
    magnitude = QuantizedBlock(whole.scores, whole.codes.abs(), whole.scale)
    return exact(magnitude, lengths, rows_shape, causal)[0]


def rounding(tokens, u, largest_score):
    """Relative error of every term by the arithmetic alone, in units of the sum of magnitudes.

    exp2 of a score whose product with log2(e) is rounded: an absolute error u |score| log2(e) in
    the exponent becomes a relative one of ln 2 times that, for numerator and denominator; sums of
    n terms add n u each; per block five factors are rounded (decay, ratio, sigma, unit, tile).
    """
    blocks = tokens  # at most one block a token
    return 4 * u * largest_score + (2 * tokens + 12 * blocks + 20) * u


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3))
lengths_of = st.lists(st.integers(0, 90), min_size=1, max_size=3)


@given(
    seed=st.integers(0, 2**32),
    rows_shape=shapes,
    lengths=lengths_of,
    block=st.sampled_from([1, 7, 16, 64, 128]),
    causal=st.booleans(),
    binades=st.sampled_from([0.0, 2.0, 20.0]),
    spread=st.sampled_from([0.0, 3.0, 60.0]),
)
def test_without_casts_it_is_exact_attention(
    seed, rows_shape, lengths, block, causal, binades, spread
):
    whole = draw(seed, len(lengths), rows_shape, 90, 5, spread=spread, binades=binades)
    result = attend(whole, lengths, rows_shape, causal=causal, block_tokens=block, p_format="exact")
    out, lse = exact(whole, lengths, rows_shape, causal)
    largest = float(whole.scores.abs().max())
    bound = rounding(90, U64, largest) * weight_sum(whole, lengths, rows_shape, causal)
    assert bool(((result.out - out).abs() <= bound).all())
    visible = ~lse.isneginf()
    assert torch.equal(result.lse.isneginf(), lse.isneginf())
    lse_error = (result.lse - lse)[visible].abs()
    assert bool((lse_error <= rounding(90, U64, largest) * (1 + largest)).all())


@given(
    seed=st.integers(0, 2**32),
    rows_shape=shapes,
    lengths=lengths_of,
    block=st.sampled_from([1, 16, 64]),
    binades=st.sampled_from([0.0, 2.0, 20.0]),
    spread=st.sampled_from([0.0, 3.0, 60.0]),
)
def test_quantising_p_costs_at_most_a_half_step_of_every_weight(
    seed, rows_shape, lengths, block, binades, spread
):
    """In units of sigma an element of P is off by max(2^-4 of it, 2^-10).

    2^-10 sigma is 2^-10 / 448 of the block's largest ``weight x scale``; a block has at most
    `block` such elements, each multiplied by a code of at most 448.
    """
    whole = draw(seed, len(lengths), rows_shape, 90, 5, spread=spread, binades=binades)
    result = attend(whole, lengths, rows_shape, block_tokens=block)
    out, lse = exact(whole, lengths, rows_shape)
    relative = 2**-4 * weight_sum(whole, lengths, rows_shape)
    ones = QuantizedBlock(whole.scores, torch.ones_like(whole.codes), whole.scale)
    # Sum over all keys bounds the sum over blocks of their largest element.
    flushed = 2**-10 / 448 * block * 448 * exact(ones, lengths, rows_shape)[0]
    arithmetic = rounding(90, U32, float(whole.scores.abs().max())) * weight_sum(
        whole, lengths, rows_shape
    )
    assert bool(((result.out - out).abs() <= relative + flushed + arithmetic).all())
    # The denominator sums p before it is quantised: no FP8 error in lse.
    visible = ~lse.isneginf()
    largest = 1 + float(whole.scores.abs().max())
    difference = (result.lse - lse)[visible].abs()
    assert bool((difference <= rounding(90, U64, largest) * largest).all())


@pytest.mark.parametrize("row", ["peaked", "flat", "mixed", "one hot among -7"])
def test_v_of_ones_gives_one(row):  # FR-17
    tokens = 4096
    scores = {
        "peaked": torch.linspace(0, 60, tokens),
        "flat": torch.zeros(tokens),
        "mixed": 4 * torch.randn(tokens, generator=torch.Generator().manual_seed(0)),
        "one hot among -7": torch.full((tokens,), -7.0),
    }[row].clone()
    if row == "one hot among -7":
        scores[0] = 0.0
    whole = QuantizedBlock(
        scores.view(1, 1, -1), torch.full((1, tokens, 1), 256.0), torch.full((1, tokens), 2.0**-8)
    )
    result = attend(whole, [tokens], (1, 1), dtype=torch.float32)
    assert abs(float(result.out) - 1.0) < 0.01


def test_a_tile_with_nothing_visible_changes_no_bit():  # FR-19
    whole = draw(1, 1, (1, 2), 32, 4)
    state = initial_state(1, 2, 4, dtype=torch.float64, device=torch.device("cpu"))
    hidden = QuantizedBlock(
        torch.full((1, 2, 32), -math.inf, dtype=torch.float64), whole.codes, whole.scale
    )
    for before in (state, apply_block(state, whole)):
        after = apply_block(before, hidden)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


def test_causal_queries_longer_than_the_cache_see_nothing():  # FR-19: s_q = 4, length 2
    whole = draw(2, 1, (4, 1), 8, 3)
    result = attend(whole, [2], (4, 1))
    assert torch.equal(result.out[0, :2], torch.zeros(2, 1, 3, dtype=torch.float64))
    assert bool(result.lse[0, :2].isneginf().all())
    assert bool(result.lse[0, 2:].isfinite().all())


@given(
    seed=st.integers(0, 2**32),
    jumps=st.lists(st.integers(-40, 87), min_size=2, max_size=8),
    steps=st.lists(st.integers(-60, 60), min_size=8, max_size=8),
)
def test_scales_and_maxima_that_jump_from_tile_to_tile_stay_finite_and_right(seed, jumps, steps):
    """Each tile has its own binade of V's scale and its own level of scores, in any direction."""
    tokens = 16 * len(jumps)
    whole = draw(seed, 1, (1, 2), tokens, 4, spread=1.0)
    scale = torch.exp2(torch.tensor(jumps, dtype=torch.float64)).repeat_interleave(16)[None]
    level = torch.tensor(steps[: len(jumps)], dtype=torch.float64).repeat_interleave(16)
    whole = QuantizedBlock((whole.scores + level).float(), whole.codes.float(), scale.float())
    result = attend(whole, [tokens], (1, 2), dtype=torch.float32, block_tokens=16)
    out, _ = exact(whole, [tokens], (1, 2))
    assert bool(result.out.isfinite().all())
    relative = 2**-4 * weight_sum(whole, [tokens], (1, 2))
    ones = QuantizedBlock(whole.scores, torch.ones_like(whole.codes), whole.scale)
    flushed = 2**-10 * 16 * exact(ones, [tokens], (1, 2))[0]
    # A floored sigma flushes below 2^-60 of the largest contribution, 16 elements of 448 a tile.
    floored = 2**-60 * tokens * exact(ones, [tokens], (1, 2))[0] * 448
    arithmetic = rounding(tokens, U32, float(whole.scores.abs().max())) * weight_sum(
        whole, [tokens], (1, 2)
    )
    assert bool(((result.out - out).abs() <= relative + flushed + floored + arithmetic).all())


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 90), max_size=5).map(sorted),
    order=st.randoms(use_true_random=False),
)
def test_merging_splits_equals_one_pass(seed, cuts, order):
    rows_shape, lengths = (2, 2), [90, 0, 37]
    whole = draw(seed, 3, rows_shape, 90, 4)
    edges = [0, *cuts, 90]
    parts = [
        attend(
            whole,
            lengths,
            rows_shape,
            first_token=a,
            last_token=b,
            p_format="exact",
            block_tokens=16,
        )
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    order.shuffle(parts)
    merged = merge_partials(*(torch.stack(part) for part in zip(*parts, strict=True)))
    out, lse = exact(whole, lengths, rows_shape)
    largest = 1 + float(whole.scores.abs().max())
    bound = 2 * rounding(90, U64, largest)
    assert bool(((merged.out - out).abs() <= bound * weight_sum(whole, lengths, rows_shape)).all())
    visible = ~lse.isneginf()
    assert torch.equal(merged.lse.isneginf(), ~visible)
    assert bool(((merged.lse - lse)[visible].abs() <= bound * largest).all())


def test_merging_uses_natural_logarithms():  # FR-24: Z = 2 and 8, outputs 0 and 10
    merged = merge_partials(torch.tensor([[0.0], [10.0]]), torch.log(torch.tensor([2.0, 8.0])))
    assert float(merged.out) == pytest.approx(8.0, abs=8 * U32 * 10)


def test_an_empty_partial_is_never_read():  # FR-23
    outs = torch.tensor([[1.5], [math.nan]])
    lses = torch.tensor([0.25, -math.inf])
    for index in ([0, 1], [1, 0]):
        merged = merge_partials(outs[index], lses[index])
        assert float(merged.out) == 1.5
        assert float(merged.lse) == 0.25
    nothing = merge_partials(torch.full((2, 1), math.nan), torch.full((2,), -math.inf))
    assert float(nothing.out) == 0.0
    assert float(nothing.lse) == -math.inf


def test_nan_where_a_request_has_no_token_never_matters():  # FR-01
    whole = draw(4, 2, (1, 2), 64, 4)
    lengths = [40, 64]
    clean = attend(whole, lengths, (1, 2))
    dirty = QuantizedBlock(*(part.clone() for part in whole))
    for part in (dirty.scores[0], dirty.codes[0].T, dirty.scale[0][None]):
        part[..., 40:] = math.nan
    again = attend(dirty, lengths, (1, 2))
    assert torch.equal(clean.out, again.out)
    assert torch.equal(clean.lse, again.lse)
