# %% [markdown]
# # 20. Stage 1: a latent in 8 bits, and what stays out of them
#
# The cache of stage 0 takes 1152 bytes a token and layer. Stage 1 takes 644. This chapter goes
# through the choices in that number: the format, the unit that shares a scale, and the 128 bytes
# that are *not* quantised.

# %%
import csv
import dataclasses
from collections import defaultdict
from pathlib import Path

import figures
import torch

import stage1_quant
from stage0_reference import AbsorbedBackend, load_model
from stage0_reference.evaluation import choose_windows, heldout_loss
from stage0_reference.latent_attention import latent_attention
from stage0_reference.training.corpus import load_heldout
from stage1_quant import (
    Fp8CacheBackend,
    dequantize_rows,
    encode_e4m3,
    quantize_q,
    quantize_rows,
    token_scale,
)
from stage1_quant.alternatives import FORMATS
from stage1_quant.sensitivity_study import format_errors, synthetic_sample

torch.manual_seed(0)
RESULTS = Path(stage1_quant.__file__).parent / "results" / "quant_study_h200"

# %% [markdown]
# ## Count: what e4m3 can say
#
# 4 exponent bits and 3 mantissa bits: 253 different numbers up to 448. Between 2^-6 and 448
# neighbours are at most 1/8 apart relative to their size, so rounding errs by at most 1/16. Below
# 2^-6 the spacing stops shrinking at 2^-9.

# %%
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
finite = codes[codes.isfinite()].unique()  # one zero for both signs
normal = finite[finite >= 2.0**-6]
step = (normal[1:] - normal[:-1]) / normal[:-1]
print(
    f"{len(finite)} values, the largest {finite.max():.0f}, steps {step.min():.4f} to {step.max()}"
)
assert len(finite) == 253 and finite.max() == 448 and step.max() == 2.0**-3

# %% [markdown]
# So an element is off by at most `max(2^-4 |x|, 2^-10 scale)`. A cast says nothing of what happens
# above 448: stacks differ between NaN, 448 and worse. `encode_e4m3` clamps first.

# %%
print(encode_e4m3(torch.tensor([448.0, 464.0, 465.0, 1000.0, -torch.inf, torch.nan])).float())
assert encode_e4m3(torch.tensor([1000.0])).float() == 448

# %% [markdown]
# ## Look at what is to be stored
#
# The largest magnitude of every channel in three layers of the shipped model, over held-out text
# (one NVIDIA H200, 2026-11-30; `value_ranges_by_channel.csv`):

# %%
channels = defaultdict(lambda: {"latent": [], "rope": []})
with open(RESULTS / "value_ranges_by_channel.csv") as file:
    for row in csv.DictReader(file):
        part = "latent" if row["part"] == "c_kv" else "rope"
        channels[int(row["layer"])][part].append(float(row["max"]))

largest = {layer: {part: max(v) for part, v in parts.items()} for layer, parts in channels.items()}
for layer, parts in sorted(largest.items()):
    print(f"layer {layer}: latent {parts['latent']:5.2f}, rope {parts['rope']:5.2f}")
assert all(parts["rope"] > 1.4 * parts["latent"] for parts in largest.values())

figures.channel_ranges(
    {f"layer {layer}": channels[layer] for layer in (0, 2, 5)},
    "Largest magnitude of every channel in three layers: rotary channels reach further",
)

# %% [markdown]
# In the first layer the rotary part reaches sixteen times the latent, in every layer more. The
# paper reports rotary outliers of a thousand for large models. `synthetic_sample` draws a cache
# like that; it is what the rest of this chapter measures on.
#
# ## The naive form: one row, one scale
#
# Put latent and rotary key side by side and give the row one scale. The scale comes from the rotary
# outliers, and the latent gets what is left of the format.

# %%
formats = {cache_format.name: cache_format for cache_format in FORMATS}
sample = synthetic_sample(tokens=1024)
one_row = formats["one-row"].round_trip(*sample.rows)
apart = formats["token-amax"].round_trip(*sample.rows)

for name, back in (("one row", one_row), ("rope apart", apart)):
    errors = [
        float((got - exact).norm() / exact.norm())
        for got, exact in zip(back, sample.rows, strict=True)
    ]
    print(f"{name:<12} relative error: latent {errors[0]:.2%}, rope {errors[1]:.2%}")

# %% [markdown]
# Surprisingly little happens to the latent: e4m3 is a floating format, and loses nothing over 15
# binades. The rotary part is the victim: 3 bits of mantissa for numbers around a thousand, where
# the softmax sees absolute differences.
#
# ## Change one thing: rope stays in BF16, in the latent's units
#
# The scale is taken from the latent alone. The rotary key keeps BF16 and is *divided by that
# scale*, so that codes and rotary key are in one unit and one accumulator serves both products:
#
#     q . k = q_scale scale (q_codes . codes + q_rope' . rope')

# %%
rows = quantize_rows(*sample.rows, scale_format="amax")
query = quantize_q(sample.q_latent[:, None], sample.q_rope[:, None], scale_format="amax")

in_one_unit = torch.einsum("qshc,tc->qsht", query.codes.float(), rows.codes.float())
in_one_unit += torch.einsum("qshc,tc->qsht", query.rope.float(), rows.rope.float())
scores = in_one_unit * query.scale[..., None] * rows.scale

meaning = dequantize_rows(rows), dequantize_rows(query)
dequantised = torch.einsum("qshc,tc->qsht", meaning[1].c_kv, meaning[0].c_kv)
dequantised += torch.einsum("qshc,tc->qsht", meaning[1].k_rope, meaning[0].k_rope)
print("scores from codes against scores from dequantised rows:")
print(f"{float((scores - dequantised).norm() / dequantised.norm()):.1e} relative")
assert float((scores - dequantised).norm() / dequantised.norm()) < 1e-5

# %% [markdown]
# ## Test: the bound, element by element

# %%
back = dequantize_rows(rows)
bound = torch.maximum(sample.rows.c_kv.abs() * 2.0**-4, rows.scale[:, None] * 2.0**-10)
used = (back.c_kv - sample.rows.c_kv).abs() / bound
print(f"latent: the worst element uses {float(used.max()):.1%} of its bound")
assert used.max() <= 1 + 2.0**-20  # float32 rounding of the division and the product

rope_error = (back.k_rope - sample.rows.k_rope).abs() / sample.rows.k_rope.abs()
print(f"rope: at most {float(rope_error.max()):.1e} relative; BF16's bound is {2.0**-8:.1e}")
assert rope_error.max() <= 2.0**-8 + 2.0**-20

# %% [markdown]
# ## Measure: every granularity on the same cache
#
# `alternatives.py` has eleven ways to store the row. Output error is the relative error of the
# attention output, in float64, with exact queries.

# %%
table = format_errors([sample])
print(f"{'format':<16}{'bytes':>6}{'latent dB':>11}{'rope dB':>9}{'output':>9}   append")
for row in table:
    cache_format = formats[row["format"]]
    print(
        f"{row['format']:<16}{cache_format.bytes_per_token:>6.0f}{row['latent_sqnr_db']:>11.1f}"
        f"{row['rope_sqnr_db']:>9.1f}{row['output_error']:>9.2%}   {cache_format.append[:34]}"
    )
output_error = {row["format"]: row["output_error"] for row in table}
assert output_error["one-row"] > 1.2 * output_error["token-amax"]

# %%
recorded = {}
for kind in ("shipped", "synthetic"):
    with open(RESULTS / f"errors_{kind}.csv") as file:
        recorded[kind] = {
            row["format"]: 100 * float(row["output_error"])
            for row in csv.DictReader(file)
            if row["format"] != "bf16"
        }
figures.bars(
    {"shipped model's cache": recorded["shipped"], "synthetic cache": recorded["synthetic"]},
    "Error of the attention output for ten formats on two caches",
    xlabel="output error, percent (recorded: one NVIDIA H200, 2026-11-30)",
)

# %% [markdown]
# Read aloud: per token, per tile of 128 channels, per block, per channel and per tensor agree to a
# few percent of each other. *Granularity hardly matters for accuracy.* What per-token scales buy is
# the last column: a token's scale is known when the token arrives, and no other token is touched.
# INT8 is the more accurate format of the same size here; FP8 is chosen for its tensor cores, which
# multiply it beside a BF16 rope term, and for rows with one huge element.
#
# ## Appending
#
# Two tokens with very different sizes go in one after the other. The first one's bytes stay.

# %%
small, large = torch.full((1, 512), 0.01), torch.full((1, 512), 100.0)
no_rope = torch.zeros(1, 64)
alone = quantize_rows(small, no_rope)
both = quantize_rows(torch.cat((small, large)), torch.cat((no_rope, no_rope)))
assert torch.equal(alone.codes.view(torch.uint8), both.codes[:1].view(torch.uint8))
print("scales:", [f"{scale:.3g}" for scale in both.scale.tolist()])

# %% [markdown]
# ## A scale that loses nothing twice
#
# The paper's scale is `amax / 448`. The default here is the next power of two that fits. It costs
# 0.2 dB, and then two things are exact: dividing the rotary part, and quantising again what was
# read back in BF16. A prefix that is fetched and appended again keeps its bytes.

# %%
any_rows = torch.randn(4096, 512), torch.randn(4096, 64)
for scale_format in ("amax", "pow2"):
    first = quantize_rows(*any_rows, scale_format)
    read_back = [part.bfloat16() for part in dequantize_rows(first)]
    again = quantize_rows(*read_back, scale_format)
    differ = [int((a.float() != b.float()).sum()) for a, b in zip(first, again, strict=True)]
    print(
        f"{scale_format}: {differ[0]} codes, {differ[1]} scales, {differ[2]} rotary values differ"
    )
    assert any(differ) == (scale_format == "amax")

amax = torch.tensor([1.0, 464.0, 464.1, 3.7])
print(token_scale(amax, "pow2").tolist(), "for", amax.tolist())

# %% [markdown]
# ## On a model
#
# The decoder of stage 0, unchanged, on this cache: held-out text, one window of 512 bytes. One
# window says that it works, not how much it loses.

# %%
decoder, tokenizer = load_model()
documents = [tokenizer.encode(data.decode()) for _, data in load_heldout()]
windows = choose_windows(documents, 512, longest_context=512, max_windows=1)
losses = {
    "stage 0": heldout_loss(decoder, AbsorbedBackend(), windows).loss,
    "stage 1": heldout_loss(decoder, Fp8CacheBackend(), windows).loss,
}
print({name: f"{loss:.4f} nats a byte" for name, loss in losses.items()})
assert abs(losses["stage 1"] - losses["stage 0"]) < 0.01

# %% [markdown]
# Recorded over 48 windows (one NVIDIA H200, 2026-11-30, float32): 0.5482 nats a byte for stage 0
# and 0.5483 for stage 1 at context 512; 0.4382 and 0.4385 at 4,096, with a standard error of 0.0001
# on the difference. The loss hardly tells the formats apart; the output error does.
#
# ## And the rotary part in FP8, once more
#
# What the 64 bytes saved by "one row" would have cost, with queries that look at few tokens:

# %%
sharp = dataclasses.replace(sample, softmax_scale=4 * sample.softmax_scale)
exact = latent_attention(sharp.q_latent, sharp.q_rope, *sharp.rows, sharp.softmax_scale).out
for name, back in (("one row", one_row), ("rope apart", apart)):
    out = latent_attention(sharp.q_latent, sharp.q_rope, *back, sharp.softmax_scale).out
    print(f"{name:<12} output error {float((out - exact).norm() / exact.norm()):.1%}")

# %% [markdown]
# Exercises: `docs/exercises/stage1.py`; `python -m docs.exercises.check stage1`. Tests:
# `pytest -m stage1`.
