"""Fetched rows are stage 1's, bit for bit, whatever lies beside them.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage1_quant import fp8_latent_cache as twin
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage3_dataflow import append_kv, fetch_dequant
from tests.stage3.cached_requests import (
    FORMATS,
    as_bytes,
    assert_same_bits,
    batch_of,
    fill_cache,
    meets_nan,
)
from tests.stage3.test_mla_decode import DEFAULT_CASE, cases, far_view
from tests.strategies import kernel_cases, lay_out_pages

pytestmark = pytest.mark.stage3

formats = st.sampled_from(FORMATS)


def fetched(batch, **choices):
    return fetch_dequant(batch.cache, batch.block_table, batch.cache_seqlens, **choices).cpu()


@given(case=kernel_cases(largest_batch=4), scale_format=formats)
@example(cases(token_counts=(0, 0)), "pow2")
@example(cases(kv_lora_rank=512, qk_rope_head_dim=64, token_counts=(70,)), "amax")
@example(cases(kv_lora_rank=256, qk_rope_head_dim=0, page_size=1, token_counts=(3, 0, 5)), "amax")
@settings(max_examples=8)
def test_rows_are_the_twins_bytes(device, case, scale_format):
    pages = case.pages()
    expected = twin.fetch_dequant(
        fill_cache(case, pages, scale_format), pages.block_table, pages.cache_seqlens
    )
    batch = batch_of(case, device, scale_format, pages=pages)
    rows = fetched(batch)
    assert_same_bits([rows], [expected])
    total = sum(case.token_counts)
    assert_same_bits([fetched(batch, total_tokens=total)], [expected])  # no synchronisation


@pytest.mark.parametrize("total", [0, 1, 100, 300])
def test_rows_behind_the_last_request_are_zero_and_fewer_may_be_asked_for(device, total):
    batch = batch_of(DEFAULT_CASE, device)
    whole = fetched(batch)
    rows = fetched(batch, total_tokens=total)
    known = min(total, len(whole))
    assert rows.shape == (total, whole.shape[1])
    assert_same_bits([rows[:known]], [whole[:known]])
    assert not bool(rows[known:].any())


@given(case=kernel_cases(), seed=st.integers(1, 1000))
@settings(max_examples=4)
def test_neither_page_order_nor_unused_slots_matter(device, case, seed):
    other = lay_out_pages(case.token_counts, case.page_size, case.seed + seed)
    one = fetched(batch_of(case, device))
    assert_same_bits([fetched(batch_of(case, device, pages=other, fill=0.0))], [one])


def test_a_whole_page_of_nan_beside_a_request(device):
    """FR-01: page 4, length 13: slots 13 to 15 are NaN in every plane."""
    case = cases(page_size=4, token_counts=(13,))
    rows = fetched(batch_of(case, device))
    assert bool(rows.isfinite().all())
    assert_same_bits([rows], [fetched(batch_of(case, device, fill=0.0))])


def launch_unchecked(batch, total):
    """Fetch without the entry point, which refuses on a CPU what follows."""
    from stage3_dataflow.kernels.launch import launch_fetch_dequant, launch_readable_lengths

    num_pages, page_size, latent = batch.cache.codes.shape
    lengths = torch.empty_like(batch.cache_seqlens)
    launch_readable_lengths(batch.block_table, batch.cache_seqlens, lengths, num_pages, page_size)
    out = torch.empty(
        total, latent + batch.cache.rope.shape[-1], dtype=torch.bfloat16, device=lengths.device
    )
    launch_fetch_dequant(batch.cache, batch.block_table, lengths, lengths.cumsum(0), out)
    return lengths.tolist(), out.cpu()


@pytest.mark.parametrize("column", [0, 5, 8])
@pytest.mark.parametrize("page", [-1, "num_pages", 2**31 - 1, -(2**31)])
def test_a_request_with_a_page_outside_the_pool_has_no_rows(device, page, column):
    batch = batch_of(cases(token_counts=(20, 129, 33)), device)
    whole = fetched(batch)
    table = batch.block_table.clone()
    table[1, column] = len(batch.cache.codes) if page == "num_pages" else page
    lengths, rows = launch_unchecked(batch._replace(block_table=table), 20 + 33 + 4)
    assert lengths == [20, 0, 33]
    assert_same_bits([rows[:20], rows[20:53]], [whole[:20], whole[149:]])
    assert not bool(rows[53:].any())


@pytest.mark.parametrize("length", [-1, "capacity + 1", 2**31 - 1, -(2**31)])
def test_a_request_whose_length_cannot_be_has_no_rows(device, length):
    batch = batch_of(cases(token_counts=(20, 129, 33)), device)
    whole = fetched(batch)
    seqlens = batch.cache_seqlens.clone()
    capacity = batch.block_table.shape[1] * 16
    seqlens[1] = capacity + 1 if length == "capacity + 1" else length
    lengths, rows = launch_unchecked(batch._replace(cache_seqlens=seqlens), 53)
    assert lengths == [20, 0, 33]
    assert_same_bits([rows[:20], rows[20:]], [whole[:20], whole[149:]])


def test_tables_wider_than_a_block_of_pages_are_read_to_the_end(device):
    """Pages of one token: 300 columns are needed, more than one step of 256."""
    case = cases(page_size=1, token_counts=(300, 300))
    batch = batch_of(case, device)
    table = batch.block_table.clone()
    table[0, 299] = -1
    lengths, _ = launch_unchecked(batch._replace(block_table=table), 300)
    assert lengths == [0, 300]
    table = batch.block_table.clone()
    table[0, 300] = -1  # behind the end
    lengths, _ = launch_unchecked(batch._replace(block_table=table), 600)
    assert lengths == [300, 300]


@pytest.mark.parametrize("plane", LatentPages._fields)
def test_offsets_past_2_to_31(device, plane):  # FR-10
    cache = allocate_latent_pages(34, 16, 32, 16, device=device)
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.randn(16, 32, generator=generator)
    k_rope = torch.randn(16, 16, generator=generator)
    append_kv(c_kv.to(device), k_rope.to(device), cache, 33 * 16 + torch.arange(16, device=device))
    table = torch.tensor([[33]], dtype=torch.int32, device=device)
    seqlens = torch.tensor([16], dtype=torch.int32, device=device)
    expected = fetch_dequant(cache, table, seqlens)
    far = far_view(getattr(cache, plane), 34)
    far[33] = getattr(cache, plane)[33]
    result = fetch_dequant(cache._replace(**{plane: far}), table, seqlens)
    assert_same_bits([result], [expected])


@pytest.mark.parametrize("view", ["one layer of many", "token by token"])
def test_planes_that_are_views(device, view):  # FR-09
    batch = batch_of(DEFAULT_CASE, device)
    planes = []
    for plane in batch.cache:
        own = plane.view(torch.uint8) if plane.element_size() == 1 else plane
        if view == "one layer of many":
            planes.append(torch.stack((own, own), 1).view(plane.dtype)[:, 1])
        else:
            planes.append(own.transpose(0, 1).contiguous().transpose(0, 1).view(plane.dtype))
        assert not planes[-1].is_contiguous()
    assert_same_bits([fetched(batch._replace(cache=LatentPages(*planes)))], [fetched(batch)])


@meets_nan
@pytest.mark.parametrize("scale_format", FORMATS)
def test_nan_and_infinities(device, scale_format):
    """What was appended as infinite comes back as BF16's largest number; a NaN stays in its row."""
    c_kv, k_rope = torch.ones(4, 32), torch.ones(4, 16)
    c_kv[1, 3], k_rope[2, 5] = math.nan, math.inf
    cache = allocate_latent_pages(1, 4, 32, 16, device=device)
    slots = torch.arange(4, device=device)
    append_kv(c_kv.to(device), k_rope.to(device), cache, slots, scale_format=scale_format)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    seqlens = torch.tensor([4], dtype=torch.int32, device=device)
    rows = fetch_dequant(cache, table, seqlens).cpu()
    assert bool(rows[1].isnan().all())
    assert bool(rows[[0, 2, 3]].isfinite().all())
    on_cpu = LatentPages(*(plane.cpu() for plane in cache))
    expected = twin.fetch_dequant(on_cpu, table.cpu(), seqlens.cpu())
    assert_same_bits([rows[[0, 2, 3]]], [expected[[0, 2, 3]]])


def test_appending_fetched_rows_again_gives_the_same_bytes(device):
    """FR-31: with power-of-two scales a prefix survives any number of trips through BF16."""
    case = dataclasses.replace(DEFAULT_CASE, token_counts=(37,), regime="many binades")
    batch = batch_of(case, device, "pow2", fill=0.0)
    rows = fetch_dequant(batch.cache, batch.block_table, batch.cache_seqlens)
    again = allocate_latent_pages(len(batch.cache.codes), 16, 32, 16, device=device)
    for plane in again:
        plane.view(torch.uint8).fill_(0)
    append_kv(
        rows[:, :32], rows[:, 32:], again, case.pages().slot_mapping.to(device), scale_format="pow2"
    )
    for plane, other in zip(again, batch.cache, strict=True):
        assert torch.equal(as_bytes(plane), as_bytes(other))


def test_no_request(device):
    batch = batch_of(DEFAULT_CASE, device)
    rows = fetch_dequant(batch.cache, batch.block_table[:0], batch.cache_seqlens[:0])
    assert rows.shape == (0, 48)
