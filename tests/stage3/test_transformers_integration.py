"""transformers' models over the FP8 latent cache, against transformers' own runs and stage 3's.

What a logit may be off by is measured on transformers' model: `cost_of_a_cache` is its error when
its normed latents are rounded as an FP8 cache rounds them. The cache's own runs round the query and
P as well, in the same formats, hence `SMALL_MULTIPLE` of that. Where two runs should round alike,
most tokens must agree to a few float32 roundings; a value whose float32 rounding falls on the other
side of an e4m3 or BF16 midpoint moves a token by no more than rounding it does at all: again the
cost of the cache.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stage0_reference.attention_backend import LayerCache, cache_bytes_per_token, load_backend
from stage0_reference.decoder import CachedAttention, Decoder
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage3_dataflow import use_path
from tests.stage0.test_against_transformers import (
    SMALL_MULTIPLE,
    Case,
    Oracle,
    apart,
)
from tests.stage0.test_families import EVERY_EXPERT, consult, cost_of_a_cache
from tests.stage3.cached_requests import as_bytes, poison

transformers = pytest.importorskip("transformers", minversion="5.24")

from stage3_dataflow import transformers_integration  # noqa: E402
from stage3_dataflow.transformers_integration import FP8LatentCache, snapmla_mask  # noqa: E402

pytestmark = pytest.mark.stage3

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
ALL_EXPERTS = {"num_experts_per_tok": 8}  # or a rounding could choose others, rightly
CASES = {
    **EVERY_EXPERT,
    # transformers changes LongRoPE's list when a request outgrows the pretrained context.
    "minicpm": Case("minicpm3", {}),
    "v3": Case("deepseek_v3", ALL_EXPERTS),
    "v3, direct queries": Case("deepseek_v3", ALL_EXPERTS | {"q_lora_rank": None}),
    "v3, rotary halves, yarn": Case(
        "deepseek_v3", ALL_EXPERTS | {"rope_interleave": False, "rope_parameters": YARN}
    ),
    "v2, yarn": Case("deepseek_v2", ALL_EXPERTS | {"rope_parameters": YARN}),
}
LENGTHS = [17, 7]
CHUNKS = [9, 1, 4, 3]
"""Of the longer request: expanded, then absorbed. The shorter one has none of the first nine."""


class Consulted(NamedTuple):
    """A case: transformers' model set to "snapmla", what is exact, and what roundings cost."""

    model: Any
    oracle: Oracle
    cost: float


def consulted_case(case: Case, directory: Path, device: torch.device) -> Consulted:
    """Build, save and run transformers' model."""
    oracle, model = consult(case, directory)
    cost = cost_of_a_cache(model, oracle, 3)
    model.set_attn_implementation("snapmla")
    return Consulted(model.to(device), oracle, cost)


@pytest.fixture(scope="module", params=CASES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Consulted:
    """Each case in turn."""
    return consulted_case(CASES[request.param], tmp_path_factory.mktemp("checkpoint"), device)


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Consulted:
    """DeepSeek-V3 alone."""
    return consulted_case(CASES["v3"], tmp_path_factory.mktemp("checkpoint"), device)


@pytest.fixture(autouse=True)
def twins(kernels_of_stage3: None) -> Iterator[None]:
    """Run the PyTorch twins where there is no GPU: what is tested here lies around the kernels."""
    with use_path("default" if torch.cuda.is_available() else "pytorch"):
        yield


def new_cache(model: Any, max_cache_len: int = 32, **choices: Any) -> FP8LatentCache:
    return FP8LatentCache(model.config, max_cache_len, **{"page_size": 16, **choices})


def padded(requests: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Requests as generate pads them: ids, attention mask and position ids."""
    longest = max(map(len, requests))
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request) :] = request
        mask[row, longest - len(request) :] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return ids.to(device), mask.to(device), positions.to(device)


@torch.no_grad()
def run(
    model: Any,
    requests: Sequence[Tensor],
    chunks: Sequence[int],
    cache: FP8LatentCache | None = None,
) -> list[Tensor]:
    """Logits of each request's tokens, [length, vocab_size], from a left-padded batch."""
    ids, mask, positions = padded(requests, model.device)
    cache = new_cache(model) if cache is None else cache
    logits, start = [], 0
    for end in torch.tensor(chunks).cumsum(0).tolist():
        span = slice(start, end)
        output = model(
            ids[:, span], attention_mask=mask[:, :end], position_ids=positions[:, span], cache=cache
        )
        logits.append(output.logits.cpu())
        start = end
    rows = torch.cat(logits, dim=1)
    return [row[-len(request) :] for row, request in zip(rows, requests, strict=True)]


def assert_rounds_alike(ours: Sequence[Tensor], others: Sequence[Tensor], case: Consulted) -> None:
    """See this module's docstring."""
    for one, other in zip(ours, others, strict=True):
        per_token = (one - other).abs().amax(dim=-1)
        assert float(per_token.median()) <= SMALL_MULTIPLE * case.oracle.float32_cost
        assert float(per_token.max()) <= SMALL_MULTIPLE * case.cost


# Against transformers and against stage 3


@torch.no_grad()
def stage_3_run(
    decoder: Decoder, request: Tensor, chunks: Sequence[int]
) -> tuple[Tensor, list[LayerCache]]:
    """Stage 3's logits of one request, and its planes: a single page of 128 tokens."""
    backend, device = load_backend(3), decoder.device
    planes = backend.make_cache(decoder.config, 1, 128, device=device)
    logits, start = [], 0
    for count in chunks:
        new = torch.arange(start, start + count, device=device)
        attention = CachedAttention(
            backend,
            planes,
            query_lens=[count],
            slot_mapping=new,
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            cache_seqlens=torch.tensor([start + count], dtype=torch.int32, device=device),
        )
        logits.append(decoder(request.to(device)[new], new, attention).cpu())
        start += count
    return torch.cat(logits), planes


def test_a_run_costs_little_more_than_rounding_the_latents(family):
    error = apart(run(family.model, family.oracle.requests, CHUNKS), family.oracle.exact)
    # From below too: rounding did happen.
    assert family.cost / SMALL_MULTIPLE <= error <= SMALL_MULTIPLE * family.cost


def test_logits_and_bytes_are_those_of_stage_3(family):
    request = family.oracle.requests[0]
    decoder = load_decoder(family.oracle.directory, dtype=torch.float32, device=family.model.device)
    theirs, planes = stage_3_run(decoder, request, CHUNKS)
    cache = new_cache(family.model, page_size=32)
    ours = run(family.model, [request], CHUNKS, cache)
    kind = family.model.config.model_type
    if kind == "longcat_flash":
        # Stage 0 scales its scores, transformers its queries, which then round at another scale.
        assert apart(ours, [theirs]) <= SMALL_MULTIPLE * family.cost
    else:
        assert_rounds_alike(ours, [theirs], family)
    for mine, its in zip(cache.layers[0].planes, planes[0], strict=True):
        if mine.dtype == torch.bfloat16 and kind == "deepseek_v2":
            continue  # transformers leaves its rotary pairs side by side
        same = as_bytes(mine[0, : len(request)]) == as_bytes(its[0, : len(request)])
        assert float(same.float().mean()) > 0.99  # but for roundings at a midpoint


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels in every test")
def test_the_kernels_give_what_the_twins_give(v3):
    request = v3.oracle.requests[0][:10]
    twins = run(v3.model, [request], [9, 1])
    with use_path("default"):
        assert_rounds_alike(run(v3.model, [request], [9, 1]), twins, v3)


# What generate does with a cache


def test_a_padded_request_is_as_if_alone(v3):
    requests = v3.oracle.requests
    cache = new_cache(v3.model)
    together = run(v3.model, requests, CHUNKS, cache)
    assert (cache.lengths, cache.get_seq_length()) == (LENGTHS, 17)
    # Its chunks, without what is padding in them.
    alone = run(v3.model, requests[:1], CHUNKS) + run(v3.model, requests[1:], [4, 3])
    assert_rounds_alike(together, alone, v3)


@torch.no_grad()
def test_padding_may_be_anywhere(v3):
    request, device = v3.oracle.requests[0], v3.model.device
    real = torch.tensor([[1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]])
    ids = torch.zeros_like(real).masked_scatter(real.bool(), request)
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    cache, logits = new_cache(v3.model), []
    for span in (slice(0, 12), slice(12, 22)):
        output = v3.model(
            ids[:, span].to(device),
            attention_mask=real[:, : span.stop].to(device),
            position_ids=positions[:, span].to(device),
            cache=cache,
        )
        logits.append(output.logits[0].cpu())
    assert cache.lengths == [17]
    spread = torch.cat(logits)[real[0].bool()]
    assert_rounds_alike([spread], run(v3.model, [request], [9, 8]), v3)


GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WITH_LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Greedy tokens and their logits, unless asked for otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask  # or a prompt's 0 would be padding
    return model.generate(ids, attention_mask=mask, **{**GREEDY, **WITH_LOGITS, **options})


@contextlib.contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """Collect how many positions each forward pass computes."""
    counts: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, inputs: counts.append(inputs[0].shape[1])
    )
    try:
        yield counts
    finally:
        hook.remove()


def test_a_second_turn_computes_only_what_is_new(v3):
    ids = v3.oracle.requests[0][None].to(v3.model.device)
    cache = new_cache(v3.model)
    with counted_tokens(v3.model) as counts:
        first = generate(v3.model, ids[:, :9], cache=cache, max_new_tokens=3).sequences
        turn = torch.cat((first, ids[:, 9:]), dim=1)
        second = generate(v3.model, turn, cache=cache, max_new_tokens=4)
    assert counts == [9, 1, 1, 1 + 8, 1, 1, 1]
    assert cache.lengths == [sum(counts)]
    (logits,) = run(v3.model, [second.sequences[0, :-1].cpu()], counts)
    assert_rounds_alike([torch.cat(second.logits).cpu()], [logits[-4:]], v3)


@torch.no_grad()
def test_a_copy_of_a_prompts_cache_goes_its_own_way(v3):
    request, device = v3.oracle.requests[0], v3.model.device
    prompt = new_cache(v3.model)
    v3.model(request[None, :9].to(device), cache=prompt)
    caches = [copy.deepcopy(prompt), prompt]
    for token, cache in enumerate(caches):
        logits = v3.model(torch.tensor([[token]], device=device), cache=cache).logits[0].cpu()
        (whole,) = run(v3.model, [torch.tensor([*request[:9], token])], [9, 1])
        assert_rounds_alike([logits], [whole[9:]], v3)


@torch.no_grad()
def test_repeated_requests_share_the_pages_of_their_prompt(v3):
    request, device = v3.oracle.requests[0], v3.model.device
    cache = new_cache(v3.model, max_batch_size=4, page_size=4)
    v3.model(request[None, :9].to(device), cache=cache)
    before = cache._allocator.num_available
    cache.batch_repeat_interleave(4)
    assert (cache.lengths, cache._allocator.num_available) == ([9] * 4, before)
    for plane in (plane for layer in cache.layers for plane in layer.planes):
        poison([plane[3:]])  # pages that nobody has may hold anything
    tokens = torch.tensor([5, 6, 7, 8])
    v3.model(tokens[:, None].to(device), cache=cache)
    assert cache._allocator.num_available == before - 3  # the last one kept the page
    cache.reorder_cache(torch.tensor([2, 2, 0, 1], device=device))
    cache.batch_select_indices(torch.tensor([True, False, True, True], device=device))
    after = v3.model(torch.tensor([[9], [10], [11]], device=device), cache=cache).logits.cpu()
    expected = [
        run(v3.model, [torch.tensor([*request[:9], *two])], [9, 1, 1])[0][-1:]
        for two in ((7, 9), (5, 10), (6, 11))
    ]
    assert_rounds_alike(list(after), expected, v3)
    cache.reset()
    cache._allocator.check_invariants()
    assert cache._allocator.num_available == cache.num_pages
    run(v3.model, [request], [17], cache)  # the pool is there for another batch


def test_beams_have_the_scores_of_their_tokens(v3):
    prompt = v3.oracle.requests[0][None, :9].to(v3.model.device)
    cache = new_cache(v3.model, page_size=4)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    output = generate(v3.model, prompt, cache=cache, output_scores=True, **options)
    # Some beam ended, and another one was continued twice.
    assert any(len(set(beams)) < 4 for beams in output.beam_indices.T.tolist()[1:])
    errors = []
    for tokens, score in zip(output.sequences.cpu(), output.sequences_scores, strict=True):
        (logits,) = run(v3.model, [tokens[:-1]], [9, *[1] * 7])
        chosen = logits[-8:].log_softmax(dim=-1).gather(1, tokens[-8:, None])
        errors.append(abs(float(score) - float(chosen.mean())))
    # A log-probability is off by a logit's error, and by that of the sum over all logits.
    assert float(torch.tensor(errors).median()) <= 2 * SMALL_MULTIPLE * v3.oracle.float32_cost
    assert max(errors) <= 2 * SMALL_MULTIPLE * v3.cost


def test_a_long_prompts_queries_may_attend_in_parts(v3, monkeypatch):
    whole = run(v3.model, v3.oracle.requests, [17])
    monkeypatch.setattr(transformers_integration, "PROMPT_CHUNK", 5)
    assert_rounds_alike(run(v3.model, v3.oracle.requests, [17]), whole, v3)


def test_a_cache_begun_in_inference_mode_goes_on_outside_of_it(v3):
    ids = v3.oracle.requests[0][None].to(v3.model.device)
    cache = new_cache(v3.model)
    with torch.inference_mode():
        v3.model(ids[:, :9], cache=cache)
    with torch.no_grad():
        v3.model(ids[:, 9:], cache=cache)
    assert cache.lengths == [17]


def test_a_failed_forward_pass_leaves_the_cache_as_it_was(v3):
    requests = v3.oracle.requests
    ids, mask, positions = padded(requests, v3.model.device)
    cache = new_cache(v3.model, page_size=4)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    def chunk(start: int, end: int) -> Tensor:
        with torch.no_grad():
            return v3.model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                cache=cache,
            ).logits

    chunk(0, 13)
    lengths = cache.lengths
    hook = v3.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        chunk(13, 17)
    hook.remove()
    assert cache.lengths == lengths
    after = torch.cat((chunk(13, 15), chunk(15, 17)), dim=1).cpu()
    expected = run(v3.model, requests, [13, 2, 2])
    assert_rounds_alike(list(after), [logits[-4:] for logits in expected], v3)


def test_weights_loaded_in_place_are_seen_at_once(v3):
    model = copy.deepcopy(v3.model)
    projection = model.model.layers[0].self_attn.kv_b_proj
    before = run(model, v3.oracle.requests, CHUNKS)
    with torch.no_grad():
        projection.weight.mul_(2.0)
    after = run(model, v3.oracle.requests, CHUNKS)
    assert apart(before, after) > SMALL_MULTIPLE * v3.cost
    assert apart(run(copy.deepcopy(model), v3.oracle.requests, CHUNKS), after) == 0.0


def test_another_attention_function_undoes_it(v3):
    ids = v3.oracle.requests[0][None].to(v3.model.device)
    model = copy.deepcopy(v3.model)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        before = model(ids).logits
        model.set_attn_implementation("snapmla")
        model(ids, cache=new_cache(model))
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, before)


# The shipped model, as a user runs it


class Shipped(NamedTuple):
    """The shipped checkpoint in both libraries."""

    model: Any
    decoder: Decoder


@pytest.fixture(scope="module")
def shipped(device: torch.device) -> Shipped:
    """The shipped checkpoint in both libraries."""
    directory = shipped_checkpoint()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="snapmla"
    )
    return Shipped(model.to(device), load_decoder(directory, dtype=torch.float32, device=device))


@contextlib.contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """Set another attention function for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def own_logits(model: Any, tokens: Tensor) -> Tensor:
    """transformers' logits after each of some tokens, by its own attention."""
    with attending_by(model, "sdpa"):
        return model(tokens[None], use_cache=False).logits[0].cpu()


@pytest.fixture(scope="module")
def shipped_cost(shipped: Shipped) -> float:
    """What a logit may be off by: a small multiple of what it is off by in stage 3's decoder."""
    tokens = shipped_text()
    with use_path("default" if torch.cuda.is_available() else "pytorch"):
        logits, _ = stage_3_run(shipped.decoder, tokens, [len(tokens) - 8, *[1] * 8])
    cost = apart([logits], [own_logits(shipped.model, tokens.to(shipped.model.device))])
    return SMALL_MULTIPLE * cost


def shipped_text() -> Tensor:
    """Start of a Python file."""
    return torch.tensor([256, *b'def area(width, height):\n    """Return the area of a rectangle'])


def assert_greedy(
    output: Any, new: int, model: Any, bound: float, row: int = 0, padding: int = 0
) -> None:
    """Every token is transformers' own choice, or one that it rates about as high.

    On the very tokens that were generated, transformers' logits are at most `bound` from the
    generated ones; so the token that was chosen is at most twice that below its best.
    """
    tokens = output.sequences[row, padding:]
    own = own_logits(model, tokens[:-1])[-new:]
    ours = torch.stack([step[row] for step in output.logits]).cpu()
    assert apart([ours], [own]) <= bound
    chosen = own.gather(1, tokens[-new:, None].cpu())[:, 0]
    assert float((own.amax(dim=1) - chosen).max()) <= 2 * bound


def test_greedy_tokens_are_transformers_choices(shipped, shipped_cost):
    prompt = shipped_text()[None, :40].to(shipped.model.device)
    cache = new_cache(shipped.model, 64)
    output = generate(shipped.model, prompt, cache=cache, max_new_tokens=20)
    assert_greedy(output, 20, shipped.model, shipped_cost)
    assert cache_bytes_per_token([layer.planes for layer in cache.layers]) == 6 * 644


def test_prompts_of_a_padded_batch_are_continued_as_if_alone(shipped, shipped_cost):
    text = shipped_text()
    ids, mask, _ = padded([text[:40], text[:12], text[:23]], shipped.model.device)
    cache = new_cache(shipped.model, 64)
    output = generate(shipped.model, ids, mask, cache=cache, max_new_tokens=6)
    assert cache.lengths == [40 + 5, 12 + 5, 23 + 5]
    for row, length in enumerate((40, 12, 23)):
        assert_greedy(output, 6, shipped.model, shipped_cost, row, padding=40 - length)


def test_a_prompt_in_chunks_and_rejected_speculation_change_nothing(shipped, shipped_cost):
    prompt = shipped_text()[None, :40].to(shipped.model.device)
    for options in ({"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 4}):
        cache = new_cache(shipped.model, 64)
        output = generate(shipped.model, prompt, cache=cache, max_new_tokens=12, **options)
        assert_greedy(output, 12, shipped.model, shipped_cost)
        assert cache.lengths == [cache.get_seq_length()] == [40 + 11]


def test_samples_follow_their_own_logits(shipped, shipped_cost):
    prompt = shipped_text()[None, :40].to(shipped.model.device)
    cache = new_cache(shipped.model, 64)
    options = {
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 6,
        "temperature": 2.0,
    }
    output = generate(shipped.model, prompt, cache=cache, **options)
    assert len({tuple(row) for row in output.sequences.tolist()}) > 1
    for row, tokens in enumerate(output.sequences):
        own = own_logits(shipped.model, tokens[:-1])[-6:]
        ours = torch.stack([step[row] for step in output.logits]).cpu()
        assert apart([ours], [own]) <= shipped_cost


# What is refused


def tokens_on(model: Any, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64, device=model.device)


@torch.no_grad()
def test_what_cannot_be_served_is_refused(v3):
    model = v3.model
    cache = new_cache(model, max_batch_size=2)
    ids = tokens_on(model, 2, 3)
    model(ids, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), cache=cache)
    new = tokens_on(model, 2, 1)

    def refused(error: type[Exception], match: str, **arguments: Any) -> None:
        before = cache.lengths
        with pytest.raises(error, match=match):
            model(**{"input_ids": new, "cache": cache, **arguments})
        assert cache.lengths == before == [2, 3]

    refused(ValueError, "needs cache=FP8LatentCache", use_cache=False, cache=None)
    refused(ValueError, "needs cache=FP8LatentCache", cache=transformers.DynamicCache())
    refused(ValueError, "the cache holds 2 requests; got a batch of 1", input_ids=new[:1])
    short, hiding = tokens_on(model, 2, 1), tokens_on(model, 2, 4)
    refused(NotImplementedError, r"must be \[2, 4\].*got \[2, 1\]", attention_mask=short)
    refused(NotImplementedError, "can't be hidden", attention_mask=hiding)  # or be unhidden
    refused(NotImplementedError, "attention_mask must be", attention_mask=hiding[:, None, None])
    refused(NotImplementedError, "no output_attentions", output_attentions=True)
    refused(ValueError, "max_cache_len is 32; got .* 33", input_ids=tokens_on(model, 2, 30))
    with pytest.raises(ValueError, match="room for 2 requests; got 4"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="must be negative or 0"):
        cache.crop(1)
    cache.reset()
    with pytest.raises(ValueError, match="max_batch_size is 2; got a batch of 3"):
        model(tokens_on(model, 3, 1), cache=cache)
    with attending_by(model, "sdpa"), pytest.raises(ValueError, match="set_attn_implementation"):
        model(new, cache=cache)
    with pytest.raises(NotImplementedError, match="is causal"):
        snapmla_mask(mask_function=lambda *_: True)


@torch.no_grad()
def test_what_an_interrupted_pass_left_is_void(v3, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    attention = v3.model.model.layers[0].self_attn
    cache = new_cache(v3.model)
    with monkeypatch.context() as patch:  # between the cache's update and the attention function
        patch.setattr(attention, "expand_kv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            v3.model(tokens_on(v3.model, 1, 2), cache=cache)
    with pytest.raises(ValueError, match="needs cache=FP8LatentCache"):
        v3.model(tokens_on(v3.model, 1, 2), use_cache=False)
    assert cache.lengths == []


def test_gradients_and_dropout_are_refused(v3):
    model = copy.deepcopy(v3.model).requires_grad_(True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        model(tokens_on(model, 1, 2), cache=new_cache(model))
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(NotImplementedError, match="no attention_dropout"):
        model(tokens_on(model, 1, 2), cache=new_cache(model))


@torch.no_grad()
def test_another_layer_in_place_of_kv_b_proj_is_refused(v3):
    class Adapter(nn.Linear):
        """Not what its weight says."""

    model = copy.deepcopy(v3.model)
    attention = model.model.layers[0].self_attn
    plain = attention.kv_b_proj
    for replacement, match in (
        (Adapter(32, 66, bias=False), "got Adapter"),
        (nn.Linear(32, 66), "got Linear"),
        (copy.deepcopy(plain).double(), "float64"),
        (copy.deepcopy(plain).to("meta"), "on meta"),
    ):
        attention.kv_b_proj = replacement
        attention.expand_kv = lambda latents, rotary: (
            latents,
            rotary,
        )  # comes before, and may fail
        with pytest.raises(NotImplementedError, match=f"(?s)kv_b_proj must be.*{match}"):
            model(tokens_on(model, 1, 2), cache=new_cache(model))


def test_other_models_and_sizes_are_refused(v3):
    config = v3.model.config
    with pytest.raises(NotImplementedError, match="must have a kv_lora_rank.*'llama'"):
        FP8LatentCache(transformers.LlamaConfig(), 8)
    hybrid = copy.deepcopy(config)
    hybrid.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="with full_attention, linear_attention"):
        FP8LatentCache(hybrid, 8)
    for sizes in ({"max_cache_len": 0}, {"max_batch_size": 0}, {"page_size": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be at least 1"):
            FP8LatentCache(config, **{"max_cache_len": 8, **sizes})
    with pytest.raises(ValueError, match="scale_format"):
        FP8LatentCache(config, 8, scale_format="e8m0")
    expanded = torch.zeros(1, 3, 2, 28), torch.zeros(1, 3, 2, 10)  # as transformers 5.14 has them
    with pytest.raises(NotImplementedError, match="older than 5.15"):
        new_cache(v3.model).update(*expanded, 0)


def test_without_transformers_only_this_module_is_missing():
    program = (
        "import sys; sys.modules['transformers'] = None; import stage3_dataflow; print('fine');"
        "import stage3_dataflow.transformers_integration"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "fine\n"
    assert "ImportError: transformers 5.15 or newer is needed" in ended.stderr
