# %% [markdown]
# # 30. Stage 2: the scale that stands in the sum
#
# Stage 1 reads 8-bit codes and then widens them for the second product. Stage 2 keeps both large
# products on FP8 operands. Scores were easy: a token's scale multiplies the token's score. Values
# are not: this chapter shows why, the four ways that fail, and the one that works.

# %%
import csv
from collections import defaultdict
from pathlib import Path

import figures
import torch

import stage2_pv_pipeline
from stage0_reference.latent_attention import latent_attention
from stage1_quant import E4M3_MAX, dequantize_rows, quantize_q, quantize_rows
from stage1_quant.e4m3 import decode_e4m3, encode_e4m3
from stage1_quant.fp8_latent_cache import quantized_scores, widen
from stage1_quant.quantize import QuantizedRows
from stage1_quant.sensitivity_study import synthetic_sample
from stage2_pv_pipeline import merge_partials
from stage2_pv_pipeline.rescaled_pv import (
    QuantizedBlock,
    quantize_probabilities,
    rescaled_pv_attention,
)
from stage2_pv_pipeline.tensor_core_accumulator import accumulation_error_bound, draw_case, drift
from stage2_pv_pipeline.wrong_ways import (
    cast_without_a_scale,
    largest_scale_of_the_block,
    out_of_order,
    right_way,
    without_value_scale,
)

_ = torch.manual_seed(0)

# %% [markdown]
# ## Count
#
# Per cached token and head there are 512 + 64 multiply-adds for the score and 512 for the value. If
# only the score's 512 run on FP8 operands, at twice the rate of BF16, the products take
# 0.5 x 512 + 64 + 512 = 832 of 1088 units. With both it is 576: 1.44 times faster again.

# %%
scores_only, both = 512 / 2 + 64 + 512, 512 / 2 + 64 + 512 / 2
print(f"{scores_only:.0f} and {both:.0f} of {512 + 64 + 512}; {scores_only / both:.2f} times")
assert round(scores_only / both, 2) == 1.44

# %% [markdown]
# ## Why the obvious places fail
#
# The value of token t is `codes[t] scale[t]`, and the output is a sum over t:
#
#     out = sum over t of p[t] scale[t] codes[t]
#
# A factor that depends on t cannot be taken in front of a sum over t. The smallest input that shows
# it has two tokens of equal score, with values 1 and 3. Each is stored as code 448 under its own
# scale. The answer is 2.

# %%
two = QuantizedBlock(
    scores=torch.zeros(1, 1, 2),
    codes=torch.full((1, 2, 1), 448.0),
    scale=torch.tensor([[1.0, 3.0]]) / 448,
)
print("right way                 ", float(right_way(two).out))
print("scale left out            ", float(without_value_scale(two).out))
print("scale taken as the largest", float(largest_scale_of_the_block(two).out))
assert abs(float(right_way(two).out) - 2) < 2.0**-4 * 2
assert abs(float(without_value_scale(two).out) - 448) < 1e-3
assert abs(float(largest_scale_of_the_block(two).out) - 3) < 1e-5

# %% [markdown]
# One could widen V and cast P alone. Then P's size is the trouble: a softmax over thousands of
# tokens has weights far below 2^-10, half of e4m3's smallest number, and they become 0. One key at
# logit 0 and 4095 at -7, all values 1, so that the answer is 1:

# %%
tail = QuantizedBlock(
    scores=torch.cat((torch.zeros(1, 1, 1), torch.full((1, 1, 4095), -7.0)), dim=-1),
    codes=torch.full((1, 4096, 1), 448.0),
    scale=torch.full((1, 4096), 1 / 448),
)
cast = cast_without_a_scale(tail)
print(f"P cast as it is: {float(cast.out):.3f}, and lse {float(cast.lse):.4f} is perfect")
print(f"right way:       {float(right_way(tail).out):.3f}")
assert float(cast.out) < 0.25 and abs(float(right_way(tail).out) - 1) < 0.01

# %% [markdown]
# The perfect lse is what makes this one hard to find: the denominator still has the weights.
#
# ## Change one thing: put the scale into P, then quantise P
#
#     u = p scale           sigma = max(u) / 448           p8 = e4m3(u / sigma)
#
# per query row and block of 64 tokens. One row and block, step by step: the weights; the weights
# with V's scale in them, which spread over more binades; the result in units of sigma. For
# comparison, what a cast without sigma would have kept. (The cache is synthetic, its tokens' sizes
# spread over six binades, so that the scales can be seen.)

# %%
sample = synthetic_sample(tokens=4096)
sizes = torch.exp2(6 * torch.rand(4096, 1) - 3)
rows = quantize_rows(sample.rows.c_kv * sizes, sample.rows.k_rope, scale_format="amax")
query = quantize_q(sample.q_latent[:, None], sample.q_rope[:, None])
query_rows = QuantizedRows(*(part.flatten(0, 2)[None] for part in widen(query)))
key_rows = QuantizedRows(*(part[None] for part in widen(rows)))
spread = float(quantized_scores(query_rows, key_rows, 1.0).std())
softmax_scale = 0.5 / spread  # attention to many tokens; heavy tokens still stand out
whole = QuantizedBlock(
    scores=quantized_scores(query_rows, key_rows, softmax_scale),
    codes=key_rows.codes,
    scale=key_rows.scale,
)

row, block = 5, slice(0, 64)
score = whole.scores[0, row]
p = torch.exp(score[block] - score[block].max())
u = p * whole.scale[0, block]
sigma = u.max() / E4M3_MAX
p8 = quantize_probabilities(u[None, None], sigma[None, None])[0, 0]
unscaled = decode_e4m3(encode_e4m3(u))
lost = int((unscaled == 0).sum())
for name, part in (("p", p), ("u", u)):
    print(f"{name} spans {float((part.max() / part.min()).log2()):.1f} binades")
print(f"largest code {float(p8.max()):.0f}; lost {int((p8 == 0).sum())} with sigma, {lost} without")
assert p8.max() == E4M3_MAX and lost > int((p8 == 0).sum())

figures.probabilities(
    {
        "p = exp(score - max)": p.tolist(),
        "u = p scale": u.tolist(),
        "p8 = e4m3(u / sigma)": p8.tolist(),
        "without sigma: e4m3(u)": unscaled.tolist(),
    },
    {"p8 = e4m3(u / sigma)": 2.0**-10, "without sigma: e4m3(u)": 2.0**-10},
)

# %% [markdown]
# The largest u of the block becomes 448 exactly, so the weight that matters most carries no error
# at all. The dashed line is 2^-10, below which a number rounds to 0.
#
# ## Test: without the two casts nothing has changed
#
# `p_format="exact"` leaves the rounding out. What remains must be attention over the dequantised
# rows, to float32's rounding. That identity is the first thing to check in any such pipeline.

# %%
exact = latent_attention(
    *(part.flatten(0, 2)[None].double() for part in dequantize_rows(query)),
    *(part.double() for part in dequantize_rows(rows)),
    softmax_scale,
    causal=False,
)


def read_block(positions):
    """Give the pipeline its block of tokens."""
    part = slice(int(positions[0]), int(positions[-1]) + 1)
    return QuantizedBlock(whole.scores[..., part], whole.codes[:, part], whole.scale[:, part])


def pipeline(p_format, **options):
    """Run the rescaled pipeline over the whole sequence; output [rows, 512]."""
    shape = torch.empty(1, 1, whole.scores.shape[1], 512)
    return rescaled_pv_attention(
        read_block, shape, [4096], causal=False, p_format=p_format, **options
    )


errors = {}
for p_format in ("exact", "bf16", "e4m3"):
    out = pipeline(p_format).out[0, 0].double()
    errors[p_format] = float((out - exact.out[0]).norm() / exact.out.norm())
    print(f"P in {p_format:<6} relative error of the output {errors[p_format]:.1e}")
assert errors["exact"] < 1e-4 < errors["e4m3"] < 2.0**-4
assert errors["bf16"] < errors["e4m3"]

# %% [markdown]
# Rounding P to e4m3 costs less than a percent here: half an ulp is 6 percent, but the errors of
# thousands of weights have no common sign. The bound of 2^-4 is what is *guaranteed*; the number
# above is what happens. (Set the 0.5 of `softmax_scale` to 2 and rows look at few tokens: e4m3 is
# then as accurate as BF16, since each block's largest weight is exact.)
#
# ## One order per row
#
# O is kept in units of the newest sigma; each block's ratio leads from the old unit to the new. Two
# workers that add their tiles in another order use the wrong ratios. Two blocks, values 16 and 1,
# answer 8.5:

# %%
blocks = QuantizedBlock(
    scores=torch.zeros(1, 1, 128),
    codes=torch.full((1, 128, 1), 448.0),
    scale=torch.cat((torch.full((1, 64), 16.0), torch.full((1, 64), 1.0)), dim=1) / 448,
)
in_order = float(out_of_order(blocks, [0, 1]).out)
exchanged = float(out_of_order(blocks, [1, 0]).out)
print(f"in order {in_order}, exchanged {exchanged}")
assert abs(in_order - 8.5) < 8.5 * 2.0**-4 and abs(exchanged - 0.5) < 0.5 * 2.0**-4

figures.block_order(
    {
        "in order: each ratio meets the unit it was made for": [
            ("block 0", "unit 16 / 448"),
            ("block 1", "ratio 16: unit 1 / 448"),
            ("result", f"{in_order:.1f}"),
        ],
        "exchanged: block 1's tile meets block 0's ratio": [
            ("block 1", "unit 1 / 448"),
            ("block 0", "ratio 0: block 1 is lost"),
            ("result", f"{exchanged:.1f}"),
        ],
    },
    "Two blocks added in order give 8.5, exchanged 0.5",
)

# %% [markdown]
# Splits are another matter: each split is a pipeline of its own with its own unit, and partial
# results are normalised before they are merged by lse. Merging is free of order up to rounding.

# %%
parts = [pipeline("exact", first_token=a, last_token=b) for a, b in ((0, 1024), (1024, 4096))]
merged = merge_partials(*(torch.stack(field) for field in zip(*parts, strict=True)))
swapped = merge_partials(*(torch.stack(field) for field in zip(*reversed(parts), strict=True)))
difference = float((merged.out[0, 0].double() - exact.out[0]).norm() / exact.out.norm())
print(f"two splits, merged: {difference:.1e} from one pass")
assert difference < 1e-4
torch.testing.assert_close(merged.out, swapped.out)

# %% [markdown]
# ## Measure: what the tensor core's accumulator loses
#
# On Hopper the FP8 tensor core does not add in float32: in each step of 32 products all addends are
# aligned to the largest and cut to about 14 bits. `tensor_core_accumulator.py` is a model of it.
# Keep O in that accumulator and the loss grows with the length:

# %%
print("tokens    never promoted    every 64 tokens")
for tokens in (1024, 4096, 8192):
    never, every = (drift("flat, V = 1 + N(0, 0.5)", tokens, policy) for policy in (None, 64))
    print(f"{tokens:>6}{never.bias:>18.2%}{every.bias:>19.1e}")
    assert abs(every.bias) < 1e-3 < abs(never.bias)

weights, tile_values = draw_case("flat, V = 1 + N(0, 0.5)", 8192)
magnitude = weights.abs() @ tile_values.abs()
bounds = {
    policy: float((accumulation_error_bound(magnitude, 8192, policy) / magnitude).max())
    for policy in (None, 64)
}
print(
    f"derived bounds at 8,192 tokens: {bounds[None]:.0%} never promoted, {bounds[64]:.1%} promoted"
)
assert bounds[64] < 0.01 < 1 < bounds[None]

# %%
series = defaultdict(lambda: ([], []))
drift_table = Path(stage2_pv_pipeline.__file__).parent / "results/accumulator_model/drift.csv"
with open(drift_table) as file:
    for line in csv.DictReader(file):
        if line["kind"] == "flat, V = 1 + N(0, 0.5)":
            series[line["promoted"]][0].append(int(line["tokens"]))
            series[line["promoted"]][1].append(abs(float(line["relative bias of O"])))
figures.lines(
    series,
    "Relative loss of O by length for four promotion policies; promoted every 64 tokens it is flat",
    xlabel="tokens (model, not a measurement)",
    ylabel="relative loss of O",
    log="xy",
)

# %% [markdown]
# Measured on one NVIDIA H200 (2026-11-30, triton 3.6.0, uniform attention with V = 1, one split,
# never promoted): -12.8 percent at 8,192 tokens and -92 percent at 131,072; the model says -12.8
# and -91.8 (stage 2's README has the table). So every tile's product starts from zero and joins O
# in float32: `accumulator * ratio + tile`, one multiply-add that the online softmax needs anyway.
# And in scores the FP8 latent product comes first, the rotary product after it.
#
# Exercises: `docs/exercises/stage2.py`; `python -m docs.exercises.check stage2`. Tests:
# `pytest -m stage2`.
