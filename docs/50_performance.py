# %% [markdown]
# # 50. Performance: where the time goes
#
# Nothing in this chapter can be measured without a GPU. What it shows was recorded on one NVIDIA
# H200 (132 multiprocessors) by `snapmla bench kernels` and `snapmla bench stages`, and their times
# are read from their files; `docs/performance-log.md` has the history, with what was predicted
# before each measurement. The counts are computed here.

# %%
import json
from pathlib import Path

import figures

import stage3_dataflow
from stage3_dataflow.bench_cases import count_work, parse_shape

RESULTS = Path(stage3_dataflow.__file__).parent / "results"
kernels, stages = (
    json.loads((RESULTS / folder / "results.json").read_text())
    for folder in ("h200_kernels", "h200_stages")
)
for report in (kernels, stages):
    machine = report["machine"]
    print(
        f"{machine['device']}, {machine['date']}, torch {machine['torch']}, "
        f"triton {machine['triton']}"
    )

# %% [markdown]
# ## Count: the roof
#
# Three measured rates of that machine: a device-to-device copy, of the same run as the kernels, and
# 716 TFLOP/s for BF16 products and 1,300 for FP8 (cuBLAS, 8192 x 8192 matrices, one run on
# 2026-11-30; the FP8 rate is limited by power). In FP8 decoding 1,024 of 1,088 multiply-adds are
# FP8, the 64 of rope BF16.

# %%
COPY_RATE, BF16_RATE, FP8_RATE = kernels["ceilings"]["copy"], 716e12, 1300e12
MIXED_RATE = 1088 / (1024 / FP8_RATE + 64 / BF16_RATE)
gain = MIXED_RATE / BF16_RATE
print(f"a copy reaches {COPY_RATE / 1e12:.2f} TB/s")
print(f"FP8 decoding can reach {MIXED_RATE / 1e12:,.0f} TFLOP/s, {gain:.2f} times BF16")

roofs = {
    "FP8 cache and products": (COPY_RATE, MIXED_RATE),
    "BF16 cache and products": (COPY_RATE, BF16_RATE),
}
for name, (bandwidth, peak) in roofs.items():
    print(f"{name}: bound by memory below {peak / bandwidth:.0f} operations a byte")
assert 1.7 < gain < 17 / 9

# %% [markdown]
# ## Measure: the Hopper kernel against its roof
#
# One call a CUDA graph, L2 cold, the merge of splits included. What a graph of one trivial kernel
# takes is taken off here. Splits in brackets.

# %%
GRAPH_OWN = kernels["ceilings"]["empty_us"]
rows_of = {
    shape["name"]: {row["kernel"]: row for row in shape["rows"]} for shape in kernels["shapes"]
}


def seconds_of(shape, kernel):
    """Say what a kernel took, without the graph's own time."""
    return (rows_of[shape][kernel]["microseconds"] - GRAPH_OWN) * 1e-6


print("batch, heads, length, s_q       us    roof us   bound      TFLOP/s     TB/s   of the roof")
reached = {}
for shape, rows in rows_of.items():
    work = count_work("decode", parse_shape(shape), "fp8")
    seconds = seconds_of(shape, "fp8 hopper")
    moving, multiplying = work.total_bytes / COPY_RATE, work.total_flops / MIXED_RATE
    roof = max(moving, multiplying)
    case = f"{shape} [{rows['fp8 hopper']['splits']}]"
    reached[shape] = roof / seconds
    print(
        f"{case:<26}{seconds * 1e6:>8.1f}{roof * 1e6:>10.1f}   "
        f"{'memory' if moving > multiplying else 'products':<9}"
        f"{work.total_flops / seconds / 1e12:>8.0f}{work.total_bytes / seconds / 1e12:>10.2f}"
        f"{reached[shape]:>12.0%}"
    )
assert all(0.4 < share < 1.02 for share in reached.values())  # a copy is no bound, only a rate
assert reached["128,16,8192"] > 0.97
assert 0.65 < reached["128,128,8192"] < 0.8
flops = count_work("decode", parse_shape("128,128,8192"), "fp8").total_flops
assert round(flops / seconds_of("128,128,8192", "fp8 hopper") / 1e12) == 865  # quoted below

# %% [markdown]
# Read aloud: with 16 heads the kernel moves the cache as fast as a plain copy would. With 128 heads
# it has about 70 percent of the products' roof. Short requests and single ones lose to start-up: a
# program waits for its length, its page ids and its first block, one after the other.
#
# ## The roofline, with every stage on it
#
# Operations per byte follow from the stage: at 16 heads a BF16 cache has 1,152 bytes a token to
# move, an FP8 cache 644. What a stage reaches is another matter. One layer's attention over 32
# requests of 8,192 tokens was timed through each stage's backend, between events.

# %%
timed = {
    (row["stage"], shape["heads"]): row["milliseconds"] * 1e-3
    for shape in stages["shapes"]
    for row in shape["rows"]
}


def rate(cache, shape, seconds):
    """Operations a byte that must move, and operations a second."""
    work = count_work("decode", parse_shape(shape), cache)
    return work.total_flops / work.total_bytes, work.total_flops / seconds


points = {
    f"stage {stage}, PyTorch, 16 heads": rate(
        "bf16" if stage == 0 else "fp8", "32,16,8192", timed[f"stage {stage}", 16]
    )
    for stage in (0, 1, 2)
}
for name, shape in (
    ("portable", "128,16,8192"),
    ("Hopper", "128,16,8192"),
    ("Hopper", "32,64,8192"),
    ("portable", "128,128,8192"),
    ("Hopper", "128,128,8192"),
):
    seconds = seconds_of(shape, f"fp8 {name.lower()}")
    points[f"stage 3 {name}, {parse_shape(shape).heads} heads"] = rate("fp8", shape, seconds)
for name, (intensity, speed) in points.items():
    print(f"{name:<30}{intensity:>6.0f} operations a byte, {speed / 1e12:>6.1f} TFLOP/s")
assert points["stage 0, PyTorch, 16 heads"][1] < 0.05 * points["stage 3 Hopper, 16 heads"][1]

figures.roofline(
    roofs,
    points,
    {},
    "Roofline of one H200: stages 0 to 2 far below, the portable kernel between, the Hopper kernel "
    "at the memory roof for 16 heads and at 70 percent of the product roof for 128",
)

# %% [markdown]
# Between stage 0 and the Hopper kernel at 16 heads lies a factor of almost 300 in operations a
# second (32 requests issued from Python, 128 by graph); 1.8 of it is the smaller cache. The rest is
# what fusing buys: no widened copy of the cache, no scores in memory, no queue of small launches.
# Stages 1 and 2 are slower than stage 0: they widen codes to float32 and walk blocks in Python,
# stage 2 blocks of 64 tokens. They are there to be read.
#
# ## Why FP8 PV needs a transpose
#
# Tensor cores for 8-bit operands on Hopper contract along contiguous memory, on both sides. Scores
# contract over the latent's 512 dimensions, and a token's latent lies contiguous: good. The value
# product contracts over *tokens*, and consecutive tokens' elements of one dimension lie 512 bytes
# apart. For 16-bit operands the hardware can turn a tile while it loads it; for 8-bit ones it
# cannot. MLA makes this unavoidable: key and value are the same memory, so neither layout suits
# both products.
#
# What that costs depends on who does it, at 128 requests, 128 heads, 8,192 tokens:
#
# | way | TFLOP/s | why |
# |---|---|---|
# | `tl.dot`, V in FP8 | 53 | the compiler transposes bytes by 215 byte stores in the loop |
# | `tl.dot`, V widened to BF16 in registers | 248 | no bytes to transpose, but the BF16 rate |
# | Gluon, product turned | 865 | one byte permutation for each 32-bit register |
#
# (The first two: a prototype of the portable kernel. The third is the table above.)
#
# The third way turns the product: O^T = V^T P^T. V^T is the operand from registers. The tile is
# read as 16-bit elements by the loads that transpose 16-bit matrices, so that each register holds
# two tokens of two neighbouring dimensions; one permutation a register parts the even from the odd
# dimension. That permutation, in numbers:

# %%
tile = [[f"t{token}d{dim}" for dim in range(4)] for token in range(4)]  # bytes as they lie


def transposing_load(tokens, pair):
    """Give a register of a 16-bit transposing load: two tokens of one pair of dimensions."""
    return [tile[token][2 * pair + parity] for token in tokens for parity in (0, 1)]


def prmt(low, high, selector):
    """Choose four of eight bytes, as the instruction does; the lowest digit is the first byte."""
    both = low + high
    return [both[int(digit, 16)] for digit in reversed(selector)]


low, high = transposing_load((0, 1), 0), transposing_load((2, 3), 0)
even, odd = prmt(low, high, "6420"), prmt(low, high, "7531")
print("two registers as loaded:", low, high)
print("even dimension:", even, " odd dimension:", odd)
assert even == ["t0d0", "t1d0", "t2d0", "t3d0"] and odd == ["t0d1", "t1d1", "t2d1", "t3d1"]

# %% [markdown]
# Two registers in, two out, two instructions: four tokens of one dimension, contiguous along the
# sum as the tensor core wants them. The order of tokens changes with the load's pattern; P's
# columns are stored in the same order, and a sum does not mind.
#
# ## Why it is not faster: shared memory, not the tensor cores
#
# At 128 heads 30 percent of the products' roof is missing. A block of 64 tokens and 64 rows takes
# about 1,745 wavefronts of shared memory (counted from the kernel's loads and stores), a wavefront
# being a cycle in which it serves 128 bytes:

# %%
wavefronts = {"Q": 256, "K": 256, "rotary": 128, "P": 256, "V": 256, "TMA writes": 322}
total = 1745
wavefronts["scales, P's stores, hand-offs"] = total - sum(wavefronts.values())
assert wavefronts["scales, P's stores, hand-offs"] > 0

blocks = 128 * 2 * (8192 // 64) / 132  # tiles of 64 heads, a multiprocessor's share
floor_us = blocks * total / 1750  # at 1,750 MHz
taken_us = seconds_of("128,128,8192", "fp8 hopper") * 1e6
print(f"{blocks:.0f} blocks a multiprocessor: {floor_us:.0f} us of shared memory in {taken_us:.0f}")
assert 240 < floor_us < 260

figures.bars(
    {"wavefronts": wavefronts},
    "Shared-memory wavefronts of one block of 64 tokens and 64 rows: 1745 in all",
    xlabel="wavefronts for 64 tokens and 64 rows",
    number="{:.0f}",
)

# %% [markdown]
# So overlapping better would not help much; fewer bytes through shared memory would. The log lists
# the ways that were tried or calculated, and why each was closed (registers, mostly: one
# accumulator of 64 rows and 512 dimensions is half of the register file).
#
# ## Reading SASS
#
# What a compiler made of a kernel can be read without a GPU: Triton compiles ahead of time, and
# `cuobjdump -sass` prints the instructions. What to look for in a decode kernel:
#
# | instruction | says |
# |---|---|
# | `QGMMA` / `HGMMA` | FP8 / 16-bit wgmma. HMMA instead: the tile has fewer than 64 rows |
# | `LDSM.16.MT88` | transposing 16-bit loads from shared memory |
# | `PRMT` | byte permutation: one a register is the transpose above, many are a layout conversion |
# | `STS.U8` | byte stores: a transpose through shared memory that costs a factor of five |
# | `LDL`, `STL` | spilled registers; in the loop they cost, before it they hardly do |
# | `WARPGROUP.DEPBAR` after every product | wgmma serialised: ptxas warns, Triton is silent |
#
# `tests/stage3/test_ahead_of_time.py` and `tests/stage3/test_hopper_ahead_of_time.py` compile all
# decode kernels for Hopper in CI and assert registers, spills and serialisation.
#
# ## What did not work
#
# About half of the log. Three that look right on paper: merging splits inside the decode kernel,
# which saves a launch, took 20 us for one row, since a multiprocessor fetches straight-line code it
# runs once more slowly than it executes it (and once the merge was small, the launch cost nothing
# to speak of); a grid that skips the splits no request has made the equal case slower; publishing P
# as soon as it is stored cost 1.5 to 2 percent, because the value product then queues before the
# next scores. Each had a prediction beside it, which is how one learns that it was wrong.
