"""The portable kernels compile for the GPUs they are shipped for, and well, without a GPU.

What would only show as a failed launch or a slow kernel is asserted here: shared memory, the kind
of tensor core instruction, registers spilled inside the loop over tokens. Each version of Triton
compiles in a process of its own, `ahead_of_time.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage3

ROOT = Path(__file__).parents[2]
MEASURED_VERSIONS = ("3.6", "3.9")
"""Of Triton. Another one's registers may differ a little; its instructions may not."""

ALLOWED_SPILLS = {
    "decode fp8 cache, 64 rows": 54,
    "decode fp8 cache fp8 P, 64 rows": 188,
    "decode bf16 cache, 64 rows": 99,
    "decode fp8 cache, 16 rows": 7,
    "decode fp8 cache fp8 P, 16 rows": 28,
    "local pages": 5,
}
"""Loads and stores of spilled registers inside the loop (anywhere in kernels without products),
where there may be any; at most this many over page sizes and both versions.

64 rows: O is 128 registers a thread and an FP8 tile on its way to BF16 another 32 to 64; what is
spilled are offsets and masks that the loop does not change. Smaller tiles spill nothing and were
slower on an H200 (see `launch.decode_blocks`). P in e4m3 transposes V byte by byte through
registers, which is why BF16 is this kernel's default. 16 rows: O is 64 registers and a thread
holds 8 rows of the BF16 tile for mma.sync."""


def names_and_kinds():
    """Names of all configurations; written here again so that one that goes missing is seen."""
    decodes = [
        f"decode {cache}, {rows} rows, pages of {page_size}"
        for cache in ("fp8 cache", "fp8 cache fp8 P", "bf16 cache")
        for rows in (16, 64)
        for page_size in (64, 16)
    ]
    decodes.append("decode fp8 cache, 64 rows, pages of 64, all keys")
    small = [
        f"Ada: decode {cache} cache, {rows} rows" for cache in ("fp8", "bf16") for rows in (16, 64)
    ]
    others = [
        "combine", "q-quant", "q-quant, rotated", "append", "append, fused", "append to bf16",
        "fetch", "readable lengths", "local pages", "merge of ranks",
    ]  # fmt: skip
    return decodes, small, others


DECODES, SMALL_DECODES, OTHERS = names_and_kinds()
ALL = (*DECODES, *SMALL_DECODES, *OTHERS)


def reports_of(triton_folder: Path | None, cache: Path) -> dict[str, dict]:
    """Run ahead_of_time.py with the installed Triton or one unpacked in a folder."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    paths = [str(ROOT)] if triton_folder is None else [str(triton_folder), str(ROOT)]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    script = str(Path(__file__).with_name("ahead_of_time.py"))
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def compiled_by(version: str, cache: Path) -> dict[str, dict]:
    """Reports of one version of Triton, "installed" or "3.6"."""
    if version == "installed":
        pytest.importorskip("triton")
        return reports_of(None, cache)
    folder = Path(os.environ.get("SNAPMLA_TRITON_36", ROOT / ".venv" / "triton-3.6.0"))
    if not (folder / "triton").is_dir():
        pytest.skip(f"SNAPMLA_TRITON_36 names no folder with triton 3.6 unpacked: {folder}")
    return reports_of(folder, cache)


@pytest.mark.parametrize("version", ["installed", "3.6"])
def test_kernels_compile_well(version, tmp_path):
    """One test a version, so that each compiles once, in whatever worker."""
    reports = compiled_by(version, tmp_path)
    triton_version = reports.pop("triton")
    assert sorted(reports) == sorted(ALL)
    check_shared_memory(reports)
    check_products(reports)
    if triton_version.startswith(MEASURED_VERSIONS):
        check_spills(reports)


def check_shared_memory(reports):  # FR-22
    too_large = {
        name: report["shared"]
        for name, report in reports.items()
        if report["shared"] > report["shared_limit"]
    }
    assert not too_large


def check_products(reports):
    """A warpgroup's instructions take 64 rows; FP8 ones where both operands are FP8.

    QK: 512 / 32 FP8 instructions of K = 32, and 64 / 16 BF16 ones for the rotary part. PV with P in
    e4m3: one for 32 tokens; in BF16, at least as many as for 64 tokens of K = 16.
    """
    for name in DECODES:
        products = reports[name]["products"]
        assert reports[name]["main_loops"] == 1, name
        if "16 rows" in name:
            # No warpgroup's instruction takes 16 rows; sm_90 has no FP8 for a single warp's.
            assert products["HMMA"] >= 512 // 16, name
            assert products["QGMMA"] == products["HGMMA"] == products["QMMA"] == 0, name
            continue
        assert products["HMMA"] == products["QMMA"] == 0, name
        if "bf16 cache" in name:
            assert products["QGMMA"] == 0, name
            assert products["HGMMA"] >= 512 // 16 + 64 // 16, name
        else:
            fp8_pv = 64 // 32 if "fp8 P" in name else 0
            assert products["QGMMA"] >= 512 // 32 + fp8_pv, name
            assert products["HGMMA"] >= 64 // 16 + (0 if fp8_pv else 64 // 16), name
    for name in OTHERS:
        assert not any(reports[name]["products"].values()), name


def check_spills(reports):
    for name in (*DECODES, *OTHERS):
        allowed = ALLOWED_SPILLS.get(name.split(", pages")[0], 0)
        found = reports[name]["loop_spills" if name in DECODES else "spills"]
        assert found <= allowed, (name, found, allowed)
