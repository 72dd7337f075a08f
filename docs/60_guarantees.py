# %% [markdown]
# # 60. What FP8 attention guarantees
#
# "Near-lossless" is a measurement on somebody's data. This chapter derives what holds for *any*
# data, one step at a time, and puts beside each step what happens on typical data and which
# property test holds it. The bounds are worst cases. They have to be: a test that searches for a
# counterexample finds it.
#
# Two errors are kept apart throughout. *The kernel's*: against float64 attention over what the
# codes stand for. *The format's*: what the codes stand for against what was cached.

# %%
import figures
import torch

from stage0_reference.latent_attention import latent_attention
from stage1_quant import E4M3_MAX, dequantize_rows, quantize_q, quantize_rows, token_scale
from stage1_quant.e4m3 import decode_e4m3, encode_e4m3
from stage1_quant.fp8_latent_cache import quantized_scores, widen
from stage1_quant.quantize import QuantizedRows
from stage1_quant.sensitivity_study import synthetic_sample
from stage2_pv_pipeline.rescaled_pv import QuantizedBlock, rescaled_pv_attention
from stage2_pv_pipeline.tensor_core_accumulator import FRACTION_BITS, STEP_PRODUCTS

torch.manual_seed(0)
worst_case, typical = {}, {}

# %% [markdown]
# ## Step 1: an element
#
# Rounding to nearest in a format with 3 mantissa bits errs by at most half a step. A normal
# number's step is at most 2^-3 of its size, so the error is at most 2^-4 |x|. Below 2^-6 the step
# is 2^-9 in units of the scale, so the error is at most 2^-10 scale. Clamping adds nothing: the
# scale is chosen so that the largest element rounds to at most 448.
#
#     |codes scale - x|  <=  max(2^-4 |x|, 2^-10 scale)
#
# The worst inputs are the midpoints between codes. There are few enough to try them all.

# %%
codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
midpoints = ((codes[1:].double() + codes[:-1].double()) / 2).float()
error = (decode_e4m3(encode_e4m3(midpoints)) - midpoints).abs()
bound = torch.maximum(midpoints * 2.0**-4, torch.tensor(2.0**-10))
print(f"midpoints use up to {float((error / bound).max()):.0%} of the bound")
assert (error <= bound).all() and float((error / bound).max()) > 0.9

sample = synthetic_sample(tokens=2048, rope_outlier=30.0)
rows, query = quantize_rows(*sample.rows), quantize_q(sample.q_latent[None], sample.q_rope[None])
meaning, asked = dequantize_rows(rows), dequantize_rows(query)
latent_error = (meaning.c_kv - sample.rows.c_kv).norm() / sample.rows.c_kv.norm()
worst_case["1 element"], typical["1 element"] = 2.0**-4, float(latent_error)
print(f"typical relative error of a latent: {typical['1 element']:.1%}")

# %% [markdown]
# Held by `tests/stage1/test_quantize.py::test_a_dequantised_row_is_within_the_formats_rounding`
# (any row: zeros, denormals, BF16's largest number) and
# `tests/stage1/test_e4m3.py::test_midpoints_tie_to_even_and_their_neighbours_do_not`.
#
# The rotary part is not in this at all. It is divided by a power of two and keeps BF16's 2^-8:
# `tests/stage1/test_quantize.py::test_rotary_parts_keep_bf16_rounding_whatever_the_latents_size`.
#
# ## Step 2: a score
#
# With query elements off by dq and key elements by dk, a score is off by at most
#
#     h  =  softmax_scale sum over i of (|q_i| dk_i + dq_i |k_i| + dq_i dk_i)
#
# the sum over latent and rotary widths. That is up to 2^-3 of the sum of magnitudes, and no smaller
# constant is true: errors may all point the same way.

# %%
q = torch.cat((sample.q_latent, sample.q_rope), -1).double().flatten(0, 1)
k = torch.cat(sample.rows, -1).double()
q_hat = torch.cat((asked.c_kv[0], asked.k_rope[0]), -1).double().flatten(0, 1)
k_hat = torch.cat(meaning, -1).double()


def element_bound(latent, scale, rope):
    """Step 1 for latents, BF16's rounding for rotary parts."""
    latent_part = torch.maximum(latent.abs() * 2.0**-4, scale[..., None] * 2.0**-10)
    return torch.cat((latent_part, rope.abs() * 2.0**-8), -1).double()


dq = element_bound(sample.q_latent, query.scale[0], sample.q_rope).flatten(0, 1)
dk = element_bound(sample.rows.c_kv, rows.scale, sample.rows.k_rope)
h = sample.softmax_scale * (q.abs() @ dk.T + dq @ k.abs().T + dq @ dk.T)
scores, quantised = q @ k.T * sample.softmax_scale, q_hat @ k_hat.T * sample.softmax_scale
off = (quantised - scores).abs()
print(f"scores with a standard deviation of {float(scores.std()):.1f}:")
print(f"off by {float(off.mean()):.3f} on average, {float(off.max()):.2f} at most")
print(f"bound: {float(h.mean()):.2f} on average; used at most {float((off / h).max()):.0%}")
assert (off <= h).all()
magnitude = sample.softmax_scale * (q.abs() @ k.abs().T)
worst_case["2 score"], typical["2 score"] = 2.0**-3 + 2.0**-8, float((off / magnitude).mean())
assert (h <= magnitude * (2.0**-3 + 2.0**-8) * 1.01).all()

# %% [markdown]
# ## Step 3: the softmax
#
# If every score is off by at most h, numerator and denominator change by factors within exp(+-h)
# each. So lse is off by at most h, and a weight by a factor within exp(+-2h):
#
#     |out' - out|  <=  (exp(2h) - 1) max |v|  +  exp(2h) max |dv|
#
# Read that as a warning. Scores off by a tenth can change a weight by a fifth, whatever is done
# afterwards. It is the reason why the rotary part, whose scores can be the largest, stays out of
# FP8.

# %%
spread = off.max(dim=-1).values
lse, lse_hat = torch.logsumexp(scores, -1), torch.logsumexp(quantised, -1)
weights, weights_hat = torch.softmax(scores, -1), torch.softmax(quantised, -1)
assert ((lse_hat - lse).abs() <= spread).all()
factor = (weights_hat / weights).log().abs().max(dim=-1).values
assert (factor <= 2 * spread).all()
print(f"lse: off by {float((lse_hat - lse).abs().max()):.3f}; scores by {float(spread.max()):.3f}")
print(f"weights: by factors of up to exp({float(factor.max()):.2f})")

values, values_hat = sample.rows.c_kv.double(), meaning.c_kv.double()
exact, format_only = weights @ values, weights_hat @ values_hat
format_error = float((format_only - exact).norm() / exact.norm())
print(f"what the format does to the output: {format_error:.1%}")

# %% [markdown]
# Held in `tests/stage1/test_fp8_latent_cache.py` by
# `test_attention_is_within_the_formats_rounding_of_unquantised_attention`,
# with a sharper form of the same argument: a key that is far off but has no weight costs nothing.
#
# ## Step 4: P in e4m3
#
# P is rounded in units of sigma, the block's largest u over 448. Step 1 with sigma for the scale:
#
#     |p8 sigma - u|  <=  max(2^-4 u, 2^-10 sigma)
#
# The first term is a relative error of every weight, the second at most 2^-10 / 448 of the block's
# largest u, per token. Neither contains the length. The denominator sums p before rounding, so lse
# carries none of it.

# %%
query_rows = QuantizedRows(*(part.flatten(1, 2) for part in widen(query)))
key_rows = QuantizedRows(*(part[None] for part in widen(rows)))
all_scores = quantized_scores(query_rows, key_rows, sample.softmax_scale)


def read_block(positions):
    """Give the pipeline its block of tokens."""
    part = slice(int(positions[0]), int(positions[-1]) + 1)
    return QuantizedBlock(all_scores[..., part], key_rows.codes[:, part], key_rows.scale[:, part])


shape = torch.empty(1, 1, len(q), 512)
pipeline = rescaled_pv_attention(read_block, shape, [len(k)], causal=False)
got = pipeline.out[0, 0].double()

u = weights_hat * rows.scale.double()
blocks = u.unflatten(-1, (-1, 64))
sigma = (blocks.amax(-1, keepdim=True) / E4M3_MAX).expand_as(blocks).flatten(-2)
p_error = torch.maximum(2.0**-4 * u, 2.0**-10 * sigma)
p_bound = p_error @ key_rows.codes[0].abs().double()
kernel_error = (got - format_only).abs()
print(f"the pipeline uses at most {float((kernel_error / p_bound).max()):.0%} of P's bound")
assert (kernel_error <= p_bound * 1.001 + 1e-4 * format_only.abs().max()).all()
worst_case["4 P"] = 2.0**-4
typical["4 P"] = float((got - format_only).norm() / format_only.norm())
print(f"typical: {typical['4 P']:.2%} of the output; lse off by "
      f"{float((pipeline.lse[0, 0].double() - lse_hat).abs().max()):.1e}")  # fmt: skip

# %% [markdown]
# Held by
# `tests/stage2/test_rescaled_pv.py::test_quantising_p_costs_at_most_a_half_step_of_every_weight`,
# and for the smallest weights by `test_v_of_ones_gives_one` in the same file.
#
# ## Step 5: the accumulator
#
# A step of Hopper's FP8 tensor core adds 32 products and the accumulator, each cut by less than
# 2^-13 of the largest. A tile of 64 tokens has two steps. So a tile that starts from zero is off by
# at most
#
#     33 x 2 x 2^-13  =  0.8 percent of the sum of its magnitudes
#
# and tiles are added in float32. The length does not occur. Scores have one product of 512: 16
# steps, so 6.4 percent of the sum of magnitudes at worst. (In tests on one NVIDIA H200, 2026-11-30,
# lse was off by 0.001 to 0.005.)

# %%
tile = (STEP_PRODUCTS + 1) * 2 * 2.0**-FRACTION_BITS
score = (STEP_PRODUCTS + 1) * 16 * 2.0**-FRACTION_BITS
print(f"tile of P @ V: {tile:.2%}; score of 512 products: {score:.1%}")
assert 0.008 < tile < 0.0081 and 0.064 < score < 0.065
worst_case["5 accumulator"], typical["5 accumulator"] = tile, 1.2e-5  # the model's bias, chapter 30

figures.bars(
    {"worst case": worst_case, "typical": typical},
    "Worst case and typical size of four error sources, relative",
    xlabel="relative error (element, score and accumulator: of the sum of magnitudes)",
    log=True,
    number="{:.1e}",
)

# %% [markdown]
# Held by `tests/stage2/test_tensor_core_accumulator.py::test_the_bound_of_every_policy_holds` for
# the model, and on a GPU by the kernels' own bound, which contains the same expression
# (`tests/stage3/test_mla_decode.py::test_attention_is_float64s_over_the_dequantised_cache`).
#
# ## What is exact
#
# Some promises have no tolerance: they hold bit for bit, and are the more useful ones.
#
# - a token's bytes do not depend on other tokens:
#   `tests/stage1/test_quantize.py::test_a_rows_bytes_do_not_depend_on_other_rows`
# - reading a prefix back and appending it gives the same bytes:
#   `tests/stage3/test_fetch_dequant.py::test_appending_fetched_rows_again_gives_the_same_bytes`
# - where pages lie changes nothing:
#   `tests/stage3/test_mla_decode.py::test_permuting_pages_changes_no_bit`
# - what unused slots hold never matters:
#   `tests/stage3/test_mla_decode.py::test_what_unused_slots_hold_never_matters`
# - a request alone and among 33 others:
#   `tests/stage3/test_mla_decode.py::test_a_request_has_the_same_bits_alone_and_among_33`
# - fused writes and the unfused chain:
#   `tests/stage3/test_fused_writes.py::test_appended_tokens_are_the_bytes_of_the_unfused_chain`
# - an empty block changes no bit:
#   `tests/stage2/test_rescaled_pv.py::test_a_tile_with_nothing_visible_changes_no_bit`
#
# Two of them here, on this chapter's rows:

# %%
again = quantize_rows(*(part.bfloat16() for part in meaning))
assert all(torch.equal(a.float(), b.float()) for a, b in zip(again, rows, strict=True))
alone = quantize_rows(sample.rows.c_kv[7:8], sample.rows.k_rope[7:8])
assert torch.equal(alone.codes.float(), rows.codes[7:8].float())
assert torch.equal(alone.scale, token_scale(sample.rows.c_kv[7:8].abs().amax(-1)))
print("the same bytes, read back and appended again; the same bytes alone")

# %% [markdown]
# ## What is not guaranteed
#
# - *A small error of the output for large scores.* Step 3 is sharp: where one key's score is large
#   and its neighbours' close, FP8 may exchange them. BF16 may too, at a sixteenth of the size.
# - *Equal bits on different machines.* Codes are equal everywhere; sums are added in an order that
#   the machine chooses.
# - *A model's quality.* On the shipped model the loss moves by less than two standard errors in
#   every context measured (32 windows, one NVIDIA H200, 2026-11-30, float32:
#   `stage3_dataflow/results/stage_losses_h200`). That is a measurement, on one model.

# %%
total = latent_attention(
    sample.q_latent, sample.q_rope, *sample.rows, sample.softmax_scale, causal=False
)
whole_error = float((got - total.out.flatten(0, 1).double()).norm() / exact.norm())
print(f"everything together, on this cache: {whole_error:.1%} of the output's norm")
assert abs(whole_error - format_error) < typical["4 P"] + 1e-3
