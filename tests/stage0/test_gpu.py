"""What a CPU cannot show: the same promises on a GPU, in BF16 and at real widths."""

from __future__ import annotations

import pytest
import torch

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.evaluation import choose_windows, heldout_loss
from stage0_reference.generation import TextGenerator
from stage0_reference.latent_attention import latent_attention
from stage0_reference.pretrained import load_model
from stage0_reference.sampling import SamplingParams
from stage0_reference.training.corpus import load_heldout

pytestmark = [pytest.mark.stage0, pytest.mark.gpu]

PROMPTS = ["import os\n", "class Stack:\n    def ", "def fibonacci(n):\n", "# " + "x" * 900, "a"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_a_prompt_gives_the_same_tokens_alone_and_in_a_batch(dtype):
    decoder, tokenizer = load_model(device="cuda", dtype=dtype)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    params = SamplingParams(max_new_tokens=64)

    def generate(batch):
        generator = TextGenerator(decoder, AbsorbedBackend(), num_pages=200, decode_rows=8)
        return generator.generate(batch, params)

    together = generate(prompts)
    for prompt, in_batch in zip(prompts, together, strict=True):
        assert generate([prompt])[0] == in_batch


def test_float32_generation_agrees_with_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        decoder, tokenizer = load_model(device=device, dtype=torch.float32)
        generator = TextGenerator(decoder, AbsorbedBackend(), num_pages=200)
        prompts = [tokenizer.encode(text) for text in PROMPTS[:3]]
        results.append(generator.generate(prompts, SamplingParams(max_new_tokens=48)))
    assert results[0] == results[1]


def test_bf16_loses_little_against_float32():
    """BF16 rounds activations to 2^-9 relative; the loss may move by a few of those per layer."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder, tokenizer = load_model(device="cuda", dtype=dtype)
        documents = [tokenizer.encode(data.decode()) for _, data in load_heldout()]
        windows = choose_windows(documents, 2048, longest_context=4096, max_windows=16)
        losses.append(heldout_loss(decoder, AbsorbedBackend(), windows).loss)
    roundings = 4 * 6  # about four rounded tensors a layer enter the residual stream
    assert abs(losses[1] - losses[0]) <= roundings * 2**-9 * losses[0]


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_paged_attention_matches_float64_at_real_widths(heads):
    generator = torch.Generator("cuda").manual_seed(heads)
    batch, length, page_size = 3, 1500, 64
    pages = -(-length // page_size)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    c_kv, k_rope = draw(batch, length, 512), draw(batch, length, 64)
    q_latent, q_rope = draw(batch, 2, heads, 512), draw(batch, 2, heads, 64)
    table = torch.randperm(batch * pages, generator=generator, device="cuda").view(batch, pages)
    backend = AbsorbedBackend()
    planes = [
        torch.full((batch * pages, page_size, w), float("nan"), device="cuda").bfloat16()
        for w in (512, 64)
    ]
    from stage0_reference.latent_cache import Bf16LatentPages

    cache = Bf16LatentPages(*planes)
    position = torch.arange(length, device="cuda")
    for request in range(batch):
        slots = table[request, position // page_size] * page_size + position % page_size
        backend.append(c_kv[request], k_rope[request], cache, slots)
    seqlens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    scale = 192**-0.5
    result = backend.attend(q_latent.float(), q_rope.float(), cache, table.int(), seqlens, scale)
    for request in range(batch):
        exact = latent_attention(
            q_latent[request].double(),
            q_rope[request].double(),
            c_kv[request].double(),
            k_rope[request].double(),
            scale,
        )
        # A score is a sum of 576 products in f32; each weight is off by that error's exponential.
        magnitude = (
            q_latent[request].double().abs().amax() * c_kv[request].double().abs().sum(-1).amax()
            + q_rope[request].double().abs().amax() * k_rope[request].double().abs().sum(-1).amax()
        )
        u = 2.0**-24
        score_error = 577 * u * scale * magnitude
        bound = (2 * score_error + (length + 4) * u) * c_kv[request].double().abs().amax()
        assert (result.out[request].double() - exact.out).abs().amax() <= bound
        assert (result.lse[request].double() - exact.lse).abs().amax() <= score_error + (
            length + 4
        ) * u * (1 + exact.lse.abs().amax())
