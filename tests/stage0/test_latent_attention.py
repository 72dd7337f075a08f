"""Naive and absorbed attention: against a loop in exact arithmetic, and against each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.latent_attention import (
    AttentionOutput,
    absorb_query,
    absorbed_attention,
    accumulation_dtype,
    causal_mask,
    latent_attention,
    masked_softmax,
    naive_attention,
    project_values,
)
from tests.bounds import (
    assert_within,
    attention_error,
    dot_error,
    expanded_attention_error,
    latent_attention_error,
    rounding_error,
    visible_keys,
)
from tests.strategies import (
    Geometry,
    draw_values,
    geometries,
    layouts,
    regimes,
    seeds,
    with_layout,
)

pytestmark = pytest.mark.stage0

FORMS = {"naive": naive_attention, "absorbed": absorbed_attention}


class Layer(NamedTuple):
    """Arguments of `naive_attention` before the scale."""

    q_nope: Tensor
    q_rope: Tensor
    c_kv: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor

    def to(self, dtype: torch.dtype) -> Layer:
        return Layer(*(tensor.to(dtype) for tensor in self))


def draw_layer(
    geometry: Geometry, s_q: int, length: int, regime: str, seed: int, dtype: torch.dtype
) -> Layer:
    """Make a layer whose weights keep the magnitude of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    heads, rank, rope, nope, v_head_dim = geometry

    def make(regime: str, *shape: int, factor: float = 1.0) -> Tensor:
        return (draw_values(shape, regime, generator, torch.float64) * factor).to(dtype)

    return Layer(
        q_nope=make("normal", s_q, heads, nope),
        q_rope=make("normal", s_q, heads, rope),
        c_kv=make(regime, length, rank),
        k_rope=make("normal", length, rope),
        w_uk=make("normal", heads, nope, rank, factor=nope**-0.5),
        w_uv=make("normal", heads, v_head_dim, rank, factor=rank**-0.5),
    )


layers = st.builds(
    draw_layer,
    geometry=geometries(),
    s_q=st.integers(1, 8),
    length=st.one_of(st.integers(0, 40), st.integers(0, 4)),
    regime=regimes(),
    seed=seeds(),
    dtype=st.just(torch.float64),
)
scales = st.floats(0.01, 2.0)


def scale_for(layer: Layer, spread: float) -> float:
    """Divide out the layer's size: scores are then of the order of `spread`."""
    return spread / math.sqrt(layer.q_nope.shape[-1] + layer.q_rope.shape[-1]) / largest(layer.c_kv)


def largest(tensor: Tensor) -> float:
    return max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0


def attend_by_loop(layer: Layer, scale: float, causal: bool) -> AttentionOutput:
    """Attention as its formula reads, in Python numbers, each sum exact up to one rounding."""
    q_nope, q_rope, c_kv, k_rope, w_uk, w_uv = (tensor.tolist() for tensor in layer)
    outs, lses = [], []
    for i in range(len(q_nope)):
        sees = min(len(c_kv), len(c_kv) - len(q_nope) + i + 1) if causal else len(c_kv)
        for h in range(len(w_uk)):
            scores = []
            for t in range(sees):
                expanded = [math.fsum(map(float.__mul__, row, c_kv[t])) for row in w_uk[h]]
                terms = [*map(float.__mul__, q_nope[i][h], expanded)]
                terms += [*map(float.__mul__, q_rope[i][h], k_rope[t])]
                scores.append(math.fsum(terms) * scale)
            largest_score = max(scores, default=0.0)
            weights = [math.exp(score - largest_score) for score in scores]
            total = math.fsum(weights)
            lses.append(largest_score + math.log(total) if scores else -math.inf)
            for row in w_uv[h]:
                values = [math.fsum(map(float.__mul__, row, latent)) for latent in c_kv]
                weighted = math.fsum(map(float.__mul__, weights, values)) if scores else 0.0
                outs.append(weighted / total if scores else 0.0)
    shape = (len(q_nope), len(w_uk))
    return AttentionOutput(
        torch.tensor(outs, dtype=torch.float64).view(*shape, -1),
        torch.tensor(lses, dtype=torch.float64).view(shape),
    )


def assert_same_attention(
    actual: AttentionOutput, expected: AttentionOutput, out_bound: Tensor, lse_bound: Tensor
) -> None:
    assert_within(actual.out, expected.out, out_bound, about="out")
    assert_within(actual.lse, expected.lse, lse_bound, about="lse")


@pytest.mark.parametrize("form", FORMS)
@given(
    geometry=st.builds(
        Geometry,
        heads=st.integers(1, 3),
        kv_lora_rank=st.integers(1, 5),
        qk_rope_head_dim=st.sampled_from((0, 2, 4)),
        qk_nope_head_dim=st.integers(1, 4),
        v_head_dim=st.integers(1, 4),
    ),
    s_q=st.integers(1, 4),
    length=st.integers(0, 6),
    regime=regimes(),
    seed=seeds(),
    spread=st.sampled_from((0.1, 3.0, 100.0)),
    causal=st.booleans(),
)
def test_equals_the_formula_in_a_python_loop(
    form, geometry, s_q, length, regime, seed, spread, causal
):
    layer = draw_layer(geometry, s_q, length, regime, seed, torch.float64)
    scale = scale_for(layer, spread)
    actual = FORMS[form](*layer, scale, causal=causal)
    error = expanded_attention_error(*layer, scale, dtype=torch.float64, causal=causal)
    assert_same_attention(
        actual, attend_by_loop(layer, scale, causal), 2 * error.out, 2 * error.lse
    )


@given(layer=layers, spread=scales, causal=st.booleans())
def test_naive_and_absorbed_are_equal_in_float64(layer, spread, causal):
    scale = scale_for(layer, spread)
    naive = naive_attention(*layer, scale, causal=causal)
    absorbed = absorbed_attention(*layer, scale, causal=causal)
    error = expanded_attention_error(*layer, scale, dtype=torch.float64, causal=causal)
    assert_same_attention(absorbed, naive, 2 * error.out, 2 * error.lse)


@pytest.mark.parametrize("form", FORMS)
@given(layer=layers, spread=st.sampled_from((0.5, 10.0, 200.0)))
def test_float32_is_within_its_rounding_of_float64(form, layer, spread):
    layer = layer.to(torch.float32)
    scale = scale_for(layer, spread)
    actual = FORMS[form](*layer, scale)
    assert actual.out.dtype == actual.lse.dtype == torch.float32
    narrow = expanded_attention_error(*layer, scale, dtype=torch.float32)
    wide = expanded_attention_error(*layer, scale, dtype=torch.float64)
    exact = naive_attention(*layer.to(torch.float64), scale)
    assert_same_attention(actual, exact, narrow.out + wide.out, narrow.lse + wide.lse)


@given(layer=layers, spread=st.sampled_from((0.5, 10.0)))
def test_bf16_inputs_are_computed_in_float32_and_rounded_once(layer, spread):
    layer = layer.to(torch.bfloat16)
    scale = scale_for(layer, spread)

    def check(actual: AttentionOutput, exact: AttentionOutput, narrow, wide) -> None:
        assert (actual.out.dtype, actual.lse.dtype) == (torch.bfloat16, torch.float32)
        computed = narrow.out + wide.out
        once = rounding_error(exact.out.abs() + computed, torch.bfloat16)
        assert_same_attention(actual, exact, computed + once, narrow.lse + wide.lse)

    check(
        naive_attention(*layer, scale),
        naive_attention(*layer.to(torch.float64), scale),
        expanded_attention_error(*layer, scale, dtype=torch.float32),
        expanded_attention_error(*layer, scale, dtype=torch.float64),
    )
    operands = (absorb_query(layer.q_nope, layer.w_uk), layer.q_rope, layer.c_kv, layer.k_rope)
    check(
        latent_attention(*operands, scale),
        latent_attention(*(tensor.double() for tensor in operands), scale),
        latent_attention_error(*operands, scale, dtype=torch.float32),
        latent_attention_error(*operands, scale, dtype=torch.float64),
    )


@given(layer=layers, spread=scales)
def test_lse_is_the_natural_logsumexp_of_the_visible_scores(layer, spread):
    scale = scale_for(layer, spread)
    lse = naive_attention(*layer, scale).lse
    expanded = torch.einsum("hdc,tc->htd", layer.w_uk, layer.c_kv)
    bound = expanded_attention_error(*layer, scale, dtype=torch.float64).lse
    for i in range(len(layer.q_nope)):
        sees = max(0, len(layer.c_kv) - len(layer.q_nope) + i + 1)
        for h in range(len(layer.w_uk)):
            scores = expanded[h, :sees] @ layer.q_nope[i, h]
            scores = (scores + layer.k_rope[:sees] @ layer.q_rope[i, h]) * scale
            assert_within(lse[i, h], torch.logsumexp(scores, 0), 2 * bound[i, h])


def test_lse_is_in_base_e():
    zeros = torch.zeros(1, 1, 3), torch.zeros(1, 1, 0), torch.zeros(7, 3), torch.zeros(7, 0)
    lse = latent_attention(*zeros, 1.0).lse
    assert float(lse) == pytest.approx(math.log(7), rel=torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("form", FORMS)
@given(layer=layers, spread=scales)
def test_each_query_equals_its_own_single_token_call(form, layer, spread):
    scale = scale_for(layer, spread)
    s_q, length = len(layer.q_nope), len(layer.c_kv)
    together = FORMS[form](*layer, scale)
    error = expanded_attention_error(*layer, scale, dtype=torch.float64)
    for i in range(s_q):
        sees = max(0, length - s_q + i + 1)
        own = Layer(
            layer.q_nope[i : i + 1],
            layer.q_rope[i : i + 1],
            layer.c_kv[:sees],
            layer.k_rope[:sees],
            layer.w_uk,
            layer.w_uv,
        )
        alone = FORMS[form](*own, scale)
        assert_same_attention(
            AttentionOutput(*(part[i : i + 1] for part in together)),
            alone,
            2 * error.out[i : i + 1],
            2 * error.lse[i : i + 1],
        )


@pytest.mark.parametrize("form", FORMS)
@given(geometry=geometries(), length=st.integers(0, 6), extra=st.integers(1, 8), seed=seeds())
def test_queries_before_the_first_key_give_zero_and_minus_infinity(
    form, geometry, length, extra, seed
):
    layer = draw_layer(geometry, length + extra, length, "normal", seed, torch.float32)
    result = FORMS[form](*layer, 0.1)
    assert bool((result.out[:extra] == 0).all())
    assert bool(result.lse[:extra].isneginf().all())
    assert bool(result.out[extra:].isfinite().all())
    assert bool(result.lse[extra:].isfinite().all())


@pytest.mark.parametrize("form", FORMS)
@given(layer=layers, spread=scales)
def test_without_the_causal_mask_every_query_sees_all_keys(form, layer, spread):
    scale = scale_for(layer, spread)
    everything = FORMS[form](*layer, scale, causal=False)
    error = expanded_attention_error(*layer, scale, dtype=torch.float64, causal=False)
    for i in range(len(layer.q_nope)):
        only = slice(i, i + 1)
        alone = FORMS[form](layer.q_nope[only], layer.q_rope[only], *layer[2:], scale)
        assert_same_attention(
            AttentionOutput(*(part[only] for part in everything)),
            alone,
            2 * error.out[only],
            2 * error.lse[only],
        )


@given(layer=layers, spread=scales)
def test_every_head_equals_attention_with_that_head_alone(layer, spread):
    scale = scale_for(layer, spread)
    together = absorbed_attention(*layer, scale)
    error = expanded_attention_error(*layer, scale, dtype=torch.float64)
    for h in range(len(layer.w_uk)):
        only = slice(h, h + 1)
        alone = absorbed_attention(
            layer.q_nope[:, only],
            layer.q_rope[:, only],
            layer.c_kv,
            layer.k_rope,
            layer.w_uk[only],
            layer.w_uv[only],
            scale,
        )
        assert_same_attention(
            AttentionOutput(*(part[:, only] for part in together)),
            alone,
            2 * error.out[:, only],
            2 * error.lse[:, only],
        )


@pytest.mark.parametrize("form", FORMS)
@given(layer=layers, layout=layouts(), spread=scales)
def test_memory_layout_changes_rounding_only(form, layer, layout, spread):
    scale = scale_for(layer, spread)
    views = Layer(*(with_layout(tensor, layout) for tensor in layer))
    error = expanded_attention_error(*layer, scale, dtype=torch.float64)
    assert_same_attention(
        FORMS[form](*views, scale), FORMS[form](*layer, scale), 2 * error.out, 2 * error.lse
    )


@given(layer=layers, spread=st.sampled_from((0.5, 10.0, 1e4)))
def test_latent_output_lies_between_the_smallest_and_largest_visible_latent(layer, spread):
    scale = scale_for(layer, spread)
    operands = (absorb_query(layer.q_nope, layer.w_uk), layer.q_rope, layer.c_kv, layer.k_rope)
    out = latent_attention(*operands, scale).out
    error = latent_attention_error(*operands, scale, dtype=torch.float64).out
    for i, seen in enumerate(visible_keys(len(layer.q_nope), len(layer.c_kv), causal=True)):
        if bool(seen.any()):
            latents = layer.c_kv[seen]
            assert bool((out[i] <= latents.amax(0) + error[i]).all())
            assert bool((out[i] >= latents.amin(0) - error[i]).all())


@given(layer=layers, leading=st.sampled_from(((), (3,), (2, 1))))
def test_moving_w_uk_to_the_query_keeps_every_score(layer, leading):
    q_nope = layer.q_nope[:1].expand(*leading, 1, *layer.q_nope.shape[1:])
    q_latent = absorb_query(q_nope, layer.w_uk)
    assert q_latent.shape == (*q_nope.shape[:-1], layer.c_kv.shape[-1])
    absorbed = torch.einsum("...hc,tc->...ht", q_latent, layer.c_kv)
    expanded = torch.einsum("...hd,htd->...ht", q_nope, layer.c_kv @ layer.w_uk.mT)
    magnitude = torch.einsum(
        "...hd,hdc,tc->...ht", q_nope.abs(), layer.w_uk.abs(), layer.c_kv.abs()
    )
    terms = q_nope.shape[-1] + layer.c_kv.shape[-1]
    assert_within(absorbed, expanded, 2 * dot_error(magnitude, terms, torch.float64))

    out_latent = q_latent.flip(-1)
    out = project_values(out_latent, layer.w_uv)
    for h in range(len(layer.w_uv)):
        magnitude = out_latent[..., h, :].abs() @ layer.w_uv[h].abs().T
        bound = 2 * dot_error(magnitude, out_latent.shape[-1], torch.float64)
        assert_within(out[..., h, :], out_latent[..., h, :] @ layer.w_uv[h].T, bound)


@given(s_q=st.integers(1, 9), length=st.integers(0, 12), causal=st.booleans())
def test_the_mask_is_aligned_to_the_end_of_the_keys(s_q, length, causal):
    assert torch.equal(
        causal_mask(s_q, length, causal=causal), visible_keys(s_q, length, causal=causal)
    )


@given(
    scores=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    hide=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_softmax_ignores_what_is_hidden_and_sums_to_one(scores, hide):
    row = torch.tensor(scores, dtype=torch.float64)
    visible = ~torch.tensor(hide[: len(scores)])
    weights, lse = masked_softmax(row, visible)
    assert bool((weights[~visible] == 0).all())
    if not bool(visible.any()):
        assert bool(lse.isneginf())
        return
    one = torch.ones(len(scores), 1, dtype=torch.float64)
    error = attention_error(
        row.masked_fill(~visible, float("-inf")),
        torch.zeros_like(row),
        one,
        score_roundings=0,
        value_roundings=0,
        dtype=torch.float64,
    )
    assert_within(weights.sum(), torch.tensor(1.0), error.out.squeeze())
    assert_within(lse, torch.logsumexp(row[visible], 0), 2 * error.lse)


def test_only_float64_is_computed_in_float64():
    assert accumulation_dtype(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert accumulation_dtype(dtype) == torch.float32
