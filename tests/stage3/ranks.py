"""Groups of ranks for tests: threads of this process, and processes of their own."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stage0_reference.latent_cache import as_bytes

ROOT = Path(__file__).parents[2]

GRACE_SECONDS = 3.0
"""How long other ranks have to notice that one failed, before the launcher ends them."""


class _Meeting:
    """Where threads wait for one another and leave tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.left: list[Tensor | None] = [None] * size


class ThreadRanks:
    """Ranks that are threads: many groups a second, for properties."""

    def __init__(self, rank: int, size: int, meeting: _Meeting | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self._meeting = meeting or _Meeting(1)

    def gather(self, tensor: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.left[self.rank] = tensor.detach().clone()
        meeting.barrier.wait()
        received: Sequence[Any] = list(meeting.left)
        meeting.barrier.wait()  # before anyone leaves something new
        kinds = {(part.shape, part.dtype) for part in received}
        assert len(kinds) == 1, f"ranks gathered {kinds}"
        return torch.stack([as_bytes(part) for part in received]).view(tensor.dtype)


def on_threads(size: int, program: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Run a program on every rank and give what each returned; the first error is raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = program(ThreadRanks(rank, size, meeting))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
    for error in [*own, *errors]:
        if error is not None:
            raise error
    return results


def errors_on_threads(size: int, program: Callable[[ThreadRanks], Any]) -> list[Exception | None]:
    """What a program raised on each rank."""

    def run(ranks: ThreadRanks) -> Exception | None:
        try:
            program(ranks)
        except Exception as error:
            return error
        return None

    return on_threads(size, run)


class Finished:
    """How a group of processes ended."""

    def __init__(self, codes: list[int], outputs: list[str], seconds: float) -> None:
        self.codes = codes
        self.outputs = outputs
        self.seconds = seconds


def on_processes(
    size: int, program: str, directory: Path, *, limit_seconds: float = 120.0
) -> Finished:
    """Run a program of `rank_programs` on processes, as a launcher does: one ends, all end.

    The test fails, with what the ranks printed, when they do not end within the limit.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
    }
    started = time.monotonic()
    logs = [directory / f"{program}-{rank}-of-{size}.txt" for rank in range(size)]
    command = [sys.executable, "-m", "tests.stage3.rank_programs", program, str(directory)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(size)],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        while any(process.poll() is None for process in processes):
            assert time.monotonic() - started < limit_seconds, (
                f"{program} hangs on {size} ranks",
                [log.read_text() for log in logs],
            )
            if any(process.poll() for process in processes):  # one failed: let the others say why
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline and any(p.poll() is None for p in processes):
                    time.sleep(0.05)
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    return Finished(codes, [log.read_text() for log in logs], time.monotonic() - started)


def under_torchrun(*arguments: str, limit_seconds: float) -> str:
    """Run a module, its name first, on two CPU processes as torchrun does; what it printed."""
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=limit_seconds,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
