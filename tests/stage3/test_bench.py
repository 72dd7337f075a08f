"""The benchmarks count right, time nothing that is wrong, keep what they measured, and fit a page.

Numbers of a CPU say nothing, so none is compared here; what is timed, counted and written is.
"""

from __future__ import annotations

import copy
import json
import math
import types
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage0_reference import cli
from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput, latent_attention
from stage0_reference.latent_cache import Bf16LatentPages
from stage3_dataflow import bench_command, bench_kernels, bench_peers, bench_stages, use_path
from stage3_dataflow.bench_cases import (
    SOFTMAX_SCALE,
    build_case,
    count_work,
    equal_shape,
    exact_attention,
    parse_shape,
    ragged_shapes,
    relative_error,
)
from stage3_dataflow.bench_kernels import (
    DEFAULT_SHAPES,
    KernelBenchmark,
    add_speedups,
    allowed_error,
    failures,
    rates,
    rounding_rms,
    suggested_rule,
)
from stage3_dataflow.bench_peers import FlashInferPeer, FlashMlaFp8Peer, FlashMlaPeer, load_peers
from stage3_dataflow.bench_report import COLUMNS, ResultFiles, kernel_text, throughput_text
from stage3_dataflow.bench_throughput import Setting, ThroughputBenchmark, default_memory
from stage3_dataflow.bench_timing import Ceilings, Stopwatch, Timing
from stage3_dataflow.split_plan import splits_for
from tests.model_factory import random_decoder, tiny_config

pytestmark = pytest.mark.stage3

CPU = torch.device("cpu")
SMALL = equal_shape(2, 3, 70, 2)
PEERS = ("FlashInfer BF16", "FlashMLA BF16", "FlashMLA FP8")


@pytest.fixture
def twins() -> Iterator[None]:
    """Run the PyTorch twins: the interpreter is slow and has tests of its own."""
    with use_path("pytorch"):
        yield


def no_report(report):
    """Observe nothing."""


# Counting


def test_work_of_the_first_shape_is_what_the_formula_of_the_notes_gives():
    """2 B H L (576 + 512) operations; 644 bytes of FP8 or 1152 of BF16 for a cached token."""
    shape = equal_shape(128, 128, 8192)
    fp8, bf16 = count_work("decode", shape), count_work("decode", shape, "bf16")
    assert fp8.total_flops == bf16.total_flops == 2 * 128 * 128 * 8192 * 1088
    assert fp8.flops["scores, rope"] * 8 == fp8.flops["values"]
    assert fp8.bytes["cache"] == 128 * 8192 * 644
    assert bf16.bytes["cache"] == 128 * 8192 * 1152


def test_every_term_of_a_small_shape_by_hand():
    """Two requests of 70 tokens, two query tokens, three heads: 12 rows, 2 pages each."""
    decode = count_work("decode", SMALL)
    assert decode.flops == {  # per request one query sees 69 keys, the other 70
        "scores, latent": 2 * 3 * 2 * (69 + 70) * 512,
        "scores, rope": 2 * 3 * 2 * (69 + 70) * 64,
        "values": 2 * 3 * 2 * (69 + 70) * 512,
    }
    assert decode.bytes == {
        "cache": 140 * 644,
        "query": 12 * 644,
        "table and lengths": 4 * 4 + 2 * 4,
        "output": 12 * 1024,
        "lse": 12 * 4,
    }
    assert count_work("decode", SMALL, "fp8 per tensor").bytes["cache"] == 140 * 576
    assert count_work("q-quant", SMALL).bytes == {
        "query in": 12 * 1152,
        "cos and sin": 4 * 2 * 32 * 4,
        "query out": 12 * 644,
    }
    assert count_work("k-append", SMALL).bytes == {
        "tokens in": 4 * 1152,
        "cos and sin": 4 * 2 * 32 * 4,
        "norm weight": 1024,
        "slots": 32,
        "tokens out": 4 * 644,
    }
    fetch = count_work("fetch-dequant", SMALL)
    assert fetch.total_bytes == 140 * (644 + 1152) + 24
    assert not fetch.flops
    whole = count_work("mla_decode", SMALL)
    assert whole.total_bytes == decode.total_bytes + 12 * (1152 + 644)
    assert count_work("decode", SMALL, page_size=16).bytes["table and lengths"] == 2 * 5 * 4 + 8


def test_rates_divide_work_by_the_median():
    work = count_work("decode", equal_shape(1, 16, 64))
    ceilings = Ceilings(copy=1e12, matrix=1e14, empty_us=1.0)
    result = rates(work, Timing(10.0, 9.0, 90.0, 5.0, 3), ceilings)
    assert result["tflops"] == pytest.approx(2 * 16 * 64 * 1088 / 10e-6 / 1e12)
    assert result["matrix_share"] == pytest.approx(result["tflops"] / 100)
    assert result["gbs"] == pytest.approx(work.total_bytes / 10e-6 / 1e9)
    assert result["copy_share"] == pytest.approx(result["gbs"] / 1000)
    moved = rates(count_work("q-quant", SMALL), Timing(10.0, 9.0, 11.0, 5.0, 3), ceilings)
    assert moved["tflops"] is None and moved["gbs"] is not None
    assert set(rates(work, Timing(10.0, 9.0, 11.0, None, 3), None).values()) == {None}


@given(batch=st.integers(1, 70), heads=st.integers(1, 128), longest=st.integers(64, 200_000))
def test_ragged_and_equal_lengths_have_the_same_total(batch, heads, longest):
    ragged, longest_first, equal = ragged_shapes(batch, heads, longest)
    assert sorted(ragged.lengths, reverse=True) == list(longest_first.lengths)
    assert ragged.tokens == equal.tokens and ragged.batch == equal.batch == batch
    assert 1 <= min(ragged.lengths) and max(ragged.lengths) <= longest
    assert max(equal.lengths) - min(equal.lengths) <= 1


@given(
    batch=st.integers(1, 300),
    heads=st.integers(1, 200),
    s_q=st.integers(1, 4),
    length=st.integers(4, 200_000),
)
def test_a_shape_is_read_back_from_its_name(batch, heads, s_q, length):
    shape = equal_shape(batch, heads, length, s_q)
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize(
    "text", ["", "1,2", "1,2,3,4,5", "a,b,c", "0,1,64", "1,0,64", "1,1,0", "1,1,1,2", "1,1,1,0"]
)
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        parse_shape(text)


def test_suggested_splits_fill_an_h200_once_at_most():
    for shape in DEFAULT_SHAPES:
        tiles = shape.batch * -(-shape.s_q * shape.heads // 64)
        splits = len(splits_for(shape.lengths[0], suggested_rule(shape, 132, "hopper")))
        assert splits == 1 or tiles * splits <= 132
        assert 2 * tiles * splits > 132 or splits > 60  # more would not fit


# Errors


def test_the_rms_of_uniform_rounding_is_measured_as_derived():
    """Values spread over many binades: their errors fill +-u of each binade's lower end.

    Relative to the value, rounding is largest just above a power of two, so the mean square stays
    below the derived one, and above a quarter of it, since no value is twice its binade's end.
    """
    values = torch.exp(torch.randn(100_000, dtype=torch.float64))
    relative = (values.bfloat16().double() - values) / values
    rms = float(relative.square().mean().sqrt())
    assert rounding_rms(torch.bfloat16) / 2 < rms < rounding_rms(torch.bfloat16)


def test_what_is_allowed_would_not_hide_a_lost_block(twins):
    """Attention without the last 64 of 2,048 tokens errs more than any kernel is allowed to."""
    case = build_case(equal_shape(1, 16, 2048), device=CPU)
    operands = case.fp8_operands(0)
    short = operands._replace(c_kv=operands.c_kv[:-64], k_rope=operands.k_rope[:-64])
    lost = relative_error(exact_attention(short), exact_attention(operands))
    assert lost > allowed_error(torch.float8_e4m3fn) > allowed_error(torch.bfloat16)


# Kernels


def test_every_row_is_checked_and_timed_on_the_path_that_ran(twins):
    seen = []
    benchmark = KernelBenchmark(CPU, repeats=2, peers=bench_peers.all_peers())
    report = benchmark.run({"shapes": [SMALL]}, lambda r: seen.append(copy.deepcopy(r)))
    (shape,) = report["shapes"]
    assert [row["kernel"] for row in shape["rows"]] == [
        "q-quant",
        "k-append",
        "q-quant and k-append",
        "fetch-dequant",
        "fp8 portable",
        "fp8 portable, fixed splits",
        "fp8 with q-quant",
        "bf16 portable",
        "bf16 portable, fixed splits",
    ]
    for row in shape["rows"]:
        assert row["failure"] is None and 0 <= row["error"] <= row["allowed_error"]
        assert row["microseconds"] > 0 and row["path"] == "pytorch"
        assert row["tflops"] is row["gbs"] is None  # nobody asked a CPU for rates
    assert report["peers"] == dict.fromkeys(PEERS, "needs a CUDA device")
    assert [len(r["shapes"]) for r in seen] == [0, 1]
    assert not failures(report, ["shapes"])


def test_the_kernels_own_code_runs_through_the_interpreter():
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are compiled: see the gpu test")
    benchmark = KernelBenchmark(CPU, repeats=1, only=("k-append", "fp8 portable,", "q-quant"))
    report = benchmark.run({"shapes": [equal_shape(1, 2, 20)]}, no_report)
    rows = {row["kernel"]: row for row in report["shapes"][0]["rows"]}
    assert set(rows) == {
        "k-append",
        "fp8 portable, fixed splits",
        "q-quant",
        "q-quant and k-append",
    }
    assert {row["path"] for row in rows.values()} == {"interpreter"}
    assert not failures(report, ["shapes"])


def test_a_wrong_kernel_is_not_timed_and_one_that_raises_is_named(twins, monkeypatch):
    right = bench_kernels.decode_quantized

    def wrong(*arguments, **keywords):
        if keywords["split_rule"] == bench_kernels.DEFAULT_SPLIT_RULE:
            raise RuntimeError("no such luck")
        result = right(*arguments, **keywords)
        result.out[0, 0, 0, 0] = math.nan
        return result

    monkeypatch.setattr(bench_kernels, "decode_quantized", wrong)
    report = KernelBenchmark(CPU, repeats=1).run({"shapes": [SMALL]}, no_report)
    rows = {row["kernel"]: row for row in report["shapes"][0]["rows"]}
    assert "error nan is above" in rows["fp8 portable"]["failure"]
    assert rows["fp8 portable, fixed splits"]["failure"] == "RuntimeError: no such luck"
    assert not any("microseconds" in rows[f"fp8 portable{s}"] for s in ("", ", fixed splits"))
    assert "microseconds" in rows["fp8 with q-quant"]
    assert len(failures(report, ["shapes"])) == 2
    report["command"] = "snapmla bench kernels"
    assert "error nan is above" in kernel_text(report, ["shapes"])


@pytest.mark.parametrize("scale", [0.9, 1.2])
def test_an_output_off_by_a_factor_is_wrong(scale, twins):
    case = build_case(equal_shape(2, 4, 130), device=CPU)
    out = torch.stack([exact_attention(case.fp8_operands(r)) for r in range(2)])
    error, allowed = bench_kernels._attention_error(
        case, out * scale, case.fp8_operands, torch.float8_e4m3fn
    )
    assert error == pytest.approx(abs(scale - 1)) and error > allowed
    assert bench_kernels._attention_error(case, out, case.fp8_operands, torch.bfloat16)[0] == 0


def test_timing_repeats_as_often_as_it_says(twins):
    calls = []
    timing = Stopwatch(CPU, repeats=5).time(lambda: calls.append(1))
    assert len(calls) == 6 and timing.repeats == 5  # one to warm up
    assert timing.low <= timing.median <= timing.high and timing.host is None
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        Stopwatch(CPU, repeats=0)
    with pytest.raises(ValueError, match="flush must be read or write; got 'wash'"):
        Stopwatch(CPU, flush="wash")


# Other libraries, played by stand-ins that compute what the real ones document


def stand_in_attention(query, rows, causal):
    """Attend one request, query [s_q, heads, 576] and rows [length, 576], in float64."""
    parts = (half for part in (query, rows) for half in part.double().split((512, 64), dim=-1))
    return latent_attention(*parts, SOFTMAX_SCALE, causal=causal).out


class StandInWrapper:
    """FlashInfer's wrapper: requests and their pages in compressed rows."""

    def __init__(self, workspace, *, backend):
        assert backend == "fa3" and workspace.numel() >= 128 * 2**20

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe, sm_scale) == (512, 64, SOFTMAX_SCALE)
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert q_data_type == kv_data_type == torch.bfloat16
        assert len(kv_indices) == kv_indptr[-1]
        self.plan_of = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal)

    def run(self, q_nope, q_pe, ckv, kpe, *, out):
        starts, page_starts, pages, lengths, causal = self.plan_of
        for request, length in enumerate(lengths.tolist()):
            ids = pages[page_starts[request] : page_starts[request + 1]].long()
            rows = torch.cat((ckv, kpe), dim=-1)[ids].flatten(0, 1)[:length]
            tokens = slice(starts[request], starts[request + 1])
            query = torch.cat((q_nope[tokens], q_pe[tokens]), dim=-1)
            out[tokens] = stand_in_attention(query, rows, causal).to(out.dtype)


def paged_stand_in(query, plane, lengths, table, causal):
    """FlashMLA: query [batch, s_q, heads, 576], plane [pages, page_size, 1, 576]."""
    assert plane.shape[1:] == (64, 1, 576) and table.dtype == lengths.dtype == torch.int32
    out = [
        stand_in_attention(query[r], plane.double()[table[r].long()].flatten(0, 2)[:length], causal)
        for r, length in enumerate(lengths.tolist())
    ]
    return torch.stack(out).bfloat16()


@pytest.fixture
def installed_peers(monkeypatch):
    """Make the operators and modules that the peers look for."""
    state = types.SimpleNamespace(schedules=[])

    def dense(q, plane, width, lengths, table, scale, causal, schedule, splits, out):
        assert width == 512 and scale == SOFTMAX_SCALE and out is None
        state.schedules.append(schedule)
        fresh = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        attended = paged_stand_in(q, plane, lengths, table, causal)
        return attended, torch.zeros(1), *(fresh if schedule is None else (schedule, splits))

    def plan_fp8(lengths, rows, kv_heads):
        assert kv_heads == 1
        state.rows = rows
        return [torch.zeros(1, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)]

    def fp8(q, plane, width, lengths, table, scale, causal, schedule, splits, q_scale, k_scale):
        assert q.dtype == plane.dtype == torch.float8_e4m3fn and width == 512
        values = q.float() * q_scale, plane.float() * k_scale
        return [paged_stand_in(*values, lengths, table, causal), torch.zeros(1)]

    monkeypatch.setattr(
        bench_peers.torch,
        "ops",
        types.SimpleNamespace(
            _flashmla_C=types.SimpleNamespace(
                dense_decode_fwd=types.SimpleNamespace(default=StandInOperator(dense))
            ),
            _flashmla_extension_C=types.SimpleNamespace(
                get_mla_decoding_metadata_dense_fp8=plan_fp8, fwd_kvcache_mla_fp8=fp8
            ),
        ),
    )
    return state


class StandInOperator:
    """An operator of ten arguments, as later builds of FlashMLA have."""

    _schema = types.SimpleNamespace(arguments=[None] * 10)

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)


@pytest.mark.parametrize("shape", [SMALL, ragged_shapes(3, 2, 300)[0]], ids=["s_q 2", "ragged"])
def test_flashinfer_is_given_the_case(shape, twins):
    peer = FlashInferPeer()
    peer._wrapper_class = StandInWrapper
    case = build_case(shape, device=CPU)
    bound = peer.bind(case)
    error, allowed = bench_kernels._attention_error(
        case, bound.call(), bound.operands, torch.bfloat16
    )
    assert error <= rounding_rms(torch.bfloat16) < allowed


@pytest.mark.parametrize("peer", [FlashMlaPeer(), FlashMlaFp8Peer()], ids=["bf16", "fp8"])
def test_flashmla_is_given_the_case(peer, twins, installed_peers):
    case = build_case(SMALL, device=CPU)
    bound = peer.bind(case)
    error, _ = bench_kernels._attention_error(case, bound.call(), bound.operands, torch.bfloat16)
    assert error <= rounding_rms(torch.bfloat16)
    if peer.cache == "bf16":
        assert installed_peers.schedules[0] is None and installed_peers.schedules[1] is not None
    else:
        assert installed_peers.rows == SMALL.s_q * SMALL.heads


def test_absent_and_broken_peers_say_why(tmp_path):
    class Broken(FlashInferPeer):
        def load(self):
            raise OSError("undefined symbol\n  _ZN2at")

    cuda = torch.device("cuda")  # named, not used
    status = load_peers([FlashMlaPeer(tmp_path), Broken()], cuda)
    assert status["FlashMLA BF16"] == f"no _flashmla_C*.so in {tmp_path}"
    assert status["FlashInfer BF16"] == "OSError: undefined symbol _ZN2at"
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"not a library")
    assert "Error" in load_peers([FlashMlaPeer(tmp_path)], cuda)["FlashMLA BF16"]


def test_a_peer_that_fails_on_a_shape_is_a_line_of_its_own(twins):
    class Failing(FlashInferPeer):
        def bind(self, case):
            raise RuntimeError("unsupported head count")

    benchmark = KernelBenchmark(CPU, repeats=1, peers=[Failing()], only=("k-append", "Flash"))
    benchmark.peer_status["FlashInfer BF16"] = "ready"
    benchmark._warm_up = lambda: None
    report = benchmark.run({"shapes": [SMALL]}, no_report)
    assert report["shapes"][0]["rows"][-1] == {
        "kernel": "FlashInfer BF16",
        "peer": True,
        "failure": "RuntimeError: unsupported head count",
    }
    assert not failures(report, ["shapes"])  # not this library's


# Reports


def made_up_report():
    """A report as a GPU would give it, with the widest names and numbers."""

    def row(kernel, us, *, peer=False, failure=None):
        return {
            "kernel": kernel,
            "peer": peer,
            "path": "triton",
            "splits": None if peer else 64,
            "error": 0.0123,
            "allowed_error": 0.07,
            "failure": failure,
            "microseconds": us,
            "host_microseconds": 1234.5,
            "tflops": 1234.5,
            "gbs": 4321.0,
            "copy_share": 0.998,
            "matrix_share": 1.023,
        }

    def shape(name):
        return {
            "name": name,
            "batch": 64,
            "heads": 128,
            "s_q": 2,
            "lengths": [1, 131072],
            "tokens": 700_000,
            "suggested_rule": {"min_tokens": 131072, "max_splits": 132},
            "rows": [
                row("fp8 hopper", 12345.6),
                row("fp8 hopper, fixed splits", 12345.6),
                row("fp8 portable, fixed splits", 99999.9),
                row("fp8 with q-quant", 15000.0),
                row("bf16 portable", 24691.2),
                row("FlashInfer BF16", 18518.4, peer=True, failure="error " + "x" * 200),
                row("FlashMLA FP8", 6172.8, peer=True),
            ],
        }

    machine = {
        "device": "NVIDIA H200",
        "power_limit_w": "700.00",
        "sm_clock_mhz": "1980",
        "max_sm_clock_mhz": "1980",
        "memory_clock_mhz": "3201",
        "driver": "580.82.07",
        "path": "triton",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "commit": "0123456+",
        "date": "2026-11-30",
    }
    return {
        "command": "snapmla bench kernels --device auto" + " --shape 64,128,131072,2" * 5,
        "machine": machine,
        "method": "CUDA graph replay, L2 flushed by a read",
        "repeats": 50,
        "fixed_rule": {"min_tokens": 1024, "max_splits": 64},
        "peers": dict(zip(PEERS, ("ready", "not installed " + "y" * 200, "ready"), strict=True)),
        "ceilings": {"copy": 4.27e12, "matrix": 7.16e14, "empty_us": 3.21},
        "shapes": [shape("64,128,131072,2"), shape("128,128,8192")],
        "sweep": [shape("64,128,65536")],
    }


def test_tables_fit_a_page_and_absent_peers_keep_their_column():
    report = made_up_report()
    add_speedups(report, ["shapes", "sweep"])
    text = kernel_text(report, ["shapes"])
    assert max(map(len, text.splitlines())) <= COLUMNS
    line = next(x for x in text.splitlines() if x.startswith("128,128,8192  "))
    assert line.split() == (
        "128,128,8192 12345.6 2.00 / 1.65 1.50 / 1.23 absent* 0.50 / 0.41".split()
    )
    assert "FlashMLA BF16: not installed" in text
    widest = next(x for x in text.splitlines() if "fp8 portable, fixed" in x)
    assert widest.split()[-7:] == "64 99999.9 1234 4321 100 102 1234".split()


def test_speedups_are_of_this_librarys_decodes_over_all_others():
    report = made_up_report()
    add_speedups(report, ["shapes"])
    rows = {row["kernel"]: row for row in report["shapes"][0]["rows"]}
    assert rows["fp8 hopper"]["speedup_over"] == {
        "FlashInfer BF16": pytest.approx(1.5),
        "FlashMLA FP8": pytest.approx(0.5),
        "bf16 portable": pytest.approx(2.0),
    }
    assert "speedup_over" not in rows["bf16 portable"]


def test_files_are_complete_after_every_write_and_strict_json(tmp_path):
    files = ResultFiles(tmp_path / "a.json", tmp_path / "out")
    files.write({"x": [1.0]}, "first\n")
    files.write({"x": [1.0, math.nan, 1 / 3]}, "second\n")
    for path in (tmp_path / "a.json", tmp_path / "out" / "results.json"):
        report = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert report == {"x": [1, None, 0.333333]}
    assert (tmp_path / "out" / "table.txt").read_text() == "second\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["results.json", "table.txt"]


def test_an_interrupted_run_keeps_the_shapes_it_finished(tmp_path, twins, monkeypatch):
    measure = KernelBenchmark._time

    def interrupted(self, shape, **keywords):
        if shape.batch == 2:
            raise KeyboardInterrupt
        return measure(self, shape, **keywords)

    monkeypatch.setattr(KernelBenchmark, "_time", interrupted)
    status = cli.main(
        ["bench", "kernels", "--device", "cpu", "--only", "k-append", "--repeats", "1"]
        + ["--shape", "1,2,20", "--shape", "2,2,20", "--out", str(tmp_path)]
    )
    assert status == 130
    report = json.loads((tmp_path / "results.json").read_text())
    assert [shape["name"] for shape in report["shapes"]] == ["1,2,20"]
    assert "1,2,20" in (tmp_path / "table.txt").read_text()


def test_plots_are_drawn_from_reports(tmp_path):
    pytest.importorskip("matplotlib")
    from stage3_dataflow.bench_plots import plot_kernels

    plot_kernels(made_up_report(), ["shapes", "sweep"], tmp_path)
    for name in ("shapes.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# Throughput


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(tiny_config(num_hidden_layers=2))


def test_both_caches_get_the_same_bytes(decoder, twins):
    """Widths 32 and 16: 68 bytes of FP8 against 96 of BF16 for a token and layer."""
    memory = default_memory(decoder, 40, 4, requests=5)
    assert memory == 5 * 10 * 4 * 2 * 96
    benchmark = ThroughputBenchmark(decoder, memory, page_size=4, steps=2, prefill_chunk=8)
    settings = [Setting(40, 5), Setting(40, 5, most=3)]
    seen = []
    report = benchmark.run(settings, lambda r: seen.append(len(r["steady"]) + len(r["whole"])))
    assert seen == list(range(1, 9))
    for kind in ("steady", "whole"):
        running = {(row["cache"], row["most"]): row["running"] for row in report[kind]}
        assert running == {
            ("bf16", None): 5,
            ("fp8", None): 5 * 96 // 68,
            ("bf16", 3): 3,
            ("fp8", 3): 3,
        }
    for row in report["whole"]:
        assert row["generated_tokens"] == 5 * row["requests"]
        assert row["requests"] == 2 * (5 if row["most"] is None else 3)
        assert row["seconds"] >= row["decode_seconds"] > 0
    for row in report["steady"] + report["whole"]:
        assert row["decode"] == "eager" and row["why_eager"] == "the model is on cpu"
        assert row["tokens_per_second"] > 0
    report["command"] = "snapmla bench throughput"
    text = throughput_text(report)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert text.count("x BF16") == 4


def test_throughput_refuses_what_cannot_be_measured(decoder, twins):
    with pytest.raises(ValueError, match="the cache must hold a request of 40 tokens"):
        ThroughputBenchmark(decoder, 100, page_size=4).run([Setting(40, 5)], no_report)
    with pytest.raises(ValueError, match="new_tokens must be between 1 and 39"):
        Setting(40, 40)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        Setting(40, 4, 0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        ThroughputBenchmark(decoder, 100, steps=0)


def test_a_request_that_fails_is_a_row_that_says_so(decoder, twins, monkeypatch):
    monkeypatch.setattr(
        decoder, "logits", lambda hidden: hidden.new_full((*hidden.shape[:-1], 61), math.nan)
    )
    benchmark = ThroughputBenchmark(decoder, default_memory(decoder, 20, 4, 2), page_size=4)
    report = benchmark.run([Setting(20, 4)], no_report)
    assert all("requests failed" in row["failure"] for row in report["whole"])
    report["command"] = "snapmla bench throughput"
    assert max(map(len, throughput_text(report).splitlines())) <= COLUMNS


# The command line


def test_bench_kernels_from_the_command_line(tmp_path, capsys, twins):
    status = cli.main(
        ["bench", "kernels", "--device", "cpu", "--shape", "1,2,70", "--shape", "2,3,20,2"]
        + ["--repeats", "1", "--json", str(tmp_path / "r.json"), "--out", str(tmp_path / "o")]
    )
    assert status == 0
    printed = capsys.readouterr()
    assert printed.out == (tmp_path / "o" / "table.txt").read_text()
    assert max(map(len, printed.out.splitlines())) <= COLUMNS
    assert "pytorch path, which says nothing about a GPU" in " ".join(printed.out.split())
    assert "check 2/2" in printed.err and "time shapes 2/2" in printed.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report == json.loads((tmp_path / "o" / "results.json").read_text())
    assert [shape["name"] for shape in report["shapes"]] == ["1,2,70", "2,3,20,2"]
    assert report["command"].startswith("snapmla bench kernels") and report["ceilings"] is None
    assert {"device", "torch", "triton", "date", "commit"} <= set(report["machine"])


def test_the_source_tree_runs_without_being_installed(capsys, twins):
    command = ["bench", "kernels", "--device", "cpu", "--only", "k-append", "--repeats", "1"]
    assert bench_command.main([*command, "--shape", "1,1,1"]) == 0
    assert "k-append" in capsys.readouterr().out
    assert bench_command.main([*command, "--shape", "1,1"]) == 2
    assert "a shape must be" in capsys.readouterr().err


def test_a_wrong_kernel_gives_status_1(capsys, twins, monkeypatch):
    monkeypatch.setattr(
        bench_kernels, "fetch_dequant", lambda *a, total_tokens: torch.zeros(total_tokens, 576)
    )
    command = ["bench", "kernels", "--device", "cpu", "--shape", "1,2,20", "--only", "fetch"]
    assert cli.main(command) == 1
    assert "1,2,20, fetch-dequant: error 1.0e+00 is above" in capsys.readouterr().err


def test_bench_stages_from_the_command_line(tmp_path, capsys, twins):
    status = cli.main(
        ["bench", "stages", "--device", "cpu", "--shape", "2,3,70", "--shape", "1,2,20,2"]
        + ["--repeats", "1", "--page-size", "16", "--out", str(tmp_path)]
    )
    assert status == 0
    printed = capsys.readouterr()
    assert printed.out == (tmp_path / "table.txt").read_text()
    assert max(map(len, printed.out.splitlines())) <= COLUMNS
    assert "1,2,20,2 stage 3, BF16 cache" in printed.err
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["command"].startswith("snapmla bench stages") and report["method"] == "wall clock"
    assert [shape["name"] for shape in report["shapes"]] == ["2,3,70", "1,2,20,2"]
    for shape in report["shapes"]:
        rows = {row["stage"]: row for row in shape["rows"]}
        assert [*rows] == [*(f"stage {n}" for n in range(4)), "stage 3, BF16 cache"]
        assert all(row["milliseconds"] > 0 for row in shape["rows"])
        # Quantising costs more than rounding to BF16, and the stages quantise the same.
        rounded = max(rows[name]["error"] for name in ("stage 0", "stage 3, BF16 cache"))
        quantised = [rows[f"stage {n}"]["error"] for n in (1, 2, 3)]
        assert 0 < rounded < 2**-7 < min(quantised)
        assert max(quantised) < 1.5 * min(quantised)


def test_stages_are_compared_with_exact_attention(monkeypatch, twins):
    """A backend that gives nothing is off by the whole, one that is exact by its output's dtype."""

    class Exact(AbsorbedBackend):
        def attend(self, q_latent, q_rope, cache, table, lengths, scale, *, causal=True):
            wide = Bf16LatentPages(*(plane.double() for plane in cache))
            return super().attend(q_latent.double(), q_rope.double(), wide, table, lengths, scale)

    class Nothing(AbsorbedBackend):
        def attend(self, q_latent, *arguments, causal=True):
            return AttentionOutput(torch.zeros_like(q_latent), torch.zeros(q_latent.shape[:3]))

    named = {"exact": (Exact(), "bf16"), "nothing": (Nothing(), "bf16")}
    monkeypatch.setattr(bench_stages, "backends", lambda: named)
    report = bench_stages.measure_stages([SMALL], CPU, repeats=1)
    exact, nothing = (row["error"] for row in report["shapes"][0]["rows"])
    assert exact < 2.0**-40
    assert nothing == 1.0


def test_bench_throughput_from_the_command_line(tmp_path, capsys, twins):
    status = cli.main(
        ["bench", "throughput", "--device", "cpu", "--contexts", "24", "--batches", "2", "memory"]
        + ["--page-size", "16", "--memory-gb", "0.0007", "--steps", "1", "--new-tokens", "2"]
        + ["--out", str(tmp_path)]
    )
    assert status == 0
    assert capsys.readouterr().out == (tmp_path / "table.txt").read_text()
    report = json.loads((tmp_path / "results.json").read_text())
    running = {(row["cache"], row["most"]): row["running"] for row in report["steady"]}
    # 700,000 bytes are 6 pages of 16 x 6 x 1152 and 11 of 16 x 6 x 644; a request takes 2.
    assert running == {("bf16", 2): 2, ("fp8", 2): 2, ("bf16", None): 3, ("fp8", None): 5}
    assert len(report["whole"]) == 4


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["kernels", "--sweep"], "--sweep and --ragged need a CUDA device"),
        (["kernels", "--ragged"], "--sweep and --ragged need a CUDA device"),
        (["kernels", "--shape", "1,2"], "a shape must be batch,heads,length"),
        (["kernels", "--page-size", "0"], "--page-size must be at least 1"),
        (["kernels", "--repeats", "0"], "repeats must be at least 1"),
        (["kernels", "--json", "/no/such/folder/x.json"], "--json must be in a folder that exists"),
        (["stages", "--shape", "1,2"], "a shape must be batch,heads,length"),
        (["stages", "--repeats", "0"], "repeats must be at least 1"),
        (["throughput", "--geometry", "v2-lite"], "--geometry v2-lite needs a CUDA device"),
        (["throughput", "--batches", "many"], "--batches must be whole numbers or 'memory'"),
        (["throughput", "--layers", "2"], "--layers belongs to --geometry"),
        (["throughput", "--contexts", "1"], "new_tokens must be between 1 and 0"),
        (["throughput", "--contexts", "5000"], "at most the model's 4096 positions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line(options, refusal, capsys, twins):
    assert cli.main(["bench", *options, "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("snapmla bench: error: ") and refusal in lines[-1]


def test_throughput_does_not_measure_the_interpreter(capsys):
    if torch.cuda.is_available():
        pytest.skip("tests interpret kernels only where there is no GPU")
    assert cli.main(["bench", "throughput", "--device", "cpu"]) == 2
    assert "would measure Triton's interpreter" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_gives_rates(tmp_path):
    """Nothing can read faster than the copy of this run, give or take the L2 cache's flush."""
    status = cli.main(
        ["bench", "kernels", "--shape", "16,64,2048", "--repeats", "5", "--peers", "none"]
        + ["--out", str(tmp_path)]
    )
    assert status == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["ceilings"]["copy"] > 0 and report["machine"]["path"] == "triton"
    for row in report["shapes"][0]["rows"]:
        assert row["microseconds"] > 0 and row["gbs"] > 0 and row["host_microseconds"] > 0
        assert row["copy_share"] < 1.1
        if row["kernel"].startswith("fp8"):
            assert row["speedup_over"]["bf16 portable"] > 0
