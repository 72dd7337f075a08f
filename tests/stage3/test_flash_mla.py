"""FlashMLA's names and layouts are this library's kernels, seen through views.

What a public caller does is written out here in plain PyTorch, from the layouts and formulas that
FlashMLA and SGLang-FluentLLM document, and compared with what the drop-in makes of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stage3_dataflow as snapmla
from stage3_dataflow import flash_mla
from stage3_dataflow.flash_mla import (
    dequantize_ckv_fused_indexed,
    flash_mla_ckv_fp8_per_token,
    flash_mla_with_kvcache,
    get_mla_metadata,
    quantize_and_cache_k,
    quantize_ckv_per_token_head,
)
from stage3_dataflow.split_plan import splits_for
from tests.bounds import assert_within, gamma, latent_attention_error, rounding_error
from tests.strategies import lay_out_pages, seeds

pytestmark = pytest.mark.stage3

PAGE_SIZE, LATENT, ROPE, HEADS = 64, 32, 16, 3
SCALE = 0.11
FP8 = torch.float8_e4m3fn
LENGTHS = (70, 0, 130)


class Caller(NamedTuple):
    """What a server of the FluentLLM kind holds: a flat pool of three planes, and its requests.

    Attributes
    ----------
    k_lora, k_scale, k_rope
        [slots, 1, width]; the first as bytes.
    key
        [tokens, 1, LATENT + ROPE], what was written into `slots`.
    """

    k_lora: Tensor
    k_scale: Tensor
    k_rope: Tensor
    key: Tensor
    slots: Tensor
    query: Tensor
    block_table: Tensor
    cache_seqlens: Tensor

    def pages(self) -> dict[str, Tensor]:
        """View the pool as the caller does for a decode."""
        return {
            "k_cache_lora": self.k_lora.view(-1, PAGE_SIZE, 1, self.k_lora.shape[-1]),
            "k_cache_rope": self.k_rope.view(-1, PAGE_SIZE, 1, self.k_rope.shape[-1]),
            "k_scale": self.k_scale.view(-1, PAGE_SIZE, 1, 1),
        }


def caller(
    lengths: tuple[int, ...] = LENGTHS, s_q: int = 1, fill: bool = True, **kw: Any
) -> Caller:
    latent, rope = kw.get("latent", LATENT), kw.get("rope", ROPE)
    pages = lay_out_pages(lengths, PAGE_SIZE, seed=len(lengths))
    slots = pages.num_pages * PAGE_SIZE
    held = Caller(
        torch.full((slots, 1, latent), 0x7F, dtype=torch.uint8),  # NaN
        torch.full((slots, 1, 1), math.nan),
        torch.full((slots, 1, rope), math.nan, dtype=torch.bfloat16),
        torch.randn(sum(lengths), 1, latent + rope).bfloat16(),
        pages.slot_mapping.int(),
        torch.randn(len(lengths), s_q, HEADS, latent + rope).bfloat16(),
        pages.block_table,
        pages.cache_seqlens,
    )
    if fill:
        with snapmla.use_path("pytorch"):
            quantize_and_cache_k(held.key, *held[:3], held.slots, latent)
    return held


def quantised_by_formula(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise as FluentLLM's PyTorch code and FlagGems' state it: codes, scale, aligned rope."""
    latent, rope = values.float().split((LATENT, ROPE), dim=-1)
    scale = latent.abs().amax(dim=-1, keepdim=True) / 448.0
    return (latent / scale).to(FP8), scale, (rope / scale).to(torch.bfloat16)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def decode_as_fluentllm_does(held: Caller, **changes: Any) -> tuple[Tensor, Tensor]:
    q_nope, q_scale, q_rope = quantize_ckv_per_token_head(held.query.contiguous(), LATENT)
    metadata, num_splits = get_mla_metadata(held.cache_seqlens, held.query.shape[1] * HEADS, 1)
    arguments = {
        "q_nope": q_nope,
        "q_rope": q_rope,
        **held.pages(),
        "q_scale": q_scale,
        "block_table": held.block_table[: len(held.query)],
        "cache_seqlens": held.cache_seqlens,
        "head_dim_v": LATENT,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": SCALE,
        "causal": True,
    }
    return flash_mla_ckv_fp8_per_token(**arguments | changes)


# The FP8 convention.


def test_the_cache_has_the_bytes_that_the_callers_own_formula_gives():
    held = caller(fill=False)
    quantize_and_cache_k(held.key, *held[:3], held.slots, LATENT, scale_format="amax")
    codes, scale, rope = quantised_by_formula(held.key)
    at = held.slots.long()
    assert torch.equal(held.k_lora[at], codes.view(torch.uint8))
    assert torch.equal(held.k_scale[at], scale)
    assert torch.equal(held.k_rope[at], rope)
    others = torch.ones(len(held.k_lora), dtype=torch.bool)
    others[at] = False
    assert held.k_scale[others].isnan().all()


def test_a_query_has_the_bytes_that_the_callers_own_formula_gives_in_its_order():
    held = caller()
    q_nope, q_scale, q_rope = quantize_ckv_per_token_head(held.query, LATENT, scale_format="amax")
    codes, scale, rope = quantised_by_formula(held.query)
    assert same_bits(q_nope, codes)
    assert torch.equal(q_scale, scale)
    assert torch.equal(q_rope, rope)


def test_scores_take_both_rotary_parts_as_divided_by_their_scales():
    """With one key visible, lse is its score: ``(q_nope . k_lora + q_rope . k_rope) scales``.

    A score is two dot products and their sum, the softmax scale rounded to float32, and three
    products with scales: LATENT + ROPE + 5 roundings at most, as `tests.bounds.fp8_attention_error`
    counts them. The softmax of one score adds its exp and log, of 1, and one sum: 2 more.
    """
    held = caller((1,) * 4, s_q=1, fill=False)
    codes, scale, rope = quantised_by_formula(held.key)
    at = held.slots.long()
    held.k_lora[at], held.k_scale[at], held.k_rope[at] = codes.view(torch.uint8), scale, rope
    q_codes, q_scale, q_rope = quantised_by_formula(held.query)
    _, lse = decode_as_fluentllm_does(held, q_nope=q_codes, q_scale=q_scale, q_rope=q_rope)
    query = torch.cat((q_codes.double(), q_rope.double()), -1) * q_scale * SCALE
    key = torch.cat((codes.double(), rope.double()), -1) * scale
    products = query[:, 0] * key  # [batch, heads, width]
    bound = gamma(LATENT + ROPE + 5 + 2, torch.float32) * products.abs().sum(-1)
    assert_within(lse[..., 0], products.sum(-1), bound)


def test_rows_read_back_are_the_callers_own_formula():
    held = caller()
    indices = held.slots[torch.randperm(len(held.slots))]
    at = indices.long()
    scale = held.k_scale[at]
    k_lora, k_rope = dequantize_ckv_fused_indexed(
        held.k_lora.view(FP8), held.k_rope, held.k_scale, indices
    )
    assert torch.equal(k_lora, (held.k_lora[at].view(FP8).float() * scale).bfloat16())
    assert torch.equal(k_rope, (held.k_rope[at].float() * scale).bfloat16())
    assert k_lora.is_contiguous() and k_rope.is_contiguous()
    assert dequantize_ckv_fused_indexed(*held[0:3:2], held.k_scale, indices[:0])[1].shape == (
        0, 1, ROPE,
    )  # fmt: skip


# The per-token FP8 decode.


@pytest.mark.parametrize("s_q", [1, 2])
def test_the_fp8_decode_is_decode_quantized(s_q):
    held = caller((70, 0, 130), s_q)
    out, lse = decode_as_fluentllm_does(held)
    query = snapmla.quantize_q(held.query[..., :LATENT], held.query[..., LATENT:])
    cache = snapmla.LatentPages(
        held.k_lora.view(FP8).view(-1, PAGE_SIZE, LATENT),
        held.k_scale.view(-1, PAGE_SIZE),
        held.k_rope.view(-1, PAGE_SIZE, ROPE),
    )
    expected = snapmla.decode_quantized(query, cache, held.block_table, held.cache_seqlens, SCALE)
    assert same_bits(out, expected.out)
    assert lse.shape == (3, HEADS, s_q)
    for token in range(s_q):
        assert torch.equal(lse[:, :, token], expected.lse[:, token])
    assert not out[1].any() and lse[1].eq(-math.inf).all()  # of length 0
    assert lse[0].isfinite().all()
    # As the caller goes on with it:
    assert out.view(-1, HEADS * LATENT).shape == (3 * s_q, HEADS * LATENT)


@pytest.mark.gpu
def test_a_flat_pool_serves_on_the_gpu_at_full_width(device):
    """Written, attended and read back through the caller's views, against the PyTorch twins."""
    held = Caller(*(part.to(device) for part in caller(fill=False, latent=512, rope=64)))
    query = snapmla.QuantizedRows(
        *(part.view(3, 1, HEADS, -1) for part in quantize_ckv_per_token_head(held.query, 512))
    )
    twin = held._replace(**{name: getattr(held, name).clone() for name in held._fields[:3]})
    quantize_and_cache_k(held.key, *held[:3], held.slots)
    with snapmla.use_path("pytorch"):
        quantize_and_cache_k(twin.key, *twin[:3], twin.slots)
    assert all(map(same_bits, held[:3], twin[:3]))
    requests = held.block_table, held.cache_seqlens
    arguments = {"q_nope": query.codes, "q_scale": query.scale, "q_rope": query.rope}
    out, lse = flash_mla_ckv_fp8_per_token(
        **arguments, **held.pages(), block_table=requests[0], cache_seqlens=requests[1],
        head_dim_v=512, softmax_scale=SCALE, causal=True,
    )  # fmt: skip
    cache = snapmla.LatentPages(
        held.k_lora.view(FP8).view(-1, PAGE_SIZE, 512),
        held.k_scale.view(-1, PAGE_SIZE),
        held.k_rope.view(-1, PAGE_SIZE, 64),
    )
    expected = snapmla.decode_quantized(
        query._replace(scale=query.scale[..., 0]), cache, *requests, SCALE
    )
    assert same_bits(out, expected.out)
    assert torch.equal(lse, expected.lse.transpose(1, 2))
    rows = dequantize_ckv_fused_indexed(held.k_lora, held.k_rope, held.k_scale, held.slots)
    with snapmla.use_path("pytorch"):
        expected_rows = dequantize_ckv_fused_indexed(*held[0:3:2], held.k_scale, held.slots)
    assert all(map(same_bits, rows, expected_rows))


SHAPES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "codes as e4m3": lambda a: {
        "k_cache_lora": a["k_cache_lora"].view(FP8), "q_nope": a["q_nope"].view(FP8),
    },
    "codes as bytes": lambda a: {"q_nope": a["q_nope"].view(torch.uint8)},
    "k_scale [pages, page_size, 1]": lambda a: {"k_scale": a["k_scale"][..., 0]},
    "k_scale [pages, page_size]": lambda a: {"k_scale": a["k_scale"][..., 0, 0]},
    "q_scale [batch, s_q, heads]": lambda a: {"q_scale": a["q_scale"][..., 0]},
    "no axis of one head": lambda a: {
        "k_cache_lora": a["k_cache_lora"][:, :, 0], "k_cache_rope": a["k_cache_rope"][:, :, 0],
    },
    "planes of a larger pool": lambda a: {
        name: torch.stack((torch.zeros_like(a[name]), a[name]), dim=1)[:, 1]
        for name in ("k_cache_lora", "k_cache_rope", "k_scale")
    },
    "strided query": lambda a: {
        "q_scale": a["q_scale"].mT.contiguous().mT,
        "q_rope": torch.cat((a["q_rope"], a["q_rope"]), -1)[..., ROPE:],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_that_callers_pass_mean_the_same(name):
    held = caller()
    q_nope, q_scale, q_rope = quantize_ckv_per_token_head(held.query, LATENT)
    given = held.pages() | {"q_nope": q_nope, "q_scale": q_scale, "q_rope": q_rope}
    changed = SHAPES[name](given)
    with snapmla.use_path("pytorch"):
        expected = decode_as_fluentllm_does(held)
        got = decode_as_fluentllm_does(held, **changed)
    assert all(map(same_bits, got, expected))


def spied(monkeypatch: pytest.MonkeyPatch, name: str) -> list[inspect.BoundArguments]:
    """Note the calls of one of the library's functions that the drop-in makes."""
    function, calls = getattr(flash_mla, name), []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(inspect.signature(function).bind(*args, **kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(flash_mla, name, note)
    return calls


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_nothing_is_copied(monkeypatch):
    held = caller()
    decodes, appends = spied(monkeypatch, "decode_quantized"), spied(monkeypatch, "append_kv")
    fetches, dense = spied(monkeypatch, "fetch_dequant"), spied(monkeypatch, "mla_decode")
    k_cache = torch.randn(8, PAGE_SIZE, 1, LATENT + ROPE).bfloat16()
    table = torch.tensor([[2, 5]], dtype=torch.int32)
    lengths = torch.tensor([100], dtype=torch.int32)
    with snapmla.use_path("pytorch"):
        decode_as_fluentllm_does(held)
        quantize_and_cache_k(held.key, *held[:3], held.slots, LATENT)
        dequantize_ckv_fused_indexed(held.k_lora, held.k_rope, held.k_scale, held.slots)
        flash_mla_with_kvcache(held.query[:1], k_cache, table, lengths, LATENT)
    pool = [storage(plane) for plane in held[:3]]
    for calls in (decodes, appends, fetches):
        assert [storage(plane) for plane in calls[0].arguments["cache"]] == pool
    assert storage(appends[0].arguments["c_kv"]) == storage(held.key)
    assert {storage(plane) for plane in dense[0].arguments["cache"]} == {storage(k_cache)}
    assert storage(dense[0].arguments["q_rope"]) == storage(held.query)


# The BF16 decode.


def attention_by_definition(
    query: Tensor, keys: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Dense attention of one request in float64, value = the first LATENT of the key's channels."""
    s_q, length = len(query), len(keys)
    scores = torch.einsum("qhd,kd->hqk", query.double(), keys.double()) * softmax_scale
    if causal:
        mask = torch.ones(s_q, length, dtype=torch.bool).tril(diagonal=length - s_q)
        scores = scores.masked_fill(~mask, -math.inf)
    out = scores.softmax(-1) @ keys[:, :LATENT].double()
    return out.transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("softmax_scale", [SCALE, None])
@pytest.mark.parametrize("causal", [True, False])
def test_the_bf16_decode_is_attention_by_definition(causal, softmax_scale):
    """Within the error of float32 attention, of the same in float64, and BF16's of the output."""
    lengths = (70, 130)
    pages = lay_out_pages(lengths, PAGE_SIZE, seed=3)
    k_cache = torch.full((pages.num_pages, PAGE_SIZE, 1, LATENT + ROPE), math.nan).bfloat16()
    keys = torch.randn(sum(lengths), 1, LATENT + ROPE).bfloat16()
    k_cache.view(-1, 1, LATENT + ROPE)[pages.slot_mapping] = keys
    query = torch.randn(2, 2, HEADS, LATENT + ROPE).bfloat16()
    with snapmla.use_path("pytorch"):
        out, lse = flash_mla_with_kvcache(
            query, k_cache, pages.block_table, pages.cache_seqlens, LATENT,
            *get_mla_metadata(pages.cache_seqlens, 2 * HEADS, 1),
            softmax_scale=softmax_scale, causal=causal,
        )  # fmt: skip
    scale = (LATENT + ROPE) ** -0.5 if softmax_scale is None else softmax_scale
    assert out.dtype == torch.bfloat16
    for request, rows in enumerate(keys[:, 0].split(lengths)):
        expected, expected_lse = attention_by_definition(query[request], rows, scale, causal)
        parts = query[request].split((LATENT, ROPE), -1) + rows.split((LATENT, ROPE), -1)
        single, double = (
            latent_attention_error(*parts, scale, causal=causal, dtype=dtype)
            for dtype in (torch.float32, torch.float64)
        )
        exact = single.out + double.out
        rounded = rounding_error(expected.abs() + exact, torch.bfloat16)
        assert_within(out[request], expected, exact + rounded)
        assert_within(lse[request].T, expected_lse.T, single.lse + double.lse)


def test_the_bf16_decode_runs_the_kernels_on_views():
    pages = lay_out_pages(LENGTHS, PAGE_SIZE, seed=3)
    k_cache = torch.randn(pages.num_pages, PAGE_SIZE, 1, LATENT + ROPE).bfloat16()
    query = torch.randn(3, 2, HEADS, LATENT + ROPE).bfloat16()
    arguments = pages.block_table, pages.cache_seqlens
    out, lse = flash_mla_with_kvcache(
        query, k_cache, *arguments, LATENT, softmax_scale=SCALE, causal=True
    )
    expected = snapmla.mla_decode(
        query[..., :LATENT].contiguous(),
        query[..., LATENT:].contiguous(),
        snapmla.Bf16LatentPages(
            k_cache[:, :, 0, :LATENT].contiguous(), k_cache[:, :, 0, LATENT:].contiguous()
        ),
        *arguments,
        SCALE,
    )
    assert same_bits(out, expected.out)
    assert torch.equal(lse, expected.lse.transpose(1, 2))


# Metadata.


@given(st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 2**20)), max_size=5))
def test_num_splits_counts_the_splits_of_each_request(lengths):
    metadata, num_splits = get_mla_metadata(torch.tensor(lengths, dtype=torch.int32), 128, 1)
    assert metadata.dtype == num_splits.dtype == torch.int32
    assert metadata.shape == (1, 8)
    assert num_splits.diff().tolist() == [len(splits_for(length)) for length in lengths]
    assert num_splits[0] == 0


def test_metadata_may_be_copied_into_what_a_graph_reads():
    """As FluentLLM does: buffers are made for the largest batch and refreshed for smaller ones."""
    buffer, counts = get_mla_metadata(torch.ones(8, dtype=torch.int32), 16, 1)
    metadata, num_splits = get_mla_metadata(torch.full((3,), 9000, dtype=torch.int32), 16, 1)
    buffer.copy_(metadata)
    counts[:4].copy_(num_splits)
    assert counts[:4].tolist() == [0, 9, 18, 27]


def test_metadata_needs_no_arguments():
    assert get_mla_metadata() == (snapmla.SplitRule(), None)


def test_metadata_is_ignored_but_a_split_rule_is_obeyed(monkeypatch):
    held = caller()
    calls = spied(monkeypatch, "decode_quantized"), spied(monkeypatch, "mla_decode")
    k_cache = torch.randn(8, PAGE_SIZE, 1, LATENT + ROPE).bfloat16()
    dense = held.query[:1], k_cache, torch.zeros(1, 1).int(), torch.tensor([5]).int(), LATENT
    rule = snapmla.SplitRule(64, 2)
    nothing = {"tile_scheduler_metadata": None, "num_splits": None}
    with snapmla.use_path("pytorch"):
        for metadata in ({}, nothing, {"tile_scheduler_metadata": rule}):
            decode_as_fluentllm_does(held, **metadata)
            flash_mla_with_kvcache(*dense, **metadata)
    for noted in calls:
        rules = [call.arguments["split_rule"] for call in noted]
        assert rules == [snapmla.SplitRule(), snapmla.SplitRule(), rule]


def test_signatures_begin_as_the_public_ones():
    """Positional callers: names, order and defaults of deepseek-ai/FlashMLA and of FluentLLM."""
    dense = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
    dense += "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache "
    dense += "extra_indices_in_kvcache topk_length extra_topk_length"
    fp8 = "q_nope q_rope k_cache_lora k_cache_rope q_scale k_scale block_table cache_seqlens "
    fp8 += "head_dim_v tile_scheduler_metadata num_splits softmax_scale causal"
    metadata = "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q is_fp8_kvcache topk"
    append = "key k_lora_cache k_lora_scale_cache k_rope_cache indices head_dim_v"
    for function, names in (
        (flash_mla_with_kvcache, dense),
        (flash_mla_ckv_fp8_per_token, fp8),
        (get_mla_metadata, metadata),
        (quantize_and_cache_k, append),
    ):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(names.split())] == names.split()
        if "causal" in parameters:
            assert parameters["causal"].default is False
            assert parameters["softmax_scale"].default is None


def test_the_default_softmax_scale_counts_latent_and_rotary_width():
    held = caller()
    with snapmla.use_path("pytorch"):
        default = decode_as_fluentllm_does(held, softmax_scale=None)
        explicit = decode_as_fluentllm_does(held, softmax_scale=(LATENT + ROPE) ** -0.5)
    assert all(map(same_bits, default, explicit))


@given(seed=seeds())
def test_negative_slots_write_nothing(seed):
    held = caller(fill=False)
    kept = torch.rand(len(held.slots), generator=torch.Generator().manual_seed(seed)) < 0.5
    slots = held.slots.masked_fill(~kept, -1)
    with snapmla.use_path("pytorch"):
        quantize_and_cache_k(held.key, *held[:3], slots, LATENT)
    written = held.k_scale[:, 0, 0].isfinite()
    assert set(written.nonzero()[:, 0].tolist()) == set(held.slots[kept].tolist())


# Refusals.


def refused_fp8(**changes: Callable[[dict[str, Any]], Any]) -> Callable[[Caller], Any]:
    def call(held: Caller) -> Any:
        q_nope, q_scale, q_rope = quantize_ckv_per_token_head(held.query, LATENT)
        given = held.pages() | {
            "q_nope": q_nope, "q_rope": q_rope, "q_scale": q_scale,
            "block_table": held.block_table, "cache_seqlens": held.cache_seqlens,
        }  # fmt: skip
        return decode_as_fluentllm_does(
            held, **{name: change(given) for name, change in changes.items()}
        )

    return call


def refused_bf16(**changes: Any) -> Callable[[Caller], Any]:
    def call(held: Caller) -> Any:
        arguments: dict[str, Any] = {
            "q": held.query,
            "k_cache": torch.zeros(8, PAGE_SIZE, 1, LATENT + ROPE, dtype=torch.bfloat16),
            "block_table": held.block_table,
            "cache_seqlens": held.cache_seqlens,
            "head_dim_v": LATENT,
        }
        return flash_mla_with_kvcache(**arguments | changes)

    return call


two_heads = torch.zeros(8, PAGE_SIZE, 2, LATENT + ROPE, dtype=torch.bfloat16)
REFUSED: list[tuple[type[Exception], str, Callable[[Caller], Any]]] = [
    (ValueError, "head_dim_v must be the width of q_nope", refused_fp8(head_dim_v=lambda a: 512)),
    (NotImplementedError, "k_cache_lora must have one KV head", refused_fp8(
        k_cache_lora=lambda a: a["k_cache_lora"].expand(-1, -1, 2, -1))),
    (NotImplementedError, "k_cache_rope must have one KV head", refused_fp8(
        k_cache_rope=lambda a: a["k_cache_rope"].expand(-1, -1, 2, -1))),
    (ValueError, "k_cache_rope must be bfloat16", refused_fp8(
        k_cache_rope=lambda a: a["k_cache_rope"][1:])),
    (ValueError, "k_cache_lora must be", refused_fp8(
        k_cache_lora=lambda a: a["k_cache_lora"][..., :16])),
    (TypeError, "q_nope must be float8_e4m3fn, or its bytes", refused_fp8(
        q_nope=lambda a: a["q_nope"].bfloat16())),
    (TypeError, "k_cache_lora must be float8_e4m3fn, or its bytes", refused_fp8(
        k_cache_lora=lambda a: a["k_cache_lora"].view(torch.float8_e5m2))),
    (TypeError, "q_rope must be bfloat16", refused_fp8(q_rope=lambda a: a["q_rope"].float())),
    (TypeError, "q_scale must be float32", refused_fp8(q_scale=lambda a: a["q_scale"].double())),
    (ValueError, "q_scale must have 3 axes", refused_fp8(
        q_scale=lambda a: a["q_scale"].expand(-1, -1, -1, 4))),
    (ValueError, "q_scale must be float32", refused_fp8(
        q_scale=lambda a: a["q_scale"][:, :, 1:])),
    (ValueError, "k_scale must have 2 axes", refused_fp8(
        k_scale=lambda a: a["k_scale"].expand(-1, -1, 1, 4))),
    (ValueError, "k_scale must be float32", refused_fp8(
        k_scale=lambda a: a["k_scale"].view(-1, 1, 1, 1))),
    (TypeError, "k_scale must be float32", refused_fp8(k_scale=lambda a: a["k_scale"].half())),
    (TypeError, "block_table must be int32", refused_fp8(
        block_table=lambda a: a["block_table"].long())),
    (TypeError, "cache_seqlens must be int32", refused_fp8(
        cache_seqlens=lambda a: a["cache_seqlens"].long())),
    (NotImplementedError, "head_dim_v must be the width of the latent", refused_bf16(
        head_dim_v=16)),
    (NotImplementedError, "k_cache must have one KV head", refused_bf16(k_cache=two_heads)),
    (ValueError, "k_cache must be", refused_bf16(k_cache=two_heads[:, :, :1, 1:])),
    (TypeError, "k_cache must be bfloat16", refused_bf16(k_cache=two_heads[:, :, :1].half())),
    (TypeError, "q must be", refused_bf16(q=torch.zeros(3, 1, HEADS, LATENT + ROPE).double())),
    (NotImplementedError, "is_fp8_kvcache must be left out", refused_bf16(is_fp8_kvcache=True)),
    (NotImplementedError, "descale_q must be left out", refused_bf16(descale_q=torch.ones(1))),
    (NotImplementedError, "descale_k must be left out", refused_bf16(descale_k=torch.ones(1))),
    *((NotImplementedError, f"{name} must be left out: sparse attention", refused_bf16(
        **{name: torch.zeros(1)})) for name in ("indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length")),
    (NotImplementedError, "num_heads_k must have one KV head", lambda held: get_mla_metadata(
        held.cache_seqlens, HEADS, 2)),
    (NotImplementedError, "topk must be left out", lambda held: get_mla_metadata(topk=2048)),
    (TypeError, "cache_seqlens must be int32", lambda held: get_mla_metadata(
        held.cache_seqlens.long(), HEADS, 1)),
    (NotImplementedError, "head_dim_v must be", lambda held: quantize_ckv_per_token_head(
        held.query, 48)),
    (NotImplementedError, "key must have one KV head", lambda held: quantize_and_cache_k(
        held.key.expand(-1, 2, -1), *held[:3], held.slots, LATENT)),
    (TypeError, "key must be", lambda held: quantize_and_cache_k(
        held.key.double(), *held[:3], held.slots, LATENT)),
    (TypeError, "k_lora_cache must be float8_e4m3fn, or its bytes", lambda held: (
        quantize_and_cache_k(held.key, held.k_lora.float(), *held[1:3], held.slots, LATENT))),
    (ValueError, "k_lora_cache must be flat", lambda held: dequantize_ckv_fused_indexed(
        held.k_lora.view(-1, PAGE_SIZE, 1, LATENT), held.k_rope.view(-1, PAGE_SIZE, 1, ROPE),
        held.k_scale.view(-1, PAGE_SIZE, 1, 1), held.slots)),
    (TypeError, "indices must be", lambda held: dequantize_ckv_fused_indexed(
        held.k_lora, held.k_rope, held.k_scale, held.slots.float())),
]  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("error", "message", "call"), REFUSED, ids=[message for _, message, _ in REFUSED]
)
def test_what_is_not_served_is_refused_by_name(error, message, call):
    held = caller()
    with snapmla.use_path("pytorch"), pytest.raises(error, match=message):
        call(held)
