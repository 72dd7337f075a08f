"""One layer's attention through every stage's backend: what the course's steps cost and gain.

Each backend attends over the cache it writes itself: BF16 in stage 0 and in the baseline, FP8 in
the others. Calls are issued from Python and not recorded, since stages 0 to 2 read lengths back to
the host; a short kernel then shows the host's time, not its own (`bench_kernels` has that). Nor is
the L2 cache emptied between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stage0_reference.attention_backend import AttentionBackend, load_backend
from stage3_dataflow.bench_cases import (
    SOFTMAX_SCALE,
    Case,
    Shape,
    build_case,
    equal_shape,
    exact_attention,
    relative_error,
)
from stage3_dataflow.bench_timing import Stopwatch, describe_machine
from stage3_dataflow.triton_backend import Bf16KernelBackend

DEFAULT_SHAPES = (equal_shape(32, 16, 8192), equal_shape(32, 128, 8192))
CPU_SHAPES = (equal_shape(2, 8, 512),)
STAGES = (0, 1, 2, 3)


def backends() -> dict[str, tuple[AttentionBackend, str]]:
    """Every stage's backend and the cache it attends over, by the name of its row."""
    named: dict[str, tuple[AttentionBackend, str]] = {
        f"stage {stage}": (load_backend(stage), "bf16" if stage == 0 else "fp8") for stage in STAGES
    }
    return named | {"stage 3, BF16 cache": (Bf16KernelBackend(), "bf16")}


def measure_stages(
    shapes: Sequence[Shape],
    device: torch.device,
    *,
    repeats: int = 10,
    page_size: int = 64,
    observe: Callable[[dict[str, Any]], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time each stage's attention over each shape.

    Parameters
    ----------
    shapes
        Batches, of s_q = 1 or more.
    repeats
        Timed calls, after some that are not.
    observe, say
        Get the report each time it has grown by a shape, and a line when a row begins.

    Returns
    -------
    dict
        ``machine``, ``method``, ``repeats``, ``page_size`` and ``shapes``: of each its name and
        rows of ``stage``, ``milliseconds``, ``quartiles`` and ``error``, which is the relative L2
        distance of the first request's output to exact attention over unquantised rows.
    """
    watch = Stopwatch(device, repeats)
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "method": "wall clock" if device.type != "cuda" else "between CUDA events, no graph",
        "repeats": repeats,
        "page_size": page_size,
        "shapes": [],
    }
    for shape in shapes:
        case = build_case(shape, device=device, page_size=page_size)
        exact = exact_attention(case.bf16_operands(0))
        rows: list[dict[str, Any]] = []
        for name, (backend, cache) in backends().items():
            say(f"{shape.name} {name}")
            call = _bind(backend, case, cache)
            error = relative_error(call().out[0], exact)
            timing = watch.time_issued(call)
            rows.append(
                {
                    "stage": name,
                    "milliseconds": timing.median / 1e3,
                    "quartiles": [timing.low / 1e3, timing.high / 1e3],
                    "error": error,
                }
            )
        report["shapes"].append(
            {
                "name": shape.name,
                "batch": shape.batch,
                "heads": shape.heads,
                "length": max(shape.lengths),
                "rows": rows,
            }
        )
        observe(report)
    return report


def _bind(backend: AttentionBackend, case: Case, cache: str) -> Callable[[], Any]:
    planes = case.bf16 if cache == "bf16" else case.fp8
    return lambda: backend.attend(
        case.q_latent,
        case.q_rope,
        planes,
        case.block_table,
        case.cache_seqlens,
        SOFTMAX_SCALE,
    )
