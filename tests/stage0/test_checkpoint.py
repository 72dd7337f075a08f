"""Checkpoints: exact numbers, every problem in one error, and nothing touched when refused.

Files are written by the module's own writer where they are well-formed, and byte by byte where the
point is that nobody should have written them.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stage0_reference.checkpoint import (
    CheckpointError,
    MisShaped,
    dequantize_block_fp8,
    load_safetensors,
    save_safetensors,
)
from stage0_reference.decoder import Decoder
from stage0_reference.model_config import ModelConfig
from tests.model_factory import config_fields

pytestmark = pytest.mark.stage0

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INDEX = "model.safetensors.index.json"
SENTINEL = -77.0
SLACK = 4 * 2**20
"""Bytes that the process's memory may grow by beside tensors."""


def random_codes(shape: Sequence[int], seed: int = 0, *, nan: bool = False) -> Tensor:
    """Draw e4m3 codes from all bytes, NaN's two among them or not."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)
    if not nan:
        codes[(codes & 0x7F) == 0x7F] = 0
    return codes.view(torch.float8_e4m3fn)


def random_scales(rows: int, cols: int, block: tuple[int, int], seed: int = 0) -> Tensor:
    """Draw positive scales over many binades, no two blocks alike."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (-(-rows // block[0]), -(-cols // block[1]))
    return torch.exp2(8 * torch.randn(shape, generator=generator)).to(torch.float32)


def dequantize_loop(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply element by element, in numpy's float32."""
    codes, factors = weight.float().numpy(), scale.float().numpy()
    out = np.empty_like(codes)
    for row in range(codes.shape[0]):
        for col in range(codes.shape[1]):
            out[row, col] = codes[row, col] * factors[row // block[0], col // block[1]]
    return torch.from_numpy(out)


def empty_like(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Allocate destinations, filled with a number that no checkpoint here has."""
    return {
        name: torch.full(tensor.shape, SENTINEL, dtype=dtype or tensor.dtype)
        for name, tensor in tensors.items()
    }


def assert_untouched(destinations: Mapping[str, Tensor]) -> None:
    """Check that no byte was written."""
    for name, destination in destinations.items():
        assert torch.all(destination == SENTINEL), f"{name} was written"


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Compare bit by bit, so that NaN equals itself and -0 does not equal 0."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, expected)]
    assert torch.equal(*as_bytes)


def write_raw(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> None:
    """Write a file of zeros whose header says dtype, shape and bytes, whatever they are."""
    header, offset = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Change the weight map in place."""
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def write_config(directory: Path, quantization: object) -> None:
    """Write the part of config.json that the loader reads."""
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def refusal(directory: Path, destinations: Mapping[str, Tensor], **options: Any) -> CheckpointError:
    """Load, expect to be refused, and check that nothing was written."""
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(directory, destinations, **options)
    assert_untouched({n: t for n, t in destinations.items() if not t.is_meta})
    return caught.value


# Block dequantisation


@given(
    rows=st.integers(0, 20),
    cols=st.integers(0, 20),
    block=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    seed=st.integers(0, 2**16),
)
@example(rows=576, cols=130, block=(128, 128), seed=0)  # kv_a_proj: 512 + 64 rows
@example(rows=127, cols=129, block=(128, 128), seed=0)
@example(rows=256, cols=128, block=(128, 128), seed=0)
def test_block_dequantisation_is_the_loop(
    rows: int, cols: int, block: tuple[int, int], seed: int
) -> None:
    """Bit for bit, for any code and any shape, and neither argument is changed."""
    weight, scale = (
        random_codes((rows, cols), seed, nan=True),
        random_scales(rows, cols, block, seed),
    )
    copies = weight.clone(), scale.clone()
    got = dequantize_block_fp8(weight, scale, block)
    expected = dequantize_loop(weight, scale, block)
    assert torch.equal(got.isnan(), weight.float().isnan())
    assert_same_bits(got.nan_to_num(nan=SENTINEL), expected.nan_to_num(nan=SENTINEL))
    assert_same_bits(weight, copies[0])
    assert_same_bits(scale, copies[1])


def test_block_dequantisation_takes_any_strides() -> None:
    """A transposed weight, and a scale that is a row of something larger."""
    weight, scale = random_codes((200, 150)).T, random_scales(300, 200, (128, 128))[1:]
    assert_same_bits(
        dequantize_block_fp8(weight, scale), dequantize_loop(weight, scale, (128, 128))
    )


@pytest.mark.parametrize("shape", [(4, 2), (5, 1), (2, 5), (4, 5)])
def test_a_scale_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    """576 rows in blocks of 128 are five blocks, the last one half."""
    with pytest.raises(ValueError, match=r"scale must be .*= \[5, 2\].*got"):
        dequantize_block_fp8(random_codes((576, 256)), torch.ones(shape))


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_a_block_without_extent_is_refused(block: tuple[int, int]) -> None:
    """Before the division by it."""
    with pytest.raises(ValueError, match="block must be two positive sizes"):
        dequantize_block_fp8(random_codes((4, 4)), torch.ones(1, 1), block)


@pytest.mark.unchecked
def test_dequantisation_refuses_other_dtypes_and_ranks() -> None:
    """A weight in float32 would be multiplied in place."""
    with pytest.raises(TypeError, match="weight must be float8_e4m3fn; got torch.float32"):
        dequantize_block_fp8(torch.ones(4, 4), torch.ones(1, 1))
    with pytest.raises(TypeError, match="scale must be float32; got torch.bfloat16"):
        dequantize_block_fp8(random_codes((4, 4)), torch.ones(1, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"weight must be \[rows, cols\]; got \[2, 4, 4\]"):
        dequantize_block_fp8(random_codes((2, 4, 4)), torch.ones(1, 1))


# Round trips


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw a few tensors of any float dtype, shape and strides, some sharing memory."""
    names = draw(
        st.lists(st.text("abc.é", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
    )
    shared = torch.randn(4, 6, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensors = {}
    for name in names:
        kind = draw(st.sampled_from(["own", "row", "transposed", "whole"]))
        if kind == "own":
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            tensors[name] = torch.randn(shape).to(draw(st.sampled_from(FLOATS)))
        else:
            tensors[name] = {"row": shared[1], "transposed": shared.T, "whole": shared}[kind]
    return tensors


@given(tensors=named_tensors(), max_shard_bytes=st.none() | st.integers(1, 400))
def test_what_is_saved_is_loaded_bit_for_bit(
    tensors: dict[str, Tensor], max_shard_bytes: int | None
) -> None:
    """In one file or many, whatever memory the tensors shared."""
    with tempfile.TemporaryDirectory() as directory:
        save_safetensors(directory, tensors, max_shard_bytes=max_shard_bytes)
        destinations = empty_like(tensors)
        report = load_safetensors(directory, destinations)
        for name, tensor in tensors.items():
            assert_same_bits(destinations[name], tensor)
        assert report.num_tensors == len(tensors)
        assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert report.num_shards == len(list(Path(directory).glob("*.safetensors")))
        assert report.dequantized == report.ignored == ()


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), limit=st.integers(1, 120))
def test_shards_keep_to_their_limit_and_the_index_is_the_hubs(sizes: list[int], limit: int) -> None:
    """Names, total size and map as the hub's tools expect; only a tensor alone goes beyond."""
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.bfloat16) for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_safetensors(directory, tensors, max_shard_bytes=limit)
        files = sorted(path.name for path in directory.iterdir())
        if "model.safetensors" in files:
            assert files == ["model.safetensors"]
            assert sum(sizes) * 2 <= limit or len(sizes) == 1
            return
        shards = [file for file in files if file != INDEX]
        count = len(shards)
        assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        index = json.loads((directory / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(sizes) * 2
        assert index["weight_map"].keys() == tensors.keys()
        for shard in shards:
            with safe_open(directory / shard, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
                held = set(file.keys())
            assert held == {n for n, where in index["weight_map"].items() if where == shard}
            assert len(held) == 1 or sum(tensors[n].nbytes for n in held) <= limit
            # And full: the next tensor would have gone beyond.
            following = tensors.get(f"t{max(int(n[1:]) for n in held) + 1}")
            filled = sum(tensors[n].nbytes for n in held)
            assert following is None or filled + following.nbytes > limit


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_the_dtype_is_converted_in_the_copy(
    tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    """Rounded once, from what the file holds to what the decoder wants."""
    values = torch.randn(257, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensors = {"w": values.to(source)}
    save_safetensors(tmp_path, tensors)
    destinations = empty_like(tensors, target)
    load_safetensors(tmp_path, destinations)
    assert_same_bits(destinations["w"], tensors["w"].to(target))


def test_parameters_and_views_of_a_stack_receive_their_tensors(tmp_path: Path) -> None:
    """Experts are stacked: each view is written and what lies between views is left alone."""
    tensors = {f"experts.{i}.up.weight": torch.full((3, 2), float(i)) for i in range(3)}
    tensors["norm.weight"] = torch.arange(4.0)
    save_safetensors(tmp_path, tensors)
    stack = torch.nn.Parameter(torch.full((3, 5, 2), SENTINEL, dtype=torch.bfloat16))
    norm = torch.nn.Parameter(torch.zeros(4))
    views = {f"experts.{i}.up.weight": stack[i, 1:4] for i in range(3)}
    load_safetensors(tmp_path, {**views, "norm.weight": norm})
    assert stack[:, 1:4].eq(torch.arange(3.0)[:, None, None]).all()
    assert stack[:, [0, 4]].eq(SENTINEL).all()
    assert norm.tolist() == [0, 1, 2, 3] and norm.requires_grad and norm.grad_fn is None


@pytest.mark.gpu
def test_destinations_may_live_on_the_gpu(tmp_path: Path) -> None:
    """FP8 is multiplied out there, with the same bits as on the host."""
    weight, scale = random_codes((200, 300)), random_scales(200, 300, (128, 128))
    save_safetensors(
        tmp_path, {"x.weight": weight, "x.weight_scale_inv": scale, "n": torch.ones(3)}
    )
    destinations = {
        "x.weight": torch.zeros(200, 300, dtype=torch.bfloat16, device="cuda"),
        "n": torch.zeros(3, device="cuda"),
    }
    load_safetensors(tmp_path, destinations)
    expected = dequantize_loop(weight, scale, (128, 128)).to(torch.bfloat16)
    assert_same_bits(destinations["x.weight"].cpu(), expected)
    assert destinations["n"].tolist() == [1, 1, 1]


# FP8 with block scales


@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    block=st.none() | st.tuples(st.integers(1, 200), st.integers(1, 200)),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    target=st.sampled_from(FLOATS),
    together=st.booleans(),
    nested=st.booleans(),
)
def test_fp8_weights_are_multiplied_out_on_the_way_in(
    rows: int,
    cols: int,
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype,
    target: torch.dtype,
    together: bool,
    nested: bool,
) -> None:
    """Once, in float32, with config.json's block or 128 x 128, wherever the scale was packed."""
    size = block or (128, 128)
    weight = random_codes((rows, cols))
    scale = random_scales(rows, cols, size).clamp(2.0**-14, 2.0**7).to(scale_dtype)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_safetensors(directory, tensors, max_shard_bytes=None if together else 1)
        if block is not None:
            quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
            config: dict[str, object] = {"quantization_config": quantization}
            config = {"text_config": config} if nested else config
            (directory / "config.json").write_text(json.dumps(config))
        destinations = {"a.weight": torch.full((rows, cols), SENTINEL, dtype=target)}
        report = load_safetensors(directory, destinations)
        expected = dequantize_block_fp8(weight, scale.float(), size).to(target)
        assert_same_bits(destinations["a.weight"], expected)
        assert report.dequantized == ("a.weight",) and report.ignored == ()
        assert report.num_bytes == weight.nbytes + scale.nbytes


def test_kv_b_proj_in_fp8_gives_each_head_its_own_scales(tmp_path: Path) -> None:
    """Two heads of 96 + 64 rows: head 1's W_UK starts inside a block that head 0 begins.

    What absorption slices from the loaded matrix must be the dequantised W_UK and W_UV.
    """
    num_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank = 2, 96, 64, 512
    rows = num_heads * (qk_nope_head_dim + v_head_dim)
    weight, scale = (
        random_codes((rows, kv_lora_rank)),
        random_scales(rows, kv_lora_rank, (128, 128)),
    )
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    save_safetensors(tmp_path, {name: weight, name + "_scale_inv": scale})
    loaded = torch.full((rows, kv_lora_rank), SENTINEL)
    load_safetensors(tmp_path, {name: loaded})

    expected = dequantize_loop(weight, scale, (128, 128))
    for head in range(num_heads):
        start = head * (qk_nope_head_dim + v_head_dim)
        middle, end = start + qk_nope_head_dim, start + qk_nope_head_dim + v_head_dim
        per_head = loaded.view(num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)[head]
        assert_same_bits(per_head[:qk_nope_head_dim], expected[start:middle])  # W_UK
        assert_same_bits(per_head[qk_nope_head_dim:], expected[middle:end])  # W_UV
    assert not torch.equal(loaded, weight.float())


def test_a_scale_with_a_destination_is_loaded_too(tmp_path: Path) -> None:
    """Whoever asks for it by name gets it, and the weight is multiplied out all the same."""
    weight, scale = random_codes((130, 4)), random_scales(130, 4, (128, 128))
    save_safetensors(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})
    destinations = {"a.weight": torch.zeros(130, 4), "a.weight_scale_inv": torch.zeros(2, 1)}
    load_safetensors(tmp_path, destinations)
    assert_same_bits(destinations["a.weight_scale_inv"], scale)
    assert_same_bits(destinations["a.weight"], dequantize_block_fp8(weight, scale))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        pytest.param(
            {"a.weight": random_codes((4, 4))},
            "a.weight is F8_E4M3 without its block scale a.weight_scale_inv",
            id="no-scale",
        ),
        pytest.param(
            {"a.weight": random_codes((4, 4)), "a.weight_scale": torch.ones(())},
            "without its block scale a.weight_scale_inv; a.weight_scale is not a block scale",
            id="per-tensor-scale",
        ),
        pytest.param(
            {"a.weight": torch.ones(4, 4), "a.weight_scale_inv": torch.ones(1, 1)},
            "a.weight_scale_inv is a scale, but a.weight is F32, not F8_E4M3",
            id="scale-of-a-plain-weight",
        ),
        pytest.param(
            {"a.weight_scale_inv": torch.ones(1, 1)},
            "a.weight_scale_inv is a scale without its weight a.weight",
            id="no-weight",
        ),
        pytest.param(
            {"a.weight": random_codes((4, 4)), "a.weight_scale_inv": torch.ones(1, 2)},
            "a.weight_scale_inv is [1, 2]; expected [1, 1]",
            id="scale-too-wide",
        ),
        pytest.param(
            {"a.weight": random_codes((4, 4)), "a.weight_scale_inv": torch.ones(())},
            "a.weight_scale_inv is []; expected [1, 1]",
            id="scale-of-the-whole",
        ),
        pytest.param(
            {
                "a.weight": random_codes((4, 4)),
                "a.weight_scale_inv": torch.ones(1, 1, dtype=torch.int8),
            },
            "a.weight_scale_inv is I8; expected one of F32",
            id="scale-of-integers",
        ),
        pytest.param(
            {"a.weight": torch.zeros(4, 4, dtype=torch.int8)},
            "a.weight is I8, which is not supported",
            id="int8",
        ),
        pytest.param(
            {"a.weight": torch.zeros(4, 4).to(torch.float8_e5m2)},
            "a.weight is F8_E5M2, which is not supported",
            id="e5m2",
        ),
    ],
)
def test_formats_that_cannot_be_read_are_named(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    """With the tensor, and with what can be read instead."""
    save_safetensors(tmp_path, tensors)
    error = refusal(tmp_path, {"a.weight": torch.full((4, 4), SENTINEL)})
    assert any(message in line for line in error.quantization), error.quantization
    assert message in str(error) and "F8_E4M3 with a block scale" in str(error)


def test_stacked_fp8_is_refused(tmp_path: Path) -> None:
    """Block scales are for matrices."""
    tensors = {"a.weight": random_codes((2, 4, 4)), "a.weight_scale_inv": torch.ones(2, 1, 1)}
    save_safetensors(tmp_path, tensors)
    error = refusal(tmp_path, {"a.weight": torch.full((2, 4, 4), SENTINEL)})
    assert "a.weight is F8_E4M3 and [2, 4, 4]" in error.quantization[0]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not supported"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({}, "quant_method None is not supported"),
        ("fp8", "quantization_config must be an object; got 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8 without block scales"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive integers; got [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "got [128, 0]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of fmt 'e5m2' is not supported"),
    ],
    ids=str,
)
def test_other_quantisation_in_the_config_is_refused_by_name(
    tmp_path: Path, quantization: object, message: str
) -> None:
    """Even where every tensor looks readable: packed integers have been stored as floats before."""
    save_safetensors(tmp_path, {"a": torch.ones(2)})
    write_config(tmp_path, quantization)
    error = refusal(tmp_path, {"a": torch.full((2,), SENTINEL)})
    assert len(error.quantization) == 1 and message in error.quantization[0]
    assert message in str(error)


def test_a_config_without_quantisation_changes_nothing(tmp_path: Path) -> None:
    """Null is how some exporters say none; fp8 may also describe a checkpoint of plain weights."""
    save_safetensors(tmp_path, {"a": torch.ones(2)})
    for quantization in (None, {"quant_method": "fp8"}):
        write_config(tmp_path, quantization)
        destination = torch.zeros(2)
        load_safetensors(tmp_path, {"a": destination})
        assert destination.tolist() == [1, 1]


# Refusals: everything at once, nothing written


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    """One of each kind, in one directory."""
    names = ["good", "shaped", "extra", "fp8.weight", "in_missing", "in_truncated", "moved"]
    tensors = {name: torch.ones(2, 2) for name in names}
    tensors["fp8.weight"] = random_codes((2, 2))
    tensors["lone.weight_scale_inv"] = torch.ones(1, 1)
    tensors["ints"] = torch.ones(2, 2, dtype=torch.int8)
    save_safetensors(tmp_path, tensors, max_shard_bytes=1)
    place = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    (tmp_path / place["in_missing"]).unlink()
    truncated = tmp_path / place["in_truncated"]
    truncated.write_bytes(truncated.read_bytes()[:-3])
    edit_index(tmp_path, lambda weight_map: weight_map.update(moved=place["good"]))

    wanted = [*names, "lone.weight", "absent", "ints"]
    wanted.remove("extra")
    destinations = {name: torch.full((2, 2), SENTINEL) for name in wanted}
    destinations["shaped"] = torch.full((4,), SENTINEL)
    destinations["meta"] = torch.empty(2, device="meta")
    error = refusal(tmp_path, destinations)

    assert set(error.missing) == {"lone.weight", "absent", "meta"}
    assert error.unexpected == ("extra",)
    assert error.mis_shaped == (MisShaped("shaped", (4,), (2, 2), place["shaped"]),)
    assert len(error.files) == 2 and len(error.index) == 1 and len(error.quantization) == 3
    assert f"{place['in_missing']}: does not exist" in error.files[0]
    assert f"{place['in_truncated']}: truncated or corrupt" in error.files[1]
    assert error.index == (f"moved is placed in {place['good']}, which does not hold it",)
    assert [line.split(" ")[0] for line in error.quantization] == [
        "fp8.weight",
        "ints",
        "lone.weight_scale_inv",
    ]
    assert error.destinations == ("meta: is on the meta device and has no memory",)
    lines = [*error.files, *error.index, *error.quantization, *error.missing, *error.unexpected]
    shaped = f"shaped: expected [4], got [2, 2] in {place['shaped']}"
    for line in [*lines, *error.destinations, shaped]:
        assert line in str(error)
    assert "\n" not in error.summary
    firsts = [error.files, error.index, error.quantization, error.missing, error.unexpected]
    for line in [*(kind[0] for kind in firsts), *error.destinations, shaped]:
        assert line in error.summary
    assert error.files[1] not in error.summary and "files that cannot be used (2)" in error.summary


@given(cut=st.integers(0, 10_000), sharded=st.booleans())
@example(cut=0, sharded=False)
@example(cut=7, sharded=True)
def test_a_file_cut_anywhere_is_named(cut: int, sharded: bool) -> None:
    """In one line, and its tensors are not called missing besides."""
    tensors = {"a": torch.ones(9), "b": torch.ones(5)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_safetensors(directory, tensors, max_shard_bytes=36 if sharded else None)
        path = min(directory.glob("*.safetensors"))
        content = path.read_bytes()
        path.write_bytes(content[: cut % len(content)])
        error = refusal(directory, empty_like(tensors))
        assert len(error.files) == 1 and error.files[0].startswith(f"{path.name}: truncated")
        assert "\n" not in error.files[0]
        assert error.missing == error.unexpected == error.index == ()


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_header_is_refused_or_harmless(position: int, flip: int) -> None:
    """No other exception comes out, and a wrong number never goes in."""
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(5)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_safetensors(directory, tensors)
        path = directory / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[position % (len(content) - 11 * 4)] ^= flip
        path.write_bytes(content)
        destinations = empty_like(tensors)
        try:
            load_safetensors(directory, destinations)
        except CheckpointError:
            assert_untouched(destinations)
        else:
            assert all(destination.eq(1).all() for destination in destinations.values())


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    """The commonest corrupt file: a clone without LFS."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    error = refusal(tmp_path, {"a": torch.full((2,), SENTINEL)})
    assert "git lfs pull" in error.files[0]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(lambda d: None, "no weights: neither model.safetensors nor", id="empty"),
        pytest.param(
            lambda d: (d / "pytorch_model.bin").touch(), "there is pytorch_model.bin", id="pickle"
        ),
        pytest.param(
            lambda d: (d / "model-00001-of-00002.safetensors").touch(),
            "there is model-00001-of-00002.safetensors",
            id="shards-without-index",
        ),
        pytest.param(
            lambda d: (d / INDEX).write_text("{"), f"{INDEX} is not valid JSON", id="bad-json"
        ),
        pytest.param(
            lambda d: (d / INDEX).write_text("[]"), "must hold a JSON object; got list", id="list"
        ),
        pytest.param(
            lambda d: (d / INDEX).write_text('{"weight_map": {}}'),
            "weight_map must map at least one name",
            id="empty-map",
        ),
        pytest.param(
            lambda d: (d / INDEX).write_text('{"weight_map": {"a": 1}}'),
            "weight_map must map at least one name",
            id="map-to-numbers",
        ),
        pytest.param(
            lambda d: (
                (d / "model.safetensors").touch(),
                (d / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}'),
            ),
            "two checkpoints: model.safetensors, and an",
            id="two-checkpoints",
        ),
    ],
)
def test_a_directory_without_usable_weights_is_one_line(
    tmp_path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    """Not a list of every tensor of the model as missing."""
    prepare(tmp_path)
    error = refusal(tmp_path, {"a": torch.full((2,), SENTINEL)})
    assert len(error.files) == 1 and message in error.files[0]
    assert error.missing == ()


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    """Nothing there, or the file itself."""
    save_safetensors(tmp_path, {"a": torch.ones(2)})
    destinations = {"a": torch.full((2,), SENTINEL)}
    assert "does not exist" in refusal(tmp_path / "nowhere", destinations).files[0]
    assert (
        "is a file; pass the directory"
        in refusal(tmp_path / "model.safetensors", destinations).files[0]
    )


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    """It could have said how to read the weights."""
    save_safetensors(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text("{,}")
    error = refusal(tmp_path, {"a": torch.full((2,), SENTINEL)})
    assert "config.json is not valid JSON" in error.files[0]


def test_long_lists_are_cut_in_the_message_and_whole_in_the_error(tmp_path: Path) -> None:
    """A wrong config.json can make sixty thousand lines."""
    save_safetensors(tmp_path, {f"extra{i}": torch.ones(1) for i in range(45)})
    error = refusal(tmp_path, {f"absent{i}": torch.full((1,), SENTINEL) for i in range(33)})
    assert len(error.missing) == 33 and len(error.unexpected) == 45
    assert str(error).count("    absent") == str(error).count("    extra") == 20
    assert "and 13 more" in str(error) and "and 25 more" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.missing == error.missing
    assert again.summary == error.summary


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.full((1,), SENTINEL).expand(2), "expanded view"),
        (torch.full((2,), int(SENTINEL), dtype=torch.int64), "is torch.int64; expected one of"),
        (torch.full((2,), SENTINEL).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
    ],
    ids=["meta", "expanded", "integers", "fp8"],
)
def test_destinations_that_cannot_be_written_are_found_before_the_others_are(
    tmp_path: Path, destination: Tensor, message: str
) -> None:
    """A copy that fails in the middle would leave a model half loaded."""
    save_safetensors(tmp_path, {"a": torch.ones(2), "z": torch.ones(2)})
    good = torch.full((2,), SENTINEL)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(tmp_path, {"a": good, "z": destination})
    assert message in caught.value.destinations[0] and message in str(caught.value)
    assert_untouched({"a": good})


# What is ignored, and what the index decides


@pytest.mark.parametrize(
    "ignore",
    [["mtp.*", "*.bias"], lambda name: name.startswith("mtp.") or name.endswith(".bias")],
    ids=["patterns", "predicate"],
)
def test_ignored_names_need_no_destination(
    tmp_path: Path, ignore: Callable[[str], bool] | Sequence[str]
) -> None:
    """Nor a supported format, nor a scale of their own that is ignored by name."""
    tensors = {
        "a": torch.ones(2),
        "mtp.x": torch.ones(2, dtype=torch.int8),
        "q.bias": random_codes((2, 2)),
        "q.bias_scale_inv": torch.ones(1, 1),
    }
    save_safetensors(tmp_path, tensors)
    destinations = empty_like({"a": tensors["a"]})
    assert refusal(tmp_path, destinations).unexpected == ("mtp.x", "q.bias", "q.bias_scale_inv")
    report = load_safetensors(tmp_path, destinations, ignore=ignore)
    assert set(report.ignored) == {"mtp.x", "q.bias", "q.bias_scale_inv"}
    assert destinations["a"].tolist() == [1, 1]


def test_an_ignored_name_with_a_destination_is_loaded(tmp_path: Path) -> None:
    """To ignore is to allow, not to skip; and what is missing is missing."""
    save_safetensors(tmp_path, {"a": torch.ones(2)})
    destinations = empty_like({"a": torch.ones(2), "b": torch.ones(2)})
    assert refusal(tmp_path, destinations, ignore=["*"]).missing == ("b",)
    del destinations["b"]
    load_safetensors(tmp_path, destinations, ignore=["*"])
    assert destinations["a"].tolist() == [1, 1]


def test_ignore_as_one_string_is_refused(tmp_path: Path) -> None:
    """It would be read as one pattern per letter."""
    with pytest.raises(TypeError, match=r"ignore must be .*Use \['mtp\.\*'\]"):
        load_safetensors(tmp_path, {}, ignore="mtp.*")


def test_a_shard_of_ignored_names_need_not_be_there(tmp_path: Path) -> None:
    """The multi-token-prediction layer is gigabytes that nobody has to download."""
    tensors = {"a": torch.ones(2), "mtp.x": torch.ones(2)}
    save_safetensors(tmp_path, tensors, max_shard_bytes=1)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    destinations = empty_like({"a": tensors["a"]})
    assert len(refusal(tmp_path, destinations).files) == 1
    report = load_safetensors(tmp_path, destinations, ignore=["mtp.*"])
    assert report.ignored == ("mtp.x",) and report.num_shards == 1


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    """The one it points at is read, whichever shard is opened first."""
    for chosen, value in (("x-1.safetensors", 1.0), ("x-2.safetensors", 2.0)):
        directory = tmp_path / chosen
        for number, shard in enumerate(("x-1.safetensors", "x-2.safetensors"), start=1):
            one = tmp_path / f"only-{number}-{chosen}"
            own = torch.ones(1)
            save_safetensors(one, {"a": torch.full((2,), float(number)), f"own{number}": own})
            directory.mkdir(exist_ok=True)
            (one / "model.safetensors").rename(directory / shard)
        weight_map = {"own1": "x-1.safetensors", "own2": "x-2.safetensors", "a": chosen}
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        destinations = {name: torch.zeros(2 if name == "a" else 1) for name in weight_map}
        load_safetensors(directory, destinations)
        assert destinations["a"].tolist() == [value, value]


def test_a_tensor_that_the_index_does_not_list_is_fine_only_if_ignored(tmp_path: Path) -> None:
    """Wanted, it is the index's fault; unwanted, unexpected."""
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    save_safetensors(tmp_path, tensors, max_shard_bytes=16)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("b"))
    error = refusal(tmp_path, empty_like(tensors))
    assert error.index == ("b is held by model-00001-of-00002.safetensors and not listed",)
    assert error.missing == error.unexpected == ()
    del tensors["b"]
    assert refusal(tmp_path, empty_like(tensors)).unexpected == ("b",)
    assert load_safetensors(tmp_path, empty_like(tensors), ignore=["b"]).ignored == ("b",)


def test_an_index_entry_that_no_shard_holds_is_fine_if_ignored(tmp_path: Path) -> None:
    """Exporters that strip layers forget the index; otherwise it is a fault."""
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    save_safetensors(tmp_path, tensors, max_shard_bytes=1)
    edit_index(tmp_path, lambda weight_map: weight_map.update(c=weight_map["a"]))
    assert refusal(tmp_path, empty_like(tensors)).index[0].startswith("c is placed in")
    assert load_safetensors(tmp_path, empty_like(tensors), ignore=["c"]).ignored == ("c",)


def test_dtypes_that_safetensors_does_not_know_are_a_corrupt_file(tmp_path: Path) -> None:
    """The library refuses the header; the line names the file."""
    write_raw(tmp_path / "model.safetensors", {"a": ("X3", [2], 8)})
    assert "X3" in refusal(tmp_path, {"a": torch.full((2,), SENTINEL)}).files[0]


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "U8", "F8_E8M0", "F4"])
def test_dtypes_of_other_formats_are_named(tmp_path: Path, dtype: str) -> None:
    """Those that the writer cannot write, or that no weight should have."""
    num_bytes = {"I64": 64, "F4": 4}.get(dtype, 8)
    write_raw(tmp_path / "model.safetensors", {"a": (dtype, [8], num_bytes)})
    error = refusal(tmp_path, {"a": torch.full((8,), SENTINEL)})
    assert error.quantization == (f"a is {dtype}, which is not supported",)


# Memory and progress


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_holds_one_copy_and_one_tensor(tmp_path: Path) -> None:
    """A decoder of 235 MB in float32 from four shards, half of it FP8, in a process of its own.

    Beside the parameters there is one tensor at a time: an FP8 weight multiplied out in float32, of
    which the scale, stretched along the columns, is a 128th part, and its codes a quarter where
    they are read rather than mapped. Slack: what the allocator and the libraries keep. A second
    copy would be 235 MB more, a shard kept until its end some 60.
    """
    fields = config_fields(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2560,
        num_hidden_layers=7,
        first_k_dense_replace=7,
        num_attention_heads=4,
        kv_lora_rank=128,
    )
    decoder = Decoder(ModelConfig.from_dict(fields), device="meta")
    tensors = {}
    for name, tensor in decoder.checkpoint_tensors().items():
        if "mlp" in name and "up" not in name:
            tensors[name] = random_codes(tensor.shape)
            rows, cols = tensor.shape
            tensors[name + "_scale_inv"] = random_scales(rows, cols, (128, 128))
        else:
            tensors[name] = torch.full(tensor.shape, 0.5, dtype=torch.bfloat16)
    save_safetensors(tmp_path, tensors, max_shard_bytes=24 * 2**20)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    (tmp_path / "config.json").write_text(json.dumps(fields))
    one_copy = sum(4 * tensor.numel() for tensor in decoder.checkpoint_tensors().values())
    largest = max(4 * tensor.numel() for tensor in tensors.values())
    del tensors
    done = subprocess.run(
        [sys.executable, "-m", "tests.stage0.load_probe", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        # A block of a megabyte and more goes back to the system when it is freed, in glibc.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    report = json.loads(done.stdout)
    assert report["parameters"] == one_copy > 200e6
    bound = one_copy + (1 + 1 / 128 + 1 / 4) * largest + SLACK
    assert one_copy < report["peak"] < bound, {"bound": bound, "largest": largest, **report}


@pytest.mark.gpu
def test_a_gpu_holds_one_tensor_beside_the_destinations(tmp_path: Path) -> None:
    """Of an FP8 weight: its codes, its scale, that stretched, and the product in float32.

    A plain tensor is converted on the host. torch's blocks may be a megabyte larger than asked for.
    """
    rows, cols = 2048, 4096
    tensors = {f"plain{i}": torch.ones(rows, cols, dtype=torch.bfloat16) for i in range(3)}
    for i in range(3):
        tensors[f"fp8.{i}.weight"] = random_codes((rows, cols))
        tensors[f"fp8.{i}.weight_scale_inv"] = random_scales(rows, cols, (128, 128))
    save_safetensors(tmp_path, tensors, max_shard_bytes=2**25)
    destinations = {
        name: torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
        for name in tensors
        if not name.endswith("_scale_inv")
    }
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_safetensors(tmp_path, destinations)
    scale = rows // 128 * cols // 128 * 4
    held = torch.cuda.max_memory_allocated() - before
    assert held <= (1 + 4 + 4 / 128) * rows * cols + scale + 4 * 2**20
    assert torch.cuda.memory_allocated() == before


def test_progress_is_on_stderr_if_asked_and_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output belongs to the generated text, and a log file wants no bars."""
    tensors = {"a": torch.ones(500), "b": torch.ones(500)}
    save_safetensors(tmp_path, tensors)
    load_safetensors(tmp_path, empty_like(tensors), progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_safetensors(tmp_path, empty_like(tensors))
    assert capsys.readouterr() == ("", "")
    load_safetensors(tmp_path, empty_like(tensors), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "4.00k/4.00k" in err


# Saving


LAYOUTS = {"one-file": None, "two-shards": 16, "four-shards": 8}


@pytest.mark.parametrize("old", LAYOUTS)
@pytest.mark.parametrize("new", LAYOUTS)
def test_an_interrupted_save_is_never_read_as_a_mixture(old: str, new: str) -> None:
    """Stopped at each step of the exchange: the old checkpoint, the new one, or a refusal."""
    names = [f"t{i}" for i in range(4)]
    outcomes = []
    for step in range(50):
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            directory = Path(name)
            before, after = ({n: torch.full((2,), value) for n in names} for value in (1.0, 2.0))
            save_safetensors(directory, before, max_shard_bytes=LAYOUTS[old])
            steps_left = [step]

            def stopping(method: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
                def wrapper(*args: Any, **kwargs: Any) -> Any:
                    if left[0] == 0:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    return method(*args, **kwargs)

                return wrapper

            for method in ("replace", "unlink"):
                patch.setattr(Path, method, stopping(getattr(Path, method), steps_left))
            finished = True
            try:
                save_safetensors(directory, after, max_shard_bytes=LAYOUTS[new])
            except KeyboardInterrupt:
                finished = False
            patch.undo()
            destinations = empty_like(after)
            try:
                load_safetensors(directory, destinations)
                values = {value for tensor in destinations.values() for value in tensor.tolist()}
            except CheckpointError:
                assert_untouched(destinations)
                values = set()
            assert values in ({1.0}, {2.0}, set())
            assert not list(directory.glob(".*")), "left something beside the checkpoint"
            outcomes.append(values)
            if finished:
                break
    assert finished and outcomes[0] == {1.0} and outcomes[-1] == {2.0}


def test_a_save_that_fails_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up at the second shard."""
    old = {"a": torch.ones(2), "b": torch.ones(2)}
    save_safetensors(tmp_path, old, max_shard_bytes=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr("stage0_reference.checkpoint.save_file", failing)
    with pytest.raises(OSError, match="No space left"):
        save_safetensors(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, max_shard_bytes=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_save_removes_the_earlier_shards_and_nothing_else(tmp_path: Path) -> None:
    """Gigabytes that no index names; but not the files of others."""
    tensors = {f"t{i}": torch.ones(2) for i in range(4)}
    save_safetensors(tmp_path, tensors, max_shard_bytes=8)
    others = ["config.json", "consolidated.safetensors", "model-final.safetensors"]
    for name in others:
        (tmp_path / name).write_text("{}")
    save_safetensors(tmp_path, tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", *others}


def test_metadata_is_written_beside_the_format(tmp_path: Path) -> None:
    """The hub's loaders refuse a file without a format."""
    save_safetensors(tmp_path / "deep" / "er", {"a": torch.ones(2)}, metadata={"step": "7"})
    with safe_open(tmp_path / "deep" / "er" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ({}, {}, ValueError, "tensors is empty"),
        ({"a": torch.ones(1)}, {"max_shard_bytes": 0}, ValueError, "max_shard_bytes must be pos"),
        ({"a": torch.empty(1, device="meta")}, {}, ValueError, "meta device: a"),
    ],
    ids=["empty", "limit", "meta"],
)
def test_what_cannot_be_saved_is_refused_and_no_directory_made(
    tmp_path: Path,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Before anything is on the disk."""
    with pytest.raises(error, match=message):
        save_safetensors(tmp_path / "new", tensors, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.unchecked
def test_metadata_other_than_strings_is_refused(tmp_path: Path) -> None:
    """Before anything is written, and not by the library's traceback."""
    numbers: Any = {"step": 7}
    with pytest.raises(TypeError, match=r"metadata must map strings to strings; .*\['step'\]"):
        save_safetensors(tmp_path, {"a": torch.ones(1)}, metadata=numbers)
