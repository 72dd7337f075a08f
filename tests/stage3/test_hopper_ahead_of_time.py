"""The Hopper kernel, compiled for sm_90 without a GPU by both versions of Triton it is written for.

What would only show as a slow kernel on a GPU is asserted here: registers spilled to memory, tensor
core instructions that the assembler serialised (its advice C7510 to C7512, which Triton hides), V
transposed byte by byte. Each version compiles in a process of its own: this file, run as a program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage3

ROOT = Path(__file__).parents[2]
SHARED_MEMORY_OF_HOPPER = 227 * 1024
CONFIGURATIONS = {
    "rows64": dict(PAGE_SIZE=64, BLOCK_ROWS=64, CAUSAL=False),
    "rows64-causal": dict(PAGE_SIZE=64, BLOCK_ROWS=64, CAUSAL=True),
    "rows32-causal": dict(PAGE_SIZE=64, BLOCK_ROWS=32, CAUSAL=True),
    "rows16": dict(PAGE_SIZE=64, BLOCK_ROWS=16, CAUSAL=False),
    "rows16-page128-causal": dict(PAGE_SIZE=128, BLOCK_ROWS=16, CAUSAL=True),
    "rows32-page32": dict(PAGE_SIZE=32, BLOCK_ROWS=32, CAUSAL=False),
    "rows64-page16": dict(PAGE_SIZE=16, BLOCK_ROWS=64, CAUSAL=False),
}
for _name in ("rows64", "rows64-causal", "rows16", "rows64-page16"):
    CONFIGURATIONS[f"{_name}-many"] = CONFIGURATIONS[_name]
for _name in ("rows64", "rows16"):
    CONFIGURATIONS[f"{_name}-many-ordered"] = CONFIGURATIONS[_name]
"""Those called "many" are of more items than programs; if "ordered", taken up in an order."""


MERGES = {"merge4": (4, 64), "merge16-few": (16, 16), "merge64": (64, 64), "merge128": (128, 64)}
"""Of the merge of splits: how many there may be at most, and partial rows fetched at a time."""

POINTERS = {
    "query_scale": "*fp32",
    "block_table": "*i32",
    "cache_seqlens": "*i32",
    "order": "*i32",
    "counter": "*i32",
    "out": "*bf16",
    "lse": "*fp32",
    "partial_out": "*bf16",
    "partial_lse": "*fp32",
}


def compile_all() -> dict[str, dict[str, object]]:
    """Compile every configuration with the Triton that is importable; reports by name."""
    from stage3_dataflow.kernels import hopper_decode, hopper_merge

    def tiles(dtype: str, shape: str, layout) -> str:
        return f"tensordesc<{dtype}[{shape}],{layout.value!r}>"

    reports: dict[str, dict[str, object]] = {}
    for name, constants in CONFIGURATIONS.items():
        box = min(constants["PAGE_SIZE"], 64)
        rows = constants["BLOCK_ROWS"]
        by_tma = hopper_decode.scale_by_tma(box)
        types = POINTERS | {
            "query_codes": tiles("fp8e4nv", f"{rows},128", hopper_decode.SWIZZLED_CODES),
            "query_rope": tiles("bf16", f"{rows},64", hopper_decode.SWIZZLED_ROPE),
            "codes_plane": tiles("fp8e4nv", f"{box},128", hopper_decode.SWIZZLED_CODES),
            "rope_plane": tiles("bf16", f"{box},64", hopper_decode.SWIZZLED_ROPE),
            "scale_plane": (
                tiles("fp32", f"{box}", hopper_decode.FLAT_SCALE) if by_tma else "*fp32"
            ),
            "score_scale_log2": "fp32",
        }
        many, ordered = "many" in name, "ordered" in name
        given: dict[str, object] = {**constants, "MANY": many}
        given |= {} if many else {"counter": None}
        given |= {} if ordered else {"order": None}
        reports[name] = report_of(name, hopper_decode.hopper_decode_kernel, types, given)
    for name, (splits, partials) in MERGES.items():
        kernel = hopper_merge.hopper_combine_kernel
        constants = {"MERGE_SPLITS": splits, "PARTIALS": partials}
        reports[name] = report_of(name, kernel, POINTERS, constants)
    return reports


def report_of(
    name: str, kernel, types: dict[str, str], constants: Mapping[str, object]
) -> dict[str, object]:
    """Compile a kernel and count what matters; what has no type here is an int32."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, dtype in enumerate(signature.values())
        if dtype.startswith("*")
    }
    print(f"### {name}", flush=True)  # the assembler's log follows
    compiled = triton_compile(
        GluonASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4},
    )
    sass = disassembled(compiled.asm["cubin"])
    loops = loops_over_blocks(sass)
    return {
        "shared": compiled.metadata.shared,
        "fp8_products": len(re.findall(r"\bQGMMA", sass)),
        "bf16_products": len(re.findall(r"\bHGMMA", sass)),
        "transposing_loads": len(re.findall(r"\bLDSM\S*\.MT88", sass)),
        "scale_messages": len(re.findall(r"\bUTMALDG\.1D", sass)),
        "words": len(re.findall(r"\bLDGSTS\.E", sass)),
        "spills_in_loops": sum(count(r"\b(?:STL|LDL)\b", body) for body in loops),
        "scale_terms_in_loops": sum(count(r"MUFU\.(?:LG2|RCP)", body) for body in loops),
        "loads_behind_the_wait": loads_behind_the_wait(loops) if loops else None,
        "score_columns": score_columns(loops) if loops else None,
        "stores_are_fenced": stores_are_fenced(scores_of(loops)) if loops else None,
        "barriers_in_scores": count(r"\bBAR\.SYNC", scores_of(loops)) if loops else None,
        "barriers": len(re.findall(r"\bmbarrier\.init\b", compiled.asm["ptx"])),
        "counted_arrivals": len(
            re.findall(r"cp\.async\.mbarrier\.arrive\.(?!noinc)", compiled.asm["ptx"])
        ),
        "early_starts": len(re.findall(r"\bPREEXIT\b", sass)),
        "waits_for_the_launch_before": len(re.findall(r"\bACQBULK\b", sass)),
        "prefetches": len(re.findall(r"\bCCTL\.E\.PF2", sass)),
        "narrow_stores": len(re.findall(r"\bSTG\.E\.U16", sass)),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
    }


def loops_over_blocks(sass: str) -> list[list[str]]:
    """Find the innermost loops that have products: the instructions of each, in order."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    code = [(int(address, 16), text) for address, text in lines]
    jumps = [
        (int(target, 16), address)
        for address, text in code
        for target in re.findall(r"\bBRA .*?0x([0-9a-f]+)", text)
        if int(target, 16) < address
    ]
    loops = []
    for start, end in jumps:
        inner = [jump for jump in jumps if start <= jump[0] and jump[1] <= end]
        body = [text for address, text in code if start <= address <= end]
        if inner == [(start, end)] and "GMMA" in " ".join(body):
            loops.append(body)
    products = sum(" ".join(body).count("GMMA.") for body in loops)
    assert products == sass.count("GMMA."), "a product is in no loop, or in two"
    return loops


def count(pattern: str, code: list[str]) -> int:
    """Count the instructions that a pattern is found in."""
    return sum(re.search(pattern, text) is not None for text in code)


def scores_of(loops: list[list[str]]) -> list[str]:
    """Pick the loop that multiplies scores: the only one with BF16 products."""
    (scores,) = (body for body in loops if count("HGMMA", body))
    return scores


def stores_are_fenced(scores: list[str]) -> bool:
    """Say whether a fence lies between the last store and the arrival, which itself orders nothing.

    The arrival stands behind the fence, or in the next round of the loop.
    """
    last_store = max(i for i, text in enumerate(scores) if re.search(r"\bSTSM?\b", text))
    fence = max(i for i, text in enumerate(scores) if "MEMBAR.ALL.CTA" in text)
    (arrival,) = (i for i, text in enumerate(scores) if "ARRIVES.LDGSTSBAR" in text)
    first_store = min(i for i, text in enumerate(scores) if re.search(r"\bSTS(?:M|\.U8)\b", text))
    return last_store < fence and (arrival > fence or arrival < first_store)


def score_columns(loops: list[list[str]]) -> list[str]:
    """Collect the widths of the scores' FP8 products, which have 64 rows."""
    return sorted(set(re.findall(r"\bQGMMA\.64x(\d+)x32", " ".join(scores_of(loops)))))


def loads_behind_the_wait(loops: list[list[str]]) -> int:
    """Count the loads from shared memory between the scores and their maximum."""
    scores = scores_of(loops)
    wait = next(i for i, text in enumerate(scores) if "WARPGROUP.DEPBAR" in text)
    maximum = next(i for i, text in enumerate(scores) if "SHFL" in text)
    return count(r"\bLDS\b", scores[wait:maximum])


def disassembled(cubin: bytes) -> str:
    """SASS of a compiled kernel. Triton's own listing ends at 64 KiB of machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True, timeout=60
        )


def reports_of(triton_folder: Path | None, cache: Path) -> dict[str, dict[str, object]]:
    """Run this file with the installed Triton or one unpacked in a folder; reports with logs."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    paths = [str(ROOT)] if triton_folder is None else [str(triton_folder), str(ROOT)]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log, _, reports_json = done.stdout.rpartition("### reports\n")
    reports = json.loads(reports_json)
    for section in log.split("### ")[1:]:
        name, _, text = section.partition("\n")
        reports[name]["log"] = text
    return reports


@pytest.fixture(scope="module")
def with_installed(tmp_path_factory):
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")
    return reports_of(None, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def with_triton_36(tmp_path_factory):
    folder = Path(os.environ.get("SNAPMLA_TRITON_36", ROOT / ".venv" / "triton-3.6.0"))
    if not (folder / "triton").is_dir():
        pytest.skip(f"SNAPMLA_TRITON_36 names no folder with triton 3.6 unpacked: {folder}")
    return reports_of(folder, tmp_path_factory.mktemp("triton36"))


def check_common(name: str, report: dict) -> None:
    assert "C75" not in report["log"], report["log"]  # serialised wgmma
    # What the scores' warpgroup, for which everybody waits, is spared: the scales' logarithms, and
    # waiting for what could be loaded while the tensor cores work.
    assert report["scale_terms_in_loops"] == 0
    assert "causal" in name or report["loads_behind_the_wait"] == 0
    # Of few rows they are turned: as many columns, where 64 would be multiplied and weighed.
    rows = int(re.findall(r"\d+", name)[0])
    assert report["score_columns"] == [str(rows)]
    # Each thread says for itself that its part of P is there, so the warps meet once a block. (With
    # few rows they meet for the maximum too, over tokens that lie in all four.)
    assert rows < 64 or report["barriers_in_scores"] == 1 + ("causal" in name)
    assert report["stores_are_fenced"]
    # Both warpgroups of `add_values` let the merge start; the first page id is asked for early. The
    # order may still be on its way when this launch begins.
    assert report["early_starts"] == 2
    assert report["waits_for_the_launch_before"] == ("ordered" in name)
    assert report["prefetches"] == 1
    assert report["shared"] <= SHARED_MEMORY_OF_HOPPER
    # Scores: 512 / 32 FP8 and 64 / 16 BF16 instructions, written out once, whatever is masked.
    # P @ V: two warpgroups, four tiles of 64 dimensions, 64 / 32 instructions.
    assert report["fp8_products"] == 16 + 2 * 4 * 2
    assert report["bf16_products"] == 4
    # V: two warpgroups, two groups of 64 pairs, 64 x 64 x 2 bytes by 4 warps and 512 bytes a load.
    assert report["transposing_loads"] == 2 * 2 * (64 * 64 * 2) // (4 * 512)
    # What was a barrier once may not be written to, and Triton puts other tensors in the place of
    # one that nobody uses: a lone item makes none of those that only further items need.
    assert report["barriers"] == (27 if "many" in name else 22)
    # No arrival counts its barrier up first: to synccheck the phase would be over before it.
    assert report["counted_arrivals"] == 0
    # The TMA writes to 128-byte boundaries only: 16 scales come word by word, two a lane. So do the
    # queries' of further items, 32 rows at a time, and all of it is written out twice.
    small_pages = "page16" in name
    assert (report["scale_messages"] == 0) == small_pages
    further_items = 2 * (2 if "rows64" in name else 1) if "many" in name else 0
    assert report["words"] == 2 * small_pages + further_items
    # Two neighbouring dimensions of the output leave together.
    assert report["narrow_stores"] == 0


def check_merge(name: str, report: dict) -> None:
    """Small: what a program executes, of one branch, it fetches for the first time."""
    assert spilled_bytes(report) == 0
    assert report["waits_for_the_launch_before"] == 1
    # Two programs to a multiprocessor, or many small ones.
    fit = SHARED_MEMORY_OF_HOPPER // (report["shared"] + 1024)
    assert fit > 8 if "few" in name else fit == 2
    branches = {"merge4": 1, "merge16-few": 3, "merge64": 5, "merge128": 5}[name]
    # Copies of 16 bytes in a loop; the assembler unrolls it by four, once more behind the loop.
    assert branches <= report["words"] <= 8 * branches
    assert report["instructions"] < 750 * branches


def spilled_bytes(report: dict) -> int:
    found = re.findall(r"(\d+) bytes spill stores", report["log"])
    assert found, f"no assembler log: {report['log']!r}"
    return max(map(int, found))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiles_well_with_triton_36(with_triton_36, name):
    check_common(name, with_triton_36[name])
    assert with_triton_36[name]["spills_in_loops"] == 0
    # What goes from item to item: once an item, not once a block.
    assert spilled_bytes(with_triton_36[name]) <= (16 if "many" in name else 0)


SPILLS_OF_TRITON_39 = {
    "rows64": (28, 1),
    "rows64-causal": (28, 2),
    "rows32-causal": (32, 1),
    "rows16": (16, 0),
    "rows16-page128-causal": (16, 0),
    "rows32-page32": (28, 1),
    "rows64-page16": (32, 1),
    "rows64-many": (28, 0),
    "rows64-causal-many": (32, 1),
    "rows16-many": (0, 0),
    "rows64-page16-many": (48, 0),
    "rows64-many-ordered": (28, 0),
    "rows16-many-ordered": (0, 0),
}
"""Bytes that 3.9's assembler keeps on the stack, and instructions in loops that go there."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiles_well_with_the_installed_triton(with_installed, name):
    check_common(name, with_installed[name])
    in_all, in_loops = SPILLS_OF_TRITON_39[name]
    assert spilled_bytes(with_installed[name]) <= in_all
    assert with_installed[name]["spills_in_loops"] <= in_loops


@pytest.mark.parametrize("name", MERGES)
def test_the_merge_compiles_small(with_triton_36, name):
    check_merge(name, with_triton_36[name])


@pytest.mark.parametrize("name", MERGES)
def test_the_merge_compiles_small_with_the_installed_triton(with_installed, name):
    check_merge(name, with_installed[name])


if __name__ == "__main__":
    results = compile_all()
    print("### reports", flush=True)
    print(json.dumps(results))
