"""Stage 3 in stage 0's decoder: the backends hand everything on to the kernels."""

from __future__ import annotations

import pytest
import torch

from stage0_reference.attention_backend import AttentionBackend, load_backend
from stage0_reference.generation import TextGenerator
from stage0_reference.latent_cache import Bf16LatentPages, write_rows
from stage0_reference.sampling import SamplingParams
from stage1_quant.fp8_latent_cache import LatentPages
from stage1_quant.fp8_latent_cache import append_kv as append_kv_twin
from stage3_dataflow import SplitRule, mla_decode, use_path, workspace_bytes
from stage3_dataflow.triton_backend import Bf16KernelBackend, FusedBackend
from tests.model_factory import random_decoder, tiny_config
from tests.stage3.cached_requests import FORMATS, as_bytes, assert_same_bits, batch_of, poison
from tests.stage3.test_mla_decode import DEFAULT_CASE, EVERY_64, P_FORMATS

pytestmark = pytest.mark.stage3


def pools(backend, device, num_pages=8, page_size=16):
    """One layer's planes of a tiny model, poisoned."""
    cache = backend.make_cache(tiny_config(), num_pages, page_size, device=device)[0]
    poison(cache)
    return cache


def test_stage_3_is_found_by_its_number():
    backend = load_backend(3)
    assert isinstance(backend, FusedBackend)
    assert isinstance(backend, AttentionBackend)
    assert isinstance(Bf16KernelBackend(), AttentionBackend)
    assert backend.stage == Bf16KernelBackend.stage == 3


@pytest.mark.parametrize("kind", [FusedBackend, Bf16KernelBackend])
def test_the_description_says_what_runs(kind, device):
    backend = kind()
    pools(backend, device)
    path = "triton" if device.type == "cuda" else "interpreter"
    assert backend.description.endswith(f"({path})")
    with use_path("pytorch"):
        pools(backend, device)
    assert backend.description.endswith("(here as PyTorch twins)")


@pytest.mark.parametrize("kind", [FusedBackend, Bf16KernelBackend])
def test_the_planes_are_those_of_its_format(kind, device):
    planes = pools(kind(), device)
    expected = LatentPages if kind is FusedBackend else Bf16LatentPages
    assert isinstance(planes, expected)
    assert all(plane.device.type == device.type for plane in planes)
    bytes_per_token = sum(plane[0, 0].numel() * plane.element_size() for plane in planes)
    assert bytes_per_token == (32 + 4 + 2 * 16 if kind is FusedBackend else 2 * (32 + 16))


@pytest.mark.parametrize(
    ("scale_format", "p_format"), list(zip(FORMATS, P_FORMATS, strict=True)), ids=str
)
def test_attention_is_mla_decode_with_the_backends_choices(device, scale_format, p_format):
    backend = FusedBackend(scale_format, p_format=p_format, split_rule=EVERY_64)
    batch = batch_of(DEFAULT_CASE, device, scale_format)
    choices = {"scale_format": scale_format, "p_format": p_format, "split_rule": EVERY_64}
    for causal in (True, False, True):  # the workspace serves every call
        result = backend.attend(*batch, causal=causal)
        assert_same_bits(result, mla_decode(*batch, causal=causal, **choices))


def test_bf16_attention_is_mla_decode_over_its_planes(device):
    backend = Bf16KernelBackend(split_rule=EVERY_64)
    batch = batch_of(DEFAULT_CASE, device, None)
    assert_same_bits(backend.attend(*batch), mla_decode(*batch, split_rule=EVERY_64))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_appending_and_reading_back_are_stage_1s(device, scale_format):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 32, generator=generator), torch.randn(20, 16, generator=generator)
    slots = torch.randperm(8 * 16, generator=generator)[:20]
    backend = FusedBackend(scale_format)
    cache = pools(backend, device)
    backend.append(*(row.to(device) for row in rows), cache, slots.to(device))
    expected = pools(FusedBackend(scale_format), "cpu")
    append_kv_twin(*rows, expected, slots, scale_format=scale_format)
    for plane, other in zip(cache, expected, strict=True):
        assert torch.equal(as_bytes(plane), as_bytes(other))

    table = torch.tensor([[3, 0], [7, 7]], dtype=torch.int32)
    seqlens = torch.tensor([17, 2], dtype=torch.int32)
    poison(cache, 0.0)
    poison(expected, 0.0)
    tokens = torch.cat((3 * 16 + torch.arange(16), torch.tensor([0, 7 * 16, 7 * 16 + 1])))
    backend.append(*(row[:19].to(device) for row in rows), cache, tokens.to(device))
    append_kv_twin(*(row[:19] for row in rows), expected, tokens, scale_format=scale_format)
    read = backend.read_prefix(cache, table.to(device), seqlens.to(device))
    with use_path("pytorch"):
        wanted = FusedBackend(scale_format).read_prefix(expected, table, seqlens)
    assert_same_bits((part.cpu() for part in read), wanted)


def test_a_bf16_append_rounds_and_writes(device):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 32, generator=generator), torch.randn(5, 16, generator=generator)
    slots = torch.tensor([9, -1, 0, 127, 64])
    backend = Bf16KernelBackend()
    cache, expected = pools(backend, device), pools(backend, "cpu")
    backend.append(*(row.to(device) for row in rows), cache, slots.to(device))
    write_rows(expected, rows, slots)
    for plane, other in zip(cache, expected, strict=True):
        assert torch.equal(as_bytes(plane), as_bytes(other))


def test_its_workspace_is_what_it_says(device):  # FR-32
    rule = SplitRule(16, 4)
    backend = FusedBackend(split_rule=rule)
    batch = batch_of(DEFAULT_CASE, device)
    backend.attend(*batch)
    capacity = batch.block_table.shape[1] * 16
    promised = backend.workspace_bytes(3, 2, 2, 32, capacity)
    assert promised == workspace_bytes(3, 2, 2, 32, capacity, rule)
    (held,) = backend._workspaces.values()
    assert held.nbytes == promised


@pytest.mark.parametrize("kind", [FusedBackend, Bf16KernelBackend])
def test_a_decoder_generates_what_it_generates_on_the_twins(kind, device):
    """Three layers, greedy; both paths round P to BF16, so no token changes."""
    decoder = random_decoder(tiny_config()).to(device)
    prompts = [[5, 17, 3, 44, 8], [9, 9, 1]]
    params = SamplingParams(max_new_tokens=3)

    def generate():
        generator = TextGenerator(decoder, kind(), num_pages=8, page_size=16)
        return generator.generate(prompts, params)

    interpreted = generate()
    with use_path("pytorch"):
        assert generate() == interpreted
