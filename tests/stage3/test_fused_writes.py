"""The write kernels give the bytes of the unfused chain: norm, rotate, quantise, align, write.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stage0_reference.latent_cache import Bf16LatentPages, allocate_pages
from stage0_reference.model_config import RopeConfig
from stage0_reference.rope import RotaryEmbedding, Rotation, apply_rotary
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.quantize import dequantize_rows, quantize_rows
from stage3_dataflow import append_kv, fused_k_append, fused_q_quant, quantize_q
from stage3_dataflow.write_references import fused_k_append_reference, fused_q_quant_reference
from tests.bounds import (
    assert_within,
    quantization_error,
    rms_norm_error,
)
from tests.stage3.cached_requests import (
    FORMATS,
    as_bytes,
    assert_same_bits,
    meets_nan,
    poison,
)
from tests.strategies import (
    KERNEL_DTYPES,
    LAYOUTS,
    draw_values,
    layouts,
    regimes,
    seeds,
    with_layout,
)

pytestmark = pytest.mark.stage3

formats = st.sampled_from(FORMATS)
latents = st.sampled_from((32, 64))
ropes = st.sampled_from((0, 16, 32))
dtypes = st.sampled_from(KERNEL_DTYPES)
rotations = st.sampled_from((None, "halves", "interleaved"))

ROPE_CONFIG = RopeConfig(theta=10000.0)


def rotation_at(positions, rope):
    return RotaryEmbedding(ROPE_CONFIG, rope).rotation(positions)


def to_device(device, *parts):
    return [part if part is None else part.to(device) for part in parts]


def moved(rotation, device):
    return rotation and Rotation(*(part.to(device) for part in rotation))


def pools(fp8, pages, page_size, width, rope):
    """Two pools of equal, recognisable bytes."""
    allocate = allocate_latent_pages if fp8 else allocate_pages
    both = [allocate(pages, page_size, width, rope) for _ in range(2)]
    for pool in both:
        for byte, plane in zip((0x11, 0x22, 0x33), pool, strict=False):
            plane.view(torch.uint8).fill_(byte)
    return both


def assert_same_planes(pool, expected):
    for name, one, other in zip(type(pool)._fields, pool, expected, strict=True):
        differ = as_bytes(one) != as_bytes(other)
        assert not bool(differ.any()), (name, differ.nonzero()[:5].flatten().tolist())


# The query


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
    width=latents,
    rope=ropes,
    dtype=dtypes,
    regime=regimes(),
    rotated=rotations,
    scale_format=formats,
    layout=layouts(),
    seed=seeds(),
)
@settings(max_examples=25)
def test_quantised_queries_are_the_bytes_of_the_unfused_chain(
    device, shape, width, rope, dtype, regime, rotated, scale_format, layout, seed
):
    generator = torch.Generator().manual_seed(seed)
    q_latent = draw_values((*shape, width), regime, generator, dtype)
    q_rope = draw_values((*shape, rope), "many binades", generator, dtype)
    rotation = None
    if rotated:
        rotation = rotation_at(torch.randint(0, 20000, shape[:2], generator=generator), rope)
    choices = {"interleaved": rotated == "interleaved", "scale_format": scale_format}
    expected = fused_q_quant_reference(q_latent, q_rope, rotation, **choices)
    result = fused_q_quant(
        with_layout(q_latent.to(device), layout),
        with_layout(q_rope.to(device), layout),
        moved(rotation, device),
        **choices,
    )
    assert_same_bits((part.cpu() for part in result), expected)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_queries_of_a_published_width(device, scale_format):
    generator = torch.Generator().manual_seed(0)
    q_latent = torch.randn(1, 2, 3, 512, generator=generator).bfloat16()
    q_rope = torch.randn(1, 2, 3, 64, generator=generator).bfloat16()
    rotation = rotation_at(torch.tensor([[15962, 15963]]), 64)  # FR-05
    choices = {"interleaved": True, "scale_format": scale_format}
    expected = fused_q_quant_reference(q_latent, q_rope, rotation, **choices)
    result = fused_q_quant(
        q_latent.to(device), q_rope.to(device), moved(rotation, device), **choices
    )
    assert_same_bits((part.cpu() for part in result), expected)


def test_both_layouts_of_pairs_rotate_alike(device):
    """FR-04: q = [1, 2, ...] as adjacent pairs, and the same pairs as halves."""
    interleaved = torch.arange(1.0, 17.0).view(1, 1, 1, 16)
    halves = torch.cat((interleaved[..., 0::2], interleaved[..., 1::2]), -1)
    rotation = moved(rotation_at(torch.tensor([[3]]), 16), device)
    q_latent = torch.ones(1, 1, 1, 32, device=device)
    one = fused_q_quant(q_latent, interleaved.to(device), rotation, interleaved=True)
    other = fused_q_quant(q_latent, halves.to(device), rotation)
    assert_same_bits(one, other)
    turned = apply_rotary(halves, rotation_at(torch.tensor([[[3]]]), 16), interleaved=False)
    rope = one.rope.cpu().float() * one.scale.cpu()[..., None]
    assert_within(rope, turned, 2.0**-8 * turned.abs())


# The append


@given(
    slots=st.lists(st.one_of(st.integers(0, 20), st.integers(-5, -1)), max_size=9, unique=True),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
    width=latents,
    rope=ropes,
    dtype=dtypes,
    regime=regimes(),
    rotated=rotations,
    scale_format=st.sampled_from((*FORMATS, None)),
    layout=st.sampled_from([layout for layout in LAYOUTS if layout != "transposed"]),
    seed=seeds(),
)
@example([4, -1, 0], torch.int64, 32, 16, torch.bfloat16, "normal", None, "amax", "sliced", 0)
@settings(max_examples=25)
def test_appended_tokens_are_the_bytes_of_the_unfused_chain(
    device, slots, slot_dtype, width, rope, dtype, regime, rotated, scale_format, layout, seed
):
    """All planes whole, so a slot that was not asked for keeps its bytes. FR-26: none for -1.

    `scale_format` None is a BF16 cache.
    """
    generator = torch.Generator().manual_seed(seed)
    c_kv = draw_values((len(slots), width), regime, generator, dtype)
    k_rope = draw_values((len(slots), rope), "many binades", generator, dtype)
    rotation = None
    if rotated:
        rotation = rotation_at(torch.randint(0, 20000, (len(slots),), generator=generator), rope)
    choices = {
        "interleaved": rotated == "interleaved",
        "scale_format": scale_format or "pow2",
    }
    expected, start = pools(scale_format is not None, 3, 7, width, rope)
    slot_mapping = torch.tensor(slots, dtype=slot_dtype)
    fused_k_append_reference(c_kv, k_rope, expected, slot_mapping, rotation=rotation, **choices)
    pool = type(start)(*to_device(device, *start))
    fused_k_append(
        with_layout(c_kv.to(device), layout),
        with_layout(k_rope.to(device), layout),
        pool,
        slot_mapping.to(device),
        rotation=moved(rotation, device),
        **choices,
    )
    assert_same_planes(pool, expected)


@given(
    width=latents,
    dtype=dtypes,
    regime=st.sampled_from(("normal", "one huge channel", "zero rows")),
    eps=st.sampled_from((1e-6, 1e-5)),
    fp8=st.booleans(),
    scale_format=formats,
    seed=seeds(),
)
@settings(max_examples=20)
def test_normed_tokens_are_within_the_norms_rounding(
    device, width, dtype, regime, eps, fp8, scale_format, seed
):
    """A sum of squares in another order changes bits, so bytes may differ: by a rounding at most.

    What is written stands for the exact norm within the norm's own error (`rms_norm_error`) and the
    format's. A scale follows the largest element: its error is within that element's.
    """
    generator = torch.Generator().manual_seed(seed)
    c_kv = draw_values((6, width), regime, generator, dtype)
    weight = 1.0 + 0.3 * torch.randn(width, generator=generator)
    k_rope = draw_values((6, 16), "normal", generator, dtype)
    (pool,) = pools(fp8, 1, 8, width, 16)[:1]
    pool = type(pool)(*to_device(device, *pool))
    fused_k_append(
        *to_device(device, c_kv, k_rope),
        pool,
        torch.arange(6, device=device),
        norm_weight=weight.to(device, dtype),
        norm_eps=eps,
        scale_format=scale_format,
    )
    narrow = weight.to(dtype).double()
    wide = c_kv.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * narrow
    error = rms_norm_error(c_kv, weight.to(dtype), eps, dtype)
    written = type(pool)(*(plane.cpu()[0, :6] for plane in pool))
    if not fp8:
        off = error + 2.0**-8 * (exact.abs() + error)
        assert_within(written.c_kv, exact, off)
        assert_same_bits([written.k_rope], [k_rope.bfloat16()])
        return
    latent = written.codes.double() * written.scale.double()[:, None]
    # Within `error` of the exact norm lies what was quantised, with the scale that was written.
    largest = exact.abs() + error
    quantised = quantization_error(
        largest.float() * (1 + 2.0**-23),
        k_rope,
        written.scale,
        exact_scaling=scale_format == "pow2",
    )
    assert_within(latent, exact, error + quantised.c_kv)
    smallest = quantize_rows((exact.abs() - error).clamp(min=0).float(), k_rope, scale_format).scale
    greatest = quantize_rows((largest * (1 + 2.0**-23)).float(), k_rope, scale_format).scale
    assert bool((written.scale >= smallest * (1 - 2.0**-23)).all())
    assert bool((written.scale <= greatest).all())
    rope = written.rope.double() * written.scale.double()[:, None]
    assert_within(rope, k_rope, quantised.k_rope)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_norm_and_rotation_in_one_launch_at_a_published_width(device, fp8, interleaved):
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.randn(5, 512, generator=generator).bfloat16()
    k_rope = torch.randn(5, 64, generator=generator).bfloat16()
    weight = (1 + 0.1 * torch.randn(512, generator=generator)).bfloat16()
    rotation = rotation_at(torch.tensor([0, 1, 15962, 7, 100]), 64)
    slots = torch.tensor([3, -1, 0, 70, 64])
    start, expected = pools(fp8, 2, 64, 512, 64)
    pool = type(start)(*to_device(device, *start))
    fused_k_append(
        *to_device(device, c_kv, k_rope),
        pool,
        slots.to(device),
        norm_weight=weight.to(device),
        rotation=moved(rotation, device),
        interleaved=interleaved,
    )
    # The rotary part does not pass the norm: its bytes are the chain's where the scale is.
    turned = apply_rotary(k_rope, rotation, interleaved=interleaved)
    exact = c_kv.double() / (c_kv.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = exact * weight.double()
    error = rms_norm_error(c_kv, weight, 1e-6, torch.bfloat16)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        own = [plane.cpu()[slot // 64, slot % 64] for plane in pool]
        if fp8:
            latent = own[0].double() * own[1].double()
            off = error[token] + torch.maximum(
                2.0**-4 * (exact[token].abs() + error[token]), 2.0**-10 * own[1].double()
            )
            assert torch.equal(own[2], (turned[token].float() / own[1]).bfloat16())
        else:
            latent, off = own[0], error[token] * (1 + 2.0**-8) + 2.0**-8 * exact[token].abs()
            assert torch.equal(own[1], turned[token])
        assert_within(latent, exact[token], off)
    untouched = torch.ones(2, 64, dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    for plane, before in zip(pool, expected, strict=True):
        assert_same_bits([plane.cpu()[untouched]], [before[untouched]])


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("view", ["one layer of many", "token by token"])
def test_planes_that_are_views(device, fp8, view):  # FR-09
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.randn(9, 32, generator=generator)
    k_rope = torch.randn(9, 16, generator=generator)
    slots = torch.randperm(20, generator=generator)[:9]
    expected, start = pools(fp8, 4, 5, 32, 16)
    fused_k_append_reference(c_kv, k_rope, expected, slots)
    buffers, planes = [], []
    for plane in start:
        own = plane.view(torch.uint8) if plane.element_size() == 1 else plane
        if view == "one layer of many":
            buffer = torch.stack((own, own, own), 1).to(device)
            planes.append(buffer.view(plane.dtype)[:, 1])
            buffers.append(buffer)
        else:
            planes.append(own.transpose(0, 1).contiguous().transpose(0, 1).to(device))
            planes[-1] = planes[-1].view(plane.dtype)
    pool = type(start)(*planes)
    fused_k_append(*to_device(device, c_kv, k_rope), pool, slots.to(device))
    assert_same_planes(pool, expected)
    for buffer, plane in zip(buffers, start, strict=False):  # the layers beside it
        for layer in (0, 2):
            assert torch.equal(as_bytes(buffer[:, layer]), as_bytes(plane))


@pytest.mark.parametrize("plane", LatentPages._fields)
def test_writing_past_2_to_31(device, plane):  # FR-10
    from tests.stage3.test_mla_decode import far_view

    cache = allocate_latent_pages(34, 4, 32, 16, device=device)
    poison(cache)
    far = far_view(getattr(cache, plane), 34)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 32, generator=generator), torch.randn(2, 16, generator=generator)
    slots = torch.tensor([33 * 4 + 3, 33 * 4])
    append_kv(*to_device(device, *rows), cache, slots.to(device))
    append_kv(*to_device(device, *rows), cache._replace(**{plane: far}), slots.to(device))
    for at in (0, 3):
        assert_same_bits([far[33, at]], [getattr(cache, plane)[33, at]])


def test_no_token_at_all(device):
    (pool, expected) = pools(True, 1, 4, 32, 16)
    pool = LatentPages(*to_device(device, *pool))
    append_kv(
        torch.zeros(0, 32, device=device),
        torch.zeros(0, 16, device=device),
        pool,
        torch.zeros(0, dtype=torch.int64, device=device),
    )
    assert_same_planes(pool, expected)


@pytest.mark.parametrize("slot", [12, 2**31 - 1, 2**40, -(2**40)])
def test_slots_past_the_pool_write_nothing_on_the_device(device, slot):
    """The entry point refuses them on a CPU; a GPU alone could see them, and skips them."""
    from stage3_dataflow.kernels.launch import launch_fused_k_append

    start, expected = pools(True, 3, 4, 32, 16)
    rows = torch.ones(2, 32), torch.ones(2, 16)
    fused_k_append_reference(*(row[:1] for row in rows), expected, torch.tensor([5]))
    pool = LatentPages(*to_device(device, *start))
    launch_fused_k_append(
        *to_device(device, *rows),
        pool,
        torch.tensor([5, slot], device=device),
        None,
        1e-6,
        None,
        interleaved=False,
        pow2=True,
    )
    assert_same_planes(pool, expected)


# Rows that are not numbers


@meets_nan
@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_nan_stays_in_its_row_and_infinities_are_the_largest_numbers(device, scale_format):
    c_kv, k_rope = torch.ones(7, 32), torch.ones(7, 16)
    c_kv[1, 3] = math.nan
    k_rope[2, 5] = math.nan
    c_kv[3, 0], c_kv[4, 31] = math.inf, -math.inf
    k_rope[5, 0], k_rope[5, 15] = math.inf, -math.inf
    start, expected = pools(True, 1, 8, 32, 16)
    pool = LatentPages(*to_device(device, *start))
    slots = torch.arange(7)
    fused_k_append_reference(c_kv, k_rope, expected, slots, scale_format=scale_format)
    append_kv(*to_device(device, c_kv, k_rope), pool, slots.to(device), scale_format=scale_format)
    assert bool(pool.scale[0, 1].isnan())
    rope_of_nan = pool.rope[0, 2].cpu()
    assert rope_of_nan.isnan().tolist() == [index == 5 for index in range(16)]
    numbers = [0, 3, 4, 5, 6]
    for plane, wanted in zip(pool, expected, strict=True):
        assert_same_bits([plane.cpu()[0, numbers]], [wanted[0, numbers]])
    rows = dequantize_rows(type(quantize_rows(c_kv, k_rope))(*(p.cpu()[0] for p in pool)))
    assert bool(rows.c_kv[numbers].isfinite().all())

    query = quantize_q(
        c_kv.view(7, 1, 1, 32).to(device),
        k_rope.view(7, 1, 1, 16).to(device),
        scale_format=scale_format,
    )
    assert_same_bits(
        (part.cpu()[numbers, 0, 0] for part in query), (plane[0, numbers] for plane in expected)
    )


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_dead_latent_keeps_its_rotary_key(device, scale_format):  # FR-13
    start, _ = pools(True, 1, 3, 32, 16)
    pool = LatentPages(*to_device(device, *start))
    c_kv, k_rope = torch.zeros(3, 32), torch.full((3, 16), 2.0**16)
    c_kv[0] = c_kv[2] = 1.0
    append_kv(
        *to_device(device, c_kv, k_rope),
        pool,
        torch.arange(3, device=device),
        scale_format=scale_format,
    )
    assert not bool((as_bytes(pool.codes[0, 1]) & 0x7F).any())
    assert 0.0 < float(pool.scale[0, 1]) < math.inf
    assert torch.equal(
        pool.rope[0, 1].cpu().float() * float(pool.scale[0, 1]), torch.full((16,), 2.0**16)
    )


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_a_bf16_cache_gets_the_rounded_rows(device, dtype):
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.randn(4, 32, generator=generator).to(dtype)
    k_rope = torch.randn(4, 16, generator=generator).to(dtype)
    start, _ = pools(False, 1, 4, 32, 16)
    pool = Bf16LatentPages(*to_device(device, *start))
    fused_k_append(*to_device(device, c_kv, k_rope), pool, torch.arange(4, device=device))
    assert_same_bits((plane.cpu()[0] for plane in pool), (c_kv.bfloat16(), k_rope.bfloat16()))
