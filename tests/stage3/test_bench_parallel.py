"""The benchmark of several ranks notices what is wrong, and keeps what it measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from stage3_dataflow import use_path
from stage3_dataflow.bench_parallel import (
    SMOKE,
    Decoded,
    ParallelBenchmark,
    compare,
    lse_bound,
    main,
)
from stage3_dataflow.bench_parallel_report import failed_checks, text_of
from stage3_dataflow.bench_report import COLUMNS, ResultFiles
from tests.stage3.ranks import on_threads, under_torchrun

pytestmark = pytest.mark.stage3

SMALL = dataclasses.replace(SMOKE, models={"V2-Lite": SMOKE.models["V2-Lite"]})
SECTIONS = ("messages", "context", "tensor", "attention", "decode")


def run(*names: str) -> dict:
    """Report of some sections on two ranks, by the twins."""

    def program(ranks):
        benchmark = ParallelBenchmark(ranks, SMALL)
        sections = benchmark.sections()
        return benchmark.run({name: sections[name] for name in names})

    with use_path("pytorch"):
        first, second = on_threads(2, program)
    assert failed_checks(first) == failed_checks(second)
    return first


def test_what_is_right_is_found_right():
    report = run("context", "tensor")
    assert failed_checks(report) == []
    (long,) = report["sections"]["context"]["rows"]
    assert long["tokens"] == 384  # 300 in as many whole pages on each rank
    assert long["cache_bytes_one_rank"] == 2 * long["cache_bytes_on_a_rank"] == 384 * 644
    # Rounding there was, or the bounds bound nothing.
    assert 0.0 < long["error_ranks"] <= long["bound"]
    narrow, wide = report["sections"]["tensor"]["rows"]
    assert (narrow["dtype"], wide["dtype"]) == ("float32", "bfloat16")
    for row in (narrow, wide):
        assert 0.0 < row["error_ranks"] <= row["bound"]
        assert row["parameters"] / 2 < row["parameters_on_a_rank"] < row["parameters"]
    assert narrow["error_ranks"] < 1e-3 * wide["error_ranks"]
    assert narrow["equal_tokens"] == narrow["tokens"] == 2 * (9 + 3)


def test_partial_sums_that_are_not_added_up_are_found(monkeypatch):
    monkeypatch.setattr(
        "stage3_dataflow.tensor_parallel.sum_over_ranks", lambda ranks, partial: partial
    )
    wrong = failed_checks(run("tensor"))
    for row in (1, 2):
        assert f"tensor, row {row}: logits" in wrong
        assert f"tensor, row {row}: same cache on all ranks" in wrong
        assert f"tensor, row {row}: same logits on all ranks" in wrong


def test_partial_attention_that_is_not_merged_is_found(monkeypatch):
    monkeypatch.setattr(
        "stage3_dataflow.context_parallel.merge_over_ranks",
        lambda ranks, partial, *_, **__: partial,
    )
    wrong = failed_checks(run("context"))
    found = ("error of all ranks", "lse", "same result on all ranks")
    assert wrong == [f"context, row 1: {check}" for check in found]


def test_lse_shows_one_page_of_131072_tokens():
    """A page less is log(1 - 64 / 131072), 4.9e-4, where all tokens weigh alike."""
    assert lse_bound(2**17, 2) < 64 / 2**17
    assert lse_bound(2**20, 8) < 64 / 2**14


def test_a_token_may_differ_where_two_are_nearly_best():
    exact = torch.zeros(1, 3, 5, dtype=torch.float64)
    exact[0, 1, :2] = torch.tensor([1.0, 1.0 - 1e-6], dtype=torch.float64)
    logits = exact.float()
    logits[0, 0, 4] = 1e-6  # one rank's error
    one = Decoded(torch.tensor([[7, 7, 0]]), logits, [])
    other = Decoded(torch.tensor([[7, 7, 1]]), logits.clone(), [])
    other.logits[0, 2] = 100.0  # of another input: not compared
    row = compare(one, other, exact)
    assert all(row["checks"].values())
    assert (row["equal_tokens"], row["tokens"]) == (2, 3)
    assert row["gaps_where_tokens_differ"] == [pytest.approx(1e-6)]
    for changed in (exact, logits, other.logits):
        changed[0, 1, 1] = 0.9
    assert compare(one, other, exact)["checks"] == {"logits": True, "greedy tokens": False}
    other.logits[0, 1, 1] = 1.0
    assert compare(one, other, exact)["checks"] == {"logits": False, "greedy tokens": False}
    other.logits[0, 1] = torch.nan
    assert not compare(one, other, exact)["checks"]["logits"]


def test_a_section_that_fails_costs_the_others_nothing(tmp_path):
    def program(ranks):
        def fails_on_one_rank():
            yield {"batch": 1}
            if ranks.rank == 1:
                raise ValueError("no memory")

        def fine():
            yield {"checks": {"this": True, "that": ranks.rank < 0}}

        files = ResultFiles(out=tmp_path) if ranks.rank == 0 else None
        benchmark = ParallelBenchmark(ranks, SMALL, files, "command")
        return benchmark.run({"one": fails_on_one_rank, "other": fine})

    with use_path("pytorch"):
        reports = on_threads(2, program)
    messages = [report["sections"]["one"]["error"] for report in reports]
    assert messages == [
        "RuntimeError: rank 1 of 2 failed in one: ValueError: no memory",
        "ValueError: no memory",
    ]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["sections"]["one"]["rows"] == [{"batch": 1}]
    assert kept["sections"]["other"]["status"] == "done"
    assert failed_checks(kept) == [f"one: {messages[0]}", "other, row 1: that"]
    assert "WRONG other, row 1: that" in (tmp_path / "table.txt").read_text()


def test_the_table_fits_a_page():
    time = {"us": 123456.7}
    context = {
        "heads": 128,
        "tokens": 2**20,
        "cache_bytes_on_a_rank": 337e6,
        "one_rank": time,
        "own_pages": time,
        "ranks": time,
        "speedup": 1.99,
        "error_one_rank": 0.0123,
        "error_ranks": 0.0123,
        "bound": 0.077,
    }
    decode = {
        "model": "V3 widths",
        "layers": 27,
        "context": 131072,
        "batch": 128,
        "mode": "graph",
        "ranks": 8,
        "ms": 1234.5,
        "tokens_per_second": 123456.0,
        "speedup": 1.99,
    }
    report = run() | {"devices": ["NVIDIA H200"] * 8, "ranks": 8}
    content = "tensor parallel, V3 widths, 64 requests"
    message = {"gather": time, "sum_over_ranks": time, "all_reduce": time}
    rows = {
        "messages": [{"content": content, "bytes": 917504} | message],
        "context": [context],
        "decode": [decode, {"skipped": "needs 150 GB; 139 GB are free"}],
    }
    report["sections"] = {
        name: {"status": "done", "seconds": 12.0, "rows": own} for name, own in rows.items()
    }
    text = text_of(report)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "not measured: needs 150 GB" in text and "1,048,576" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs for it")
def test_full_sizes_are_refused_without_gpus(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path)])
    assert "1 ranks need as many CUDA devices; got 0. Use --smoke" in capsys.readouterr().err


@pytest.mark.processes
def test_torchrun_measures_every_section(tmp_path):
    printed = under_torchrun(
        *("stage3_dataflow.bench_parallel", "--smoke", "--timeout", "60", "--out", str(tmp_path)),
        limit_seconds=200,
    )
    report = json.loads((tmp_path / "results.json").read_text())
    assert tuple(report["sections"]) == SECTIONS
    for section in report["sections"].values():
        assert section["status"] == "done" and section["rows"] and "error" not in section
        assert not [row for row in section["rows"] if "skipped" in row]
    assert failed_checks(report) == []
    assert printed == (tmp_path / "table.txt").read_text()
    assert max(map(len, printed.splitlines())) <= COLUMNS
