"""Choosing a token: what each filter keeps, and that draws follow the probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage0_reference.sampling import SamplingParams, sample_token, token_probabilities

pytestmark = pytest.mark.stage0

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40).map(torch.tensor)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(LOGITS, st.integers(0, 2**32))
def test_temperature_zero_takes_the_likeliest_whatever_the_seed(logits, seed):
    token = sample_token(logits, SamplingParams(seed=seed), stream(seed))
    assert logits[token] == logits.max()


@given(LOGITS, st.floats(0.05, 5.0), st.integers(0, 45))
def test_top_k_keeps_the_k_likeliest_in_their_proportions(logits, temperature, k):
    params = SamplingParams(temperature=temperature, top_k=k)
    kept = token_probabilities(logits, params)
    everything = token_probabilities(logits, SamplingParams(temperature=temperature))
    assert math.isclose(float(kept.sum()), 1.0, rel_tol=len(logits) * 2**-52)
    allowed = k if 0 < k < len(logits) else len(logits)
    assert int((kept > 0).sum()) <= allowed
    chosen = kept > 0
    # No dropped token is likelier than a kept one.
    if chosen.any() and not chosen.all():
        assert logits[~chosen & (everything > 0)].numel() == 0 or (
            logits[~chosen & (everything > 0)].max() <= logits[chosen].min()
        )
    share = everything[chosen] / everything[chosen].sum()
    assert torch.allclose(kept[chosen], share, rtol=1e-12, atol=0)


@given(LOGITS, st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_likeliest_that_reach_p(logits, p):
    everything = token_probabilities(logits, SamplingParams(temperature=1.0))
    kept = token_probabilities(logits, SamplingParams(temperature=1.0, top_p=p))
    chosen = kept > 0
    slack = len(logits) * 2**-50  # sums of float64 probabilities
    assert everything[chosen].sum() >= p - slack
    fewer = everything[chosen].sum() - everything[chosen].min()
    assert int(chosen.sum()) == 1 or fewer < p + slack


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf")])
    params = SamplingParams(temperature=0.7)
    expected = token_probabilities(logits, params)
    source, draws = stream(1), 4000
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[sample_token(logits, params, source)] += 1
    assert counts[4] == 0
    # Chi-square with 3 degrees of freedom: 16.27 is its 0.1% point, and the seed is fixed.
    cells = expected[:4] * draws
    assert float(((counts[:4] - cells) ** 2 / cells).sum()) < 16.27


def test_same_seed_same_tokens_other_seed_others():
    logits = torch.zeros(1000)
    params = SamplingParams(temperature=1.0)

    def draw(seed):
        source = stream(seed)
        return [sample_token(logits, params, source) for _ in range(20)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


@pytest.mark.parametrize("temperature", [1e-308, 1e-320, 1e-3])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    params = SamplingParams(temperature=temperature)
    assert sample_token(torch.tensor([1.0, 5.0, 2.0, -3.0]), params, stream()) == 1


@pytest.mark.parametrize(
    "logits",
    [[0.0, float("nan")], [float("-inf")] * 3, [0.0, float("inf")]],
    ids=["nan", "nothing-finite", "infinite"],
)
def test_broken_logits_are_refused(logits):
    with pytest.raises(ValueError, match="logits must be numbers"):
        sample_token(torch.tensor(logits), SamplingParams(), stream())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_impossible_parameters_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
