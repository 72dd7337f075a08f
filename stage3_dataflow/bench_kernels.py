"""Every kernel of this stage by shape: first whether it is right, then how long it takes.

Two passes over the shapes. The first builds each shape's data and compares every kernel, as it will
be timed, with float64 on the operands it reads. The second times what was right. Kernels are
compiled in the first pass, and so are other libraries', in a thread.

Shapes follow each other in memory: a case is freed before the next is built.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stage0_reference.rope import Rotation, apply_rotary
from stage1_quant.quantize import QuantizedRows, dequantize_rows
from stage3_dataflow.bench_cases import (
    SOFTMAX_SCALE,
    CacheFormat,
    Case,
    Kind,
    Operands,
    Shape,
    Work,
    build_case,
    count_work,
    equal_shape,
    exact_attention,
    relative_error,
)
from stage3_dataflow.bench_peers import Peer, PeerWarmUp, load_peers, one_line
from stage3_dataflow.bench_timing import (
    Ceilings,
    Flush,
    Stopwatch,
    Timing,
    describe_machine,
    measure_ceilings,
)
from stage3_dataflow.decode import Kernel, decode_quantized, mla_decode, which_kernel
from stage3_dataflow.execution_path import which_path
from stage3_dataflow.fused_writes import fused_k_append, fused_q_quant
from stage3_dataflow.prefix import fetch_dequant
from stage3_dataflow.split_plan import (
    DEFAULT_SPLIT_RULE,
    SplitRule,
    splits_for,
    suggest_split_rule,
)
from stage3_dataflow.workspace import DecodeWorkspace

DEFAULT_SHAPES = (
    equal_shape(128, 128, 8192),
    equal_shape(64, 128, 8192),
    equal_shape(64, 128, 8192, 2),
    equal_shape(32, 64, 8192),
    equal_shape(128, 16, 8192),
    equal_shape(1, 128, 65536),
    equal_shape(16, 16, 65536),
    equal_shape(128, 128, 640),
)
CPU_SHAPES = (equal_shape(2, 4, 200), equal_shape(1, 16, 130, 2))
"""Enough to see that everything runs; their times say nothing about a GPU."""

SWEEP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SWEEP_SETTINGS = ((64, 128), (64, 16), (1, 128))
"""Batch and heads of the curves over length."""

BASELINE = "bf16 portable"
FIXED = ", fixed splits"
"""Behind the name of a decode that runs under the default rule, which no batch mate changes."""

PROCESSORS = 132
"""Multiprocessors of an H100 or H200, for a rule where no GPU says its own."""


@dataclasses.dataclass
class Implementation:
    """Something to check and time on a case.

    Attributes
    ----------
    name
        Of the row.
    kind, cache
        What work it does.
    call
        Runs it.
    error
        Relative L2 error of a call, and what it may be.
    rule
        How requests are split, where they can be.
    peer
        Whether it belongs to another library.
    """

    name: str
    kind: Kind
    cache: CacheFormat
    call: Callable[[], Any]
    error: Callable[[], tuple[float, float]]
    rule: SplitRule | None = None
    peer: bool = False


def rounding_rms(dtype: torch.dtype) -> float:
    """Root mean square of a rounding error that is uniform within ``+-u``: ``u / sqrt(3)``.

    A sum of independent terms of mean 0, each off by such a factor, is off by that much in the L2
    norm, relative to itself.
    """
    return torch.finfo(dtype).eps / 2 / math.sqrt(3)


def allowed_error(p_dtype: torch.dtype) -> float:
    """Twice what rounding P and the output cost; see `rounding_rms`.

    Latents are drawn with mean 0. The second half is room for the scores: a tensor core that keeps
    14 bits of an FP8 sum moves them a little. A tighter statement is the business of the tests;
    this one keeps a wrong kernel's time out of a table.
    """
    return 2.0 * (rounding_rms(p_dtype) + rounding_rms(torch.bfloat16))


def _attention_error(
    case: Case, out: Tensor, operands: Callable[[int], Operands], p_dtype: torch.dtype
) -> tuple[float, float]:
    """Largest error among the shortest, the longest and the last request."""
    lengths = case.shape.lengths
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    requests = sorted({order[0], order[-1], len(lengths) - 1})
    errors = [relative_error(out[r], exact_attention(operands(r))) for r in requests]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    return worst, allowed_error(p_dtype)


def suggested_rule(shape: Shape, processors: int, kernel: Kernel) -> SplitRule:
    """`suggest_split_rule` for a shape's mean and longest length."""
    stands_longest_first = list(shape.lengths) == sorted(shape.lengths, reverse=True)
    return suggest_split_rule(
        shape.batch,
        shape.s_q * shape.heads,
        shape.tokens // shape.batch,
        processors=processors,
        longest=max(shape.lengths),
        longest_first=stands_longest_first or kernel == "hopper",
    )


def available_kernels(case: Case) -> list[Kernel]:
    """Decode kernels that serve a case, the fastest first."""
    out = torch.empty_like(case.q_latent)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=case.device)
    choice = which_kernel(case.query, case.fp8, case.block_table, out, lse)
    return [choice.name, "portable"] if choice.name != "portable" else ["portable"]


def implementations(case: Case, processors: int) -> list[Implementation]:
    """Everything of this library that a case can run, in the order of the rows."""
    writes = [_q_quant(case), _k_append(case)]
    found = [*writes, _both(*writes), _fetch_dequant(case)]
    kernels = available_kernels(case)
    rules = {kernel: suggested_rule(case.shape, processors, kernel) for kernel in kernels}
    for kernel, rule in rules.items():
        found.append(_fp8_decode(case, kernel, rule, ""))
        found.append(_fp8_decode(case, kernel, DEFAULT_SPLIT_RULE, FIXED))
    found.append(_whole_decode(case, kernels[0], rules[kernels[0]]))
    found.append(_bf16_decode(case, rules["portable"], ""))
    found.append(_bf16_decode(case, DEFAULT_SPLIT_RULE, FIXED))
    return found


def _q_quant(case: Case) -> Implementation:
    def call() -> QuantizedRows:
        return fused_q_quant(case.q_latent, case.q_rope, case.rotation)

    def error() -> tuple[float, float]:
        per_head = Rotation(*(part[:, :, None] for part in case.rotation))
        rope = apply_rotary(case.q_rope.double(), per_head, interleaved=False)
        exact = torch.cat((case.q_latent.double(), rope), dim=-1)
        rows = torch.cat(dequantize_rows(call()), dim=-1)
        return relative_error(rows, exact), rounding_rms(torch.float8_e4m3fn)

    return Implementation("q-quant", "q-quant", "fp8", call, error)


def _k_append(case: Case) -> Implementation:
    rotation = Rotation(*(part.flatten(0, 1) for part in case.rotation))  # [tokens, pairs]

    def call() -> None:
        fused_k_append(
            case.new_latent,
            case.new_rope,
            case.append_pages,
            case.slots,
            norm_weight=case.norm_weight,
            rotation=rotation,
        )

    def error() -> tuple[float, float]:
        call()
        weight = case.norm_weight.double()
        latent = F.rms_norm(case.new_latent.double(), weight.shape, weight, 1e-6)
        rope = apply_rotary(case.new_rope.double(), rotation, interleaved=False)
        page, offset = case.slots // case.page_size, case.slots % case.page_size
        codes, scale, rope_plane = case.append_pages
        stored = codes.view(torch.uint8)[page, offset].view(codes.dtype)
        rows = dequantize_rows(QuantizedRows(stored, scale[page, offset], rope_plane[page, offset]))
        exact = torch.cat((latent, rope), dim=-1)
        return relative_error(torch.cat(rows, dim=-1), exact), rounding_rms(torch.float8_e4m3fn)

    return Implementation("k-append", "k-append", "fp8", call, error)


def _both(q_quant: Implementation, k_append: Implementation) -> Implementation:
    """Take together what a decode step writes before it attends: one graph."""

    def call() -> None:
        q_quant.call()
        k_append.call()

    return Implementation("q-quant and k-append", "writes", "fp8", call, q_quant.error)


def _fetch_dequant(case: Case) -> Implementation:
    total = case.shape.tokens

    def call() -> Tensor:
        return fetch_dequant(case.fp8, case.block_table, case.cache_seqlens, total_tokens=total)

    def error() -> tuple[float, float]:
        last = case.shape.batch - 1
        operands = case.fp8_operands(last)
        exact = torch.cat((operands.c_kv, operands.k_rope), dim=-1)
        rows = call()[total - case.shape.lengths[last] :]
        return relative_error(rows, exact), rounding_rms(torch.bfloat16)

    return Implementation("fetch-dequant", "fetch-dequant", "fp8", call, error)


def _outputs(case: Case) -> dict[str, Any]:
    """Where a decode writes: kept from call to call, as a captured step would."""
    return {
        "out": torch.empty_like(case.q_latent),
        "lse": torch.empty(case.q_latent.shape[:3], dtype=torch.float32, device=case.device),
        "workspace": DecodeWorkspace(case.device),
    }


def _fp8_decode(case: Case, kernel: Kernel, rule: SplitRule, suffix: str) -> Implementation:
    keywords = _outputs(case) | {"kernel": kernel, "split_rule": rule}

    def call() -> Tensor:
        return decode_quantized(
            case.query, case.fp8, case.block_table, case.cache_seqlens, SOFTMAX_SCALE, **keywords
        ).out

    p_dtype = torch.float8_e4m3fn if kernel == "hopper" else torch.bfloat16
    return Implementation(
        f"fp8 {kernel}{suffix}",
        "decode",
        "fp8",
        call,
        lambda: _attention_error(case, call(), case.fp8_operands, p_dtype),
        rule,
    )


def _whole_decode(case: Case, kernel: Kernel, rule: SplitRule) -> Implementation:
    keywords = _outputs(case) | {"kernel": kernel, "split_rule": rule}

    def call() -> Tensor:
        return mla_decode(
            case.q_latent,
            case.q_rope,
            case.fp8,
            case.block_table,
            case.cache_seqlens,
            SOFTMAX_SCALE,
            **keywords,
        ).out

    p_dtype = torch.float8_e4m3fn if kernel == "hopper" else torch.bfloat16
    return Implementation(
        "fp8 with q-quant",
        "mla_decode",
        "fp8",
        call,
        lambda: _attention_error(case, call(), case.fp8_operands, p_dtype),
        rule,
    )


def _bf16_decode(case: Case, rule: SplitRule, suffix: str) -> Implementation:
    keywords = _outputs(case) | {"split_rule": rule}

    def call() -> Tensor:
        return mla_decode(
            case.q_latent,
            case.q_rope,
            case.bf16,
            case.block_table,
            case.cache_seqlens,
            SOFTMAX_SCALE,
            **keywords,
        ).out

    return Implementation(
        f"{BASELINE}{suffix}",
        "decode",
        "bf16",
        call,
        lambda: _attention_error(case, call(), case.bf16_operands, torch.bfloat16),
        rule,
    )


def bind_peer(peer: Peer, case: Case) -> Implementation:
    """Put another library's kernel into a row; raises what the library raises."""
    bound = peer.bind(case)
    p_dtype = torch.float8_e4m3fn if peer.cache == "fp8 per tensor" else torch.bfloat16
    return Implementation(
        peer.name,
        "decode",
        peer.cache,
        bound.call,
        lambda: _attention_error(case, bound.call(), bound.operands, p_dtype),
        peer=True,
    )


def rates(work: Work, timing: Timing, ceilings: Ceilings | None) -> dict[str, float | None]:
    """Rates of a call and their shares of the ceilings; None where they would mean nothing."""
    if ceilings is None:
        return dict.fromkeys(("tflops", "gbs", "copy_share", "matrix_share"))
    seconds = timing.median * 1e-6
    flops, moved = work.total_flops / seconds, work.total_bytes / seconds
    return {
        "tflops": flops / 1e12 if work.flops else None,
        "gbs": moved / 1e9,
        "copy_share": moved / ceilings.copy,
        "matrix_share": flops / ceilings.matrix if work.flops else None,
    }


class ReportObserver(Protocol):
    """Is told when a report has grown by a shape."""

    def __call__(self, report: dict[str, Any]) -> None:
        """Take the report so far."""
        ...


@dataclasses.dataclass
class KernelBenchmark:
    """A run over shapes.

    Attributes
    ----------
    device
        Where to run.
    repeats
        Timed replays of each call.
    page_size
        Tokens per page.
    peers
        Other libraries' kernels to stand beside.
    flush
        How the L2 cache is emptied before each replay.
    only
        Start of the names of rows that are wanted; all by default.
    say
        Told what goes on.
    """

    device: torch.device
    repeats: int = 50
    page_size: int = 64
    peers: Sequence[Peer] = ()
    flush: Flush = "read"
    only: tuple[str, ...] = ("",)
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.device, self.repeats, flush=self.flush)
        self.path = which_path(self.device).name
        self.peer_status = load_peers(list(self.peers), self.device)
        self.machine = describe_machine(self.device)
        self.processors = int(self.machine.get("multiprocessors", PROCESSORS))
        self.ceilings: Ceilings | None = None
        self._checked: dict[tuple[str, str], dict[str, Any]] = {}

    def run(self, groups: dict[str, Sequence[Shape]], observe: ReportObserver) -> dict[str, Any]:
        """Check all shapes, then time them.

        Parameters
        ----------
        groups
            Shapes by the report's key for them. Those of "sweep" get the rows of its curves only,
            each checked just before it is timed.

        Returns
        -------
        dict
            The whole report, which `observe` has seen grow.
        """
        report: dict[str, Any] = {
            "machine": self.machine,
            "method": self.watch.method,
            "repeats": self.repeats,
            "page_size": self.page_size,
            "fixed_rule": DEFAULT_SPLIT_RULE._asdict(),
            "peers": self.peer_status,
            "ceilings": None,
            **{name: [] for name in groups},
        }
        warm_up = self._warm_up()
        shapes = [shape for name, group in groups.items() if name != "sweep" for shape in group]
        for place, shape in enumerate(shapes):
            self._check(shape, f"{place + 1}/{len(shapes)}")
            self._free()
        if warm_up is not None:
            self.say("waiting for other libraries to compile")
            for name, reason in warm_up.wait().items():
                self.peer_status[name] = reason
        self.ceilings = measure_ceilings(self.watch)
        report["ceilings"] = None if self.ceilings is None else self.ceilings._asdict()
        observe(report)
        for name, group in groups.items():
            for place, shape in enumerate(group):
                self.say(f"time {name} {place + 1}/{len(group)}: {shape.name}")
                report[name].append(self._time(shape, curves=name == "sweep"))
                self._free()
                observe(report)
        if self.ceilings is not None:
            again = measure_ceilings(self.watch)
            report["ceilings_at_end"] = None if again is None else again._asdict()
            observe(report)
        return report

    def _warm_up(self) -> PeerWarmUp | None:
        ready = [peer for peer in self.peers if self.peer_status[peer.name] == "ready"]
        if not ready:
            return None
        case = build_case(equal_shape(1, 16, 64), device=self.device)
        torch.cuda.synchronize(self.device)
        return PeerWarmUp(ready, case)

    def _wanted(self, case: Case, *, curves: bool = False) -> list[Implementation]:
        found = implementations(case, self.processors)
        if curves:
            names = f"fp8 {available_kernels(case)[0]}", BASELINE
            found = [one for one in found if one.name in names]
        return [one for one in found if one.name.startswith(self.only)]

    def _check(self, shape: Shape, place: str) -> None:
        """Compare every kernel of this library with float64; remember what was seen."""
        started = time.perf_counter()
        case = build_case(shape, device=self.device, page_size=self.page_size)
        for one in self._wanted(case):
            self._checked[shape.name, one.name] = self._judge(one)
        self.say(f"check {place}: {shape.name}, {time.perf_counter() - started:.1f} s")

    @staticmethod
    def _judge(one: Implementation) -> dict[str, Any]:
        try:
            error, allowed = one.error()
        except Exception as failure:
            return {"error": None, "allowed_error": None, "failure": one_line(failure)}
        wrong = None if error <= allowed else f"error {error:.1e} is above {allowed:.1e}"
        return {"error": error, "allowed_error": allowed, "failure": wrong}

    def _time(self, shape: Shape, *, curves: bool) -> dict[str, Any]:
        case = build_case(shape, device=self.device, page_size=self.page_size)
        suggested = suggested_rule(shape, self.processors, available_kernels(case)[0])
        result: dict[str, Any] = {
            "name": shape.name,
            "batch": shape.batch,
            "heads": shape.heads,
            "s_q": shape.s_q,
            "lengths": [min(shape.lengths), max(shape.lengths)],
            "tokens": shape.tokens,
            "suggested_rule": suggested._asdict(),
            "rows": [],
        }
        for one in self._wanted(case, curves=curves):
            checked = self._judge(one) if curves else self._checked[shape.name, one.name]
            result["rows"].append(self._row(one, case, checked))
        for peer in self.peers:
            if self.peer_status[peer.name] != "ready" or not peer.name.startswith(self.only):
                continue
            try:
                one = bind_peer(peer, case)
                row = self._row(one, case, self._judge(one))
            except Exception as failure:
                row = {"kernel": peer.name, "peer": True, "failure": one_line(failure)}
            result["rows"].append(row)
        return result

    def _row(self, one: Implementation, case: Case, checked: dict[str, Any]) -> dict[str, Any]:
        """Time a kernel that was right; a peer is timed whatever its error, which stands beside."""
        work = count_work(one.kind, case.shape, one.cache, self.page_size)
        row: dict[str, Any] = {
            "kernel": one.name,
            "peer": one.peer,
            "path": self.path,
            "split_rule": None if one.rule is None else one.rule._asdict(),
            "splits": None
            if one.rule is None
            else max(len(splits_for(length, one.rule)) for length in case.shape.lengths),
            "flops": work.flops,
            "bytes": work.bytes,
            **checked,
        }
        if row["failure"] is not None and not one.peer:
            return row
        try:
            timing = self.watch.time(one.call)
        except Exception as failure:
            return row | {"failure": one_line(failure)}
        return row | {
            "microseconds": timing.median,
            "quartiles": [timing.low, timing.high],
            "host_microseconds": timing.host,
            **rates(work, timing, self.ceilings),
        }

    def _free(self) -> None:
        """Give a case's memory back; nobody holds it any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def sweep_shapes(lengths: Sequence[int] = SWEEP_LENGTHS) -> list[Shape]:
    """Shapes of the curves over length."""
    return [
        equal_shape(batch, heads, length) for batch, heads in SWEEP_SETTINGS for length in lengths
    ]


def add_speedups(report: dict[str, Any], groups: Sequence[str]) -> None:
    """Put ``speedup_over`` into every FP8 decode row: of each BF16 and peer row of its shape.

    Not where a CPU was timed: that says nothing about the kernels.
    """
    if report["ceilings"] is None:
        return
    for shape in (shape for name in groups for shape in report.get(name, [])):
        timed = {
            row["kernel"]: row["microseconds"] for row in shape["rows"] if "microseconds" in row
        }
        others = {
            row["kernel"]
            for row in shape["rows"]
            if row["kernel"] in timed and (row["peer"] or row["kernel"].startswith(BASELINE))
        }
        for row in shape["rows"]:
            if row["kernel"] in timed and row["kernel"].startswith("fp8"):
                row["speedup_over"] = {
                    name: timed[name] / timed[row["kernel"]] for name in sorted(others)
                }


def failures(report: dict[str, Any], groups: Sequence[str]) -> list[str]:
    """Say what of this library was wrong or raised."""
    return [
        f"{shape['name']}, {row['kernel']}: {row['failure']}"
        for name in groups
        for shape in report.get(name, [])
        for row in shape["rows"]
        if not row["peer"] and row["failure"] is not None
    ]
