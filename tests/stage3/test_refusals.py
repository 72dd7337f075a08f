"""Each documented refusal names its argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

from stage0_reference.latent_cache import Bf16LatentPages, allocate_pages
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import LatentPages, allocate_latent_pages
from stage1_quant.quantize import QuantizedRows, quantize_q
from stage3_dataflow import (
    SplitRule,
    append_kv,
    decode_quantized,
    fetch_dequant,
    fused_k_append,
    fused_q_quant,
    mla_decode,
    use_path,
    which_path,
)
from stage3_dataflow.arguments import AcceptedGeometries, geometry_of
from tests.stage3.cached_requests import as_bytes

pytestmark = [pytest.mark.stage3, pytest.mark.unchecked]

WIDTH, ROPE = 32, 16
F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


@pytest.fixture
def decode(device):
    """Arguments of a call that runs, and has run: what is known of it excuses nothing else."""
    cache = allocate_latent_pages(4, 16, WIDTH, ROPE, device=device)
    append_kv(
        torch.ones(20, WIDTH, device=device),
        torch.ones(20, ROPE, device=device),
        cache,
        torch.arange(20, device=device),
    )
    arguments = {
        "q_latent": torch.ones(2, 3, 2, WIDTH, device=device),
        "q_rope": torch.ones(2, 3, 2, ROPE, device=device),
        "cache": cache,
        "block_table": torch.tensor([[0, 1], [1, 0]], dtype=I32, device=device),
        "cache_seqlens": torch.tensor([20, 4], dtype=I32, device=device),
        "softmax_scale": 0.1,
    }
    out, _lse = mla_decode(**arguments)
    lse = torch.empty(2, 3, 2, device=device)
    assert torch.equal(mla_decode(**arguments, out=torch.empty_like(out), lse=lse).out, out)
    return arguments


def plane(name, change):
    return lambda call: call["cache"]._replace(**{name: change(getattr(call["cache"], name))})


DECODE_REFUSALS = {
    "q_latent of float64": (
        {"q_latent": lambda call: call["q_latent"].double()},
        TypeError,
        r"q_latent must be bfloat16 or float16 or float32 \[batch, s_q, heads, kv_lora_rank\]; "
        r"got float64 \[2, 3, 2, 32\]",
    ),
    "q_latent that is no tensor": ({"q_latent": lambda call: 3}, TypeError, "q_latent .* got int"),
    "q_latent of three axes": (
        {"q_latent": lambda call: call["q_latent"][0]},
        ValueError,
        r"q_latent must be .* got float32 \[3, 2, 32\]",
    ),
    "q_latent with a strided last axis": (
        {"q_latent": lambda call: call["q_latent"].repeat(1, 1, 1, 2)[..., ::2]},
        ValueError,
        r"q_latent must be .* contiguous last axis; got .*strides.*Use q_latent.contiguous\(\)",
    ),
    "q_rope of other heads": (
        {"q_rope": lambda call: call["q_rope"][:, :, :1]},
        ValueError,
        r"q_rope must be .*\[2, 3, 2, qk_rope_head_dim\].*; got float32 \[2, 3, 1, 16\]",
    ),
    "no query token": (
        {name: lambda call, name=name: call[name][:, :0] for name in ("q_latent", "q_rope")},
        ValueError,
        "q_latent must have s_q of at least 1",
    ),
    "no head": (
        {name: lambda call, name=name: call[name][:, :, :0] for name in ("q_latent", "q_rope")},
        ValueError,
        "q_latent must have heads of at least 1",
    ),
    "codes of bf16": (
        {"cache": plane("codes", lambda codes: codes.to(BF16))},
        TypeError,
        r"cache.codes must be float8_e4m3fn \[num_pages, page_size, 32\]",
    ),
    "codes of another width": (
        {"cache": plane("codes", lambda codes: codes[..., :16])},
        ValueError,
        r"cache.codes must be .* 32\].* got float8_e4m3fn \[4, 16, 16\]",
    ),
    "a scale plane of fewer pages": (
        {"cache": plane("scale", lambda scale: scale[:3])},
        ValueError,
        r"cache.scale must be float32 \[4, 16\].*; got float32 \[3, 16\]",
    ),
    "rope of float32": (
        {"cache": plane("rope", lambda rope: rope.float())},
        TypeError,
        r"cache.rope must be bfloat16 \[4, 16, 16\]",
    ),
    "four planes": (
        {"cache": lambda call: (*call["cache"], call["cache"][0])},
        ValueError,
        r"cache must be LatentPages \(codes, scale, rope\) or Bf16LatentPages .*; got 4 planes",
    ),
    "pages of no token": (
        {"cache": lambda call: LatentPages(*(part[:, :0] for part in call["cache"]))},
        ValueError,
        "page_size of at least 1; got 0",
    ),
    "block_table of int64": (
        {"block_table": lambda call: call["block_table"].long()},
        TypeError,
        r"block_table must be int32 \[2, max_pages\].*Use block_table.to\(torch.int32\)",
    ),
    "block_table of another batch": (
        {"block_table": lambda call: call["block_table"][:1]},
        ValueError,
        r"block_table must be int32 \[2, max_pages\].*; got int32 \[1, 2\]",
    ),
    "cache_seqlens of int64": (
        {"cache_seqlens": lambda call: call["cache_seqlens"].long()},
        TypeError,
        r"cache_seqlens must be int32 \[2\].*Use cache_seqlens.to\(torch.int32\)",
    ),
    "cache_seqlens of another batch": (
        {"cache_seqlens": lambda call: call["cache_seqlens"][:1]},
        ValueError,
        r"cache_seqlens must be int32 \[2\]",
    ),
    "a rule that cuts nothing": (
        {"split_rule": lambda call: SplitRule(0, 1)},
        ValueError,
        "split_rule.min_tokens must be at least 1; got 0",
    ),
    "an unknown p_format": (
        {"p_format": lambda call: "e5m2"},
        ValueError,
        "p_format must be e4m3, bf16 or None; got 'e5m2'",
    ),
    "an unknown kernel": (
        {"kernel": lambda call: "fast"},
        ValueError,
        "kernel must be hopper, portable or None; got 'fast'",
    ),
    "an unknown scale_format": (
        {"scale_format": lambda call: "e8m0"},
        ValueError,
        "scale_format must be one of amax, pow2; got 'e8m0'",
    ),
    "the Hopper kernel for such widths": (
        {"kernel": lambda call: "hopper"},
        NotImplementedError,
        "kernel must be portable or None for this call, since .*; got 'hopper'",
    ),
    "out of another dtype": (
        {"out": lambda call: torch.empty_like(call["q_latent"], dtype=BF16)},
        TypeError,
        r"out must be float32 \[2, 3, 2, 32\].*; got bfloat16",
    ),
    "out of another shape": (
        {"out": lambda call: torch.empty_like(call["q_latent"])[:1]},
        ValueError,
        r"out must be float32 \[2, 3, 2, 32\].*; got float32 \[1, 3, 2, 32\]",
    ),
    "out with gaps": (
        {"out": lambda call: torch.empty_like(call["q_latent"]).repeat(1, 2, 1, 1)[:, ::2]},
        ValueError,
        "out must be contiguous; got .* strides",
    ),
    "out that is the query": (
        {"out": lambda call: call["q_latent"]},
        ValueError,
        "out may not share memory with q_latent. Pass a separate tensor",
    ),
    "lse of bf16": (
        {"lse": lambda call: torch.empty(2, 3, 2, dtype=BF16, device=call["q_latent"].device)},
        TypeError,
        r"lse must be float32 \[2, 3, 2\]",
    ),
    "lse that is part of the query": (
        {"lse": lambda call: call["q_latent"].view(-1)[:12].view(2, 3, 2)},
        ValueError,
        "lse may not share memory with q_latent",
    ),
    "lse that is a part of the scales": (
        {"lse": lambda call: call["cache"].scale.view(-1)[:12].view(2, 3, 2)},
        ValueError,
        "lse may not share memory with cache.scale",
    ),
}


@pytest.mark.parametrize("name", DECODE_REFUSALS)
def test_mla_decode_refuses(decode, name):
    changes, error, message = DECODE_REFUSALS[name]
    before = [as_bytes(part) for part in decode["cache"]]
    call = decode | {argument: change(decode) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        mla_decode(**call)
    for part, bytes_before in zip(decode["cache"], before, strict=True):
        assert torch.equal(as_bytes(part), bytes_before)


def test_the_call_that_all_these_change_runs(decode):
    assert bool(mla_decode(**decode).out.isfinite().all())


def test_out_that_lies_in_a_bf16_cache_is_refused(device):
    cache = Bf16LatentPages(*(part.fill_(0) for part in allocate_pages(4, 16, WIDTH, ROPE)))
    cache = Bf16LatentPages(*(part.to(device) for part in cache))
    query = torch.ones(1, 1, 2, WIDTH, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="out may not share memory with cache.c_kv"):
        mla_decode(
            query,
            query[..., :ROPE],
            cache,
            torch.zeros(1, 1, dtype=I32, device=device),
            torch.ones(1, dtype=I32, device=device),
            0.1,
            out=cache.c_kv[0, :2].view(1, 1, 2, WIDTH),
        )


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
def test_outputs_that_lie_in_what_is_read_are_refused(decode, name):
    decode[name] = decode[name].new_zeros(12)
    out_of = decode[name].view(F32).view(2, 3, 2)
    decode[name] = decode[name][:4].view(2, 2) if name == "block_table" else decode[name][:2]
    with pytest.raises(ValueError, match=f"lse may not share memory with {name}"):
        mla_decode(**decode, lse=out_of)


def test_lse_that_lies_in_out_is_refused(decode):
    out = torch.empty_like(decode["q_latent"])
    with pytest.raises(ValueError, match="lse may not share memory with out"):
        mla_decode(**decode, out=out, lse=out.view(-1)[:12].view(2, 3, 2))


@pytest.mark.parametrize(("width", "rope"), [(48, 16), (16, 16), (1024, 16), (32, 8), (32, 48)])
def test_widths_without_tiles_are_refused(device, width, rope):  # FR-06
    wrong = "kv_lora_rank" if width != 32 else "qk_rope_head_dim"
    cache = allocate_latent_pages(1, 16, width, rope, device=device)
    rows = torch.ones(2, width, device=device), torch.ones(2, rope, device=device)
    query = torch.ones(1, 1, 1, width, device=device), torch.ones(1, 1, 1, rope, device=device)
    table = torch.zeros(1, 1, dtype=I32, device=device)
    seqlens = torch.ones(1, dtype=I32, device=device)
    for call in (
        lambda: append_kv(*rows, cache, torch.arange(2, device=device)),
        lambda: fused_q_quant(*query),
        lambda: mla_decode(*query, cache, table, seqlens, 0.1),
        lambda: fetch_dequant(cache, table, seqlens),
    ):
        with pytest.raises(NotImplementedError, match=f"{wrong} must be .*stage2_pv_pipeline"):
            call()


def test_more_requests_than_a_grid_takes_are_refused(decode, device):
    query = torch.zeros(65536, 1, 1, WIDTH, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="q_latent must have at most 65535 requests; got 65536"):
        mla_decode(
            query,
            query[..., :ROPE],
            decode["cache"],
            torch.zeros(65536, 1, dtype=I32, device=device),
            torch.zeros(65536, dtype=I32, device=device),
            0.1,
        )


HOST_REFUSALS = {
    "a length past the table": ("cache_seqlens", [33, 4], r"cache_seqlens\[0\].* 32 .*; got 33"),
    "a negative length": ("cache_seqlens", [20, -1], r"cache_seqlens\[1\] must be between 0"),
    "a page past the pool": ("block_table", [[0, 4], [1, 0]], r"block_table\[0, 1\].* got 4"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's values are not looked at")
@pytest.mark.parametrize("name", HOST_REFUSALS)
def test_what_the_host_can_see_is_refused_there(decode, name):
    argument, values, message = HOST_REFUSALS[name]
    call = decode | {argument: torch.tensor(values, dtype=I32)}
    with pytest.raises(ValueError, match=message):
        mla_decode(**call)
    with pytest.raises(ValueError, match=message):
        fetch_dequant(call["cache"], call["block_table"], call["cache_seqlens"])


QUANTISED_REFUSALS = {
    "codes of bf16": (
        lambda query: query._replace(codes=query.codes.to(BF16)),
        TypeError,
        "query.codes must be float8_e4m3fn",
    ),
    "a scale of fewer heads": (
        lambda query: query._replace(scale=query.scale[..., :1]),
        ValueError,
        r"query.scale must be float32 \[2, 3, 2\]",
    ),
    "rope of float32": (
        lambda query: query._replace(rope=query.rope.float()),
        TypeError,
        r"query.rope must be bfloat16 \[2, 3, 2, qk_rope_head_dim\]",
    ),
}


@pytest.mark.parametrize("name", QUANTISED_REFUSALS)
def test_decode_quantized_refuses(decode, name):
    change, error, message = QUANTISED_REFUSALS[name]
    query = quantize_q(decode.pop("q_latent"), decode.pop("q_rope"))
    decode_quantized(query, **decode)
    with pytest.raises(error, match=message):
        decode_quantized(change(query), **decode)


def test_a_quantised_query_over_a_bf16_cache_is_refused(decode, device):
    query = quantize_q(decode.pop("q_latent"), decode.pop("q_rope"))
    decode["cache"] = allocate_pages(4, 16, WIDTH, ROPE, device=device)
    with pytest.raises(ValueError, match=r"cache must be LatentPages .* for a quantised query"):
        decode_quantized(query, **decode)


def test_a_quantised_querys_out_may_not_be_its_own_rope(decode):
    query = quantize_q(decode.pop("q_latent"), torch.cat((decode.pop("q_rope"),) * 2, -1))
    decode["cache"] = decode["cache"]._replace(rope=torch.cat((decode["cache"].rope,) * 2, -1))
    decode_quantized(query, **decode, out=torch.empty_like(query.rope))
    with pytest.raises(ValueError, match="out may not share memory with query.rope"):
        decode_quantized(QuantizedRows(*query), **decode, out=query.rope)


# The write side


@pytest.fixture
def append(device):
    cache = allocate_latent_pages(3, 4, WIDTH, ROPE, device=device)
    arguments = {
        "c_kv": torch.ones(3, WIDTH, device=device),
        "k_rope": torch.ones(3, ROPE, device=device),
        "cache": cache,
        "slot_mapping": torch.arange(3, device=device),
    }
    fused_k_append(**arguments)
    for byte, part in zip((0x11, 0x22, 0x33), cache, strict=True):
        part.view(torch.uint8).fill_(byte)
    return arguments


def angles(*shape):
    return lambda call: Rotation(*torch.ones(2, *shape, device=call["k_rope"].device))


APPEND_REFUSALS = {
    "c_kv of float64": (
        {"c_kv": lambda call: call["c_kv"].double()},
        TypeError,
        r"c_kv must be .* \[tokens, kv_lora_rank\].*; got float64 \[3, 32\]",
    ),
    "fewer rotary keys": (
        {"k_rope": lambda call: call["k_rope"][:1]},
        ValueError,
        r"k_rope must be .*\[3, qk_rope_head_dim\]",
    ),
    "another latent width than the cache's": (
        {"c_kv": lambda call: torch.ones(3, 64, device=call["c_kv"].device)},
        ValueError,
        r"cache.codes must be .* 64\]",
    ),
    "another rotary width than the cache's": (
        {"k_rope": lambda call: torch.ones(3, 32, device=call["c_kv"].device)},
        ValueError,
        r"cache.rope must be bfloat16 \[3, 4, 32\]",
    ),
    "slots of float": (
        {"slot_mapping": lambda call: call["slot_mapping"].float()},
        TypeError,
        r"slot_mapping must be int32 or int64 \[3\]",
    ),
    "fewer slots": (
        {"slot_mapping": lambda call: call["slot_mapping"][:2]},
        ValueError,
        r"slot_mapping must be int32 or int64 \[3\].*; got int64 \[2\]",
    ),
    "a norm of another width": (
        {"norm_weight": lambda call: torch.ones(31, device=call["c_kv"].device)},
        ValueError,
        r"norm_weight must be .*\[32\]",
    ),
    "angles of fewer tokens": (
        {"rotation": angles(2, ROPE // 2)},
        ValueError,
        r"rotation.cos must be float32 \[3, 8\]",
    ),
    "angles of the whole width": (
        {"rotation": angles(3, ROPE)},
        ValueError,
        r"rotation.cos must be float32 \[3, 8\].*; got float32 \[3, 16\]",
    ),
    "an unknown scale_format": (
        {"scale_format": lambda call: "e8m0"},
        ValueError,
        "scale_format must be one of amax, pow2",
    ),
    "three tokens whose k_rope is the cache's own": (
        {"k_rope": lambda call: call["cache"].rope[0, :3]},
        ValueError,
        "cache may not share memory with k_rope",
    ),
}


@pytest.mark.parametrize("name", APPEND_REFUSALS)
def test_fused_k_append_refuses_and_writes_nothing(append, name):
    changes, error, message = APPEND_REFUSALS[name]
    before = [as_bytes(part) for part in append["cache"]]
    call = append | {argument: change(append) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        fused_k_append(**call)
    for part, bytes_before in zip(append["cache"], before, strict=True):
        assert torch.equal(as_bytes(part), bytes_before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's values are not looked at")
def test_a_slot_past_the_pool_is_refused_where_the_host_can_see_it(append):
    before = [as_bytes(part) for part in append["cache"]]
    append["slot_mapping"][1] = 12
    with pytest.raises(ValueError, match="slot_mapping must stay below 3 pages x 4 .*got slot 12"):
        fused_k_append(**append)
    for part, bytes_before in zip(append["cache"], before, strict=True):
        assert torch.equal(as_bytes(part), bytes_before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_latent": torch.ones(2, 3, 2, 32).double()}, TypeError, "q_latent must be"),
        ({"q_rope": torch.ones(2, 3, 1, 16)}, ValueError, r"q_rope must be .*\[2, 3, 2, "),
        (
            {"rotation": Rotation(torch.ones(2, 3, 8).double(), torch.ones(2, 3, 8))},
            TypeError,
            r"rotation.cos must be float32 \[2, 3, 8\]",
        ),
        (
            {"rotation": Rotation(torch.ones(2, 3, 8), torch.ones(2, 1, 8))},
            ValueError,
            r"rotation.sin must be float32 \[2, 3, 8\].*; got float32 \[2, 1, 8\]",
        ),
        ({"scale_format": "e8m0"}, ValueError, "scale_format must be one of"),
    ],
    ids=["dtype", "heads", "angle dtype", "angle shape", "scale format"],
)
def test_fused_q_quant_refuses(changes, error, message):
    valid = {"q_latent": torch.ones(2, 3, 2, 32), "q_rope": torch.ones(2, 3, 2, 16)}
    fused_q_quant(**valid)
    with pytest.raises(error, match=message):
        fused_q_quant(**valid | changes)


# What has been accepted once


def test_a_known_geometry_is_not_checked_again(decode, monkeypatch):
    """Nor does it excuse another: each of these lets the checks run, which are made to fail."""

    def fail(*arguments, **keywords):
        raise AssertionError("checked")

    other = {
        "q_latent": decode["q_latent"].bfloat16(),
        "block_table": decode["block_table"][:, :1],
        "cache": LatentPages(*(part[1:] for part in decode["cache"])),
        "cache_seqlens": torch.ones(4, dtype=I32, device=decode["q_rope"].device)[::2],
    }
    quantize_q(decode["q_latent"].bfloat16(), decode["q_rope"])
    monkeypatch.setattr("stage3_dataflow.decode.check_tensor", fail)
    assert bool(mla_decode(**decode).out.isfinite().all())
    for name, value in other.items():
        with pytest.raises(AssertionError, match="checked"):
            mla_decode(**decode | {name: value})
    with pytest.raises(AssertionError, match="checked"):
        mla_decode(**decode | {"cache": list(decode["cache"])})


def test_what_is_known_has_bounds():
    known = AcceptedGeometries()
    tensors = [torch.empty(size) for size in range(known.MOST + 1)]
    for tensor in tensors[:-1]:
        known.add(geometry_of(tensor))
    assert all(geometry_of(tensor) in known for tensor in tensors[:-1])
    known.add(geometry_of(tensors[-1]))
    assert geometry_of(tensors[-1]) in known and geometry_of(tensors[0]) not in known


def test_what_has_no_geometry_is_never_known():
    known = AcceptedGeometries()
    one = torch.ones(1)
    for arguments in ((one, [one]), (one, 3), ((one, "e4m3"),)):
        geometry = geometry_of(*arguments)
        known.add(geometry)
        assert geometry is None and geometry not in known
    assert geometry_of(torch.ones(2), None) != geometry_of(torch.ones(2))
    assert geometry_of((torch.ones(2),)) != geometry_of(torch.ones(2))


# Reading back, and choosing a path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cache_seqlens": torch.ones(2)}, TypeError, "cache_seqlens must be int32"),
        ({"block_table": torch.zeros(1, 2, dtype=I32)}, ValueError, r"block_table .*\[2, max"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table must be int32"),
        ({"total_tokens": -1}, ValueError, "total_tokens must be at least 0; got -1"),
    ],
    ids=["lengths", "batch", "table", "total"],
)
def test_fetch_dequant_refuses(decode, device, changes, error, message):
    call = {name: decode[name] for name in ("cache", "block_table", "cache_seqlens")}
    call |= {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }
    with pytest.raises(error, match=message):
        fetch_dequant(**call)


def test_a_device_without_an_implementation_is_refused():
    with pytest.raises(NotImplementedError, match="device must be cuda or cpu; got meta"):
        which_path("meta")


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="name must be pytorch or default; got 'triton'"):
        with use_path("triton"):
            raise AssertionError("entered")


def test_paths_say_what_runs_and_why(device):
    path = which_path(device)
    assert path.name == ("triton" if device.type == "cuda" else "interpreter")
    assert path.reason
    with use_path("pytorch"):
        assert which_path(device).name == "pytorch"
        with use_path("default"):
            assert which_path(device).name == path.name
    assert which_path(device) == path
