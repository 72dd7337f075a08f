"""Requests over a paged cache on the device under test, and exact attention over what it holds.

Oracles work on the CPU, in float64; planes, queries and tables go to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import Bf16LatentPages, allocate_pages, write_rows
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.fp8_latent_cache import append_kv as append_kv_twin
from stage1_quant.quantize import QuantizedRows, ScaleFormat, quantize_q, quantize_rows
from tests.bounds import (
    AttentionError,
    assert_within,
    kernel_attention_error,
    latent_attention_error,
    rounding_error,
)
from tests.strategies import DecodeCase, Pages

FORMATS: tuple[ScaleFormat, ...] = ("amax", "pow2")

meets_nan = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning"
)
"""For tests of NaN and infinities: NumPy, below Triton's interpreter, remarks on both."""


class Batch(NamedTuple):
    """A batch as the entry points take it, on the device under test."""

    q_latent: Tensor
    q_rope: Tensor
    cache: LatentPages | Bf16LatentPages
    block_table: Tensor
    cache_seqlens: Tensor
    softmax_scale: float


def as_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor in order, on the CPU: equal bytes are equal bits, NaN's too."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def assert_same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(as_bytes(one), as_bytes(other)), f"part {index}"


def poison(planes: Sequence[Tensor], value: float = math.nan) -> None:
    """Fill planes with a value; e4m3's NaN is the byte 0x7F."""
    for plane in planes:
        if plane.element_size() == 1:
            plane.view(torch.uint8).fill_(0x7F if math.isnan(value) else 0)
        else:
            plane.fill_(value)


def fill_cache(
    case: DecodeCase, pages: Pages, scale_format: ScaleFormat, fill: float = math.nan
) -> LatentPages:
    """Append a case's rows by stage 1, on the CPU; `fill` is in every slot without a token."""
    cache = allocate_latent_pages(
        pages.num_pages, case.page_size, case.kv_lora_rank, case.qk_rope_head_dim
    )
    poison(cache, fill)
    append_kv_twin(*case.rows(), cache, pages.slot_mapping, scale_format=scale_format)
    return cache


def batch_of(
    case: DecodeCase,
    device: torch.device,
    scale_format: ScaleFormat | None = "pow2",
    *,
    pages: Pages | None = None,
    fill: float = math.nan,
) -> Batch:
    """Put a case on a device; `scale_format` None gives a BF16 cache."""
    pages = case.pages() if pages is None else pages
    cache: LatentPages | Bf16LatentPages
    if scale_format is None:
        cache = allocate_pages(
            pages.num_pages, case.page_size, case.kv_lora_rank, case.qk_rope_head_dim
        )
        poison(cache, fill)
        write_rows(cache, case.rows(), pages.slot_mapping)
    else:
        cache = fill_cache(case, pages, scale_format, fill)
    q_latent, q_rope = case.queries()
    return Batch(
        q_latent.to(device),
        q_rope.to(device),
        type(cache)(*(plane.to(device) for plane in cache)),
        pages.block_table.to(device),
        pages.cache_seqlens.to(device),
        case.softmax_scale(),
    )


class Operands(NamedTuple):
    """What one request's codes stand for, float64, and its tokens' scales."""

    q_latent: Tensor
    q_rope: Tensor
    c_kv: Tensor
    k_rope: Tensor
    scale: Tensor


def meaning(rows: QuantizedRows) -> tuple[Tensor, Tensor]:
    """Latents and rotary parts that quantised rows stand for: products that float64 holds."""
    scale = rows.scale.double()[..., None]
    return rows.codes.double() * scale, rows.rope.double() * scale


def operands_of(case: DecodeCase, scale_format: ScaleFormat | None) -> list[Operands]:
    """Exact operands of each request; over a BF16 cache, roundings to BF16."""
    queries, rows = case.queries(), case.rows()
    if scale_format is None:
        query = tuple(part.bfloat16().double() for part in queries)
        keys = tuple(part.double() for part in rows)
        scale = torch.ones(len(rows[0]), dtype=torch.float64)
    else:
        query = meaning(quantize_q(*queries, scale_format))
        quantised = quantize_rows(*rows, scale_format)
        keys, scale = meaning(quantised), quantised.scale
    parts = (part.split(case.token_counts) for part in (*keys, scale))
    return [
        Operands(query[0][request], query[1][request], *own)
        for request, own in enumerate(zip(*parts, strict=True))
    ]


def budgets(
    case: DecodeCase,
    scale_format: ScaleFormat | None,
    *,
    p_format: str,
    causal: bool = True,
    splits: int = 1,
    out_dtype: torch.dtype | None = None,
    on_gpu: bool = False,
) -> list[tuple[AttentionOutput, AttentionError]]:
    """Float64 attention over the dequantised cache and query, and what a kernel may be off."""
    dtype = case.dtype if out_dtype is None else out_dtype
    softmax_scale = case.softmax_scale()
    found = []
    for request in operands_of(case, scale_format):
        exact = latent_attention(*request[:4], softmax_scale, causal=causal)
        own = kernel_attention_error(
            *request,
            softmax_scale,
            p_format=p_format,
            causal=causal,
            splits=splits,
            # What the Hopper kernel does; the others keep float32.
            partial_dtype=dtype if on_gpu and dtype == torch.bfloat16 else torch.float32,
            fp8_tensor_core=on_gpu and scale_format is not None,
        )
        wide = latent_attention_error(
            *request[:4], softmax_scale, dtype=torch.float64, causal=causal
        )
        error = AttentionError(own.out + wide.out, own.lse + wide.lse)
        if dtype != torch.float32:
            rounded = rounding_error(exact.out.abs() + error.out, dtype)
            # a row that sees nothing is 0 and stays it
            error = error._replace(out=error.out + rounded.masked_fill(error.out == 0.0, 0.0))
        found.append((exact, error))
    return found


def assert_decodes(
    case: DecodeCase, result: AttentionOutput, scale_format: ScaleFormat | None, **choices: Any
) -> None:
    """Compare with float64 attention, request by request; `choices` as `budgets`."""
    assert result.out.dtype == choices.get("out_dtype", case.dtype)
    assert result.lse.dtype == torch.float32
    wanted = budgets(case, scale_format, on_gpu=result.out.is_cuda, **choices)
    for index, (exact, error) in enumerate(wanted):
        about = (index, scale_format, choices, case)
        assert_within(result.out[index].cpu(), exact.out, error.out, about=("out", *about))
        assert_within(result.lse[index].cpu(), exact.lse, error.lse, about=("lse", *about))
