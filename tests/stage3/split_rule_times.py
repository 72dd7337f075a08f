"""What a decode takes by the number of splits, for batches that fill the GPU badly; no test.

    python -m tests.stage3.split_rule_times

`suggest_split_rule` estimates this. What it was fitted to is
`stage3_dataflow/results/h200_split_rules.json`, and `test_split_plan` compares the two.
"""

from __future__ import annotations

import json
from functools import partial

import torch

from stage3_dataflow import suggest_split_rule
from stage3_dataflow.bench_cases import SOFTMAX_SCALE, build_case, equal_shape
from stage3_dataflow.bench_kernels import _outputs
from stage3_dataflow.bench_timing import Stopwatch, describe_machine
from stage3_dataflow.decode import decode_quantized
from stage3_dataflow.split_plan import SplitRule

SHAPES = (
    *((48, 128, length) for length in (65536, 8192, 2048)),
    *((batch, 128, 8192) for batch in (40, 70, 80, 100, 150)),
    *((batch, 16, 8192) for batch in (96, 150, 200)),
    (70, 128, 2048),
    (100, 128, 1024),
    (90, 128, 640),
    (20, 128, 32768),
    (80, 16, 32768),
    (64, 16, 512),
    (64, 16, 1024),
    (100, 64, 16384),
)
"""Batch, heads and cached tokens."""


def times(batch: int, heads: int, length: int, watch: Stopwatch) -> dict[str, float]:
    """Microseconds by splits: 1 to 5, and what is suggested."""
    device = watch.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    suggested = suggest_split_rule(batch, heads, length, processors=processors).max_splits
    case = build_case(equal_shape(batch, heads, length), device=device)
    outputs = _outputs(case)
    found: dict[str, float] = {}
    for splits in (*range(1, 6), suggested) * 2:
        call = partial(
            decode_quantized,
            case.query,
            case.fp8,
            case.block_table,
            case.cache_seqlens,
            SOFTMAX_SCALE,
            split_rule=SplitRule(max(64, -(-length // splits)), splits),
            **outputs,
        )
        taken = watch.time(call).median
        found[str(splits)] = min(taken, found.get(str(splits), taken))
    return found


def main() -> None:
    device = torch.device("cuda")
    watch = Stopwatch(device, repeats=20)
    print(json.dumps(describe_machine(device)))
    for batch, heads, length in SHAPES:
        row = {"batch": batch, "heads": heads, "length": length}
        print(json.dumps(row | {"microseconds": times(batch, heads, length, watch)}), flush=True)


if __name__ == "__main__":
    main()
