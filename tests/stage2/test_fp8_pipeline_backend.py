"""Stage 2 in stage 0's decoder: its promises hold, and its loss is stage 1's."""

from __future__ import annotations

import math

import pytest
import torch

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.attention_backend import load_backend
from stage0_reference.evaluation import choose_windows, heldout_loss, mean_over_windows
from stage0_reference.generation import TextGenerator
from stage0_reference.latent_attention import latent_attention
from stage0_reference.latent_cache import gather_packed
from stage0_reference.pretrained import load_model
from stage0_reference.sampling import SamplingParams
from stage0_reference.training.corpus import load_heldout
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage1_quant.quantize import QuantizedRows, dequantize_rows, quantize_q
from stage2_pv_pipeline.fp8_pipeline_backend import Fp8PipelineBackend

pytestmark = pytest.mark.stage2


@pytest.fixture(scope="module")
def shipped():
    return load_model()


def filled(backend, lengths, *, page_size=16, width=32, rope=8, seed=0):
    """Two planes' worth of random tokens in shuffled pages, NaN in every unused slot."""
    from stage1_quant.fp8_latent_cache import allocate_latent_pages

    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in lengths]
    cache = allocate_latent_pages(sum(pages) + 1, page_size, width, rope)
    cache.codes.view(torch.uint8).fill_(0x7F)
    cache.scale.fill_(math.nan)
    cache.rope.fill_(math.nan)
    order = torch.randperm(sum(pages), generator=generator).split(pages)
    table = torch.full((len(lengths), max(pages) + 1), 10**6, dtype=torch.int32)
    for request, (length, mine) in enumerate(zip(lengths, order, strict=True)):
        table[request, : len(mine)] = mine
        place = torch.arange(length)
        slots = mine[place // page_size] * page_size + place % page_size
        size = torch.exp2(3 * torch.randn(length, 1, generator=generator))
        c_kv = torch.randn(length, width, generator=generator) * size
        backend.append(c_kv, torch.randn(length, rope, generator=generator), cache, slots)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("scale_format", ["amax", "pow2"])
def test_against_float64_over_the_dequantised_cache(scale_format):
    """P's rounding is all that may differ: 2^-4 of every weight, and what is below the grid.

    An element of P below sigma's smallest step is off by at most 2^-10 sigma, that is 2^-10 / 448
    of its block's largest ``weight x scale``; a block of 64 has 64 of them, each times a code of
    at most 448. The largest such product in a block is at most the row's largest value times its
    weight, so 64 x 2^-10 of the largest magnitude bounds them all. float32 arithmetic over scores
    adds its exponential, far below.
    """
    lengths, heads, s_q = [150, 0, 64, 97], 3, 2
    backend = Fp8PipelineBackend(scale_format)
    cache, table, seqlens = filled(backend, lengths)
    generator = torch.Generator().manual_seed(9)
    q_latent = torch.randn(4, s_q, heads, 32, generator=generator)
    q_rope = torch.randn(4, s_q, heads, 8, generator=generator)
    result = backend.attend(q_latent, q_rope, cache, table, seqlens, 0.1)
    query = dequantize_rows(quantize_q(q_latent, q_rope, scale_format))
    for request, length in enumerate(lengths):
        planes = gather_packed(cache, table[request : request + 1], [length])
        rows = dequantize_rows(QuantizedRows(*planes))
        exact = latent_attention(
            query.c_kv[request].double(),
            query.k_rope[request].double(),
            rows.c_kv.double(),
            rows.k_rope.double(),
            0.1,
        )
        if length == 0:
            assert torch.equal(result.out[request], torch.zeros(s_q, heads, 32))
            assert bool(result.lse[request].isneginf().all())
            continue
        largest = rows.c_kv.double().abs().max()
        score_size = 0.1 * (
            query.c_kv[request].abs().sum(-1).max() * rows.c_kv.abs().max()
            + query.k_rope[request].abs().sum(-1).max() * rows.k_rope.abs().max()
        )
        arithmetic = (2 * 41 * score_size + 30 * length) * 2.0**-24
        bound = (2**-4 + 64 * 2**-10 + arithmetic) * largest
        assert bool(((result.out[request].double() - exact.out).abs() <= bound).all())
        lse_error = (result.lse[request].double() - exact.lse).abs()
        assert bool((lse_error <= arithmetic * (1 + exact.lse.abs())).all())


def test_block_size_and_batch_mates_do_not_change_a_request():
    backend = Fp8PipelineBackend()
    cache, table, seqlens = filled(backend, [150, 30, 64])
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 1, 2, 32, generator=generator), torch.randn(3, 1, 2, 8, generator=generator)
    together = backend.attend(*q, cache, table, seqlens, 0.1)
    # The same three rows, one of them shorter and another absent: the first keeps its bits.
    other = backend.attend(*q, cache, table, torch.tensor([150, 7, 0], dtype=torch.int32), 0.1)
    assert torch.equal(together.out[0], other.out[0])
    assert torch.equal(together.lse[0], other.lse[0])


def test_the_longest_mate_does_not_change_a_requests_last_block():
    backend = Fp8PipelineBackend()
    cache, table, _ = filled(backend, [150, 64, 64])
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 1, 2, 32, generator=generator), torch.randn(3, 1, 2, 8, generator=generator)
    for length in range(1, 64):
        # Among the longest, or beside a longer one.
        for mate in (length, 150):
            seqlens = torch.tensor([mate, length, length], dtype=torch.int32)
            attended = backend.attend(*q, cache, table, seqlens, 0.1)
            if mate == length:
                among = attended
        assert torch.equal(attended.out[1:], among.out[1:]), length
        assert torch.equal(attended.lse[1:], among.lse[1:]), length


def test_the_decoder_generates_on_it(shipped):
    decoder, tokenizer = shipped
    generator = TextGenerator(decoder, load_backend(2), num_pages=8)
    prompt = tokenizer.encode("class Stack:\n    def ")
    done = generator.generate([prompt, prompt[:5]], SamplingParams(max_new_tokens=12))
    assert generator.cache_bytes_per_token == 6 * 644
    alone = TextGenerator(decoder, load_backend(2), num_pages=8)
    assert alone.generate([prompt], SamplingParams(max_new_tokens=12))[0] == done[0]


def test_its_loss_is_stage_0s_within_the_noise_and_a_broken_scale_is_not(shipped):
    decoder, tokenizer = shipped
    documents = [tokenizer.encode(data.decode()) for _, data in load_heldout()]
    windows = choose_windows(documents, 512, longest_context=512, max_windows=4)
    exact = heldout_loss(decoder, AbsorbedBackend(), windows)

    def added(backend):
        report = heldout_loss(decoder, backend, windows)
        return mean_over_windows(report.token_losses - exact.token_losses, len(windows))

    class LosesTheScale(Fp8CacheBackend):
        def append(self, c_kv, k_rope, cache, slot_mapping):
            super().append(c_kv, k_rope, cache, slot_mapping)
            cache.scale.fill_(2.0**-5)

    change, error = added(Fp8PipelineBackend())
    # 1024 tokens whose loss each cache rounding moves by about a hundredth of a nat.
    assert abs(change) <= 4 * error + 0.005
    broken, error = added(LosesTheScale())
    assert broken > 4 * error + 0.005


@pytest.mark.gpu
def test_the_tile_product_on_real_fp8_tensor_cores():
    """One promoted tile through torch's FP8 matrix product, against the exact sum.

    The tensor core cuts 33 addends in each of two steps below 2^-13 of the largest.
    """
    from stage2_pv_pipeline.tensor_core_accumulator import accumulation_error_bound

    generator = torch.Generator().manual_seed(0)
    p = torch.rand(64, 64, generator=generator).mul(448).cuda().to(torch.float8_e4m3fn)
    codes = (100 * torch.randn(64, 512, generator=generator)).clamp(-448, 448)
    codes = codes.cuda().to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    column_major = codes.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn)
    got = torch._scaled_mm(p, column_major, one, one, out_dtype=torch.float32)
    exact = p.double() @ codes.double()
    bound = accumulation_error_bound(p.double().abs() @ codes.double().abs(), 64, 64)
    assert bool(((got.double() - exact).abs() <= bound).all())
