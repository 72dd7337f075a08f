"""Error budgets: every tolerance of the tests, derived from formats, shapes and data.

All bounds are worst cases, since Hypothesis searches for the worst case. They are built from the
standard model of rounding, in which an operation in a format of unit roundoff u gives
``exact * (1 + delta)`` with ``|delta| <= u``, or an absolute error below the smallest normal number
where it underflows. A product of n such factors, or of their inverses, is ``exp(e)`` with
``|e| <= gamma(n) = n u / (1 - n u)``, so errors along a chain of operations add up as a count of
roundings. A sum or dot product of n terms is within ``gamma(n)`` times the sum of its terms'
absolute values, in whatever order and with or without fused multiply-add.

"Magnitude" below is that sum of absolute values: the same expression with every factor replaced by
its absolute value. Bounds are evaluated in float64. That changes them by a relative 1e-12 or so,
which no comparison here can notice.

References
----------
Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, chapters 2 and 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

ELEMENTARY_ULPS = 2
"""Units in the last place by which torch's exp, log, pow, sin and cos may be off.

The vector libraries behind them (SLEEF's u10 functions, MKL's high-accuracy mode, CUDA's) state 1
to 2 for these functions.
"""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: half of eps, 2^-8 for bf16, 2^-24 for f32.

    eps is the step just above 1, ``2^-(bits behind the point)``; rounding errs by half a step.
    """
    return torch.finfo(dtype).eps / 2


def gamma(roundings: int, dtype: torch.dtype) -> float:
    """Relative error of a chain of `roundings` operations: ``n u / (1 - n u)``.

    Also bounds the logarithm: ``|log prod (1 + delta_i)^(+-1)| <= -n log(1 - u) <= gamma(n)``.
    """
    n_u = roundings * unit_roundoff(dtype)
    if n_u >= 1.0:
        raise ValueError(f"{roundings} roundings in {dtype} leave no correct digit")
    return n_u / (1.0 - n_u)


def elementary_roundings(calls: int = 1) -> int:
    """Roundings that `calls` elementary functions count for: one ulp is at most 2 u relative."""
    return 2 * ELEMENTARY_ULPS * calls


def rounding_error(values: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Error of casting `values` to `dtype`: half an ulp, ``max(u |x|, half the smallest step)``.

    The smallest step is the smallest subnormal, ``smallest_normal * eps``. Values beyond the
    largest finite number are not covered.
    """
    info = torch.finfo(dtype)
    half_step = 0.5 * info.smallest_normal * info.eps
    return (unit_roundoff(dtype) * values.double().abs()).clamp(min=half_step)


def dot_error(
    magnitude: Float[Tensor, "*shape"], terms: int, dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Error of a sum of `terms` products: ``gamma(terms) * magnitude`` and each one's underflow."""
    return gamma(terms, dtype) * magnitude + terms * torch.finfo(dtype).smallest_normal


class AttentionError(NamedTuple):
    """Bounds on the error of attention.

    Attributes
    ----------
    out
        Per element of the output.
    lse
        Per row; 0 where nothing is visible.
    """

    out: Tensor
    lse: Tensor


def perturbation_error(
    scores: Float[Tensor, "*rows keys"],
    score_error: Float[Tensor, "*rows keys"],
    value_magnitude: Float[Tensor, "*heads keys width"],
    value_error: Float[Tensor, "*heads keys width"],
) -> AttentionError:
    """How far attention moves, in exact arithmetic, when scores and values are a little off.

    Let score t be off by at most h_t and w_t be its exact weight. The softmax denominator changes
    by a factor ``sum_t w_t exp(+-h_t)``. Its logarithm is at most ``L = log sum_t w_t exp(h_t)``
    upwards, and not below ``-sum_t w_t h_t >= -L`` (Jensen, twice). So lse is off by at most L and
    weight t by a factor within ``exp(+-(h_t + L))``. With one h for all keys that is the familiar
    ``exp(+-2h)``. With an h_t of its own, a key that is far off but has no weight costs nothing.
    The output then moves by at most

        sum_t w_t (exp(h_t + L) - 1) |v_t|  +  sum_t w_t exp(h_t + L) |change of v_t|.

    Parameters
    ----------
    scores
        Exact and scaled; -inf where a key is hidden.
    score_error
        h, at least 0; ignored where hidden.
    value_magnitude, value_error
        Absolute values, and how far each is off, broadcast against `scores` as in ``scores @ v``.
    """
    hidden = scores.isneginf()
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)).masked_fill(hidden, 0.0)
    score_error = score_error.masked_fill(hidden, 0.0)
    lse_error = torch.log1p((weights * torch.expm1(score_error)).sum(-1))
    factor = score_error + lse_error[..., None]
    from_weights = (weights * torch.expm1(factor)) @ value_magnitude
    from_values = (weights * torch.exp(factor)) @ value_error
    return AttentionError(from_weights + from_values, lse_error)


def attention_error(
    scores: Float[Tensor, "*rows keys"],
    score_magnitude: Float[Tensor, "*rows keys"],
    value_magnitude: Float[Tensor, "*heads keys width"],
    *,
    score_roundings: int,
    value_roundings: int,
    dtype: torch.dtype,
    steps: int = 1,
) -> AttentionError:
    """Error of softmax attention that is computed in `dtype`, at once or by online softmax.

    Counted per key t, as errors of its score:

    - the score itself: ``gamma(score_roundings) * score_magnitude``;
    - ``score - maximum``, or ``score - lse``, rounded: ``u`` times the distance, which is at most
      the exact distance, plus log(keys) up to lse, plus twice the largest score error. Online
      softmax subtracts in up to `steps` parts that have one sign and the same sum;
    - exp, and one exp and one product more for each step's rescaling.

    and as errors that all keys of a row share:

    - the denominator: a sum over the keys, rescaled `steps` times;
    - ``maximum + log(sum)``: log of a number between 1 and `keys`, and a sum as large as lse.
      (Online softmax divides by the sum and is spared this one; counting it costs little.)

    `perturbation_error` says what these do to the result. The weighted sum adds its own roundings
    to each value: one per key, two per step, `value_roundings` inside the values, and three for
    weight, quotient and result. Weights and products that underflow add less than the smallest
    normal number each.

    Parameters
    ----------
    scores, score_magnitude
        Exact and scaled, -inf where hidden; and the same with absolute values, scale included.
    value_magnitude
        Absolute values, broadcast as in ``scores @ values``.
    score_roundings, value_roundings
        Longest chain of roundings in one score, and in one value or its projection.
    dtype
        What the arithmetic is done in. Rounding the result to a narrower type is not included.
    steps
        Blocks of the online softmax.
    """
    keys = scores.shape[-1]
    u, tiny = unit_roundoff(dtype), torch.finfo(dtype).smallest_normal
    if keys == 0:
        nothing = torch.zeros(*scores.shape[:-1], value_magnitude.shape[-1], dtype=torch.float64)
        return AttentionError(nothing, nothing.sum(-1))
    hidden = scores.isneginf()
    distance = (scores.amax(-1, keepdim=True) - scores).masked_fill(hidden, 0.0)
    own = dot_error(score_magnitude, score_roundings, dtype).masked_fill(hidden, 0.0)
    own = own + u * (distance + math.log(keys) + 2.0 * own.amax(-1, keepdim=True))
    own = own + gamma(elementary_roundings(steps + 1) + steps, dtype)

    summed = gamma(keys + 2 * steps, dtype) + 2.0 * keys * tiny
    hidden_rows = hidden.all(-1)
    no_values = torch.zeros(keys, 0, dtype=torch.float64)
    so_far = perturbation_error(scores, own + summed, no_values, no_values).lse
    log_sum = gamma(elementary_roundings(), dtype) * (math.log(keys) + so_far)
    lse = torch.logsumexp(scores, -1).abs().masked_fill(hidden_rows, 0.0)
    shared = summed + (1.0 + u) * log_sum + u * (lse + so_far)

    roundings = keys + 2 * steps + value_roundings + 3
    moved = perturbation_error(
        scores,
        own + shared[..., None],
        value_magnitude,
        gamma(roundings, dtype) * value_magnitude,
    )
    underflow = 2.0 * tiny * (keys + value_roundings) * (1.0 + value_magnitude.amax(-2))
    return AttentionError(
        (moved.out + underflow[..., None, :]).masked_fill(hidden_rows[..., None], 0.0),
        moved.lse.masked_fill(hidden_rows, 0.0),
    )


def visible_keys(s_q: int, length: int, causal: bool) -> Tensor:
    """Bool [s_q, length]: query i sees the keys before ``length - s_q + i + 1``."""
    if not causal:
        return torch.ones(s_q, length, dtype=torch.bool)
    seen = [[key < length - s_q + query + 1 for key in range(length)] for query in range(s_q)]
    return torch.tensor(seen, dtype=torch.bool).view(s_q, length)


class LatentScores(NamedTuple):
    """Scaled scores over latents and their magnitudes, float64 [s_q, heads, length]."""

    scores: Tensor
    magnitude: Tensor


def latent_scores(
    q_latent: Float[Tensor, "s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    softmax_scale: float,
    causal: bool = True,
) -> LatentScores:
    """Scores of absorbed queries, for bounds; -inf where a key is hidden."""
    query = torch.cat((q_latent, q_rope), -1).double()
    key = torch.cat((c_kv, k_rope), -1).double()
    hidden = ~visible_keys(len(query), len(key), causal)[:, None, :]
    scores = (query @ key.T * softmax_scale).masked_fill(hidden, float("-inf"))
    return LatentScores(scores, query.abs() @ key.abs().T * abs(softmax_scale))


def latent_attention_error(
    q_latent: Float[Tensor, "s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    softmax_scale: float,
    *,
    dtype: torch.dtype,
    causal: bool = True,
    steps: int = 1,
) -> AttentionError:
    """Error of `latent_attention`, or of its paged form in `steps` blocks, in `dtype`.

    A score is two dot products, their sum, the scale rounded to `dtype`, and a product with it.
    Returns shapes as the function: [s_q, heads, kv_lora_rank] and [s_q, heads].
    """
    scores, magnitude = latent_scores(q_latent, q_rope, c_kv, k_rope, softmax_scale, causal)
    return attention_error(
        scores,
        magnitude,
        c_kv.double().abs(),
        score_roundings=q_latent.shape[-1] + q_rope.shape[-1] + 3,
        value_roundings=0,
        dtype=dtype,
        steps=steps,
    )


def expanded_attention_error(
    q_nope: Float[Tensor, "s_q heads qk_nope_head_dim"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    w_uk: Float[Tensor, "heads qk_nope_head_dim kv_lora_rank"],
    w_uv: Float[Tensor, "heads v_head_dim kv_lora_rank"],
    softmax_scale: float,
    *,
    dtype: torch.dtype,
    causal: bool = True,
) -> AttentionError:
    """Error of `naive_attention` and of `absorbed_attention` in `dtype`, both against exactness.

    Both sum the same terms ``q W c`` of a score and ``w W c`` of an output element, in another
    order. So one magnitude and one count of roundings serves both, and the two forms differ by at
    most twice this bound.
    """
    rank, nope, rope = c_kv.shape[-1], q_nope.shape[-1], q_rope.shape[-1]
    latents, keys = c_kv.double(), k_rope.double()
    queries = (q_nope.double(), q_rope.double())
    up_key, up_value = w_uk.double(), w_uv.double()
    hidden = ~visible_keys(len(q_nope), len(c_kv), causal)

    def score(nope: Tensor, rope: Tensor, up: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        expanded = torch.einsum("qhd,hdc,tc->hqt", nope, up, latent)
        return expanded + torch.einsum("qhd,td->hqt", rope, key)

    scores = score(*queries, up_key, latents, keys) * softmax_scale
    magnitude = score(*(x.abs() for x in (*queries, up_key, latents, keys))) * abs(softmax_scale)
    error = attention_error(
        scores.masked_fill(hidden, float("-inf")),
        magnitude,
        torch.einsum("hdc,tc->htd", up_value.abs(), latents.abs()),
        score_roundings=nope + rank + rope + 3,
        value_roundings=rank,
        dtype=dtype,
    )
    return AttentionError(error.out.transpose(0, 1), error.lse.T)


def frequency_roundings(theta: float) -> int:
    """Roundings in ``theta^(-2 i / d)``: one in the exponent, magnified by ln theta, and the power.

    The exponent e lies in (-1, 0]; ``theta^(e (1 + u)) = theta^e exp(e u ln theta)``.
    """
    return math.ceil(math.log(theta)) + elementary_roundings()


def angle_error(
    angle: Float[Tensor, "*shape"], theta: float, dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Error in radians of ``position * theta^(-2 i / d)`` computed in `dtype`.

    It grows with the angle: at 16,000 radians u alone is 0.001 in float32 and 62 in bf16. The
    position counts as one rounding (none where it is exact), the product as another.
    """
    return gamma(frequency_roundings(theta) + 2, dtype) * angle.double().abs()


def rotation_error(
    angle_off: Float[Tensor, "*shape"], amplitude: float, stored: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Error of ``amplitude * cos(angle)`` (or sin) rounded to `stored`, the angle being off so far.

    |cos'| and |sin'| are at most 1. cos and the product with the amplitude are float64's.
    """
    computed = angle_off + gamma(elementary_roundings() + 1, torch.float64)
    return amplitude * (computed + unit_roundoff(stored) * (1.0 + computed))


def rotary_error(
    x: Float[Tensor, "*tokens rotary_dim"],
    table_error: Float[Tensor, "*tokens pairs"],
    amplitude: float,
    dtype: torch.dtype,
) -> Float[Tensor, "*tokens rotary_dim"]:
    """Error of rotating the pairs (x_i, x_(i + d/2)) in `dtype` with cos and sin off so far.

    Each result is a two-term dot product with factors of at most `amplitude`, so its magnitude is
    at most ``amplitude (|x| + |y|)``; an error of the table reaches it times ``|x| + |y|``.
    """
    first, second = x.double().abs().chunk(2, dim=-1)
    pair = first + second
    error = pair * table_error + dot_error((amplitude + table_error) * pair, 2, dtype)
    return torch.cat((error, error), -1)


def assert_within(
    actual: Tensor, expected: Tensor, bound: Tensor | float, *, about: object = ""
) -> None:
    """Fail, naming the worst element, where ``|actual - expected| > bound``. NaN always fails.

    Infinities must be equal. `about` is printed with the failure: what was drawn.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    got, want = actual.double(), expected.double()
    limit = torch.as_tensor(bound, dtype=torch.float64).expand(want.shape)
    off = torch.where(got == want, 0.0, (got - want).abs())  # equal infinities differ by 0
    good = off <= limit
    if bool(good.all()):
        return
    excess = torch.where(good, 0.0, (off / limit).nan_to_num(nan=math.inf))
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{int((~good).sum())} of {good.numel()} elements are out of bounds; worst at {at}: "
        f"got {got[at].item()!r}, expected {want[at].item()!r}, off by {off[at].item():.3g}, "
        f"bound {limit[at].item():.3g}. {about}"
    )


# Stage 1: rounding to e4m3 under a token's scale, and attention over what comes of it.


class RowError(NamedTuple):
    """Bounds on the error of latents and rotary parts, per element, float64.

    Attributes
    ----------
    c_kv
        [..., kv_lora_rank].
    k_rope
        [..., qk_rope_head_dim].
    """

    c_kv: Tensor
    k_rope: Tensor


def scaled_rounding_error(
    values: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*#shape"],
    dtype: torch.dtype,
    *,
    exact_scaling: bool,
) -> Float[Tensor, "*shape"]:
    """Error of ``scale * round(values / scale)``, rounded to `dtype`, the rest done in float32.

    Let u be 2^-24 and t = 2^-150, half of float32's smallest step. Then

    - the quotient is off by at most ``e = u |x / s| + t``;
    - the rounding to `dtype` adds half an ulp of a number as large as ``|x / s| + e``: for e4m3
      that is ``max(2^-4 |x / s|, 2^-10)`` but for e, so ``max(2^-4 |x|, 2^-10 s)`` after scaling;
    - the product with s multiplies this error by s and adds ``u |result| + t``.

    A power of two scales without rounding (`exact_scaling`): u is then 0 and only t stays, for
    quotients that underflow.

    Parameters
    ----------
    values
        What was divided. ``values / scale`` must be at most what rounds to the dtype's largest
        number: 464 for e4m3, where everything above 448 is 448 and at most 16 < 464 / 16 away.
    scale
        The stored scale, float32, broadcast against `values`.
    """
    u = 0.0 if exact_scaling else unit_roundoff(torch.float32)
    tiny = 2.0**-150
    size, unit = values.double().abs(), scale.double()
    quotient = size / unit
    divided = u * quotient + tiny
    rounded = rounding_error(quotient + divided, dtype) + divided
    return (unit * rounded) * (1.0 + u) + u * size + tiny


def quantization_error(
    c_kv: Float[Tensor, "*tokens kv_lora_rank"],
    k_rope: Float[Tensor, "*tokens qk_rope_head_dim"],
    scale: Float[Tensor, " *tokens"],
    *,
    exact_scaling: bool,
) -> RowError:
    """Error of tokens that were quantised with these scales and multiplied back in float32.

    The latent passes e4m3, the rotary part BF16 and nothing coarser; see `scaled_rounding_error`.
    Inputs are float32 or narrower, and a rotary part is at most BF16's maximum times the scale.
    """
    unit = scale[..., None]
    return RowError(
        scaled_rounding_error(c_kv, unit, torch.float8_e4m3fn, exact_scaling=exact_scaling),
        scaled_rounding_error(k_rope, unit, torch.bfloat16, exact_scaling=exact_scaling),
    )


def fetch_error(values: Float[Tensor, "*shape"], *, exact_scaling: bool) -> Tensor:
    """Error of one product ``codes * scale`` in float32 that is then rounded to BF16.

    A power of two times a code, or times a BF16 number, is a BF16 number (codes have 4 significant
    bits, BF16 has 8) unless it leaves the range of normal ones, so nothing is lost there.

    Parameters
    ----------
    values
        The exact products.
    """
    if exact_scaling:
        return torch.zeros_like(values, dtype=torch.float64)
    u, size = unit_roundoff(torch.float32), values.double().abs()
    return u * size + rounding_error(size * (1.0 + u), torch.bfloat16)


def fp8_attention_error(
    q_latent: Float[Tensor, "s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    softmax_scale: float,
    *,
    causal: bool = True,
    steps: int = 1,
) -> AttentionError:
    """Error of float32 attention in the scaled domain against exact attention over its meaning.

    The operands are what codes and scales stand for, as exact float64 products. Errors in the
    scaled domain, times the scales, are errors relative to the same magnitudes, so this is
    `attention_error` with its counts: a score is two dot products and their sum (width + 1), the
    softmax scale rounded to float32, two products of the three scales in any order, and that times
    the sum: width + 5. A value is one product, ``code * scale``.

    Rotary products that underflow come back times both scales. With scales up to 2^40 they stay
    below 2^-40 and so far below the rounding of exp, which each score is charged anyway.
    """
    scores, magnitude = latent_scores(q_latent, q_rope, c_kv, k_rope, softmax_scale, causal)
    return attention_error(
        scores,
        magnitude,
        c_kv.double().abs(),
        score_roundings=q_latent.shape[-1] + q_rope.shape[-1] + 5,
        value_roundings=1,
        dtype=torch.float32,
        steps=steps,
    )


def perturbed_attention_error(
    query: tuple[Tensor, Tensor],
    row: tuple[Tensor, Tensor],
    query_error: RowError,
    row_error: RowError,
    softmax_scale: float,
    *,
    causal: bool = True,
) -> AttentionError:
    """How far exact attention moves when queries and cached rows are off by so much.

    A score moves by at most

        softmax_scale * sum_i (|q_i| dk_i + dq_i |k_i| + dq_i dk_i),

    the sum over latent and rotary widths; a value by its latent's error. `perturbation_error` says
    what these do: with all scores off by at most d the weights are within ``exp(+-2d)``, the output
    off by at most ``(exp(2d) - 1) max |v|`` and the values' error, and lse by d.

    Parameters
    ----------
    query, row
        Exact (q_latent, q_rope) [s_q, heads, .] and (c_kv, k_rope) [length, .] of one request.
    query_error, row_error
        Bounds per element of each.
    """
    scores, magnitude = latent_scores(*query, *row, softmax_scale, causal)
    # |q| dk + dq (|k| + dk), each a dot product of magnitudes
    from_rows = latent_scores(*query, *row_error, softmax_scale, causal).magnitude
    off_latent = row[0].double().abs() + row_error.c_kv
    off_rope = row[1].double().abs() + row_error.k_rope
    from_query = latent_scores(*query_error, off_latent, off_rope, softmax_scale, causal).magnitude
    s_q, heads, width = query[0].shape
    if magnitude.shape[-1] == 0:
        nothing = torch.zeros(s_q, heads, width, dtype=torch.float64)
        return AttentionError(nothing, nothing.sum(-1))
    moved = perturbation_error(
        scores, from_rows + from_query, row[0].double().abs(), row_error.c_kv
    )
    empty = scores.isneginf().all(-1)
    return AttentionError(
        moved.out.masked_fill(empty[..., None], 0.0), moved.lse.masked_fill(empty, 0.0)
    )


# Stage 3: the kernels, whose P is rounded and whose sums may be a tensor core's.

PROBABILITY_ROUNDOFF = {"bf16": 2.0**-8, "e4m3": 2.0**-4}
"""Unit roundoff of P's formats."""

SIGMA_BLOCK = 64
"""Most tokens that share a scale of P in e4m3."""

TENSOR_CORE_STEP, TENSOR_CORE_BITS = 32, 13
"""Hopper's FP8 tensor core adds 32 products and its accumulator at once, each cut below 2^-13 of
the largest of them; see `stage2_pv_pipeline.tensor_core_accumulator`."""


def tensor_core_cut(terms: int) -> float:
    """Error of an FP8 tensor core's sum of products, relative to the sum of their magnitudes.

    Each step of 32 cuts 33 addends by less than 2^-13 of the largest, which is at most that sum.
    """
    steps = -(-terms // TENSOR_CORE_STEP)
    return (TENSOR_CORE_STEP + 1) * steps * 2.0**-TENSOR_CORE_BITS


def probability_error(
    scaled_weights: Float[Tensor, "*rows keys"], p_format: str
) -> Float[Tensor, "*rows keys"]:
    """Error of rounding P, where P stands for ``scaled_weights`` (weight times V's scale).

    In BF16 half an ulp, 2^-8 relative. In e4m3 P is rounded in units of its block's sigma: half an
    ulp is ``max(2^-4 |u|, 2^-10 sigma)``, sigma being the largest u of the block over 448, or 2^-60
    of the largest sigma so far. Blocks of the kernels have up to 64 tokens and begin at multiples
    of their size; a smaller one's maximum is no larger. Computing sigma, and the quotient by it,
    takes four roundings of float32, three of them divisions that may be off by 2 ulps.
    """
    relative = PROBABILITY_ROUNDOFF[p_format] * scaled_weights
    if p_format == "bf16" or scaled_weights.shape[-1] == 0:
        return relative
    keys = scaled_weights.shape[-1]
    padded = torch.nn.functional.pad(scaled_weights, (0, -keys % SIGMA_BLOCK))
    largest = padded.unflatten(-1, (-1, SIGMA_BLOCK)).amax(-1) / 448.0
    floored = torch.maximum(largest, 2.0**-60 * largest.cummax(-1).values)
    sigma = floored.repeat_interleave(SIGMA_BLOCK, -1)[..., :keys]
    return (relative + 2.0**-10 * sigma) * (1.0 + gamma(1 + elementary_roundings(3), torch.float32))


def kernel_attention_error(
    q_latent: Float[Tensor, "s_q heads kv_lora_rank"],
    q_rope: Float[Tensor, "s_q heads qk_rope_head_dim"],
    c_kv: Float[Tensor, "length kv_lora_rank"],
    k_rope: Float[Tensor, "length qk_rope_head_dim"],
    scale: Float[Tensor, " length"],
    softmax_scale: float,
    *,
    p_format: str,
    causal: bool = True,
    splits: int = 1,
    partial_dtype: torch.dtype = torch.float32,
    fp8_tensor_core: bool = False,
) -> AttentionError:
    """Error of a decode kernel against exact attention over what codes and scales stand for.

    `attention_error` with the kernels' counts, and P's rounding.

    - A score is one sum over both widths, whose additions may truncate (2 u each, as tensor cores
      do), the softmax scale and log2(e) rounded to float32, and four products: 2 (widths) + 6.
    - Scores are kept in base 2, V's scale possibly added as its logarithm: ``log2 scale``, the sum
      and its use as an exponent are off by 4 u of its size.
    - A split's lse, of size ``B = max |score| + log(keys)`` at most, is a logarithm and a sum, and
      a product with a rounded ln 2 (4 u B); its difference to the largest one is at most 2 B,
      rounded and multiplied by log2(e) for the exponential (3 u 2 B): 10 u B, and two elementary
      functions (of log2, at most log(keys)). Charged to every score, split or not.
    - A value's chain: V's scale, division by sigma, the sum (2 u an addition), per step a ratio
      with a division and two products, last two divisions and three products.
    - P's rounding, `probability_error` of the weights as computed: exact ones plus their own error,
      which `attention_error` gives when the values are the unit vectors.
    - A split's result that is kept in `partial_dtype` is rounded once more. The merge weighs them
      with what adds up to 1, and none is larger than its share of ``sum weights |v|``, error and
      all: one rounding of that.
    - On FP8 tensor cores both FP8 products lose `tensor_core_cut` of their magnitude.

    Parameters
    ----------
    q_latent, q_rope, c_kv, k_rope
        What one request's codes stand for, float64.
    scale
        Of its tokens; ones over a BF16 cache.
    splits
        Parts that the request may have been cut into.
    partial_dtype
        Of their results.
    fp8_tensor_core
        Whether FP8 products ran on tensor cores, rather than in float32.
    """
    u = unit_roundoff(torch.float32)
    scores, magnitude = latent_scores(q_latent, q_rope, c_kv, k_rope, softmax_scale, causal)
    keys, width = c_kv.shape
    if keys == 0:
        nothing = torch.zeros(*q_latent.shape, dtype=torch.float64)
        return AttentionError(nothing, nothing.sum(-1))
    score_roundings = 2 * (width + q_rope.shape[-1]) + 6
    largest = scores.masked_fill(scores.isneginf(), 0.0).abs().amax(-1, keepdim=True)
    extra = 10.0 * u * (largest + math.log(keys)) + 4.0 * u * scale.double().log2().abs().amax()
    extra = extra + gamma(elementary_roundings(2), torch.float32) * (1.0 + math.log(keys))
    if fp8_tensor_core:
        latent_only = latent_scores(
            q_latent, q_rope[..., :0], c_kv, k_rope[..., :0], softmax_scale, causal
        )
        extra = extra + tensor_core_cut(width) * latent_only.magnitude
    # `attention_error` charges gamma(roundings) of the magnitude: an error e counts as e / gamma.
    magnitude = magnitude + extra / gamma(score_roundings, torch.float32)
    steps = -(-keys // (SIGMA_BLOCK // 2)) + splits

    def error_over(values: Tensor) -> AttentionError:
        return attention_error(
            scores,
            magnitude,
            values,
            score_roundings=score_roundings,
            value_roundings=keys + 12 * steps + 20,
            dtype=torch.float32,
            steps=steps,
        )

    values = c_kv.double().abs()
    hidden_rows = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(hidden_rows, 0.0).softmax(-1).masked_fill(hidden_rows, 0.0)
    computed = weights + error_over(torch.eye(keys, dtype=torch.float64)).out
    scaled = computed * scale.double()
    off = probability_error(scaled, p_format)
    codes = values / scale.double()[:, None]
    error = error_over(values)
    # Rounded P passes the same sums: their relative error applies to its error too.
    out = error.out + (off @ codes) * (1.0 + gamma(2 * keys + 14 * steps + 23, torch.float32))
    if fp8_tensor_core and p_format == "e4m3":
        out = out + tensor_core_cut(SIGMA_BLOCK) * ((scaled + off) @ codes)
    if splits > 1 and partial_dtype != torch.float32:
        out = out + rounding_error(weights @ values + out, partial_dtype)
    return AttentionError(out.masked_fill(hidden_rows, 0.0), error.lse)


def rms_norm_error(
    x: Float[Tensor, "tokens width"],
    weight: Float[Tensor, " width"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "tokens width"]:
    """Error of ``x / sqrt(mean(x^2) + eps) * weight`` in float32, rounded to `dtype`.

    The mean is a sum of squares (one rounding each, and one per addition, all of one sign), a
    quotient and eps rounded and added: width + 4. Its root halves that, the reciprocal root is an
    elementary function, and two products follow. Squares that underflow are below eps.
    """
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    roundings = (x.shape[-1] + 4) // 2 + 1 + elementary_roundings() + 2
    own = gamma(roundings, torch.float32) * exact.abs()
    return own + rounding_error(exact.abs() + own, dtype)
