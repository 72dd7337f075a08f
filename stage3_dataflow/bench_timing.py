"""How long a call takes, what the device can do at best, and what machine this is.

On a GPU a call is recorded as a CUDA graph and replayed, since from Python a launch can take longer
than a short kernel runs. Before each replay, outside the timed interval, a buffer much larger than
the L2 cache is read, so the call finds its data in memory as a decode step would, where a whole
model's weights were read since the last one. It also gives the host time to get ahead of the
device. A flush that *writes* leaves the cache full of lines which the timed call then has to put
back into memory: on an H200 that adds about 9 microseconds to whatever moves enough.

The two ceilings are measured in the same run and the same way: a copy within the device's memory,
and cuBLAS's BF16 product of two large random matrices. Percentages are of these, not of a
datasheet.
"""

from __future__ import annotations

import datetime
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from stage3_dataflow.execution_path import which_path

FLUSH_BYTES = 512 * 2**20
"""Several times any L2, and more than 100 us of reading: see the module's docstring."""
Flush = Literal["read", "write"]
COPY_BYTES = 2 * 2**30
MATRIX_SIZE = 8192


class Timing(NamedTuple):
    """Microseconds of a call.

    Attributes
    ----------
    median, low, high
        Of the replays, low and high being the quartiles.
    host
        Of issuing the call from Python, without a graph; None where the host computes.
    repeats
        Replays timed.
    """

    median: float
    low: float
    high: float
    host: float | None
    repeats: int


class Stopwatch:
    """Times calls on a device.

    Parameters
    ----------
    device
        Where the calls run.
    repeats
        Timed replays of each call.
    flush
        How a GPU's L2 cache is emptied before each: by reading a buffer, or by writing it.
    """

    def __init__(self, device: torch.device, repeats: int = 50, *, flush: Flush = "read") -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1; got {repeats}")
        if flush not in ("read", "write"):
            raise ValueError(f"flush must be read or write; got {flush!r}")
        self.device = device
        self.repeats = repeats
        self.flush = flush
        self.method = (
            f"CUDA graph replay, L2 flushed by a {flush}"
            if device.type == "cuda"
            else f"wall clock, {which_path(device).name} path"
        )
        self._buffer = (
            torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None
        )

    def time(self, call: Callable[[], Any]) -> Timing:
        """Time a call that allocates what it likes and never synchronises."""
        if self._buffer is None:
            return self._wall_clock(call)
        host = self._issue(call)
        graph = self._capture(call)
        graph.replay()
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats)] for _ in range(2)
        )
        for start, end in zip(starts, ends, strict=True):
            if self.flush == "read":
                self._buffer.sum()
            else:
                self._buffer.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        pairs = zip(starts, ends, strict=True)
        return _summary([start.elapsed_time(end) * 1e3 for start, end in pairs], host)

    def time_issued(self, call: Callable[[], Any]) -> Timing:
        """Time a call as Python issues it: host time included, caches warm; it may synchronise."""
        if self._buffer is None:
            return self._wall_clock(call)
        for _ in range(2):
            call()
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return _summary(times, None)

    def _capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Record a call. `torch.cuda.graph` would collect garbage first, each time."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(side):
            graph.capture_begin()
            try:
                call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(side)
        return graph

    def _issue(self, call: Callable[[], Any]) -> float:
        """Microseconds until the host may go on, once everything is compiled."""
        for _ in range(2):
            call()
        times = []
        for _ in range(min(self.repeats, 10)):
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize(self.device)
        return statistics.median(times)

    def _wall_clock(self, call: Callable[[], Any]) -> Timing:
        call()
        times = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
        return _summary(times, None)


def _summary(times: list[float], host: float | None) -> Timing:
    """Median and quartiles, to a tenth of a microsecond."""
    low, median, high = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    return Timing(
        round(median, 1),
        round(low, 1),
        round(high, 1),
        None if host is None else round(host, 1),
        len(times),
    )


class Ceilings(NamedTuple):
    """The best that the device did.

    Attributes
    ----------
    copy
        Bytes per second, read and written.
    matrix
        BF16 operations per second.
    empty_us
        Microseconds of a graph of one trivial kernel: what no call can go below.
    """

    copy: float
    matrix: float
    empty_us: float


def measure_ceilings(watch: Stopwatch) -> Ceilings | None:
    """Measure them; None without a GPU."""
    device = watch.device
    if device.type != "cuda":
        return None
    copy_us = _copy_time(watch)
    matrix_us = _matrix_time(watch)
    small = torch.zeros(1, device=device)
    empty_us = watch.time(lambda: small.add_(1.0)).median
    torch.cuda.empty_cache()
    return Ceilings(
        copy=2 * COPY_BYTES / copy_us * 1e6,
        matrix=2 * MATRIX_SIZE**3 / matrix_us * 1e6,
        empty_us=empty_us,
    )


def _copy_time(watch: Stopwatch) -> float:
    """Time a kernel that reads and writes: a captured `copy_` is a memcpy node, and slower."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=watch.device).random_()
    target = torch.empty_like(source)
    return watch.time(lambda: torch.bitwise_not(source, out=target)).median


def _matrix_time(watch: Stopwatch) -> float:
    size = (MATRIX_SIZE, MATRIX_SIZE)
    left, right = (torch.randn(size, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return watch.time(lambda: torch.matmul(left, right, out=product)).median


SMI_FIELDS = {
    "power_limit_w": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "driver": "driver_version",
}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Say what ran: device, power limit and clocks as far as they can be known, versions, date.

    Clocks are those under a large matrix product.
    """
    facts: dict[str, Any] = {
        "device": f"CPU ({platform.machine()})",
        "path": which_path(device).name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        facts["device"] = properties.name
        facts["multiprocessors"] = properties.multi_processor_count
        facts["l2_mib"] = properties.L2_cache_size / 2**20
        _keep_busy(device)
        facts |= _ask_nvidia_smi(str(properties.uuid))
        torch.cuda.synchronize(device)
    return facts


def _keep_busy(device: torch.device) -> None:
    """Queue about a second of matrix products: an idle GPU's clocks say nothing."""
    matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    for _ in range(600):
        torch.matmul(matrix, matrix, out=product)


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _commit() -> str | None:
    """Commit of the source tree, with a plus sign if it has changes; None outside of one."""
    here = Path(__file__).parent
    revision = _output("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    if revision is None:
        return None
    return revision + ("+" if _output("git", "-C", str(here), "status", "--porcelain") else "")


def _ask_nvidia_smi(uuid: str) -> dict[str, str]:
    """Read a GPU's settings as nvidia-smi prints them; nothing if it does not answer."""
    answer = _output(
        "nvidia-smi",
        f"--query-gpu={','.join(SMI_FIELDS.values())}",
        "--format=csv,noheader,nounits",
        f"--id=GPU-{uuid}",
    )
    values = [] if answer is None else [value.strip() for value in answer.split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def _output(*command: str) -> str | None:
    """Run a program for its stdout; None if it is missing, slow or unsuccessful."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
