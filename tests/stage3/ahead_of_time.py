"""Compile the portable kernels as they are launched, for a GPU that need not be there.

Run as a program (without TRITON_INTERPRET), it prints one JSON object: for each configuration what
the assembler made of it. A launch is recorded instead of run, so that tiles, switches and strides
are those that ship; arguments are then specialised as Triton's launcher does (a 1 becomes a
constant, multiples of 16 are known to be such).

    python tests/stage3/ahead_of_time.py [NAME ...]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from stage0_reference.latent_cache import allocate_pages
from stage0_reference.rope import Rotation
from stage1_quant.fp8_latent_cache import allocate_latent_pages
from stage1_quant.quantize import QuantizedRows
from stage3_dataflow.kernels import launch, launch_ranks
from stage3_dataflow.kernels.split_kv_decode import split_kv_decode_kernel
from stage3_dataflow.split_plan import DEFAULT_SPLIT_RULE

HOPPER = 90
ADA = 89
"""Compute capabilities. Ada stands for the GPUs with about 100 KiB of shared memory."""

SHARED_MEMORY = {HOPPER: 227 * 1024, ADA: 99 * 1024}
"""Bytes that one program may have."""

LATENT, ROPE = 512, 64
POINTERS = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
PRODUCTS = ("QGMMA", "HGMMA", "HMMA", "QMMA")
"""Tensor core instructions: a warpgroup's on FP8 and on 16 bits, a warp's on 16 bits and on FP8."""


class Recorder:
    """Stands in for a kernel: remembers what it was launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Take a grid, as a kernel does."""

        def record(*arguments: Any, **options: Any) -> None:
            self.arguments, self.options = arguments, options

        return record


def recorded(kernel: str, call: Callable[[], None], launchers: ModuleType = launch) -> Recorder:
    """Run a launcher with one of its module's kernels replaced."""
    recorder, real = Recorder(), getattr(launchers, kernel)
    setattr(launchers, kernel, recorder)
    try:
        call()
    finally:
        setattr(launchers, kernel, real)
    return recorder


def decode(
    rows: int,
    page_size: int,
    *,
    fp8_cache: bool,
    fp8_p: bool = False,
    causal: bool = True,
    capability: int = HOPPER,
) -> Recorder:
    """Record one launch of the decode kernel."""
    query = QuantizedRows(
        torch.empty(2, 1, rows, LATENT, dtype=torch.float8_e4m3fn if fp8_cache else torch.bfloat16),
        torch.empty(2, 1, rows),
        torch.empty(2, 1, rows, ROPE, dtype=torch.bfloat16),
    )
    allocate = allocate_latent_pages if fp8_cache else allocate_pages
    cache = allocate(4, page_size, LATENT, ROPE)
    call = lambda: launch.launch_split_kv_decode(  # noqa: E731
        query,
        cache,
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        0.1,
        torch.empty(2, 1, rows, LATENT, dtype=torch.bfloat16),
        torch.empty(2, 1, rows),
        torch.empty(2, 2, rows, LATENT),
        torch.empty(2, 2, rows),
        causal=causal,
        fp8_p=fp8_p,
        split_rule=DEFAULT_SPLIT_RULE,
        blocks=launch.decode_blocks(rows, SHARED_MEMORY[capability], fp8_cache=fp8_cache),
    )
    return recorded("split_kv_decode_kernel", call)


def combine() -> Recorder:
    """Record one launch of the combine kernel."""
    call = lambda: launch.launch_combine(  # noqa: E731
        torch.empty(2, 2, 16, LATENT),
        torch.empty(2, 2, 16),
        torch.zeros(2, dtype=torch.int32),
        4096,
        torch.empty(2, 1, 16, LATENT, dtype=torch.bfloat16),
        torch.empty(2, 1, 16),
        split_rule=DEFAULT_SPLIT_RULE,
    )
    return recorded("combine_kernel", call)


def rotation(*leading: int) -> Rotation:
    """Angles of some tokens."""
    return Rotation(torch.empty(*leading, ROPE // 2), torch.empty(*leading, ROPE // 2))


def q_quant(*, rotate: bool) -> Recorder:
    """Record one launch of the query's quantisation."""
    call = lambda: launch.launch_fused_q_quant(  # noqa: E731
        torch.empty(2, 1, 16, LATENT, dtype=torch.bfloat16),
        torch.empty(2, 1, 16, ROPE, dtype=torch.bfloat16),
        rotation(2, 1) if rotate else None,
        QuantizedRows(
            torch.empty(2, 1, 16, LATENT, dtype=torch.float8_e4m3fn),
            torch.empty(2, 1, 16),
            torch.empty(2, 1, 16, ROPE, dtype=torch.bfloat16),
        ),
        interleaved=rotate,
        pow2=True,
    )
    return recorded("fused_q_quant_kernel", call)


def k_append(*, fused: bool, fp8_cache: bool) -> Recorder:
    """Record one launch of the append, with norm and rotation if `fused`."""
    allocate = allocate_latent_pages if fp8_cache else allocate_pages
    call = lambda: launch.launch_fused_k_append(  # noqa: E731
        torch.empty(8, LATENT, dtype=torch.bfloat16),
        torch.empty(8, ROPE, dtype=torch.bfloat16),
        allocate(4, 64, LATENT, ROPE),
        torch.zeros(8, dtype=torch.int64),
        torch.empty(LATENT, dtype=torch.bfloat16) if fused else None,
        1e-6,
        rotation(8) if fused else None,
        interleaved=fused,
        pow2=True,
    )
    return recorded("fused_k_append_kernel", call)


def fetch() -> Recorder:
    """Record one launch of fetch-dequant."""
    call = lambda: launch.launch_fetch_dequant(  # noqa: E731
        allocate_latent_pages(4, 64, LATENT, ROPE),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        torch.empty(8, LATENT + ROPE, dtype=torch.bfloat16),
    )
    return recorded("fetch_dequant_kernel", call)


def readable_lengths() -> Recorder:
    """Record one launch of the check of lengths and pages."""
    call = lambda: launch.launch_readable_lengths(  # noqa: E731
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        num_pages=4,
        page_size=64,
    )
    return recorded("readable_lengths_kernel", call)


def local_pages() -> Recorder:
    """Record one launch of the search for a rank's pages."""
    call = lambda: launch_ranks.launch_local_pages(  # noqa: E731
        torch.zeros(2, 33, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 33, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int32),
        rank=1,
        ranks=2,
        pages_per_rank=4,
        page_size=64,
    )
    return recorded("local_pages_kernel", call, launch_ranks)


def merge_ranks() -> Recorder:
    """Record one launch of the merge over ranks, of what one gather brought."""
    gathered = torch.empty(2, 2, 1, 16, LATENT + 1)
    out, lse = torch.empty(2, 1, 16, LATENT, dtype=torch.bfloat16), torch.empty(2, 1, 16)

    def call() -> None:
        launch_ranks.launch_merge_ranks(gathered[..., :-1], gathered[..., -1], out, lse)

    return recorded("merge_ranks_kernel", call, launch_ranks)


DECODES = {
    f"decode {name} cache{' fp8 P' if fp8_p else ''}, {rows} rows, pages of {page_size}": dict(
        rows=rows, page_size=page_size, fp8_cache=name == "fp8", fp8_p=fp8_p
    )
    for name, fp8_p in (("fp8", False), ("fp8", True), ("bf16", False))
    for rows in (16, 64)
    for page_size in (64, 16)
}
"""All that differ in their code: a page holds whole blocks, or a block needs several pages."""
DECODES["decode fp8 cache, 64 rows, pages of 64, all keys"] = dict(
    rows=64, page_size=64, fp8_cache=True, causal=False
)
SMALL_DECODES = {
    f"Ada: decode {name} cache, {rows} rows": dict(
        rows=rows, page_size=64, fp8_cache=name == "fp8", capability=ADA
    )
    for name in ("fp8", "bf16")
    for rows in (16, 64)
}
OTHERS: dict[str, tuple[str, Callable[[], Recorder]]] = {
    "combine": ("combine_kernel", combine),
    "q-quant": ("fused_q_quant_kernel", lambda: q_quant(rotate=False)),
    "q-quant, rotated": ("fused_q_quant_kernel", lambda: q_quant(rotate=True)),
    "append": ("fused_k_append_kernel", lambda: k_append(fused=False, fp8_cache=True)),
    "append, fused": ("fused_k_append_kernel", lambda: k_append(fused=True, fp8_cache=True)),
    "append to bf16": ("fused_k_append_kernel", lambda: k_append(fused=False, fp8_cache=False)),
    "fetch": ("fetch_dequant_kernel", fetch),
    "readable lengths": ("readable_lengths_kernel", readable_lengths),
    "local pages": ("local_pages_kernel", local_pages),
    "merge of ranks": ("merge_ranks_kernel", merge_ranks),
}
NAMES = (*DECODES, *SMALL_DECODES, *OTHERS)


def recording_of(name: str) -> tuple[Any, Recorder, int]:
    """Kernel, recorded launch and compute capability of a configuration."""
    if name in OTHERS:
        kernel, record = OTHERS[name]
        module = launch if hasattr(launch, kernel) else launch_ranks
        return getattr(module, kernel), record(), HOPPER
    choices: dict[str, Any] = (DECODES | SMALL_DECODES)[name]
    return split_kv_decode_kernel, decode(**choices), choices.get("capability", HOPPER)


def specialised(kernel: Any, recorder: Recorder) -> tuple[dict, dict, dict, dict]:
    """Signature, constants, attributes and options for Triton's compiler."""
    options = dict(recorder.options)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        positional = index < len(recorder.arguments)
        value = recorder.arguments[index] if positional else options.pop(name)
        free = parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif parameter.is_constexpr or (value == 1 and not free):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (
            signature[name] == "i32" and not (free or value % 16)
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes, options


def loops(sass: list[str]) -> Iterator[list[str]]:
    """Instructions of each loop: from a label to a branch back to it."""
    labels = {line[:-1]: at for at, line in enumerate(sass) if line.endswith(":")}
    for at, line in enumerate(sass):
        branch = re.search(r"\bBRA\b.*\b(LBB\d+)", line)
        if branch and labels.get(branch[1], at) < at:
            yield sass[labels[branch[1]] : at + 1]


def count(pattern: str, lines: list[str]) -> int:
    """Count the instructions that begin with one of the names."""
    return sum(re.search(rf"\b({pattern})\b", line) is not None for line in lines)


def report_of(name: str) -> dict[str, Any]:
    """Compile one configuration and read its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, recorder, capability = recording_of(name)
    signature, constants, attributes, options = specialised(kernel, recorder)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    sass = [line.split("\t")[-1].strip() for line in compiled.asm["sass"].splitlines()]
    products = "|".join(PRODUCTS)
    main_loops = [loop for loop in loops(sass) if count(products, loop)]
    return {
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY[capability],
        "products": {product: count(product, sass) for product in PRODUCTS},
        "main_loops": len(main_loops),
        "spills": count("LDL|STL", sass),
        "loop_spills": max((count("LDL|STL", loop) for loop in main_loops), default=0),
        "loop_instructions": max(map(len, main_loops), default=0),
    }


if __name__ == "__main__":
    import triton

    reports: dict[str, Any] = {name: report_of(name) for name in sys.argv[1:] or NAMES}
    print(json.dumps(reports | {"triton": triton.__version__}))
