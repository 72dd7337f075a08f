"""The decode kernels against float64 attention over the dequantised cache, and what changes no bit.

FR-nn names an entry of the public reports of faults in comparable systems. Budgets are
`tests.bounds.kernel_attention_error`'s. Without a GPU the kernel's code is interpreted; on a GPU
every test runs natively, by whichever kernel the library chooses and by the portable one.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage0_reference.latent_attention import latent_attention
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.fp8_latent_cache import append_kv as append_kv_twin
from stage1_quant.quantize import QuantizedRows, quantize_q, quantize_rows
from stage2_pv_pipeline.tensor_core_accumulator import accumulation_error_bound
from stage3_dataflow import DecodeWorkspace, SplitRule, decode_quantized, mla_decode, use_path
from stage3_dataflow.split_plan import largest_split_count
from tests.bounds import (
    assert_within,
    gamma,
    kernel_attention_error,
)
from tests.stage3.cached_requests import (
    FORMATS,
    Batch,
    assert_decodes,
    assert_same_bits,
    batch_of,
    budgets,
    meaning,
    meets_nan,
    poison,
)
from tests.strategies import (
    ABSURD_PAGES,
    KERNEL_HEADS,
    KERNEL_PAGE_SIZES,
    DecodeCase,
    kernel_cases,
    lay_out_pages,
    layouts,
    with_layout,
)

pytestmark = pytest.mark.stage3

P_FORMATS = ("bf16", "e4m3")
KERNELS = (None, "portable") if torch.cuda.is_available() else ("portable",)
"""Without a GPU there is only the portable kernel; with one, also what the library chooses."""

scale_formats = st.sampled_from(FORMATS)
p_formats = st.sampled_from(P_FORMATS)
kernels = st.sampled_from(KERNELS)
split_rules = st.builds(SplitRule, st.integers(1, 200), st.integers(1, 9))
UNSPLIT = SplitRule(min_tokens=1, max_splits=1)
EVERY_64 = SplitRule(min_tokens=64, max_splits=8)

DEFAULT_CASE = DecodeCase(
    heads=2,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    page_size=16,
    token_counts=(130, 0, 65),
    s_q=2,
    regime="normal",
    spread=5.0,
    dtype=torch.bfloat16,
    seed=0,
)


def cases(**changes):
    return dataclasses.replace(DEFAULT_CASE, **changes)


def splits_of(case, rule):
    columns = max(-(-count // case.page_size) for count in case.token_counts) + 1
    return largest_split_count(columns * case.page_size, rule)


# Right, within what roundings cost


@given(
    case=kernel_cases(largest_batch=3, longest=200),
    scale_format=st.sampled_from((*FORMATS, None)),
    p_format=p_formats,
    rule=split_rules,
    causal=st.booleans(),
    kernel=kernels,
)
@example(DEFAULT_CASE, "amax", "e4m3", EVERY_64, True, None)
@example(cases(token_counts=(2,), s_q=4), "pow2", "e4m3", UNSPLIT, True, None)  # FR-19
@settings(max_examples=20)
def test_attention_is_float64s_over_the_dequantised_cache(
    device, case, scale_format, p_format, rule, causal, kernel
):
    """`scale_format` None is a BF16 cache, whose P is always BF16."""
    result = mla_decode(
        *batch_of(case, device, scale_format),
        causal=causal,
        scale_format=scale_format or "pow2",
        p_format=p_format,
        split_rule=rule,
        kernel=kernel,
    )
    assert_decodes(
        case,
        result,
        scale_format,
        p_format=p_format if scale_format else "bf16",
        causal=causal,
        splits=splits_of(case, rule),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("widths", [(512, 64), (256, 32), (256, 64), (512, 0)], ids=str)
def test_published_widths(device, widths, p_format, kernel):  # FR-06
    """Rope 0 means no rotary term. One row a head, in tiles of 16 and of 64 rows."""
    case = cases(kv_lora_rank=widths[0], qk_rope_head_dim=widths[1], token_counts=(70,), heads=9)
    rule = SplitRule(64, 2)
    result = mla_decode(*batch_of(case, device), p_format=p_format, split_rule=rule, kernel=kernel)
    assert_decodes(case, result, "pow2", p_format=p_format, splits=2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", KERNEL_HEADS)
def test_head_counts(device, heads, kernel):  # FR-07
    case = cases(heads=heads, token_counts=(70,), s_q=1)
    for p_format in P_FORMATS:
        result = mla_decode(*batch_of(case, device), p_format=p_format, kernel=kernel)
        assert_decodes(case, result, "pow2", p_format=p_format)


@pytest.mark.parametrize("kernel", KERNELS)
def test_page_sizes(device, kernel):
    """FR-08: 130 tokens in pages of any size. A tile is not a page, so not a bit changes."""
    results = []
    for page_size in KERNEL_PAGE_SIZES:
        case = cases(page_size=page_size, token_counts=(130,))
        result = mla_decode(
            *batch_of(case, device), p_format="e4m3", split_rule=UNSPLIT, kernel=kernel
        )
        assert_decodes(case, result, "pow2", p_format="e4m3")
        results.append(result)
    if device.type == "cpu":  # a GPU's compiler may contract the sums of two tiles differently
        for result in results[1:]:
            assert_same_bits(result, results[0])


@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("query_scale", [0.01, 7.0])
def test_token_scales_over_six_decades(device, query_scale, scale_format, kernel, p_format):
    """FR-15: token scales from 1e-3 to 1e3 in one page; none may be lost or applied twice."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, rope = 64, 64, 16
    scales = torch.logspace(-3, 3, tokens)[torch.randperm(tokens, generator=generator)]
    c_kv = torch.randn(tokens, width, generator=generator)
    c_kv = c_kv / c_kv.abs().amax(-1, keepdim=True) * 448 * scales[:, None]
    k_rope = torch.randn(tokens, rope, generator=generator)
    q_latent = torch.randn(1, 1, 3, width, generator=generator)
    q_latent = q_latent / q_latent.abs().amax(-1, keepdim=True) * 448 * query_scale
    q_rope = torch.randn(1, 1, 3, rope, generator=generator)
    rows = quantize_rows(c_kv, k_rope, scale_format)
    query = (part[0] for part in meaning(quantize_q(q_latent, q_rope, scale_format)))
    operands = (*query, *meaning(rows))
    largest = torch.einsum("qhc,tc->qht", operands[0].abs(), operands[2].abs()).max()
    softmax_scale = 5.0 / float(largest)

    cache = allocate_latent_pages(1, tokens, width, rope)
    append_kv_twin(c_kv, k_rope, cache, torch.arange(tokens), scale_format=scale_format)
    result = mla_decode(
        q_latent.to(device),
        q_rope.to(device),
        LatentPages(*(plane.to(device) for plane in cache)),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.tensor([tokens], dtype=torch.int32, device=device),
        softmax_scale,
        scale_format=scale_format,
        p_format=p_format,
        kernel=kernel,
    )
    exact = latent_attention(*operands, softmax_scale)
    error = kernel_attention_error(
        *operands,
        rows.scale,
        softmax_scale,
        p_format=p_format,
        fp8_tensor_core=device.type == "cuda",
    )
    assert_within(result.out[0].cpu(), exact.out, error.out)
    assert_within(result.lse[0].cpu(), exact.lse, error.lse)
    if device.type == "cpu":  # tight enough to tell a scale that is lost or applied twice
        assert float(error.out.max()) < 0.5 * float(exact.out.abs().max())


@given(case=kernel_cases(), p_format=p_formats)
@settings(max_examples=8)
def test_the_twin_says_the_same(device, case, p_format):
    """Kernel and pipeline of stage 2, by one call: both within the budget, so within two."""
    batch = batch_of(case, device)
    query = quantize_q(batch.q_latent, batch.q_rope, "pow2")
    choices = {"out_dtype": torch.float32, "p_format": p_format}
    result = decode_quantized(query, *batch[2:], **choices)
    with use_path("pytorch"):
        twin = decode_quantized(query, *batch[2:], **choices)
    wanted = budgets(case, "pow2", on_gpu=device.type == "cuda", **choices)
    for index, (_, error) in enumerate(wanted):
        assert_within(result.out[index].cpu(), twin.out[index].cpu(), 2 * error.out, about=case)
        assert_within(result.lse[index].cpu(), twin.lse[index].cpu(), 2 * error.lse, about=case)


# Identities


def score_query(scores, rope):
    """Rotary keys [tokens, rope] and a query that give these scores, latents left out."""
    keys = torch.zeros(len(scores), rope)
    keys[:, 0] = scores
    query = torch.zeros(1, 1, 1, rope)
    query[..., 0] = 1.0
    return keys, query


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("row", ["peaked", "flat", "mixed", "one hot among -7"])
def test_v_of_ones_gives_one(device, row, p_format, kernel):
    """FR-17: no weight may vanish that the denominator keeps."""
    tokens, width, rope = 4096, 32, 16
    scores = {
        "peaked": torch.linspace(0, 60, tokens),
        "flat": torch.zeros(tokens),
        "mixed": 4 * torch.randn(tokens, generator=torch.Generator().manual_seed(0)),
        "one hot among -7": torch.full((tokens,), -7.0),
    }[row].clone()
    if row == "one hot among -7":
        scores[0] = 0.0
    keys, query = score_query(scores, rope)
    cache = allocate_latent_pages(64, 64, width, rope)
    append_kv_twin(torch.ones(tokens, width), keys, cache, torch.arange(tokens))
    result = mla_decode(
        torch.zeros(1, 1, 1, width, device=device),
        query.to(device),
        LatentPages(*(plane.to(device) for plane in cache)),
        torch.arange(64, dtype=torch.int32, device=device)[None],
        torch.tensor([tokens], dtype=torch.int32, device=device),
        1.0,
        p_format=p_format,
        kernel=kernel,
    )
    assert bool(((result.out.cpu() - 1.0).abs() < 0.01).all()), result.out.aminmax()
    if row == "flat":
        error = gamma(2 * 64 + 4, torch.float32) * math.log(tokens)
        assert abs(float(result.lse) - math.log(tokens)) <= error


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "widths"), [(16, (32, 16)), (64, (32, 16)), (64, (512, 64))])
def test_one_hot_p_returns_a_row_of_v(device, heads, widths, page_size, p_format, kernel):
    """FR-21: no element of V may be misplaced by the transposition of its tiles.

    Token t's rotary key spells t in signs, and head h asks for token 3 h. Every other token has a
    score lower by 2 x 200 at least: its weight, 2^-577, is 0 in float32. Scales are powers of two,
    so what is left is ``448 code (scale / 448)``, which is off by 2 u of float32 and rounds to
    code times scale in BF16, which has 4 bits more than a code.
    """
    width, rope = widths
    tokens = 200
    generator = torch.Generator().manual_seed(1)
    signs = (torch.arange(tokens)[:, None] >> torch.arange(8) & 1).float() * 2 - 1
    k_rope = signs.repeat(1, rope // 8)
    size = torch.exp2(torch.randint(-5, 6, (tokens, 1), generator=generator).float())
    c_kv = torch.randn(tokens, width, generator=generator) * size
    cache = allocate_latent_pages(-(-tokens // page_size), page_size, width, rope)
    poison(cache)
    append_kv_twin(c_kv, k_rope, cache, torch.arange(tokens), scale_format="pow2")
    wanted = 3 * torch.arange(heads) % tokens
    result = mla_decode(
        torch.zeros(1, 1, heads, width, dtype=torch.bfloat16, device=device),
        k_rope[wanted].bfloat16().view(1, 1, heads, rope).to(device),
        LatentPages(*(plane.to(device) for plane in cache)),
        torch.arange(cache.scale.shape[0], dtype=torch.int32, device=device)[None],
        torch.tensor([tokens], dtype=torch.int32, device=device),
        200.0,
        p_format=p_format,
        kernel=kernel,
    )
    rows = quantize_rows(c_kv, k_rope, "pow2")
    expected = (rows.codes.float() * rows.scale[:, None])[wanted].bfloat16()
    assert torch.equal(result.out[0, 0].cpu(), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
def test_a_query_token_equals_its_own_call(device, s_q, p_format, kernel):
    """FR-30: the mask hangs on the end of the cache. Length 65, and one shorter than s_q."""
    case = cases(token_counts=(65, 3), heads=2, s_q=s_q)
    batch = batch_of(case, device)
    choices = {"p_format": p_format, "split_rule": UNSPLIT, "kernel": kernel}
    together = mla_decode(*batch, **choices)
    for query in range(s_q):
        own = batch._replace(
            q_latent=batch.q_latent[:, query : query + 1],
            q_rope=batch.q_rope[:, query : query + 1],
            cache_seqlens=(batch.cache_seqlens - s_q + query + 1).clamp(min=0),
        )
        alone = mla_decode(*own, **choices)
        assert_same_bits(alone, (part[:, query : query + 1] for part in together))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p_format", P_FORMATS)
def test_a_request_has_the_same_bits_alone_and_among_33(device, p_format, kernel):  # FR-29
    counts = (150, 0, 64, *(7 * i % 90 for i in range(30)))
    # Splits are merged by programs of other sizes where there are many rows: 33 x 40, but not 40.
    heads, latent, rope = (40, 512, 64) if device.type == "cuda" else (2, 32, 16)
    case = cases(
        token_counts=counts, s_q=1, heads=heads, kv_lora_rank=latent, qk_rope_head_dim=rope
    )
    batch = batch_of(case, device)
    choices = {"p_format": p_format, "split_rule": EVERY_64, "kernel": kernel}
    together = mla_decode(*batch, **choices)
    for request in (0, 1, 2, 32):
        own = slice(request, request + 1)
        alone = mla_decode(
            batch.q_latent[own],
            batch.q_rope[own],
            batch.cache,
            batch.block_table[own],
            batch.cache_seqlens[own],
            batch.softmax_scale,
            **choices,
        )
        assert_same_bits(alone, (part[own] for part in together))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wider_table_changes_no_bit(device, kernel):
    """It has room for more splits than the requests have; they are added up as before."""
    widths = (512, 64) if device.type == "cuda" else (32, 16)
    case = cases(kv_lora_rank=widths[0], qk_rope_head_dim=widths[1], token_counts=(300, 70))
    batch, rule = batch_of(case, device), SplitRule(64, 100)
    narrow = mla_decode(*batch, split_rule=rule, kernel=kernel)
    for columns in (100, 500):  # of 16 tokens: up to 25 splits, and 100
        table = torch.nn.functional.pad(batch.block_table, (0, columns), value=-1)
        wide = mla_decode(*batch._replace(block_table=table), split_rule=rule, kernel=kernel)
        assert_same_bits(wide, narrow)


@given(case=kernel_cases(), seed=st.integers(1, 1000), rule=split_rules)
@settings(max_examples=5)
def test_permuting_pages_changes_no_bit(device, case, seed, rule):
    results = [
        mla_decode(
            *batch_of(case, device, pages=lay_out_pages(case.token_counts, case.page_size, order)),
            split_rule=rule,
        )
        for order in (case.seed, case.seed + seed)
    ]
    assert_same_bits(*results)


# What must not matter


def with_page_0_unused(case):
    """Lay a case out so that page 0, where a masked page id points, holds no token."""
    return next(
        laid_out
        for laid_out in (dataclasses.replace(case, seed=seed) for seed in range(1000))
        if int(laid_out.pages().slot_mapping.min()) >= case.page_size
    )


FR_01 = with_page_0_unused(cases(page_size=4, token_counts=(13,)))
ENDS_IN_A_PAGE = cases(page_size=64, token_counts=(70, 13))


@given(
    case=kernel_cases(),
    scale_format=st.sampled_from(("pow2", None)),
    p_format=p_formats,
    kernel=kernels,
)
@example(FR_01, "pow2", "e4m3", None)
@example(FR_01, None, "bf16", None)
@example(ENDS_IN_A_PAGE, "pow2", "bf16", None)
@example(ENDS_IN_A_PAGE, None, "bf16", None)
@settings(max_examples=3)
def test_what_unused_slots_hold_never_matters(device, case, scale_format, p_format, kernel):
    """Triton's interpreter reads e4m3's NaN as 480, which hides it; a BF16 cache's NaN it keeps."""
    pages = case.pages()
    used = torch.zeros(pages.num_pages, case.page_size, dtype=torch.bool)
    used.view(-1)[pages.slot_mapping] = True
    choices = {"p_format": p_format, "split_rule": EVERY_64, "kernel": kernel}
    batch = batch_of(case, device, scale_format, pages=pages, fill=0.0)
    clean = mla_decode(*batch, **choices)
    everywhere = batch_of(case, device, scale_format, pages=pages)
    for name in batch.cache._fields:  # each alone, then all at once
        cache = batch.cache._replace(**{name: getattr(everywhere.cache, name)})
        assert_same_bits(mla_decode(*batch._replace(cache=cache), **choices), clean)
    assert_same_bits(mla_decode(*everywhere, **choices), clean)
    garbage = [plane.cpu().clone() for plane in batch.cache]
    for plane, value in zip(garbage[1:], (math.inf, -math.inf), strict=False):
        plane[~used] = value
    cache = type(batch.cache)(*(plane.to(device) for plane in garbage))
    assert_same_bits(mla_decode(*batch._replace(cache=cache), **choices), clean)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
def test_what_the_table_holds_behind_a_requests_end_never_matters(device, rule, kernel):
    case = cases(token_counts=(130, 0, 65))
    batch = batch_of(case, device)
    behind = torch.arange(batch.block_table.shape[1]) * 16 >= batch.cache_seqlens.cpu()[:, None]
    results = []
    for page in (0, *ABSURD_PAGES):
        table = batch.block_table.cpu().masked_fill(behind, page).to(device)
        results.append(
            mla_decode(*batch._replace(block_table=table), split_rule=rule, kernel=kernel)
        )
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("garbage", "p_format"),
    [(math.nan, "e4m3"), (math.nan, "bf16"), (math.inf, "bf16"), (3e38, "bf16")],
)
def test_partials_that_nobody_wrote_are_never_read(device, garbage, kernel, p_format):
    """FR-23, FR-27: eight splits, of which these lengths fill 1, 1, 1, 8 and 2."""
    case = cases(token_counts=(0, 1, 64, 513, 65), s_q=1, heads=1, page_size=64)
    batch = batch_of(case, device)
    workspace = DecodeWorkspace(device)
    for part in workspace.partials(5, 8, case.heads, case.kv_lora_rank):
        part.fill_(garbage)
    rule = SplitRule(min_tokens=64, max_splits=8)
    result = mla_decode(
        *batch, split_rule=rule, workspace=workspace, p_format=p_format, kernel=kernel
    )
    assert_decodes(case, result, "pow2", p_format=p_format, splits=8)
    assert torch.equal(result.out[0].cpu(), torch.zeros_like(result.out[0].cpu()))  # FR-02
    assert bool(result.lse[0].isneginf().all())


@meets_nan
@pytest.mark.parametrize("plane", LatentPages._fields)
@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_is_seen_by_its_own_request_only(device, kernel, rule, plane):
    case = cases(token_counts=(20, 70, 16))
    pages = case.pages()
    batch = batch_of(case, device, pages=pages)
    choices = {"split_rule": rule, "kernel": kernel}
    clean = mla_decode(*batch, **choices)
    dirty = [part.cpu().clone() for part in batch.cache]
    at = divmod(int(pages.slot_mapping[20 + 5]), 16)  # of request 1, seen by all its queries
    poison([dirty[LatentPages._fields.index(plane)][at]])
    cache = LatentPages(*(part.to(device) for part in dirty))
    result = mla_decode(*batch._replace(cache=cache), **choices)
    # Triton's interpreter reads the code's NaN as 480. The append writes a NaN scale beside it.
    if device.type == "cuda" or plane != "codes":
        assert bool(result.out[1].isnan().all())
    for request in (0, 2):
        assert_same_bits(*((part[request] for part in each) for each in (result, clean)))


@meets_nan
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_in_a_query_stays_in_its_row(device, kernel):
    batch = batch_of(DEFAULT_CASE, device)
    clean = mla_decode(*batch, kernel=kernel)
    q_latent = batch.q_latent.clone()
    q_latent[0, 1, 1, 3] = math.nan
    result = mla_decode(*batch._replace(q_latent=q_latent), kernel=kernel)
    assert bool(result.out[0, 1, 1].isnan().all())
    other = torch.ones(clean.lse.shape, dtype=torch.bool)
    other[0, 1, 1] = False
    assert_same_bits((part.cpu()[other] for part in result), (part.cpu()[other] for part in clean))


# Layout of memory


@given(
    query_layout=layouts(),
    rope_layout=layouts(),
    cache_layout=st.sampled_from(("one layer of many", "token by token", "sliced", "offset")),
    kernel=kernels,
    scale_format=st.sampled_from(("pow2", None)),
)
@settings(max_examples=10)
def test_strided_views_give_the_bits_of_contiguous_copies(
    device, query_layout, rope_layout, cache_layout, kernel, scale_format
):  # FR-09
    case = cases(token_counts=(70,))
    batch = batch_of(case, device, scale_format)
    choices = {"split_rule": EVERY_64, "kernel": kernel}
    expected = mla_decode(*batch, **choices)

    def view(plane):
        if cache_layout == "one layer of many":
            layers = torch.empty(len(plane), 3, *plane.shape[1:], dtype=plane.dtype, device=device)
            return layers[:, 1].copy_(plane)
        if cache_layout == "token by token":
            return plane.transpose(0, 1).contiguous().transpose(0, 1)
        if plane.ndim == 2:  # scales may have any stride
            return plane.repeat_interleave(2, 1)[:, ::2]
        as_bytes_of = plane.view(torch.uint8) if plane.element_size() == 1 else plane
        if cache_layout == "sliced":
            wider = torch.cat((as_bytes_of, as_bytes_of), -1)[..., : plane.shape[-1]]
        else:
            wider = torch.cat((as_bytes_of[:1], as_bytes_of))[1:]
        return wider.view(plane.dtype) if plane.element_size() == 1 else wider

    table = torch.cat((batch.block_table, batch.block_table), 1)[:, : batch.block_table.shape[1]]
    strided = Batch(
        with_layout(batch.q_latent, query_layout),
        with_layout(batch.q_rope, rope_layout),
        type(batch.cache)(*map(view, batch.cache)),
        table,
        batch.cache_seqlens,
        batch.softmax_scale,
    )
    result = mla_decode(*strided, **choices)
    if kernel is None and device.type == "cuda":  # the Hopper kernel may refuse some strides
        assert_decodes(case, result, scale_format, p_format="bf16", splits=8)
    else:
        assert_same_bits(result, expected)


def test_a_query_that_is_a_slice_of_a_projection(device):
    """FR-09: q_nope and q_rope as views of one buffer [batch, s_q, heads, width + rope]."""
    batch = batch_of(DEFAULT_CASE, device)
    both = torch.cat((batch.q_latent, batch.q_rope), -1)
    q_latent, q_rope = both.split((32, 16), -1)
    assert not q_latent.is_contiguous()
    result = mla_decode(q_latent, q_rope, *batch[2:])
    assert_same_bits(result, mla_decode(*batch))


@pytest.mark.parametrize("plane", LatentPages._fields)
@pytest.mark.parametrize("page_size", [16, 64])
def test_offsets_past_2_to_31(device, plane, page_size):
    """FR-10: page 33 with a page stride of 2^26 elements lies behind element 2^31."""
    case = cases(token_counts=(50,), page_size=page_size)
    batch = batch_of(case, device)
    expected = mla_decode(*batch)
    near = getattr(batch.cache, plane)
    far = far_view(near, 34)
    needed = batch.block_table[0, : -(-50 // page_size)].tolist()
    moved = {page: 33 - index for index, page in enumerate(needed)}
    planes = []
    for other in batch.cache:
        target = far if other is near else other.new_zeros(34, *other.shape[1:])
        for page, destination in moved.items():
            target[destination] = other[page]
        planes.append(target)
    table = torch.tensor([[moved.get(page, -1) for page in batch.block_table[0].tolist()]])
    cache = LatentPages(*planes)
    table = table.to(device, torch.int32)
    result = mla_decode(*batch._replace(cache=cache, block_table=table))
    assert_same_bits(result, expected)


def far_view(like, pages, stride=2**26):
    """A plane whose pages are `stride` elements apart; only what is written takes memory."""
    reach = (pages - 1) * stride + like[0].numel()
    try:  # bytes, which nothing fills with NaN
        raw = torch.empty(reach * like.element_size(), dtype=torch.uint8, device=like.device)
    except RuntimeError as refused:
        pytest.skip(f"no {reach * like.element_size() / 2**30:.1f} GiB of address space: {refused}")
    return raw.view(like.dtype).as_strided(
        (pages, *like.shape[1:]), (stride, *like[0].contiguous().stride())
    )


# Results, written where the caller wants them


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
def test_out_and_lse_are_written_where_given(device, rule, kernel):
    batch = batch_of(DEFAULT_CASE, device)
    out = torch.full_like(batch.q_latent, math.nan)
    lse = torch.full(out.shape[:3], math.nan, device=device)
    fresh = mla_decode(*batch, split_rule=rule, kernel=kernel)
    result = mla_decode(*batch, split_rule=rule, kernel=kernel, out=out, lse=lse)
    assert result.out is out
    assert result.lse is lse
    assert_same_bits(result, fresh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_quantised_query_decodes_alike(device, dtype):
    batch = batch_of(cases(dtype=dtype), device)
    query = quantize_q(batch.q_latent, batch.q_rope, "pow2")
    sliced = QuantizedRows(*(torch.cat((part, part), 1)[:, :2] for part in map(raw, query)))
    sliced = QuantizedRows(*(part.view(own.dtype) for part, own in zip(sliced, query, strict=True)))
    expected = mla_decode(*batch, split_rule=EVERY_64)
    for given_query in (query, sliced):
        result = decode_quantized(given_query, *batch[2:], out_dtype=dtype, split_rule=EVERY_64)
        assert_same_bits(result, expected)


def raw(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def test_no_request_at_all(device):
    batch = batch_of(DEFAULT_CASE, device)
    none = [part[:0] for part in (batch.q_latent, batch.q_rope)]
    result = mla_decode(
        *none, batch.cache, batch.block_table[:0], batch.cache_seqlens[:0], batch.softmax_scale
    )
    assert result.out.shape == (0, 2, 2, 32)
    assert result.lse.shape == (0, 2, 2)


# What only the device can see


def launch_unchecked(batch, rule, p_format="bf16"):
    """Launch the kernels without the entry point, which refuses on a CPU what follows."""
    from stage3_dataflow.kernels.launch import launch_combine, launch_split_kv_decode

    query = quantize_q(batch.q_latent, batch.q_rope, "pow2")
    shape, device = batch.q_latent.shape, batch.q_latent.device
    out, lse = torch.empty(shape, device=device), torch.empty(shape[:3], device=device)
    capacity = batch.block_table.shape[1] * batch.cache[0].shape[1]
    splits = largest_split_count(capacity, rule)
    partials = DecodeWorkspace(device).partials(shape[0], splits, shape[1] * shape[2], shape[3])
    launch_split_kv_decode(
        query,
        *batch[2:],
        out,
        lse,
        *partials,
        causal=True,
        fp8_p=p_format == "e4m3",
        split_rule=rule,
    )
    if splits > 1:
        launch_combine(*partials, batch.cache_seqlens, capacity, out, lse, split_rule=rule)
    return out, lse


def assert_only_the_first_is_not_empty(result, clean):
    out, lse = (part.cpu() for part in result)
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert bool(lse[1:].isneginf().all())
    assert_same_bits((out[0], lse[0]), (part[0] for part in clean))


@pytest.mark.parametrize("p_format", P_FORMATS)
@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
def test_a_page_outside_the_pool_empties_its_request(device, rule, p_format):
    """FR-26: in the first split, in the second, or in the last page, of which one slot is used."""
    places = [(page, column) for page in (-1, None, 2**31 - 1) for column in (0, 5, 8)]
    batch = batch_of(cases(token_counts=(129,) * (1 + len(places)), s_q=1), device)
    clean = launch_unchecked(batch, rule, p_format)
    table = batch.block_table.clone()
    for request, (page, column) in enumerate(places, start=1):
        table[request, column] = len(batch.cache.codes) if page is None else page
    result = launch_unchecked(batch._replace(block_table=table), rule, p_format)
    assert_only_the_first_is_not_empty(result, clean)


@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
def test_a_length_that_the_table_cannot_hold_empties_its_request(device, rule):
    capacity = 10 * 16
    lengths = (129, -1, -(2**31), capacity + 1, 2**31 - 1)
    batch = batch_of(cases(token_counts=(129,) * len(lengths), s_q=1), device)
    assert batch.block_table.shape[1] == 10
    clean = launch_unchecked(batch, rule)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    result = launch_unchecked(batch._replace(cache_seqlens=seqlens), rule)
    assert_only_the_first_is_not_empty(result, clean)


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_hundred_runs_give_the_same_bits(heads, splits, kernel):  # FR-28
    case = cases(
        heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        token_counts=(4096, 1, 2000, 63),
        s_q=1,
    )
    batch = batch_of(case, torch.device("cuda"))
    rule = SplitRule(min_tokens=64, max_splits=splits)
    first = mla_decode(*batch, split_rule=rule, kernel=kernel)
    for _ in range(100):
        assert_same_bits(mla_decode(*batch, split_rule=rule, kernel=kernel), first)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thousand_runs_give_the_same_bits(kernel):
    case = cases(
        heads=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        token_counts=(1500, 640, 65, 8192),
        s_q=2,
    )
    batch = batch_of(case, torch.device("cuda"))
    first = mla_decode(*batch, kernel=kernel)
    for _ in range(1000):
        again = mla_decode(*batch, kernel=kernel)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


MANY_COUNTS = (300, 0, 64, 1, *(0 if i % 23 == 5 else 37 * i % 520 for i in range(140)))
"""Of more requests than an H200 has multiprocessors; the last of no tokens is number 147."""


def rows_of(batch, own):
    """Some of a batch's requests, over the same cache."""
    return batch._replace(
        q_latent=batch.q_latent[own],
        q_rope=batch.q_rope[own],
        block_table=batch.block_table[own],
        cache_seqlens=batch.cache_seqlens[own],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("heads", "s_q", "page_size", "dtype"),
    [
        (16, 1, 64, torch.bfloat16),
        (128, 1, 64, torch.bfloat16),
        (20, 1, 128, torch.bfloat16),
        (20, 2, 16, torch.float16),
        (64, 2, 64, torch.bfloat16),
    ],
)
def test_more_items_than_processors_change_no_bit(heads, s_q, page_size, dtype, kernel):
    """Programs take one item after another, and pass over splits that a request has not.

    Which program takes which item varies from run to run.
    """
    case = cases(
        heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=page_size,
        token_counts=tuple(count + s_q - 1 if count else 0 for count in MANY_COUNTS),
        s_q=s_q,
    )
    batch = batch_of(case, torch.device("cuda"))
    batch = batch._replace(q_latent=batch.q_latent.to(dtype), q_rope=batch.q_rope.to(dtype))
    workspace = DecodeWorkspace("cuda")
    choices = {"split_rule": EVERY_64, "workspace": workspace, "kernel": kernel}
    together = mla_decode(*batch, **choices)
    for request in (0, 1, 2, 3, 17, len(MANY_COUNTS) - 1):
        own = slice(request, request + 1)
        alone = mla_decode(*rows_of(batch, own), **choices)
        assert_same_bits(alone, (part[own] for part in together))
    for _ in range(20):
        assert_same_bits(mla_decode(*batch, **choices), together)
    assert int(workspace.counter()) == 0
    whole = {"split_rule": UNSPLIT, "workspace": workspace, "kernel": kernel}
    uncut = mla_decode(*batch, **whole)
    assert_same_bits(mla_decode(*batch, **whole), uncut)
    for request in (0, 17):
        own = slice(request, request + 1)
        alone = mla_decode(*rows_of(batch, own), **whole)
        assert_same_bits(alone, (part[own] for part in uncut))
    # One bad page empties its own request.
    table = batch.block_table.clone()
    table[17, 0] = -1
    out, lse = mla_decode(*batch._replace(block_table=table), **choices)
    assert not bool(out[17].any()) and bool(lse[17].isneginf().all())
    others = [request for request in range(len(MANY_COUNTS)) if request != 17]
    assert_same_bits((out[others], lse[others]), (part[others] for part in together))
    # Requests of few tokens: most of the splits that the table has room for are none. Of 20, there
    # are fewer items than processors.
    short = batch._replace(cache_seqlens=batch.cache_seqlens.clamp(max=s_q))
    uncut = mla_decode(*short, **whole)
    assert_same_bits(mla_decode(*short, **choices), uncut)
    few = mla_decode(*rows_of(short, slice(20)), **choices)
    assert_same_bits(few, (part[:20] for part in uncut))
    assert int(workspace.counter()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [UNSPLIT, EVERY_64], ids=["one split", "splits"])
def test_a_graph_of_more_items_than_processors_keeps_its_memory(rule, kernel):
    """Captured with a fresh workspace, which a larger call outgrows before it is replayed."""
    case = cases(
        heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        token_counts=MANY_COUNTS,
        s_q=1,
    )
    batch = batch_of(case, torch.device("cuda"))
    small = rows_of(batch, slice(140))
    workspace = DecodeWorkspace("cuda")
    choices = {"split_rule": rule, "kernel": kernel}
    expected = [mla_decode(*each, **choices) for each in (small, batch)]
    out, lse = torch.empty_like(small.q_latent), torch.empty_like(expected[0].lse)
    lengths = small.cache_seqlens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(
            *small._replace(cache_seqlens=lengths), out=out, lse=lse, workspace=workspace, **choices
        )
    assert_same_bits(mla_decode(*small, workspace=workspace, **choices), expected[0])
    graph.replay()
    assert_same_bits((out, lse), expected[0])
    assert_same_bits(mla_decode(*batch, workspace=workspace, **choices), expected[1])
    for limit in (1, 0, 1000):
        lengths.copy_(small.cache_seqlens.clamp(max=limit))
        graph.replay()
        again = mla_decode(*small._replace(cache_seqlens=lengths), **choices)
        assert_same_bits((out, lse), again)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_follows_lengths_and_tables(kernel):
    """FR-25, FR-26, FR-27: captured at length 1, replayed at others; a pad row stays empty."""
    case = cases(
        heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        token_counts=(4096, 65, 640),
        s_q=1,
    )
    batch = batch_of(case, torch.device("cuda"))
    table = torch.cat((batch.block_table, torch.full_like(batch.block_table[:1], -1)))
    padded = batch._replace(
        q_latent=torch.cat((batch.q_latent, batch.q_latent[:1])),
        q_rope=torch.cat((batch.q_rope, batch.q_rope[:1])),
        block_table=table,
        cache_seqlens=torch.ones(4, dtype=torch.int32, device="cuda"),
    )
    rule = SplitRule(min_tokens=256, max_splits=16)
    workspace = DecodeWorkspace("cuda")
    choices = {"split_rule": rule, "workspace": workspace, "kernel": kernel}
    mla_decode(*padded, **choices)  # compiles, and reserves the workspace
    out = torch.empty_like(padded.q_latent)
    lse = torch.empty(out.shape[:3], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(*padded, out=out, lse=lse, **choices)
    for lengths in (
        [1, 1, 1, 1],
        [64, 65, 64, 1],
        [4096, 64, 640, 0],
        [65, 1, 65, 7],
        [1, 0, 1, 1],
    ):
        padded.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for part in (out, lse):
            part.fill_(math.nan)
        for part in workspace.partials(4, 16, 16, 512):
            part.fill_(math.nan)
        graph.replay()
        eager = mla_decode(*padded, split_rule=rule, kernel=kernel)
        assert_same_bits((out, lse), eager)
        assert not bool(out[3].any())
        assert bool(lse[3].isneginf().all())


@pytest.mark.parametrize(
    "tokens", [256, *(pytest.param(count, marks=pytest.mark.gpu) for count in (8192, 131072))]
)
def test_flat_attention_has_no_bias_that_grows_with_length(device, tokens):
    """FR-18: one split, P in e4m3, O promoted every 64 tokens.

    All keys score 0 and all tokens have one scale, so P is 448 for each and is not rounded. What is
    left of O's error is the tensor core's cut inside a tile, the float32 arithmetic of joining the
    tiles and summing P (worst case), and the output's rounding. The cut does not grow with length;
    kept in the tensor core's accumulator, O would lose 12 percent at 8,192 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    latents = (1 + 0.5 * torch.randn(tokens, 512, generator=generator)).clamp(-3.5, 3.5)
    latents[:, 0] = 3.0  # in the same binade for every token, and so one scale
    cache = allocate_latent_pages(tokens // 64, 64, 512, 64, device=device)
    append_kv_twin(
        latents.to(device),
        torch.zeros(tokens, 64, device=device),
        cache,
        torch.arange(tokens, device=device),
        scale_format="pow2",
    )
    assert len(cache.scale.unique()) == 1
    out, lse = mla_decode(
        torch.zeros(1, 1, 16, 512, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device),
        cache,
        torch.arange(tokens // 64, dtype=torch.int32, device=device)[None],
        torch.tensor([tokens], dtype=torch.int32, device=device),
        1.0,
        p_format="e4m3",
        split_rule=UNSPLIT,
    )
    values = (cache.codes.cpu().double() * cache.scale.cpu().double()[..., None]).flatten(0, 1)
    exact, magnitude = values.mean(0), values.abs().mean(0)
    cut = accumulation_error_bound(magnitude[None], 64, 64)[0]
    arithmetic = gamma(tokens // 64 + 2 * tokens, torch.float32) * magnitude
    bound = cut + arithmetic
    bound = bound + 2.0**-8 * (exact.abs() + bound)
    assert bool(((out.cpu().double()[0, 0] - exact).abs() <= bound).all())
    assert float(bound.max()) < 0.12 * float(magnitude.max())  # it can tell the loss apart
    drift = gamma(2 * tokens, torch.float32) + 2.0**-22 * math.log(tokens)
    assert bool(((lse.cpu().double() - math.log(tokens)).abs() <= drift).all())
