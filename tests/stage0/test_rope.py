"""Rotary embedding against exact angles, in both layouts of pairs, and YaRN's two corrections.

FR-nn names an entry of the public reports of faults in comparable systems.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
from collections.abc import Iterator
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stage0_reference.decoder import Decoder, FullAttention
from stage0_reference.model_config import RopeConfig, yarn_mscale
from stage0_reference.rope import RotaryEmbedding, Rotation, apply_rotary, rotary_frequencies
from tests.bounds import (
    angle_error,
    assert_within,
    dot_error,
    elementary_roundings,
    frequency_roundings,
    gamma,
    rotary_error,
    rotation_error,
    rounding_error,
    unit_roundoff,
)
from tests.model_factory import random_decoder, tiny_config
from tests.strategies import draw_values, layouts, regimes, seeds, with_layout

pytestmark = pytest.mark.stage0

TWO_PI = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DEEPSEEK_V2 = RopeConfig(
    rope_type="yarn",
    theta=10000.0,
    factor=40.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.707,
    mscale_all_dim=0.707,
)
KIMI_K2 = RopeConfig(
    rope_type="yarn",
    theta=50000.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    beta_fast=1.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

NORM_ERROR = unit_roundoff(torch.float32) + gamma(elementary_roundings(3) + 8, torch.float64)
"""Relative error of ``hypot(cos, sin)``, or of the norm of a pair that they turned.

cos and sin are off by at most a relative u of float32 each, whatever the angle, and so their norm
is. What float64 adds: cos, sin and hypot, the amplitude, and the products and sums of a rotation.
"""

even_widths = st.one_of(st.integers(1, 16).map(lambda pairs: 2 * pairs), st.sampled_from((32, 64)))
thetas = st.sampled_from((100.0, 10000.0, 50000.0, 1e6, 1e7))
positions_up_to_a_million = st.one_of(st.integers(0, 2**20), st.integers(0, 64))


def exact_rotation(position: int, theta: float, rotary_dim: int) -> Rotation:
    """Cos and sin from angles of 60 digits, reduced to one turn before they become floats."""
    cos, sin = [], []
    with localcontext() as context:
        context.prec = 60
        for pair in range(rotary_dim // 2):
            frequency = Decimal(theta) ** (Decimal(-2 * pair) / Decimal(rotary_dim))
            angle = float(position * frequency % TWO_PI)
            cos.append(math.cos(angle))
            sin.append(math.sin(angle))
    return Rotation(torch.tensor(cos, dtype=torch.float64), torch.tensor(sin, dtype=torch.float64))


def table_error(rope: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """Bound on cos and sin of `RotaryEmbedding` without stretching, float64 [tokens, pairs]."""
    angles = positions.double()[:, None] * rotary_frequencies(rope, rotary_dim)
    return rotation_error(
        angle_error(angles, rope.theta, torch.float64), rope.amplitude, torch.float32
    )


def reference_error() -> float:
    """Error of `exact_rotation`: an angle of at most 2 pi rounded to float64, then cos of it."""
    angle = torch.tensor(unit_roundoff(torch.float64) * 2 * math.pi)
    return float(rotation_error(angle, 1.0, torch.float64))


@given(theta=thetas, rotary_dim=even_widths, position=positions_up_to_a_million)
@example(10000.0, 64, 15962)  # FR-05
def test_cos_and_sin_are_exact_to_float32_at_any_position(theta, rotary_dim, position):
    rope = RopeConfig(theta=theta)
    positions = torch.tensor([position])
    rotation = RotaryEmbedding(rope, rotary_dim).rotation(positions)
    exact = exact_rotation(position, theta, rotary_dim)
    bound = table_error(rope, rotary_dim, positions)[0] + reference_error()
    for got, want in zip(rotation, exact, strict=True):
        assert got.dtype == torch.float32
        assert_within(got[0], want, bound, about=(theta, rotary_dim, position))


def test_first_pair_at_position_15962():  # FR-05
    """In BF16 the position itself would be 15936, and the angle 26 radians off."""
    assert float(torch.tensor(15962).bfloat16()) == 15936.0
    rotation = RotaryEmbedding(RopeConfig(), 64).rotation(torch.tensor([15962]))
    half_ulp = unit_roundoff(torch.float32)
    assert float(rotation.cos[0, 0]) == pytest.approx(math.cos(15962.0), rel=half_ulp)
    assert float(rotation.sin[0, 0]) == pytest.approx(math.sin(15962.0), rel=half_ulp)


def rotations_of(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Return cos and sin as the decoder's first layer sees them, far behind the start."""
    seen: list[Rotation] = []

    def note(module, args):
        seen.append(args[1])

    handle = decoder.model.layers[0].register_forward_pre_hook(note)
    tokens = torch.arange(4)[None]
    decoder(tokens, tokens + 15962, FullAttention())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_casting_the_decoder_does_not_reach_the_angles(dtype):  # FR-05
    config = tiny_config(num_hidden_layers=1)
    decoder = random_decoder(config)
    before = rotations_of(decoder)
    built_narrow = rotations_of(random_decoder(config, dtype=dtype))
    cast_later = rotations_of(decoder.to(dtype))
    fresh = RotaryEmbedding(config.rope, config.qk_rope_head_dim).rotation(torch.arange(4) + 15962)
    for rotation in (before, built_narrow, cast_later):
        for got, want in zip(rotation, fresh, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got[0], want)
    assert list(decoder.buffers()) == []


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("rope", (RopeConfig(), DEEPSEEK_V2), ids=("default", "yarn"))
def test_default_dtype_does_not_reach_the_angles(rope, request):
    positions = torch.tensor([0, 1, 15962])
    before = RotaryEmbedding(rope, 64).rotation(positions)
    request.getfixturevalue("bf16_by_default")
    after = RotaryEmbedding(rope, 64).rotation(positions)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


@given(
    shape=st.sampled_from(((), (0,), (3,), (2, 3))),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    rotary_dim=even_widths,
)
def test_positions_may_have_any_shape(shape, dtype, rotary_dim):
    rotary = RotaryEmbedding(RopeConfig(), rotary_dim)
    positions = torch.randint(0, 10**6, shape)
    rotation = rotary.rotation(positions.to(dtype))
    assert rotation.cos.shape == rotation.sin.shape == (*shape, rotary_dim // 2)
    flat = rotary.rotation(positions.flatten())
    assert torch.equal(rotation.cos.flatten(), flat.cos.flatten())
    assert torch.equal(rotation.sin.flatten(), flat.sin.flatten())


def pairs_of(vector: list[float], interleaved: bool) -> list[complex]:
    """Elements that turn together, as complex numbers."""
    half = len(vector) // 2
    if interleaved:
        return [complex(*vector[2 * pair : 2 * pair + 2]) for pair in range(half)]
    return [complex(vector[pair], vector[pair + half]) for pair in range(half)]


def turn(vector: list[float], position: int, theta: float, interleaved: bool) -> list[complex]:
    """Rotate by multiplication with exp(i angle)."""
    width = len(vector)
    return [
        number * cmath.exp(1j * position * theta ** (-2.0 * pair / width))
        for pair, number in enumerate(pairs_of(vector, interleaved))
    ]


def rotate(vector: list[float], position: int, theta: float, interleaved: bool) -> Tensor:
    """The library's rotation of one vector, in float64 with a float32 table."""
    rotary = RotaryEmbedding(RopeConfig(theta=theta), len(vector))
    rotation = rotary.rotation(torch.tensor(position))
    return apply_rotary(
        torch.tensor(vector, dtype=torch.float64), rotation, interleaved=interleaved
    )


vectors = st.integers(1, 4).flatmap(
    lambda pairs: st.lists(st.floats(-100, 100), min_size=2 * pairs, max_size=2 * pairs)
)


@pytest.mark.parametrize("interleaved", (True, False))
@given(vector=vectors, position=st.integers(0, 1000), theta=thetas)
@example([1.0, 2.0, 3.0, 4.0], 3, 10000.0)
def test_rotation_is_complex_multiplication_stored_in_halves(interleaved, vector, position, theta):
    expected = turn(vector, position, theta, interleaved)
    halves = torch.tensor(
        [number.real for number in expected] + [number.imag for number in expected],
        dtype=torch.float64,
    )
    pairs = pairs_of(vector, interleaved)
    before = torch.tensor([z.real for z in pairs] + [z.imag for z in pairs], dtype=torch.float64)
    rope = RopeConfig(theta=theta)
    table = table_error(rope, len(vector), torch.tensor([position]))[0]
    # Twice: the loop's angles are float64's too. What its products add lies below the second u of
    # float32, by far.
    bound = rotary_error(before, 2 * table, 1.0, torch.float64)
    assert_within(rotate(vector, position, theta, interleaved), halves, bound)


def test_scores_agree_when_queries_and_keys_are_treated_alike():  # FR-04
    q, k = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    # A rotated element is off by at most u (|x| + |y|), on either side of the product, and meets
    # two elements of the other side: 2 sqrt(2) u in all.
    bound = 4 * unit_roundoff(torch.float32) * sum(q) * sum(k)
    scores = {}
    for interleaved in (True, False):
        turned_q, turned_k = (
            turn(vector, position, 10000.0, interleaved) for vector, position in ((q, 3), (k, 7))
        )
        # Re(a conj(b)) is the pair's dot product, in whatever order its elements are stored.
        expected = sum((a * b.conjugate()).real for a, b in zip(turned_q, turned_k, strict=True))
        score = rotate(q, 3, 10000.0, interleaved) @ rotate(k, 7, 10000.0, interleaved)
        assert float(score) == pytest.approx(expected, abs=bound)
        scores[interleaved] = expected
    assert abs(scores[True] - scores[False]) > 1.0  # the flag matters,
    mixed = rotate(q, 3, 10000.0, True) @ rotate(k, 7, 10000.0, False)
    assert min(abs(float(mixed) - score) for score in scores.values()) > 1.0  # and on both sides


@given(vector=vectors, position=st.integers(0, 10**5))
def test_interleaved_vectors_are_reordered_and_then_rotated(vector, position):
    reordered = vector[0::2] + vector[1::2]
    assert torch.equal(
        rotate(vector, position, 10000.0, True), rotate(reordered, position, 10000.0, False)
    )


rotated_tensors = st.fixed_dictionaries(
    {
        "rotary_dim": even_widths,
        "theta": thetas,
        "regime": regimes(),
        "seed": seeds(),
        "interleaved": st.booleans(),
    }
)


@given(
    drawn=rotated_tensors,
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    layout=layouts(),
    amplitude=st.floats(0.5, 2.0),
)
def test_rotation_is_within_rounding_in_every_dtype_and_layout(drawn, dtype, layout, amplitude):
    generator = torch.Generator().manual_seed(drawn["seed"])
    x = draw_values((3, 2, drawn["rotary_dim"]), drawn["regime"], generator, dtype)
    positions = torch.randint(0, 10**5, (3,), generator=generator)
    rope = RopeConfig(rope_type="yarn", theta=drawn["theta"], attention_factor=amplitude)
    table = RotaryEmbedding(rope, drawn["rotary_dim"]).rotation(positions)
    rotation = Rotation(table.cos[:, None], table.sin[:, None])
    turned = apply_rotary(with_layout(x, layout), rotation, interleaved=drawn["interleaved"])
    assert turned.dtype == dtype
    assert turned.shape == x.shape

    wide = x.double()
    if drawn["interleaved"]:
        wide = torch.cat((wide[..., 0::2], wide[..., 1::2]), -1)
    pairs = torch.complex(*wide.chunk(2, -1))
    product = pairs * torch.complex(rotation.cos.double(), rotation.sin.double())
    expected = torch.cat((product.real, product.imag), -1)
    exact_table = torch.zeros_like(
        rotation.cos, dtype=torch.float64
    )  # it is the same on both sides
    largest = float(torch.stack(rotation).abs().max())
    computing = torch.float64 if dtype == torch.float64 else torch.float32
    bound = rotary_error(wide, exact_table, largest, computing)
    bound = bound + rotary_error(wide, exact_table, largest, torch.float64)
    if dtype == torch.bfloat16:
        bound = bound + rounding_error(expected.abs() + bound, dtype)
    assert_within(turned, expected, bound)


@given(drawn=rotated_tensors, position=positions_up_to_a_million)
def test_rotation_preserves_the_norm_of_every_pair(drawn, position):
    rotary_dim = drawn["rotary_dim"]
    generator = torch.Generator().manual_seed(drawn["seed"])
    x = draw_values((rotary_dim,), drawn["regime"], generator, torch.float64)
    rope = RopeConfig(theta=drawn["theta"])
    rotation = RotaryEmbedding(rope, rotary_dim).rotation(torch.tensor(position))
    turned = apply_rotary(x, rotation, interleaved=False)
    first, second = x.chunk(2)
    norm = torch.hypot(first, second)
    assert_within(torch.hypot(*turned.chunk(2)), norm, norm * NORM_ERROR)


@given(
    drawn=rotated_tensors,
    q_position=positions_up_to_a_million,
    k_position=positions_up_to_a_million,
    shift=st.integers(0, 2**20),
)
def test_scores_depend_on_the_distance_only(drawn, q_position, k_position, shift):
    rotary_dim = drawn["rotary_dim"]
    generator = torch.Generator().manual_seed(drawn["seed"])
    q, k = (draw_values((rotary_dim,), drawn["regime"], generator, torch.float64) for _ in range(2))
    rope = RopeConfig(theta=drawn["theta"])
    rotary = RotaryEmbedding(rope, rotary_dim)

    def score(shift: int) -> tuple[Tensor, Tensor]:
        """Score and its bound against exact rotations."""
        positions = torch.tensor([q_position + shift, k_position + shift])
        table = table_error(rope, rotary_dim, positions)
        turned, errors = [], []
        for x, position, off in zip((q, k), positions, table, strict=True):
            turned.append(apply_rotary(x, rotary.rotation(position), interleaved=False))
            errors.append(rotary_error(x, off, 1.0, torch.float64))
        sizes = [x.abs() + error for x, error in zip(turned, errors, strict=True)]
        error = errors[0] @ sizes[1] + sizes[0] @ errors[1]
        return turned[0] @ turned[1], error + dot_error(
            sizes[0] @ sizes[1], rotary_dim, torch.float64
        )

    (here, error_here), (there, error_there) = score(0), score(shift)
    assert_within(there, here, error_here + error_there, about=drawn)


def test_position_zero_turns_nothing():
    x = torch.randn(5, 8)
    rotation = RotaryEmbedding(RopeConfig(), 8).rotation(torch.zeros(5, dtype=torch.int64))
    assert torch.equal(apply_rotary(x, rotation, interleaved=False), x)


@pytest.mark.parametrize("rope", (RopeConfig(), DEEPSEEK_V2, KIMI_K2), ids=str)
def test_rope_width_zero_is_no_rope(rope):  # FR-06
    assert rotary_frequencies(rope, 0).shape == (0,)
    rotation = RotaryEmbedding(rope, 0).rotation(torch.arange(3))
    assert rotation.cos.shape == rotation.sin.shape == (3, 0)
    x = torch.empty(3, 0)
    for interleaved in (True, False):
        assert apply_rotary(x, rotation, interleaved=interleaved).shape == (3, 0)


@given(theta=thetas, rotary_dim=even_widths, factor=st.floats(1.0, 64.0))
def test_linear_stretching_divides_every_frequency(theta, rotary_dim, factor):
    kept = rotary_frequencies(RopeConfig(theta=theta), rotary_dim)
    stretched = rotary_frequencies(
        RopeConfig(rope_type="linear", theta=theta, factor=factor), rotary_dim
    )
    assert torch.equal(stretched, kept / factor)


@given(theta=thetas, rotary_dim=even_widths)
def test_frequencies_fall_from_one_by_equal_ratios(theta, rotary_dim):
    frequencies = rotary_frequencies(RopeConfig(theta=theta), rotary_dim)
    assert frequencies.dtype == torch.float64
    assert float(frequencies[0]) == 1.0
    ratios = frequencies[1:] / frequencies[:-1]
    off = gamma(2 * frequency_roundings(theta) + 1, torch.float64)
    exact = torch.full_like(ratios, theta ** (-2.0 / rotary_dim))
    power = gamma(frequency_roundings(theta), torch.float64)
    assert_within(ratios, exact, exact * (off + power))


@pytest.mark.parametrize(
    ("mscale_all_dim", "squared"), ((0.707, 1.5896), (1.0, 1.8739)), ids=("0.707", "1.0")
)
def test_yarn_corrects_the_softmax_scale(mscale_all_dim, squared):  # FR-03
    rope = dataclasses.replace(DEEPSEEK_V2, mscale_all_dim=mscale_all_dim)
    assert round(rope.softmax_correction, 4) == squared
    formula = (0.1 * mscale_all_dim * math.log(40.0) + 1.0) ** 2
    rounding = gamma(elementary_roundings() + 6, torch.float64)
    assert rope.softmax_correction == pytest.approx(formula, rel=rounding)
    config = dataclasses.replace(
        tiny_config(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64), rope=rope
    )
    # The width is that of one head's query, 192, in the absorbed form too.
    assert config.softmax_scale == pytest.approx(192**-0.5 * formula, rel=rounding)


def test_softmax_correction_changes_attention_between_two_keys():  # FR-03
    """Position 0 alone would not show it: its softmax over one key is 1 at any scale."""
    configs = [
        dataclasses.replace(
            tiny_config(num_hidden_layers=1),
            rope=dataclasses.replace(DEEPSEEK_V2, mscale_all_dim=mscale_all_dim, mscale=mscale),
        )
        for mscale_all_dim, mscale in ((1.0, 1.0), (None, None))
    ]
    # Same amplitude of cos and sin, so that only the softmax scale differs.
    configs[1] = dataclasses.replace(
        configs[1], rope=dataclasses.replace(configs[1].rope, attention_factor=1.0)
    )
    tokens = torch.tensor([[3, 5]])
    logits = [
        random_decoder(config, dtype=torch.float64)(tokens, torch.tensor([[0, 1]]), FullAttention())
        for config in configs
    ]
    assert torch.equal(logits[0][0, 0], logits[1][0, 0])
    assert float((logits[0][0, 1] - logits[1][0, 1]).abs().max()) > 1e-3


AMPLITUDES = {
    "equal-fields-cancel": ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
    "ratio": (
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        (0.1 * math.log(40.0) + 1.0) / (0.0707 * math.log(40.0) + 1.0),
    ),
    "neither": ({"mscale": None, "mscale_all_dim": None}, 0.1 * math.log(40.0) + 1.0),
    "given-outright": ({"attention_factor": 1.25}, 1.25),
    "nothing-stretched": ({"factor": 1.0, "mscale": None}, 1.0),
    "not-yarn": ({"rope_type": "linear", "mscale": None}, 1.0),
}


@pytest.mark.parametrize(("changes", "amplitude"), AMPLITUDES.values(), ids=AMPLITUDES)
def test_yarn_scales_cos_and_sin(changes, amplitude):  # FR-03
    rope = dataclasses.replace(DEEPSEEK_V2, **changes)
    rounding = gamma(2 * elementary_roundings() + 6, torch.float64)
    assert rope.amplitude == pytest.approx(amplitude, rel=rounding)
    rotation = RotaryEmbedding(rope, 8).rotation(torch.tensor([0, 100]))
    norm = torch.hypot(rotation.cos.double(), rotation.sin.double())
    assert_within(norm, torch.full_like(norm, amplitude), amplitude * (NORM_ERROR + rounding))


def test_without_stretching_there_is_no_correction():
    assert RopeConfig().softmax_correction == 1.0
    assert yarn_mscale(1.0, 0.707) == 1.0
    assert dataclasses.replace(DEEPSEEK_V2, mscale_all_dim=None).softmax_correction == 1.0


def test_yarn_ramp_of_deepseek_v2():
    """32 turns over 4096 tokens fall at pair 10.2, one turn at pair 22.5: the ramp is 10 to 23."""
    kept = rotary_frequencies(RopeConfig(theta=10000.0), 64)
    stretched = rotary_frequencies(DEEPSEEK_V2, 64)
    turns = 4096 * kept / (2 * math.pi)
    assert float(turns[10]) > 32.0 > float(turns[11])
    assert float(turns[22]) > 1.0 > float(turns[23])
    assert torch.equal(stretched[:11], kept[:11])
    assert torch.equal(stretched[23:], kept[23:] / 40.0)
    ramp = (torch.arange(11, 23).double() - 10) / 13
    expected = kept[11:23] * (1 - ramp) + kept[11:23] / 40.0 * ramp
    assert_within(stretched[11:23], expected, gamma(12, torch.float64) * kept[11:23])


@pytest.mark.parametrize("truncate", (True, False))
def test_equal_betas_make_a_step(truncate):
    """Kimi-K2: beta_fast = beta_slow = 1; one turn over the context falls at pair 19.2."""
    rope = dataclasses.replace(KIMI_K2, truncate=truncate)
    kept = rotary_frequencies(RopeConfig(theta=rope.theta), 64)
    stretched = rotary_frequencies(rope, 64)
    assert torch.equal(stretched[:20], kept[:20])
    assert torch.equal(stretched[20:], kept[20:] / 32.0)


@given(
    rotary_dim=st.integers(4, 32).map(lambda pairs: 2 * pairs),
    theta=st.floats(1000.0, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.integers(256, 2**20),
    beta_slow=st.floats(1.0, 4.0),
    ratio=st.one_of(st.just(1.0), st.floats(1.0, 64.0)),
    truncate=st.booleans(),
)
def test_yarn_frequencies_lie_between_kept_and_interpolated_and_fall(
    rotary_dim, theta, factor, original, beta_slow, ratio, truncate
):
    """For every context from 256 tokens to a million, at the bases and widths that models have.

    Outside, the published formula's ramp can end before it starts: 6,284 pretrained tokens at base
    1000 and width 2, or one token.
    """
    rope = RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_slow * ratio,
        beta_slow=beta_slow,
        truncate=truncate,
    )
    kept = rotary_frequencies(RopeConfig(theta=theta), rotary_dim)
    stretched = rotary_frequencies(rope, rotary_dim)
    slack = 1.0 + gamma(4, torch.float64)  # a weighted mean of two numbers: four roundings
    assert bool((stretched <= kept * slack).all())
    assert bool((stretched >= kept / factor / slack).all())
    assert bool((stretched[1:] < stretched[:-1]).all())
    # The share that is interpolated never falls from one pair to the next.
    if factor > 1.5:
        share = (kept - stretched) / (kept - kept / factor)
        assert bool((share[1:] >= share[:-1] - gamma(64, torch.float64)).all())
    turns = original * kept / (2 * math.pi)
    whole = 1 if truncate else 0  # ramp ends are rounded outwards to whole pairs
    fast = turns > rope.beta_fast * theta ** (2.0 * whole / rotary_dim) * slack
    assert_within(stretched[fast], kept[fast], gamma(4, torch.float64) * kept[fast])


@pytest.mark.parametrize("original", (1, 6, 7, 4096))
@pytest.mark.parametrize("truncate", (True, False))
@pytest.mark.parametrize("rotary_dim", (2, 4, 64))
def test_yarn_never_divides_by_zero(rotary_dim, truncate, original):
    rope = dataclasses.replace(
        KIMI_K2, original_max_position_embeddings=original, truncate=truncate
    )
    frequencies = rotary_frequencies(rope, rotary_dim)
    assert bool(frequencies.isfinite().all())
    assert bool((frequencies > 0).all())
