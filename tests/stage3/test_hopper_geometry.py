"""What the Hopper kernel takes, its messages to the TMA, its grids and merges; no GPU needed."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.quantize import QuantizedRows
from stage3_dataflow import DecodeWorkspace
from stage3_dataflow.kernels import hopper_decode, hopper_merge
from stage3_dataflow.kernels import launch as launchers
from stage3_dataflow.kernels.hopper_merge import merge_grid

pytestmark = pytest.mark.stage3


def call(page_size=64, *, batch=2, s_q=1, heads=16, latent=512, rope=64, pages=5):
    """Tensors of a call, by the names of `why_geometry_unsupported`."""
    return {
        "query_codes": torch.zeros(batch, s_q, heads, latent).to(torch.float8_e4m3fn),
        "query_scale": torch.zeros(batch, s_q, heads),
        "query_rope": torch.zeros(batch, s_q, heads, rope, dtype=torch.bfloat16),
        "codes": torch.zeros(pages, page_size, latent).to(torch.float8_e4m3fn),
        "scale": torch.zeros(pages, page_size),
        "rope": torch.zeros(pages, page_size, rope, dtype=torch.bfloat16),
        "block_table": torch.zeros(batch, 3, dtype=torch.int32),
        "out": torch.zeros(batch, s_q, heads, latent, dtype=torch.bfloat16),
        "lse": torch.zeros(batch, s_q, heads),
    }


def why(tensors, *, causal=True):
    parts = {name: hopper_decode.geometry(tensor) for name, tensor in tensors.items()}
    return hopper_decode.why_geometry_unsupported(causal, **parts)


@pytest.mark.parametrize("block_rows", [16, 32, 64])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_every_tma_message_ends_where_the_next_may_begin(page_size, block_rows):
    """A message's destination in shared memory is a multiple of 128 bytes; boxes lie in a row."""
    tensors = call(page_size)
    names = ("query_codes", "query_rope", "codes", "scale", "rope")
    parts = (hopper_decode.geometry(tensors[name]) for name in names)
    tiles = hopper_decode.tile_descriptors(block_rows, *parts)
    assert (tiles.scale is None) == (page_size * 4 < 128)
    for box in (tiles.query_codes, tiles.query_rope):
        assert box.block_shape[0] == block_rows
    for tile in filter(None, tiles):
        assert math.prod(tile.block_shape) * tile.base.dtype.itemsize % 128 == 0


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_takes_layers_of_one_allocation(page_size):
    """A view of one layer: the rows between its pages are described, with the pages' distance."""
    tensors = call(page_size)
    tensors |= {
        name: torch.stack((tensors[name].view(torch.uint8),) * 3, dim=1)[:, 1].view(
            tensors[name].dtype
        )
        for name in ("codes", "scale", "rope")
    }
    assert why(tensors) is None
    for name in ("codes", "scale", "rope"):
        plane = hopper_decode.geometry(tensors[name])
        assert plane.rows_per_page == 3 * page_size
        last = tensors[name][-1, -1:]
        distance = (last.data_ptr() - tensors[name].data_ptr()) // plane.dtype.itemsize
        assert (plane.rows - 1) * plane.strides[1] == distance


def shifted(tensor):
    """Move the same values four bytes away from a 16-byte boundary."""
    step = 4 // tensor.element_size()
    raw = torch.zeros(tensor.numel() + step).to(tensor.dtype)
    return raw[step:].view(tensor.shape)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: call(48), "page_size is 48"),
        (lambda t: call(latent=256), "are 256 and 64"),
        (lambda t: call(s_q=66), "s_q is 66"),
        (lambda t: t | {"query_codes": shifted(t["query_codes"])}, "query.codes is not contiguous"),
        (lambda t: t | {"out": t["out"].mT.contiguous().mT}, "out is not contiguous"),
        (lambda t: t | {"block_table": t["block_table"].T.contiguous().T}, "a row of block_table"),
        (lambda t: t | {"rope": shifted(t["rope"])}, "cache.rope"),
        (lambda t: t | {"scale": t["scale"].T.contiguous().T}, "cache.scale"),
    ],
)
def test_names_what_it_refuses(change, reason):
    assert why(call()) is None
    assert reason in why(change(call()))


@pytest.mark.parametrize(
    ("batch", "heads", "splits", "grid"),
    [
        (12, 16, 1, (1, 1, 12)),  # an item for each processor
        (2, 100, 3, (2, 3, 2)),
        (13, 16, 1, (12,)),  # more: programs stay, and take up one after the other
        (1, 100, 7, (12,)),  # cut: in an order
        (4, 16, 4, (12,)),
    ],
)
def test_programs_stay_where_there_are_more_items_than_processors(
    monkeypatch, batch, heads, splits, grid
):
    launches = []

    def record(kernel, grid, arguments, constants, **options):
        named = dict(zip(kernel.arg_names, (*arguments, *constants.values()), strict=True))
        launches.append((kernel.__name__, grid, named, options))

    for module in (hopper_decode, hopper_merge, launchers):
        monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr(hopper_decode, "multiprocessors", lambda device: 12)
    parts = call(batch=batch, heads=heads)
    hopper_decode.launch_hopper_decode(
        QuantizedRows(*(parts[f"query_{name}"] for name in ("codes", "scale", "rope"))),
        LatentPages(parts["codes"], parts["scale"], parts["rope"]),
        parts["block_table"],
        torch.zeros(batch, dtype=torch.int32),
        1.0,
        causal=True,
        split_rule=(64, splits),
        out=parts["out"],
        lse=parts["lse"],
        workspace=DecodeWorkspace("cpu"),
        num_splits_grid=splits,
    )
    stay = len(grid) == 1
    ordered = stay and splits > 1
    names = ["longest_first_kernel"] * ordered + ["hopper_decode_kernel"]
    names += ["hopper_combine_kernel"] * (splits > 1)
    assert [name for name, *_ in launches] == names
    _, found, named, options = launches[ordered]
    assert found == grid
    assert named["MANY"] == (named["counter"] is not None) == stay
    assert (named["order"] is not None) == options["launch_pdl"] == ordered
    tiles = -(-heads // 64)
    assert (named["tiles"], named["rows"]) == (tiles, heads)
    assert named["number"] == tiles * splits * batch
    if ordered:
        order = launches[0][2]
        assert order["order_ptr"] is named["order"]
        assert len(order["order_ptr"]) >= 1 + batch * splits
        assert order["counter_ptr"] is named["counter"]
        shared = ("capacity", "min_tokens", "max_splits")
        assert [order[name] for name in shared] == [named[name] for name in shared]
        assert (order["batch"], order["grid_splits"]) == (batch, splits)


@pytest.mark.parametrize(
    ("batch", "splits", "rows", "grid"),
    [
        (16, 8, 16, (8, 16, (8, 2, 16))),  # few rows: two to a program, not eight
        (32, 4, 64, (4, 64, (4, 2, 32))),
        (1, 64, 128, (64, 64, (128, 2, 1))),
        (1, 64, 16, (64, 64, (16, 2, 1))),  # a program has at least one row's partials
        (128, 200, 7, (128, 64, (7, 2, 128))),
    ],
)
def test_merges_are_cut_into_enough_programs(batch, splits, rows, grid):
    """(splits added up side by side, partial rows fetched at a time, (groups, halves, batch))."""
    assert merge_grid(batch, splits, rows) == grid
