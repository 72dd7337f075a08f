# %% [markdown]
# # 40. Stage 3: the same numbers in few launches
#
# Stages 1 and 2 say what is computed. Stage 3 computes it in fused kernels, cut so that one long
# request fills a GPU, and without asking the device anything, so that a decode step can be recorded
# once and replayed. This chapter calls the kernels' own code on a CPU, in Triton's interpreter, on
# small tensors; where a GPU is needed it shows recorded results.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported

# %%
import figures

from stage0_reference.rope import Rotation
from stage1_quant.quantize import dequantize_rows, quantize_rows
from stage3_dataflow import (
    DecodeWorkspace,
    SplitRule,
    allocate_latent_pages,
    append_kv,
    fetch_dequant,
    fused_k_append,
    merge_partials,
    mla_decode,
    suggest_split_rule,
    use_path,
    which_path,
    workspace_bytes,
)
from stage3_dataflow.bench_cases import count_work, equal_shape
from stage3_dataflow.split_plan import largest_split_count, splits_for

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(which_path(device))

# %% [markdown]
# `which_path` says what runs, and nothing falls back in silence. On a GPU the same calls launch
# kernels.
#
# ## Count: five passes over memory
#
# What does one new token cost before attention even starts? Read naively there are five steps: norm
# the latent, rotate the key, find the scale, quantise, write into pages. Each as a torch operation
# reads and writes memory once. The bytes of one token's latent and rotary key:

# %%
latent_bytes, rope_bytes, fp8_bytes = 512 * 2, 64 * 2, 512 + 4 + 128
passes = {
    "norm": (latent_bytes, latent_bytes),
    "rotate": (rope_bytes, rope_bytes),
    "scale": (latent_bytes, 4),
    "quantise and align": (latent_bytes + rope_bytes + 4, fp8_bytes),
    "write into pages": (fp8_bytes, fp8_bytes),
}
unfused = sum(read + written for read, written in passes.values())
work = count_work("k-append", equal_shape(1, 1, 1))
fused = work.bytes["tokens in"] + work.bytes["tokens out"]
print(f"unfused {unfused:,} bytes in {len(passes)} passes, fused {fused:,} in one")
assert fused == latent_bytes + rope_bytes + fp8_bytes < unfused / 3

# %% [markdown]
# The bytes matter less than the launches: a token is small, and a launch from Python costs tens of
# microseconds of the host (37 for the decode kernel on one H200, 2026-11-30, after its host side
# was made lean; `performance-log.md`).
#
# ## Change one thing: one launch, the same bytes
#
# `fused_k_append` does all five. Its plain twin composes the functions of stages 0 and 1. They must
# give the same *bytes*, so a test needs no tolerance. Small widths here, since the interpreter
# takes a millisecond for a handful of lines.

# %%
tokens, latent, rope = 5, 64, 16
c_kv, k_rope = torch.randn(tokens, latent).bfloat16(), torch.randn(tokens, rope).bfloat16()
angles = torch.rand(tokens, rope // 2) * 6
slots = torch.tensor([3, 17, -1, 40, 0])  # in any order; -1 writes nothing


def appended(path):
    """Planes after one call of `fused_k_append` on a path."""
    cache = allocate_latent_pages(3, 16, latent, rope, device=device)
    for plane in cache:
        plane.view(torch.uint8).zero_()
    with use_path(path):
        fused_k_append(
            c_kv.to(device),
            k_rope.to(device),
            cache,
            slots.to(device),
            rotation=Rotation(angles.cos().to(device), angles.sin().to(device)),
        )
    return cache


for name, kernel, twin in zip(
    ("codes", "scale", "rope"), appended("default"), appended("pytorch"), strict=True
):
    equal = torch.equal(kernel.view(torch.uint8), twin.view(torch.uint8))
    print(f"{name}: {'the same bytes' if equal else 'different'}")
    assert equal

# %% [markdown]
# (Rotation in the kernel, the norm left to the caller here: a norm's sum may be added in another
# order and then differs in the last bit, so its test has a derived bound instead.)
#
# ## Attention, and a cache that grows
#
# A decode by the kernel's code and by the twin, over a paged cache with permuted pages. The twin
# here rounds P to BF16 as the portable kernel does by default.

# %%
lengths = [37, 0, 130]
cache = allocate_latent_pages(12, 16, latent, rope, device=device)
table = torch.full((3, 9), -1, dtype=torch.int32)
pages = torch.randperm(12)
table[0, :3], table[2] = pages[:3].int(), pages[3:].int()
cache_seqlens = torch.tensor(lengths, dtype=torch.int32)

history = [(torch.randn(n, latent), torch.randn(n, rope)) for n in lengths]
for row, (rows_latent, rows_rope), count in zip(table, history, lengths, strict=True):
    where = torch.arange(count)
    append_kv(
        rows_latent.to(device),
        rows_rope.to(device),
        cache,
        (row[where // 16].long() * 16 + where % 16).to(device),
    )

query = torch.randn(3, 1, 4, latent).to(device), torch.randn(3, 1, 4, rope).to(device)
arguments = (*query, cache, table.to(device), cache_seqlens.to(device), 80**-0.5)
rule = SplitRule(min_tokens=64, max_splits=4)

kernel = mla_decode(*arguments, split_rule=rule, p_format="bf16", kernel="portable")
with use_path("pytorch"):
    twin = mla_decode(*arguments, p_format="bf16")
scale_of_out = float(twin.out.abs().max())
print(f"largest difference {float((kernel.out - twin.out).abs().max()) / scale_of_out:.1e}")
assert float((kernel.out - twin.out).abs().max()) < 2.0**-7 * scale_of_out  # P, in BF16, twice
assert bool((kernel.out[1] == 0).all()) and bool(kernel.lse[1].isneginf().all())

# %% [markdown]
# The request of length 0 has an answer, 0 and -inf. That is what makes padded rows of a recorded
# step harmless.
#
# ## Splits
#
# One request of 65,536 tokens and 128 heads gives two tiles of 64 heads: two programs for 132
# multiprocessors. So a request is cut into splits that run side by side, and partial results are
# merged by lse. How it is cut depends on its own length and a rule; never on the batch.

# %%
rule = SplitRule(min_tokens=1024, max_splits=8)
print("length   splits   tokens a split")
for length in (0, 1, 64, 1024, 1025, 5000, 65_536):
    parts = splits_for(length, rule)
    print(f"{length:>6}{len(parts):>9}{parts[0][1] - parts[0][0]:>17,}")
    assert parts[-1][1] == length and len(parts) <= rule.max_splits

few = suggest_split_rule(1, 128, 65_536, processors=132)
many = suggest_split_rule(128, 128, 8192, processors=132)
print(f"one long request: up to {few.max_splits} splits; 128 requests: {many.max_splits}")
assert few.max_splits == 64 and many.max_splits == 1

# %% [markdown]
# A merge weighs each split by its share of the softmax's denominator, exp(lse - total). Three
# requests of different length with random scores that rise towards the end:

# %%
quarters = SplitRule(min_tokens=1024, max_splits=4)
plan = {f"{length:,} tokens": splits_for(length, quarters) for length in (900, 2500, 6000)}
shares, merged_error = {}, 0.0
for name, parts in plan.items():
    end = parts[-1][1]
    scores = torch.randn(end, dtype=torch.float64) + torch.linspace(0, 2, end, dtype=torch.float64)
    values = torch.randn(end, 8, dtype=torch.float64)
    outs = torch.stack([torch.softmax(scores[a:b], 0) @ values[a:b] for a, b in parts])
    lses = torch.stack([torch.logsumexp(scores[a:b], 0) for a, b in parts])
    merged = merge_partials(outs, lses)
    exact = torch.softmax(scores, 0) @ values
    merged_error = max(merged_error, float((merged.out - exact).abs().max()))
    shares[name] = torch.exp(lses - merged.lse).tolist()
    assert abs(sum(shares[name]) - 1) < 1e-12
print(f"merged against one pass: {merged_error:.1e}")
assert merged_error < 1e-14
figures.splits(plan, shares, "Splits of three requests, with the weights that a merge gives them")

# %% [markdown]
# Splits cost memory for partial results, and a second launch that reads them. For one request of
# 65,536 tokens and 128 heads in 64 splits, in float32 (the Hopper kernel keeps them in BF16 where
# the output is BF16, and writes and reads half as much):

# %%
size = workspace_bytes(1, 1, 128, 512, 65_536, SplitRule(1024, 64))
print(f"{size / 1e6:.1f} MB of partial results beside {65_536 * 644 / 1e6:.1f} MB of cache")
assert size == 4 * 64 * 128 * 513
assert largest_split_count(65_536, SplitRule(1024, 64)) == 64

workspace = DecodeWorkspace(device)
workspace.partials(1, 64, 128, 512)
assert workspace.nbytes == size

# %% [markdown]
# Measured (one NVIDIA H200, 2026-11-30, triton 3.6.0, one call a CUDA graph, of which 4.0 us are
# the graph's own): about 34 us for that request without the merge, 38 with it. It took 45 before
# the merge was rewritten; [the log](performance-log.md) tells what the eight microseconds were.
#
# ## A prefix read back
#
# Chunked prefill over a cached prefix needs rows in BF16. With scales that are powers of two,
# reading and appending again changes no byte.

# %%
rows = fetch_dequant(cache, table.to(device), cache_seqlens.to(device))
print(f"{list(rows.shape)} for lengths {lengths}")
expected = dequantize_rows(quantize_rows(*(part.to(device) for part in history[0])))
assert torch.equal(rows[: lengths[0], :latent], expected.c_kv.bfloat16())
assert len(rows) == sum(lengths)

# %% [markdown]
# ## CUDA graphs
#
# A decode step of many layers is hundreds of launches. Recorded as a CUDA graph and replayed, the
# host has one. That needs two things of every kernel: no synchronisation (`mla_decode` reads
# lengths and tables on the device, and its grid comes from the table's width), and harmless padded
# rows. A GPU is needed to see it:
# `tests/stage3/test_mla_decode.py::test_a_captured_graph_follows_lengths_and_tables` records at
# length 1 and replays at others.
#
# ## Two decode kernels
#
# Microseconds for 128 requests of 8,192 tokens, 128 heads (one NVIDIA H200, 2026-12-01, triton
# 3.6.0; `stage3_dataflow/results/h200_kernels/table.txt`):
#
# | kernel | for | P | us |
# |---|---|---|---|
# | portable (`split_kv_decode.py`) | capability 8.9 and newer, any head count | BF16 | 1,087 |
# | Hopper (`hopper_decode.py`) | Hopper, latent 512 and rope 64 | e4m3 | 342 |
#
# The first is written to be read, the second to be fast. Chapter 50 says where the factor of 3.2
# comes from. `which_kernel` says which one serves a call, and why.
#
# Exercises: `docs/exercises/stage3.py`; `python -m docs.exercises.check stage3`. Tests:
# `pytest -m stage3`.
