"""Decode steps: padding rows, replays against eager steps, and what cannot be captured.

Capture is tested twice: on the CPU with a log of operations that behaves like a CUDA graph, and on
a GPU with the real thing. FR-nn names an entry of the public reports of faults in comparable
systems.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.decoder import Decoder
from stage0_reference.latent_cache import as_bytes
from stage0_reference.mixture_of_experts import BATCHED_EXPERTS_MAX_ROWS
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage3_dataflow.decode_graph import (
    CudaGraphCapture,
    DecodeRow,
    DecodeStep,
    graph_obstacle,
    routes_on_the_host,
)
from tests.model_factory import random_decoder, tiny_config
from tests.stage3.operation_log import TensorOnlyBackend, log_capture

pytestmark = pytest.mark.stage3

PAGE_SIZE = 4
COLUMNS = 5
ROWS = 4
NUM_PAGES = ROWS * COLUMNS + 1

# Rows of all products start at multiples of 16 bytes, as in every published model.
ALIGNED: dict[str, Any] = {"num_hidden_layers": 2, "v_head_dim": 12, "moe_intermediate_size": 16}


@functools.cache
def small_decoder() -> Decoder:
    """One dense layer and one with experts."""
    return random_decoder(tiny_config(**ALIGNED))


def make_step(backend, *, rows=(ROWS,), capture=None, seed=0, decoder=None) -> DecodeStep:
    """Give each row pages of its own, full of latents that are the same for the same seed."""
    decoder = decoder or small_decoder()
    cache = backend.make_cache(decoder.config, NUM_PAGES, PAGE_SIZE, device=decoder.device)
    generator = torch.Generator().manual_seed(seed)
    config, tokens = decoder.config, NUM_PAGES * PAGE_SIZE
    for layer in cache:
        latents = torch.randn(tokens, config.kv_lora_rank, generator=generator)
        ropes = torch.randn(tokens, config.qk_rope_head_dim, generator=generator)
        slots = torch.arange(tokens, device=decoder.device)
        rows_of = [part.to(decoder.device, decoder.dtype) for part in (latents, ropes)]
        backend.append(*rows_of, layer, slots)
    return DecodeStep(decoder, backend, cache, rows=rows, max_pages=COLUMNS, capture=capture)


def pages_of_row(row: int, length: int) -> list[int]:
    """Pages of a row, as many as `length` tokens need, in no order."""
    pages = [(7 * (row * COLUMNS + column)) % (ROWS * COLUMNS) for column in range(COLUMNS)]
    return pages[: -(-length // PAGE_SIZE)]


def live_rows(lengths: dict[int, int]) -> dict[int, DecodeRow]:
    return {
        row: DecodeRow((3 * row + length) % 60, length - 1, pages_of_row(row, length))
        for row, length in lengths.items()
    }


def cache_bytes(step: DecodeStep) -> list[Tensor]:
    """Bytes of the pool's pages, without what a backend may keep behind them."""
    planes = [plane[:NUM_PAGES] for layer in step.cache for plane in layer]
    return [plane.clone().view(torch.uint8) for plane in planes]


def same_bytes(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


lengths_by_row = st.dictionaries(
    st.integers(0, ROWS - 1), st.integers(1, PAGE_SIZE * COLUMNS), min_size=1
)


@settings(max_examples=20)
@given(steps=st.lists(lengths_by_row, min_size=1, max_size=5))
def test_replays_equal_eager_steps_over_changing_lengths_and_rows(steps):
    """FR-27: recorded once, with every row unused; replayed at any lengths, any rows."""
    eager = make_step(TensorOnlyBackend(torch.float32))
    replayed = make_step(TensorOnlyBackend(torch.float32), capture=log_capture)
    assert same_bytes(cache_bytes(eager), cache_bytes(replayed))  # capturing wrote nothing
    for lengths in steps:
        expected = eager.run(live_rows(lengths))
        got = replayed.run(live_rows(lengths))
        for row in lengths:
            assert torch.equal(got[row], expected[row])
        assert same_bytes(cache_bytes(eager), cache_bytes(replayed))
    assert (eager.replays, replayed.replays) == (0, len(steps))


def test_a_backend_that_asks_for_values_cannot_be_captured():
    with pytest.raises(RuntimeError, match="asks the device for a value"):
        make_step(Fp8CacheBackend(), capture=log_capture)


@settings(max_examples=20)
@given(row=st.integers(0, ROWS - 1), length=st.integers(1, 20), mates=lengths_by_row)
def test_a_row_is_the_same_among_any_others(row, length, mates):
    """FR-25: with unused rows around it or live ones, and after others have left."""
    alone = make_step(Fp8CacheBackend()).run(live_rows({row: length}))[row]
    assert bool(alone.isfinite().all())
    step = make_step(Fp8CacheBackend())
    assert torch.equal(step.run(live_rows(mates | {row: length}))[row], alone)
    assert torch.equal(step.run(live_rows({row: length}))[row], alone)


def test_unused_rows_give_finite_logits_and_write_nothing():
    """FR-25, FR-26: a step for 4 rows, 3 of them live, then 1."""
    step = make_step(Fp8CacheBackend())
    for lengths in ({0: 5, 1: 9, 3: 20}, {3: 17}):
        before = cache_bytes(step)
        logits = step.run(live_rows(lengths))
        assert logits.shape == (ROWS, small_decoder().config.vocab_size)
        assert bool(logits.isfinite().all())
        assert step.inputs.cache_seqlens.tolist() == [lengths.get(row, 0) for row in range(ROWS)]
        for row in range(ROWS):
            pages = pages_of_row(row, lengths.get(row, 0))
            behind = [-1] * (COLUMNS - len(pages))
            assert step.inputs.block_table[row].tolist() == pages + behind
            if row not in lengths:
                assert step.inputs.slot_mapping[row] == -1
        # Nothing but the live rows' slots has changed.
        written = {
            pages_of_row(row, length)[-1] * PAGE_SIZE + (length - 1) % PAGE_SIZE
            for row, length in lengths.items()
        }
        all_changed = set()
        for old, new in zip(before, cache_bytes(step), strict=True):
            changed = (old != new).view(NUM_PAGES * PAGE_SIZE, -1).any(dim=1).nonzero().flatten()
            all_changed |= set(changed.tolist())
        assert all_changed == written


def test_an_unused_row_whose_length_was_incremented_reads_no_page():
    """FR-26: in-graph increments turn length 0 into 1 while the table still says -1."""
    step = make_step(Fp8CacheBackend())
    lengths = {0: 5, 2: 9}
    expected = step.run(live_rows(lengths)).clone()
    before = cache_bytes(step)
    step.inputs.cache_seqlens[[1, 3]] += 1
    with torch.inference_mode():
        logits = step._logits(ROWS)
    assert torch.equal(logits, expected)
    assert same_bytes(before, cache_bytes(step))


def test_the_last_live_row_decides_how_many_rows_run():
    step = make_step(TensorOnlyBackend(torch.float32), rows=(1, 2, ROWS), capture=log_capture)
    assert [len(step.run(live_rows({row: 6}))) for row in range(ROWS)] == [1, 2, 4, 4]
    assert step.replays == ROWS


@pytest.mark.parametrize("rows", [(), (0, 2), (2, 1), (2, 2)])
def test_rows_must_ascend(rows):
    with pytest.raises(ValueError, match="rows must be ascending and at least 1; got"):
        make_step(Fp8CacheBackend(), rows=rows)


@pytest.mark.parametrize("row", [None, -1, ROWS])
def test_live_rows_must_be_rows_of_the_step(row):
    live = {} if row is None else {row: DecodeRow(0, 0, [0])}
    with pytest.raises(ValueError, match="live must name rows between 0 and 3, at least one; got"):
        make_step(Fp8CacheBackend()).run(live)


def test_what_cannot_be_captured_is_named(monkeypatch):
    decoder = small_decoder()
    assert graph_obstacle(decoder, TensorOnlyBackend(), 4) == "the model is on cpu"
    monkeypatch.setattr(Decoder, "device", property(lambda self: torch.device("cuda")))
    assert "stage 1 reads lengths on the host" in graph_obstacle(decoder, Fp8CacheBackend(), 4)
    assert graph_obstacle(decoder, TensorOnlyBackend(), BATCHED_EXPERTS_MAX_ROWS) is None
    beyond = BATCHED_EXPERTS_MAX_ROWS + 1
    assert "129 rows are more than the 128" in graph_obstacle(decoder, TensorOnlyBackend(), beyond)


def test_a_dense_model_never_routes_on_the_host():
    dense = random_decoder(tiny_config(num_hidden_layers=2, first_k_dense_replace=2))
    assert not routes_on_the_host(dense, 1000)
    assert routes_on_the_host(small_decoder(), BATCHED_EXPERTS_MAX_ROWS + 1)


def published_geometry() -> Decoder:
    """A tiny model on the GPU with the widths that the kernels serve."""
    config = tiny_config(
        **ALIGNED,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        hidden_size=256,
        q_lora_rank=64,
        max_position_embeddings=8192,
    )
    return random_decoder(config, dtype=torch.bfloat16).to("cuda")


@pytest.mark.gpu
@torch.inference_mode()
def test_graph_replays_equal_eager_steps_on_the_gpu():
    """FR-25, FR-27: captured at length 0; lengths 1 to 4096, rows that come and go."""
    from stage3_dataflow.triton_backend import FusedBackend

    decoder, page_size, columns, rows = published_geometry(), 64, 64, 4
    config, num_pages = decoder.config, rows * columns
    assert graph_obstacle(decoder, FusedBackend(), rows) is None
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).view(rows, -1)
    steps = []
    for capture in (None, CudaGraphCapture(decoder.device)):
        backend = FusedBackend()
        cache = backend.make_cache(config, num_pages, page_size, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        for layer in cache:
            latents, ropes = (
                torch.randn(num_pages * page_size, width, generator=generator, device="cuda")
                for width in (config.kv_lora_rank, config.qk_rope_head_dim)
            )
            slots = torch.arange(num_pages * page_size, device="cuda")
            backend.append(latents.bfloat16(), ropes.bfloat16(), layer, slots)
        steps.append(
            DecodeStep(decoder, backend, cache, rows=[rows], max_pages=columns, capture=capture)
        )
    eager, replayed = steps
    for lengths in (
        {0: 1},
        {0: 64, 1: 1, 2: 4096, 3: 65},
        {3: 66},
        {0: 65, 2: 4095},
        {0: 1, 1: 63, 2: 128, 3: 4096},
    ):
        live = {
            row: DecodeRow(row + 5, length - 1, order[row, : -(-length // page_size)].tolist())
            for row, length in lengths.items()
        }
        expected, got = eager.run(live), replayed.run(live)
        assert bool(got.isfinite().all())
        assert torch.equal(got[list(lengths)], expected[list(lengths)])
        for ours, theirs in zip(eager.cache, replayed.cache, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                assert torch.equal(as_bytes(x), as_bytes(y))
    assert (eager.replays, replayed.replays) == (0, 5)
