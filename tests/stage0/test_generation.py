"""Generation: the same tokens alone, in a batch, in any chunks and after a cache hit."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.decoder import Decoder, FullAttention
from stage0_reference.generation import TextGenerator, pages_needed
from stage0_reference.model_config import ModelConfig
from stage0_reference.page_allocator import OutOfPages
from stage0_reference.sampling import SamplingParams

pytestmark = pytest.mark.stage0

DENSE = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "max_position_embeddings": 160,
}
MIXTURE = DENSE | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}


@functools.cache
def small_decoder(mixture: bool = False, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights, spread enough that greedy choices vary with the context."""
    decoder = Decoder(ModelConfig.from_dict(MIXTURE if mixture else DENSE), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            scale = 2.0 * parameter.shape[-1] ** -0.5
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(values * scale)
    return decoder.eval().requires_grad_(False)


def make_generator(decoder, *, num_pages=60, cache_dtype=torch.bfloat16, **keywords):
    return TextGenerator(decoder, AbsorbedBackend(cache_dtype), num_pages=num_pages, **keywords)


PROMPTS = st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=60), min_size=1, max_size=6)


@settings(max_examples=25)
@given(
    prompts=PROMPTS,
    mixture=st.booleans(),
    page_size=st.sampled_from([1, 3, 16, 64]),
    chunk=st.sampled_from([7, 16, 64]),
    rows=st.sampled_from([1, 2, 4, 8]),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_prompt_gives_the_same_tokens_alone_and_in_a_batch(
    prompts, mixture, page_size, chunk, rows, temperature
):
    decoder = small_decoder(mixture)
    settings_of = [
        SamplingParams(max_new_tokens=6 + 3 * i, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    shape = {"page_size": page_size, "prefill_chunk": chunk, "decode_rows": rows}
    pool = pages_needed(
        [len(p) + s.max_new_tokens for p, s in zip(prompts, settings_of, strict=True)], page_size
    )
    together = make_generator(decoder, num_pages=pool, **shape).generate(prompts, settings_of)
    for prompt, params, in_batch in zip(prompts, settings_of, together, strict=True):
        alone = make_generator(decoder, num_pages=pool, **shape).generate([prompt], params)[0]
        assert alone == in_batch


@settings(max_examples=20)
@given(
    prompt=st.lists(st.integers(0, 39), min_size=2, max_size=100),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([1, 5, 16, 128]),
    mixture=st.booleans(),
)
def test_greedy_tokens_are_those_of_a_full_forward_pass_in_float64(
    prompt, page_size, chunk, mixture
):
    decoder = small_decoder(mixture, torch.float64)
    generator = make_generator(
        decoder,
        num_pages=160,
        page_size=page_size,
        prefill_chunk=chunk,
        cache_dtype=torch.float64,
    )
    generated = generator.generate([prompt], SamplingParams(max_new_tokens=5))[0].token_ids
    tokens = list(prompt)
    for token in generated:
        ids = torch.tensor(tokens)[None]
        logits = decoder(ids, torch.arange(len(tokens))[None], FullAttention())[0, -1]
        best = logits.topk(2).values
        # Two float64 evaluations differ by rounding; a tie closer than that decides nothing.
        if best[0] - best[1] > 1e6 * torch.finfo(torch.float64).eps * best[0].abs():
            assert token == int(logits.argmax())
        tokens.append(token)


def test_one_chunk_and_many_chunks_give_the_same_logits_to_rounding():
    """Float64 cache and weights: the chunks change the order of sums and nothing else."""
    decoder = small_decoder(False, torch.float64)
    prompt = torch.randint(40, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    outputs = []
    for chunk in (128, 64, 9, 1):
        generator = make_generator(decoder, prefill_chunk=chunk, cache_dtype=torch.float64)
        with torch.inference_mode():
            request = generator._admit([prompt], SamplingParams(max_new_tokens=1))[0]
            outputs.append(generator._prefill(request))
    scale = outputs[0].abs().max()
    for other in outputs[1:]:
        assert (other - outputs[0]).abs().max() <= 1e6 * torch.finfo(torch.float64).eps * scale


def test_a_cached_prefix_changes_no_token():
    decoder = small_decoder()
    prompt = torch.randint(40, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    generator = make_generator(decoder, page_size=8, prefill_chunk=16)
    params = SamplingParams(max_new_tokens=20)
    first = generator.generate([prompt], params)[0]
    assert generator.times.cached_tokens == 0
    second = generator.generate([prompt, prompt[:50]], params)
    # Whole chunks of the prompt less its last token: 80 of 90 and 48 of 50.
    assert generator.times.cached_tokens == 80 + 48
    assert second[0] == first
    fresh = make_generator(decoder, page_size=8, prefill_chunk=16)
    assert second[1] == fresh.generate([prompt[:50]], params)[0]


def test_prefix_cache_under_churn_never_serves_another_text():
    """FR-11: a pool of 4 pages; A uses 3, B needs all 4, then A comes again."""
    decoder = small_decoder()
    generator = make_generator(decoder, num_pages=4, page_size=8, prefill_chunk=8)
    params = SamplingParams(max_new_tokens=4)
    a, b = [1, 2, 3, 4] * 5, [7, 8, 9] * 9
    first = generator.generate([a], params)[0]
    other = generator.generate([b], params)[0]
    assert generator.generate([a], params)[0] == first
    assert generator.generate([b], params)[0] == other
    generator.allocator.check_invariants()
    assert generator.allocator.num_available == 4


def test_what_does_not_fit_is_refused_before_anything_is_written():
    decoder = small_decoder()
    generator = make_generator(decoder, num_pages=3, page_size=16)
    before = [plane.view(torch.int16).clone() for layer in generator.cache for plane in layer]
    with pytest.raises(OutOfPages, match="5 more pages needed, 3 available"):
        generator.stream([[1] * 30, [2] * 20], SamplingParams(max_new_tokens=5))
    after = [plane.view(torch.int16) for layer in generator.cache for plane in layer]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert generator.allocator.num_available == 3


def test_closing_a_stream_early_gives_the_pages_back():
    generator = make_generator(small_decoder(), num_pages=4, page_size=16)
    steps = generator.stream([[1, 2, 3], [4]], SamplingParams(max_new_tokens=10))
    next(steps)
    next(steps)
    assert generator.allocator.num_available == 2
    steps.close()
    assert generator.allocator.num_available == 4


def test_a_failure_in_the_model_gives_the_pages_back(monkeypatch):
    generator = make_generator(small_decoder(), num_pages=4, page_size=16)

    def broken(*_):
        raise RuntimeError("broken on purpose")

    steps = generator.stream([[1, 2, 3]], SamplingParams(max_new_tokens=10))
    next(steps)
    monkeypatch.setattr(generator, "_decode", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        next(steps)
    assert generator.allocator.num_available == 4


def test_stop_tokens_end_a_request_and_are_not_part_of_it():
    decoder = small_decoder()
    free = make_generator(decoder).generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 12
    stop = free.token_ids[5]
    stopped = make_generator(decoder).generate(
        [[1, 2, 3]], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,))
    )[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop)]


def test_the_models_context_is_the_other_limit():
    decoder = small_decoder()
    context = decoder.config.max_position_embeddings
    done = make_generator(decoder).generate(
        [[1] * (context - 3)], SamplingParams(max_new_tokens=50)
    )[0]
    assert len(done.token_ids) == 3
    assert done.finish_reason == "length"


def test_streaming_yields_what_generate_returns():
    decoder = small_decoder()
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = SamplingParams(max_new_tokens=7)
    collected = [[], [], []]
    seen = []
    for step in make_generator(decoder, decode_rows=2).stream(prompts, params):
        collected[step.request].append(step.token_id)
        seen.append(step.request)
    results = make_generator(decoder, decode_rows=2).generate(prompts, params)
    assert collected == [r.token_ids for r in results]
    assert seen[:6] == [0, 1, 2, 0, 1, 2]  # requests advance together


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"prompts\[0\] must have between 1 and 159 tokens"),
        ([[1], [2] * 160], r"prompts\[1\] must have between 1 and 159 tokens"),
        ([[1, 40]], r"prompts\[0\] must hold token ids below vocab_size = 40; got 40"),
        ([[-1]], r"prompts\[0\] must hold token ids"),
    ],
    ids=["empty", "too-long", "outside-vocabulary", "negative"],
)
def test_impossible_prompts_are_refused_by_name(prompts, message):
    with pytest.raises(ValueError, match=message):
        make_generator(small_decoder()).stream(prompts, SamplingParams())


def test_more_decode_rows_than_keep_experts_invariant_are_refused():
    with pytest.raises(ValueError, match="decode_rows must be at most 128 for a model with exp"):
        make_generator(small_decoder(mixture=True), decode_rows=200)
    make_generator(small_decoder(), decode_rows=200)


def test_one_sampling_params_per_prompt_or_one_for_all():
    with pytest.raises(ValueError, match=r"one per prompt \(2\); got 3"):
        make_generator(small_decoder()).stream([[1], [2]], [SamplingParams()] * 3)
