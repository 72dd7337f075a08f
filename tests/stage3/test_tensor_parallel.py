"""A decoder on several ranks is the decoder: same cache on all of them, same sums to rounding."""

from __future__ import annotations

import functools
import json
import re
import signal
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.decoder import CachedAttention, Decoder
from stage0_reference.mixture_of_experts import Experts, GatedMLP
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from stage3_dataflow.engine import Engine, RequestFailed
from stage3_dataflow.rank_group import require_same, same_bytes, sum_over_ranks, together
from stage3_dataflow.tensor_parallel import (
    TensorParallelDecoder,
    check_heads,
    load_tensor_parallel,
    share_of,
)
from tests.bounds import assert_within, dot_error, unit_roundoff
from tests.model_factory import config_fields, random_decoder, tiny_config, write_checkpoint
from tests.stage0.test_mixture_of_experts import expert_bound
from tests.stage3.rank_programs import exact, generate
from tests.stage3.ranks import ThreadRanks, errors_on_threads, on_processes, on_threads

pytestmark = pytest.mark.stage3

GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # inner widths and numbers of experts need not divide among ranks
    "v3": ("deepseek_v3", {"n_group": 4, "topk_group": 2, "intermediate_size": 41}),
    "v2, direct queries, biases": (
        "deepseek_v2",
        {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "n_routed_experts": 7},
    ),
    "more ranks than experts": (
        "deepseek_v2",
        {"n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 0},
    ),
    "minicpm3": ("minicpm3", {}),
    "longcat": ("longcat_flash", {}),
    "mistral4": ("mistral4", {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}}),
    "tied": ("youtu", {"tie_word_embeddings": True}),
}
SIZES = (1, 2, 4)


@functools.cache
def whole_decoder(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """Four heads; weights are float32 numbers whatever the dtype."""
    model_type, changes = MODELS[name]
    return random_decoder(
        tiny_config(model_type, **({"num_attention_heads": 4} | changes)), seed=seed, dtype=dtype
    )


def share_of_decoder(ranks, whole: Decoder) -> TensorParallelDecoder:
    return TensorParallelDecoder(whole.config, ranks, dtype=whole.dtype).copy_from(whole)


PAGE = 4


def run_cached(decoder: Decoder, tokens: list[int], form: str):
    """Logits of one request in a cache of its own dtype, and the cache."""
    pages = -(-len(tokens) // PAGE)
    backend = AbsorbedBackend(decoder.dtype)
    cache = backend.make_cache(decoder.config, pages, PAGE)
    for layer in cache:
        for plane in layer:
            plane.zero_()
    attention = CachedAttention(
        backend,
        cache,
        query_lens=[len(tokens)],
        slot_mapping=torch.arange(len(tokens)),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        cache_seqlens=torch.tensor([len(tokens)], dtype=torch.int32),
        form=form,
    )
    return decoder(torch.tensor(tokens), torch.arange(len(tokens)), attention), cache


SMALL_MULTIPLE = 8.0
"""Two evaluations of a decoder in one dtype round independently, and their largest errors are of
one size, not equal: the usual rule for whole models compares them up to a small multiple."""


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(MODELS)),
    size=st.sampled_from(SIZES),
    form=st.sampled_from(["absorbed", "naive"]),
    tokens=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    seed=st.integers(0, 5),
)
def test_ranks_together_are_one_decoder(name, size, form, tokens, seed):
    """In float32, no further from float64 than a small multiple of what float32 costs one rank.

    In float64 two evaluations are as much closer as its roundings are finer, since errors are
    proportional to unit roundoff: 2^-29 of float32's.
    """
    with torch.inference_mode():
        exact_logits, _ = run_cached(whole_decoder(name, seed=seed), tokens, form)
        narrow = whole_decoder(name, torch.float32, seed)
        float32_error = (run_cached(narrow, tokens, form)[0] - exact_logits).abs().max()
    finer = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    # an error of no rounding at all would ask for bits that nobody promises
    float32_error = float32_error + unit_roundoff(torch.float32) * exact_logits.abs().max()
    for dtype, cost in ((torch.float32, 1.0), (torch.float64, finer)):
        whole = whole_decoder(name, dtype, seed)

        def program(ranks, whole=whole):
            return run_cached(share_of_decoder(ranks, whole), tokens, form)

        results = on_threads(size, program)
        bound = SMALL_MULTIPLE * cost * float(float32_error)
        assert_within(results[0][0], exact_logits, bound, about=(name, size, form, dtype))
        for logits, cache in results:
            assert torch.equal(logits, results[0][0])
            for layer, first in zip(cache, results[0][1], strict=True):  # FR-33
                assert all(map(torch.equal, layer, first))
        assert all(len(layer.c_kv) == -(-len(tokens) // PAGE) for layer in results[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["v3", "v2, direct queries, biases"])
@pytest.mark.parametrize("size", [2, 4])
def test_only_the_order_of_a_sum_changes(name, size, dtype):
    """Of o_proj, given its input: both are dot products of as many terms, and a bias.

    Either order is within ``dot_error`` of the exact sum; adding up R partial sums is part of that
    order, and rounding them to `dtype` on the way is R roundings more.
    """
    whole = whole_decoder(name, dtype)
    layer = whole.model.layers[1].self_attn
    config = whole.config
    width = config.num_attention_heads * config.v_head_dim
    heads = torch.randn(6, width, dtype=torch.float64).to(dtype)
    weight, bias = layer.o_proj.weight.double(), layer.o_proj.bias
    shift = 0.0 if bias is None else bias.double()
    exact_output = heads.double() @ weight.T + shift
    magnitude = heads.double().abs() @ weight.T.abs() + abs(shift)

    def program(ranks):
        share = share_of_decoder(ranks, whole).model.layers[1].self_attn
        columns = share_of(width, ranks)
        return share.o_proj(heads[:, columns])

    for output in on_threads(size, program):
        bound = dot_error(magnitude, width + 1 + size, dtype)
        assert_within(output, exact_output, bound, about=(name, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [5, 150], ids=["batched", "gathered"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_mixture_is_the_sum_of_its_ranks(size, rows, dtype):
    """`expert_bound` covers any order of the sum over experts; the ranks' sum rounds R times more.

    Shared experts are one more expert of share 1.
    """
    whole = whole_decoder("v3", dtype)
    mixture = whole.model.layers[1].mlp
    hidden = torch.randn(rows, whole.config.hidden_size, dtype=torch.float64).to(dtype)
    weights, chosen = mixture.gate(hidden)
    experts = mixture.experts
    share = torch.zeros(rows, experts.num_experts, dtype=weights.dtype)
    share = share.scatter(-1, chosen, weights)
    shared = stack_of_one(mixture.shared_experts, whole.config)
    ones = torch.ones(rows, 1, dtype=weights.dtype)
    truth = mixture_in_float64(experts, hidden, share) + mixture_in_float64(shared, hidden, ones)
    unit = unit_roundoff(dtype)
    bound = expert_bound(hidden, experts, share, unit) + expert_bound(hidden, shared, ones, unit)
    magnitude = expert_bound(hidden, experts, share, 1.0) + expert_bound(hidden, shared, ones, 1.0)
    # every addition of partial sums rounds something that is at most the sum of magnitudes
    bound = bound + (size + 2) * unit * magnitude

    def program(ranks):
        return share_of_decoder(ranks, whole).model.layers[1].mlp(hidden)

    for output in on_threads(size, program):
        assert_within(output, truth, bound + 2.0**-50 * magnitude, about=(size, rows))


def stack_of_one(mlp: GatedMLP, config) -> Experts:
    """An MLP as the only expert of a stack."""
    stack = Experts(config)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(stack, name, torch.nn.Parameter(getattr(mlp, name).weight[None]))
    return stack


def mixture_in_float64(experts: Experts, hidden, share):
    x = hidden.double()
    gate, up, down = (w.double() for w in experts.projections())
    inner = torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)
    return (share.double().T[..., None] * (inner @ down.mT)).sum(0)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_hold_every_weight_and_split_ones_once(name, size):
    whole = whole_decoder(name)
    tensors = whole.checkpoint_tensors()

    def program(ranks):
        return share_of_decoder(ranks, whole).parts()

    shares = on_threads(size, program)
    held = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    for parts in shares:
        for key, part in parts.items():
            assert torch.equal(part.tensor, tensors[key][part.place]), key
            held[key][part.place] += 1.0
    split = {key for key, times in held.items() if size > 1 and bool((times == 1.0).all())}
    for key, times in held.items():
        assert bool((times == (1.0 if key in split else float(size))).all()), key
    marks = r"q_proj|q_b_proj|kv_b_proj|o_proj|gate_proj|up_proj|down_proj|gate_up"
    for key in held:
        assert (key in split) == (size > 1 and re.search(marks, key) is not None), key
    whole_count = sum(tensors[key].numel() for key in split)
    counts = [sum(p.tensor.numel() for k, p in parts.items() if k in split) for parts in shares]
    assert sum(counts) == whole_count


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("size", [2, 4])
def test_loading_a_checkpoint_is_taking_a_share_of_the_whole(name, size, tmp_path):
    model_type, changes = MODELS[name]
    fields = config_fields(model_type, **({"num_attention_heads": 4} | changes))
    whole = whole_decoder(name, torch.float32)
    unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    write_checkpoint(tmp_path, fields, whole.checkpoint_tensors() | unused)

    def program(ranks):
        loaded = load_tensor_parallel(tmp_path, ranks, dtype=torch.float32).parts()
        return loaded, share_of_decoder(ranks, whole).parts()

    for loaded, taken in on_threads(size, program):
        assert loaded.keys() == taken.keys()
        for key, part in loaded.items():
            assert torch.equal(part.tensor, taken[key].tensor), key


def test_block_scaled_weights_are_multiplied_out_before_they_are_cut(tmp_path):
    """A rank's rows begin within a block of 128."""
    config = tiny_config(num_attention_heads=4, qk_nope_head_dim=50, v_head_dim=30)
    fields = config_fields(num_attention_heads=4, qk_nope_head_dim=50, v_head_dim=30)
    whole = random_decoder(config)
    tensors = {}
    for key, tensor in whole.checkpoint_tensors().items():
        tensors[key] = tensor
        if key.endswith(("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight")):
            blocks = [-(-side // 128) for side in tensor.shape]
            tensors[key] = tensor.to(torch.float8_e4m3fn)
            tensors[key + "_scale_inv"] = 1.0 + torch.rand(blocks)
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path, fields, tensors)
    loaded_whole = load_decoder(tmp_path).checkpoint_tensors()

    def program(ranks):
        return load_tensor_parallel(tmp_path, ranks).parts()

    for parts in on_threads(2, program):
        for key, part in parts.items():
            assert torch.equal(part.tensor, loaded_whole[key][part.place]), key


def test_a_rank_does_not_read_the_others_experts(tmp_path):
    """Their file need not even be there."""
    whole = whole_decoder("v3", torch.float32)
    model_type, changes = MODELS["v3"]
    fields = config_fields(model_type, **({"num_attention_heads": 4} | changes))
    tensors = whole.checkpoint_tensors()
    second = {key for key in tensors if re.search(r"experts\.[4-7]\.", key)}  # rank 1's
    assert second
    from safetensors.torch import save_file

    index = {key: f"model-0000{2 if key in second else 1}-of-00002.safetensors" for key in tensors}
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items() if key not in second},
        tmp_path / "model-00001-of-00002.safetensors",
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(fields))

    def program(ranks):
        return load_tensor_parallel(tmp_path, ranks, dtype=torch.float32)

    first, other = errors_on_threads(2, program)
    assert re.search("rank 1 of 2 failed in loading the checkpoint: CheckpointError", str(first))
    assert "model-00002-of-00002.safetensors: does not exist" in str(other)


def test_unknown_and_missing_tensors_are_found(tmp_path):
    fields = config_fields(num_attention_heads=4)
    whole = random_decoder(tiny_config(num_attention_heads=4))
    tensors = dict(whole.checkpoint_tensors())
    tensors["model.layers.0.self_attn.other.weight"] = torch.ones(2)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    tensors["model.layers.1.self_attn.kv_b_proj.weight"] = torch.ones(5, 5)
    write_checkpoint(tmp_path, fields, tensors)
    for error in errors_on_threads(2, lambda ranks: load_tensor_parallel(tmp_path, ranks)):
        assert "model.layers.0.self_attn.other.weight" in str(error)
        assert "model.layers.1.self_attn.o_proj.weight" in str(error)
        assert "kv_b_proj.weight: expected [88, 32], got [5, 5]" in str(error)


# Refusals


def test_heads_that_do_not_divide_are_refused_by_name():  # FR-33
    message = (
        "num_attention_heads must be divisible by the number of ranks, each of which has as many "
        "whole heads as the others; got 20 heads on 8 ranks. Numbers of ranks that divide 20: "
        "1, 2, 4, 5, 10, 20"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_heads(tiny_config(num_attention_heads=20), 8)
    errors = errors_on_threads(2, lambda ranks: TensorParallelDecoder(tiny_config(), ranks))
    assert all("got 3 heads on 2 ranks" in str(error) for error in errors)
    check_heads(tiny_config(num_attention_heads=20), 5)


def test_configurations_that_differ_are_refused_on_all_ranks():
    def program(ranks):
        config = tiny_config(num_attention_heads=4, vocab_size=61 + ranks.rank // 2)
        TensorParallelDecoder(config, ranks)

    expected = "vocab_size must be the same on all ranks; got 61 on rank 0 and 62 on rank 2"
    assert [str(error) for error in errors_on_threads(3, program)] == [expected] * 3

    def another_dtype(ranks):
        dtype = torch.float64 if ranks.rank else torch.float32
        TensorParallelDecoder(tiny_config(num_attention_heads=4), ranks, dtype=dtype)

    for error in errors_on_threads(2, another_dtype):
        assert str(error).startswith("dtype must be the same on all ranks; got torch.float32")


def test_experts_of_an_unknown_making_are_refused(monkeypatch):
    class OtherExperts(Experts):
        """Not known."""

    whole = tiny_config(num_attention_heads=4)
    monkeypatch.setattr("stage0_reference.mixture_of_experts.Experts", OtherExperts)
    for error in errors_on_threads(2, lambda ranks: TensorParallelDecoder(whole, ranks)):
        assert isinstance(error, NotImplementedError)
        assert "OtherExperts of deepseek_v3 cannot be split over ranks" in str(error)


def test_a_step_that_a_rank_left_is_its_last():
    """The engine fails one request and goes on; this rank must not meet the others again."""
    whole = whole_decoder("v3")
    short = SamplingParams(max_new_tokens=5)

    def serve(decoder):
        engine = Engine(decoder, exact(), num_pages=8, page_size=4, max_running=2)
        return engine, list(engine.stream(engine.submit([5, 6, 7], short)))

    def program(ranks):
        decoder = share_of_decoder(ranks, whole)
        engine, tokens = serve(decoder)
        layer = decoder.model.layers[2].mlp

        def out_of_memory(*arguments):
            raise RuntimeError("out of memory")

        layer.gate.forward = out_of_memory  # on all ranks, or the threads would wait
        failed = engine.submit([5, 6], short)
        with pytest.raises(RequestFailed, match="out of memory"):
            list(engine.stream(failed))
        del layer.gate.forward
        refused = engine.submit([5], short)
        with pytest.raises(RequestFailed, match=f"rank {ranks.rank} of 2 left a step unfinished"):
            list(engine.stream(refused))
        return tokens

    assert on_threads(2, program) == [serve(whole)[1]] * 2


# What ranks tell each other


@given(
    size=st.integers(1, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_partial_sums_are_added_in_order_and_rounded_once(size, dtype, seed):
    parts = torch.randn(size, 3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)

    def program(ranks):
        return sum_over_ranks(ranks, parts[ranks.rank])

    for total in on_threads(size, program):
        assert torch.equal(total, expected.to(dtype))


def test_shares_are_as_equal_as_can_be():
    for total in range(12):
        for size in range(1, 6):
            shares = [share_of(total, ThreadRanks(rank, size)) for rank in range(size)]
            covered = [index for share in shares for index in range(total)[share]]
            assert covered == list(range(total))
            counts = [share.stop - share.start for share in shares]
            assert max(counts) - min(counts) <= 1


def test_all_ranks_hear_of_an_error_on_one():
    def program(ranks):
        return together(ranks, "dividing", lambda: 1 / (2 - ranks.rank))

    first, second, third = errors_on_threads(3, program)
    assert str(first) == str(second)
    assert str(first) == "rank 2 of 3 failed in dividing: ZeroDivisionError: division by zero"
    assert isinstance(third, ZeroDivisionError)
    assert on_threads(2, program) == [0.5, 1.0]


def test_bytes_are_compared_bit_by_bit():
    def program(ranks):
        zero, planes = torch.zeros(3), torch.ones(2, dtype=torch.float8_e4m3fn)
        equal = same_bytes(ranks, [zero, planes])
        zero[1] = -0.0 if ranks.rank else 0.0
        return equal, same_bytes(ranks, [zero, planes])

    assert on_threads(2, program) == [(True, False)] * 2
    assert errors_on_threads(2, lambda ranks: require_same(ranks, {"a": 1})) == [None, None]


# Processes


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
def test_processes_generate_what_one_generates(size, tmp_path):
    """Both ways, in float64, greedily; the latent caches are equal byte for byte (FR-33)."""
    finished = on_processes(size, "agree", tmp_path)
    assert finished.codes == [0] * size, finished.outputs
    results = [
        json.loads((tmp_path / f"agree-{rank}-of-{size}.json").read_text()) for rank in range(size)
    ]
    decoder = load_decoder(shipped_checkpoint(), dtype=torch.float64)
    tokens, cache = generate(decoder, exact())
    whole = sum(parameter.numel() for parameter in decoder.parameters())
    outside = sum(
        parameter.numel()
        for name, parameter in decoder.named_parameters()
        if not re.search("q_b_proj|kv_b_proj|o_proj|gate_proj|up_proj|down_proj", name)
    )
    for result in results:
        assert result["tensor"] == tokens
        assert result["context"] == tokens
        assert result["tensor_caches_equal"] is True
        assert result["fp8_caches_equal"] is True
        assert result["parameters"] == outside + (whole - outside) // size
        assert result["gloo_threads"] == []  # or the process may abort as it ends
        assert result["pages"] == len(cache[0].c_kv) // size
    written = int((cache[0].c_kv != 0.0).any(-1).sum())
    assert sum(result["tokens_cached_here"] for result in results) == written


@pytest.mark.processes
def test_a_rank_that_fails_names_itself_and_the_others_end(tmp_path):
    finished = on_processes(2, "one_fails", tmp_path)
    assert all(finished.codes)
    assert "rank 1 of 2 failed: ValueError: this one is broken\n" in finished.outputs[1]


@pytest.mark.processes
def test_a_rank_that_hangs_ends_the_others_by_the_time_limit(tmp_path):
    finished = on_processes(2, "one_stops", tmp_path)
    assert finished.codes[0] not in (0, -signal.SIGKILL)  # it ended by itself
    assert "rank 0 of 2 failed: " in finished.outputs[0]
