"""Each wrong way is wrong by far more than rounding on its smallest input; the right one is not."""

from __future__ import annotations

import pytest
import torch

from stage2_pv_pipeline import wrong_ways
from stage2_pv_pipeline.rescaled_pv import QuantizedBlock

pytestmark = pytest.mark.stage2

ROUNDING = 2**-4  # of P, relative; codes are exact in these inputs


def two_tokens():
    """Values 1 and 3, equal scores: attention gives 2."""
    return QuantizedBlock(
        scores=torch.zeros(1, 1, 2),
        codes=torch.full((1, 2, 1), 448.0),
        scale=torch.tensor([[1 / 448, 3 / 448]]),
    )


def hot_key():
    scores = torch.full((1, 1, 4096), -7.0)
    scores[..., 0] = 0.0
    return QuantizedBlock(scores, torch.full((1, 4096, 1), 256.0), torch.full((1, 4096), 2.0**-8))


def two_blocks():
    """Values 16 in the first block and 1 in the second, equal scores: attention gives 8.5."""
    scale = torch.cat((torch.full((1, 64), 16 / 448), torch.full((1, 64), 1 / 448)), dim=1)
    return QuantizedBlock(torch.zeros(1, 1, 128), torch.full((1, 128, 1), 448.0), scale)


@pytest.mark.parametrize(
    ("way", "sequence", "exact", "wrong"),
    [
        (wrong_ways.without_value_scale, two_tokens, 2.0, 448.0),
        (wrong_ways.largest_scale_of_the_block, two_tokens, 2.0, 3.0),
        (wrong_ways.cast_without_a_scale, hot_key, 1.0, 0.211),
        (lambda whole: wrong_ways.out_of_order(whole, [1, 0]), two_blocks, 8.5, 0.5),
    ],
    ids=["no value scale", "largest scale", "unscaled cast", "out of order"],
)
def test_the_smallest_input_shows_the_damage(way, sequence, exact, wrong):
    right = float(wrong_ways.right_way(sequence()).out)
    assert abs(right - exact) <= ROUNDING * exact
    damaged = float(way(sequence()).out)
    assert abs(damaged - exact) > 4 * ROUNDING * exact
    assert damaged == pytest.approx(wrong, rel=0.1)


def test_lse_stays_perfect_while_small_probabilities_vanish():
    whole = hot_key()
    damaged = wrong_ways.cast_without_a_scale(whole)
    assert torch.equal(damaged.lse, torch.logsumexp(whole.scores, dim=-1))
    assert float(damaged.out) < 0.25


def test_tiles_added_in_order_are_the_right_way():
    whole = two_blocks()
    in_order = wrong_ways.out_of_order(whole, [0, 1])
    assert float(in_order.out) == pytest.approx(float(wrong_ways.right_way(whole).out), rel=2**-20)


def test_the_package_does_not_offer_them():
    import stage2_pv_pipeline

    assert not any("wrong" in name for name in stage2_pv_pipeline.__all__)
