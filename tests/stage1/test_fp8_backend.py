"""Stage 0's decoder on the FP8 cache: generation, the shipped model's loss, and both forms.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import AttentionBackend, cache_bytes_per_token
from stage0_reference.decoder import Decoder
from stage0_reference.evaluation import (
    LossReport,
    Window,
    choose_windows,
    heldout_loss,
    mean_over_windows,
)
from stage0_reference.generation import TextGenerator, pages_needed
from stage0_reference.latent_attention import absorb_query, naive_attention, project_values
from stage0_reference.pretrained import load_model
from stage0_reference.sampling import SamplingParams
from stage0_reference.training.corpus import load_heldout
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import QuantizedRows, ScaleFormat, quantize_q
from tests.bounds import (
    RowError,
    assert_within,
    expanded_attention_error,
    fetch_error,
    fp8_attention_error,
    latent_scores,
    perturbed_attention_error,
    quantization_error,
    unit_roundoff,
)
from tests.model_factory import TINY_SIZES, random_decoder, tiny_config
from tests.strategies import (
    Geometry,
    Pages,
    draw_values,
    geometries,
    lay_out_pages,
    regimes,
    seeds,
)

pytestmark = pytest.mark.stage1

FORMATS: tuple[ScaleFormat, ...] = ("amax", "pow2")
formats = st.sampled_from(FORMATS)
tokens = st.integers(0, TINY_SIZES["vocab_size"] - 1)


@functools.cache
def small_decoder() -> Decoder:
    """Two layers, both dense: how tokens are cached does not depend on what follows attention."""
    return random_decoder(tiny_config(num_hidden_layers=2, first_k_dense_replace=2))


def make_generator(scale_format: ScaleFormat, *, num_pages: int = 60, **keywords) -> TextGenerator:
    backend = Fp8CacheBackend(scale_format)
    return TextGenerator(small_decoder(), backend, num_pages=num_pages, **keywords)


# The seam


def test_the_backend_is_what_the_decoder_asks_for():
    backend = Fp8CacheBackend()
    assert isinstance(backend, AttentionBackend)
    assert backend.stage == 1


def test_every_layer_gets_three_planes_of_644_bytes_a_token_at_the_published_geometry():
    config = tiny_config(kv_lora_rank=512, qk_rope_head_dim=64)
    cache = Fp8CacheBackend().make_cache(config, 3, 16)
    assert len(cache) == config.num_hidden_layers
    assert [plane.shape for plane in cache[0]] == [(3, 16, 512), (3, 16), (3, 16, 64)]
    assert cache_bytes_per_token(cache) == 644 * config.num_hidden_layers
    assert len({plane.data_ptr() for layer in cache for plane in layer}) == 3 * len(cache)


@pytest.mark.unchecked
def test_an_unknown_scale_format_is_refused_at_construction():
    with pytest.raises(ValueError, match="scale_format must be one of amax, pow2; got 'e5m2'"):
        Fp8CacheBackend("e5m2")


# Generation


@settings(max_examples=8)
@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=40), min_size=1, max_size=3),
    scale_format=formats,
    page_size=st.sampled_from([1, 3, 16, 64]),
    chunk=st.sampled_from([7, 16, 64]),
    rows=st.sampled_from([1, 2, 4]),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_prompt_gives_the_same_tokens_alone_and_in_a_batch(
    prompts, scale_format, page_size, chunk, rows, temperature
):
    params = [
        SamplingParams(max_new_tokens=4 + 2 * i, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    longest = [len(p) + s.max_new_tokens for p, s in zip(prompts, params, strict=True)]
    shape = {
        "num_pages": pages_needed(longest, page_size),
        "page_size": page_size,
        "prefill_chunk": chunk,
        "decode_rows": rows,
    }
    together = make_generator(scale_format, **shape).generate(prompts, params)
    for prompt, own, in_batch in zip(prompts, params, together, strict=True):
        assert make_generator(scale_format, **shape).generate([prompt], own)[0] == in_batch


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_cached_prefix_changes_no_token(scale_format):
    stream = torch.Generator().manual_seed(2)
    prompt = torch.randint(TINY_SIZES["vocab_size"], (90,), generator=stream).tolist()
    shape = {"page_size": 8, "prefill_chunk": 16}
    generator = make_generator(scale_format, **shape)
    params = SamplingParams(max_new_tokens=12)
    first = generator.generate([prompt], params)[0]
    assert len(set(first.token_ids)) > 3  # the tokens depend on something
    second = generator.generate([prompt, prompt[:50]], params)
    # Whole chunks of the prompt less its last token: 80 of 90 and 48 of 50.
    assert generator.times.cached_tokens == 80 + 48
    assert second[0] == first
    assert second[1] == make_generator(scale_format, **shape).generate([prompt[:50]], params)[0]


def test_prefix_cache_under_churn_never_serves_another_text():
    """A pool of 4 pages; A uses 3, B needs all 4, then A comes again."""
    generator = make_generator("pow2", num_pages=4, page_size=8, prefill_chunk=8)
    params = SamplingParams(max_new_tokens=4)
    a, b = [1, 2, 3, 4] * 5, [7, 8, 9] * 9
    first, other = (generator.generate([prompt], params)[0] for prompt in (a, b))
    assert generator.generate([a], params)[0] == first
    assert generator.generate([b], params)[0] == other


# The shipped model

STRETCH = 32
"""Tokens whose mean loss counts as one draw: neighbours share their context and so their errors."""

LARGEST_NOISE = 0.01
"""Share of the loss up to which three standard errors of a difference may go. Without this limit a
cache could pass by being so broken that its noise hides it."""


class PairedDifference(NamedTuple):
    """Mean of per-token differences in loss, nats, and its standard error over stretches."""

    mean: float
    standard_error: float


def paired_difference(report: LossReport, base: LossReport) -> PairedDifference:
    """Subtract token by token: what is hard to predict is so for both, and cancels."""
    difference = report.token_losses - base.token_losses
    return PairedDifference(*mean_over_windows(difference, len(difference) // STRETCH))


def is_within_noise(difference: PairedDifference, base: LossReport) -> bool:
    noise = 3 * difference.standard_error
    return noise <= LARGEST_NOISE * base.loss and abs(difference.mean) <= noise


@functools.cache
def shipped_model() -> tuple[Decoder, list[Window]]:
    decoder, tokenizer = load_model()
    documents = [tokenizer.encode(data.decode()) for _, data in load_heldout()]
    return decoder, choose_windows(documents, 600, longest_context=600, max_windows=2)


@functools.cache
def stage0_loss() -> LossReport:
    decoder, windows = shipped_model()
    return heldout_loss(decoder, AbsorbedBackend(), windows)


class LostScale(Fp8CacheBackend):
    """An FP8 cache whose scale plane is 1 wherever anything reads it."""

    def append(self, c_kv, k_rope, cache, slot_mapping):
        super().append(c_kv, k_rope, cache, slot_mapping)
        cache.scale.fill_(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("scale_format", FORMATS)
def test_the_shipped_models_loss_is_stage_0s_within_noise(scale_format):
    """512 scored bytes: the difference is about 0.0012 nats of 0.54, its standard error 0.0007."""
    decoder, windows = shipped_model()
    report = heldout_loss(decoder, Fp8CacheBackend(scale_format), windows)
    difference = paired_difference(report, stage0_loss())
    assert not torch.equal(report.token_losses, stage0_loss().token_losses)
    assert is_within_noise(difference, stage0_loss()), difference


@pytest.mark.slow
def test_a_lost_scale_is_outside_that_noise():
    decoder, windows = shipped_model()
    one = stage0_loss()
    scored = windows[0].scored
    base = LossReport(
        float(one.token_losses[:scored].mean()), 0.0, scored, 1, one.token_losses[:scored]
    )
    difference = paired_difference(heldout_loss(decoder, LostScale(), windows[:1]), base)
    assert difference.mean > 3 * difference.standard_error, difference
    assert not is_within_noise(difference, base), difference


# Both forms


class CachedRequest(NamedTuple):
    """One request in a cache, its queries and weights, float64."""

    q_nope: Tensor
    q_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    softmax_scale: float
    rows: QuantizedRows
    where: Pages
    cache: LatentPages


def cache_request(
    geometry: Geometry, scale_format: ScaleFormat, s_q: int, length: int, regime: str, seed: int
) -> CachedRequest:
    generator = torch.Generator().manual_seed(seed)
    heads, rank, rope, nope, v_head_dim = geometry

    def make(regime: str, *shape: int) -> Tensor:
        return draw_values(shape, regime, generator, torch.float64)

    c_kv, k_rope = make(regime, length, rank).float(), make("normal", length, rope).float()
    q_nope, q_rope = make("normal", s_q, heads, nope), make("normal", s_q, heads, rope).float()
    w_uk = make("normal", heads, nope, rank) * nope**-0.5
    w_uv = make("normal", heads, v_head_dim, rank) * rank**-0.5
    where = lay_out_pages([length], 4, seed)
    backend = Fp8CacheBackend(scale_format)
    config = tiny_config(kv_lora_rank=rank, qk_rope_head_dim=rope, num_hidden_layers=1)
    (cache,) = backend.make_cache(config, where.num_pages, 4)
    backend.append(c_kv, k_rope, cache, where.slot_mapping)
    page, offset = where.slot_mapping // 4, where.slot_mapping % 4
    rows = QuantizedRows(
        cache.codes.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn),
        cache.scale[page, offset],
        cache.rope[page, offset],
    )
    largest = latent_scores(absorb_query(q_nope, w_uk), q_rope, c_kv, k_rope, 1.0).magnitude.max()
    return CachedRequest(
        q_nope,
        q_rope.double(),
        w_uk,
        w_uv,
        4.0 / max(float(largest), 1e-30),
        rows,
        where,
        cache,
    )


requests = {
    "geometry": geometries(max_heads=4),
    "scale_format": formats,
    "s_q": st.integers(1, 4),
    "length": st.integers(4, 30),
    "regime": regimes(),
    "seed": seeds(),
}


Pair = tuple[Tensor, Tensor]
"""Latents (or absorbed queries) and their rotary parts."""


def each(function: Callable[[Tensor], Tensor], pair: Pair) -> Pair:
    return function(pair[0]), function(pair[1])


def meaning(rows: QuantizedRows) -> Pair:
    """Latents and rotary parts that quantised rows stand for: products that float64 holds."""
    scale = rows.scale.double()[..., None]
    return rows.codes.double() * scale, rows.rope.double() * scale


def fetch_errors(rows: Pair, scale_format: ScaleFormat) -> RowError:
    exact_scaling = scale_format == "pow2"
    return RowError(*each(lambda part: fetch_error(part, exact_scaling=exact_scaling), rows))


def projected(latent_error: Tensor, w_uv: Tensor) -> Tensor:
    """Bound behind W_UV: the latents' errors can at most all add up."""
    return torch.einsum("qhc,hdc->qhd", latent_error, w_uv.abs())


@settings(max_examples=25)
@given(**requests)
def test_a_prefix_read_back_gives_the_attention_of_the_codes_but_for_bf16(
    geometry, scale_format, s_q, length, regime, seed
):
    """FR-16, in float64: naive over `read_prefix` against naive over what the codes stand for.

    Under power-of-two scales BF16 holds the products, and no bit may differ.
    """
    request = cache_request(geometry, scale_format, s_q, length, regime, seed)
    read = Fp8CacheBackend(scale_format).read_prefix(
        request.cache, request.where.block_table, request.where.cache_seqlens
    )
    rows = meaning(request.rows)
    scale = request.softmax_scale
    queries, weights = (request.q_nope, request.q_rope), (request.w_uk, request.w_uv)
    fetched = naive_attention(*queries, *each(Tensor.double, read), *weights, scale)
    direct = naive_attention(*queries, *rows, *weights, scale)
    if scale_format == "pow2":
        assert torch.equal(fetched.out, direct.out)
        assert torch.equal(fetched.lse, direct.lse)
        return
    absorbed = (absorb_query(request.q_nope, request.w_uk), request.q_rope)
    nothing = RowError(*each(torch.zeros_like, absorbed))
    moved = perturbed_attention_error(
        absorbed, rows, nothing, fetch_errors(rows, scale_format), scale
    )
    # float64 arithmetic twice, once on rows that are at most twice as large
    twice = each(lambda part: 2 * part, rows)
    wide = expanded_attention_error(*queries, *twice, *weights, scale, dtype=torch.float64)
    out = projected(moved.out, request.w_uv) + 2 * wide.out
    assert_within(fetched.out, direct.out, out, about=geometry)
    assert_within(fetched.lse, direct.lse, moved.lse + 2 * wide.lse, about=geometry)


@settings(max_examples=25)
@given(**requests)
def test_absorbed_over_codes_and_naive_over_the_prefix_agree(
    geometry, scale_format, s_q, length, regime, seed
):
    """FR-16: they differ by the query's quantisation, the prefix's BF16, and float32."""
    request = cache_request(geometry, scale_format, s_q, length, regime, seed)
    backend = Fp8CacheBackend(scale_format)
    cache, where = request.cache, (request.where.block_table, request.where.cache_seqlens)
    scale, exact_scaling = request.softmax_scale, scale_format == "pow2"
    q_latent = absorb_query(request.q_nope, request.w_uk)
    given = each(Tensor.float, (q_latent, request.q_rope))
    batch = each(lambda part: part[None], given)
    attended = backend.attend(*batch, cache, *where, scale)
    absorbed = project_values(attended.out[0].double(), request.w_uv)
    read = backend.read_prefix(cache, *where)
    queries, weights = (request.q_nope, request.q_rope), (request.w_uk, request.w_uv)
    naive = naive_attention(*queries, *each(Tensor.double, read), *weights, scale)

    rows = meaning(request.rows)
    query = QuantizedRows(*(part[0] for part in quantize_q(*batch, scale_format)))
    query_error = quantization_error(*given, query.scale, exact_scaling=exact_scaling)
    to_float32 = unit_roundoff(torch.float32) * q_latent.abs()
    query_error = RowError(query_error.c_kv + to_float32, query_error.k_rope)
    # Each form against exact attention of the exact query over what the codes stand for.
    exact_query = (q_latent, request.q_rope)
    no_query_error, no_row_error = (
        RowError(*each(torch.zeros_like, pair)) for pair in (exact_query, rows)
    )
    by_query = perturbed_attention_error(exact_query, rows, query_error, no_row_error, scale)
    by_prefix = perturbed_attention_error(
        exact_query, rows, no_query_error, fetch_errors(rows, scale_format), scale
    )
    own = fp8_attention_error(*meaning(query), *rows, scale)
    twice = each(lambda part: 2 * part, rows)
    wide = expanded_attention_error(*queries, *twice, *weights, scale, dtype=torch.float64)
    latent_out = by_query.out + by_prefix.out + own.out
    assert_within(
        absorbed, naive.out, projected(latent_out, request.w_uv) + 2 * wide.out, about=geometry
    )
    lse = by_query.lse + by_prefix.lse + own.lse + 2 * wide.lse
    assert_within(attended.lse[0], naive.lse, lse, about=geometry)
