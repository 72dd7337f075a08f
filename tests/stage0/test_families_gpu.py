"""Every family on a GPU at its published attention widths, through the kernels and both caches.

That each family's decoder is transformers' is shown on the CPU, in float64. Here that decoder, read
back from disk, is the reference: what the kernels' roundings cost must be what the same roundings
cost their PyTorch twins on the CPU, up to a small multiple.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stage0_reference.model_config import ModelConfig
from stage0_reference.pretrained import load_decoder
from stage3_dataflow.triton_backend import Bf16KernelBackend, FusedBackend, KernelAttention
from tests.model_factory import config_fields, random_decoder, write_checkpoint
from tests.stage0.test_against_transformers import (
    LENGTHS,
    SMALL_MULTIPLE,
    apart,
    cached_logits,
    full_logits,
)

pytestmark = [pytest.mark.stage0, pytest.mark.gpu]

DEVICE = "cuda"
PAGE_SIZE = 16
"""The smallest that the Hopper kernel takes; the longest request has two pages."""

CHUNKS = [[9] + [1] * 8, [3] + [1] * 4]
"""Tokens of each step: a prompt in naive form, one in absorbed form, and then decoding."""

GROWING = {  # within 17 tokens
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 40.0,
    "original_max_position_embeddings": 5,
    "llama_4_scaling_beta": 0.3,
}
# A cache moves router scores by enough to choose other experts, rightly: so, choose them all.
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 8},
    "deepseek_v3": {"num_experts_per_tok": 8},
    "glm4_moe_lite": {"num_experts_per_tok": 8},
    "minicpm3": {},
    "longcat_flash": {"moe_topk": 9, "num_hidden_layers": ..., "num_layers": 1},
    "youtu": {},
    "mistral4": {"num_experts_per_tok": 8, "rope_parameters": GROWING},
}
WIDTHS = {
    # of each model type but kimi_k2, which is read as deepseek_v3:
    # heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
    "deepseek_v2": (16, 512, 128, 64, 128),
    "deepseek_v3": (128, 512, 128, 64, 128),
    "glm4_moe_lite": (20, 512, 192, 64, 256),
    "minicpm3": (40, 256, 64, 32, 64),
    "longcat_flash": (64, 512, 128, 64, 128),
    "youtu": (16, 512, 128, 64, 128),
    "mistral4": (32, 256, 64, 64, 128),
}


class Model(NamedTuple):
    """A family on disk, and its exact logits."""

    directory: Path
    requests: list[Tensor]
    exact: list[Tensor]


@pytest.fixture(scope="module", params=WIDTHS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each family in turn."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    sizes = dict(zip((*names, "v_head_dim"), WIDTHS[request.param], strict=True))
    sizes["num_hidden_layers"] = 2
    fields = config_fields(request.param, **(sizes | OWN_FIELDS[request.param]))
    weights = random_decoder(ModelConfig.from_dict(fields)).checkpoint_tensors()
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), fields, weights)
    stream = torch.Generator().manual_seed(0)
    requests = [torch.randint(61, (length,), generator=stream) for length in LENGTHS]
    exact = full_logits(load_decoder(directory, dtype=torch.float64), requests)
    return Model(directory, requests, exact)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `cached_logits` this module's pages, and a block table on the default device."""
    helper = inspect.unwrap(cached_logits).__globals__
    shuffled: Callable[..., tuple[Tensor, int]] = helper["shuffled_block_table"]

    def on_device(*arguments: Any) -> tuple[Tensor, int]:
        device = torch.empty(0).device
        with torch.device("cpu"):  # where the numbers are drawn
            table, num_pages = shuffled(*arguments)
        return table.to(device), num_pages

    monkeypatch.setitem(helper, "shuffled_block_table", on_device)
    monkeypatch.setitem(helper, "PAGE_SIZE", PAGE_SIZE)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (FusedBackend, torch.float32),
        (Bf16KernelBackend, torch.float32),
        (FusedBackend, torch.bfloat16),
    ],
    ids=["fp8 cache", "bf16 cache", "fp8 cache, bf16 weights"],
)
def test_rounding_costs_on_a_gpu_what_it_costs_on_the_cpu(
    make: type[KernelAttention], dtype: torch.dtype, model: Model, small_pages: None
) -> None:
    errors = {}
    for device in ("cpu", DEVICE):
        decoder = load_decoder(model.directory, dtype=dtype, device=device)
        backend: Any = make()
        backend.make_cache = functools.partial(backend.make_cache, device=device)
        requests = [tokens.to(device) for tokens in model.requests]
        with torch.device(device):
            logits = cached_logits(decoder, requests, CHUNKS, "auto", backend)
        errors[device] = apart([x.cpu() for x in logits], model.exact)
        kernels_ran = "(triton)" in backend.description
        assert kernels_ran == (device == DEVICE), backend.description
    # From below too, so that the bound is known to be one: there was rounding.
    cost = errors["cpu"]
    assert cost / SMALL_MULTIPLE <= errors[DEVICE] <= SMALL_MULTIPLE * cost, errors
