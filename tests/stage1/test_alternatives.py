"""The other cache formats do what they say, and what appending costs them is true."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage1_quant.alternatives import AT_ONCE, FORMATS, RoundTripBackend

pytestmark = pytest.mark.stage1

BY_NAME = {cache_format.name: cache_format for cache_format in FORMATS}
names = pytest.mark.parametrize("name", list(BY_NAME))


def draw_rows(seed: int, tokens: int, binades: float = 2.0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(binades * torch.randn(tokens, 1, generator=generator))
    return (
        torch.randn(tokens, 512, generator=generator) * size,
        torch.randn(tokens, 64, generator=generator) * 10,
    )


def shared_amax(name: str, c_kv: torch.Tensor) -> torch.Tensor:
    """Largest magnitude among the elements that share a scale, for every element."""
    size = c_kv.abs()
    if name == "tile-1x128":
        return size.unflatten(-1, (4, 128)).amax(-1, keepdim=True).expand(-1, 4, 128).flatten(1)
    if name == "block-64":
        return torch.cat([b.amax().expand_as(b) for b in size.split(64)])
    if name == "channel":
        return size.amax(dim=0).expand_as(size)
    if name in ("tensor", "one-row-tensor"):
        return size.amax().expand_as(size)
    return size.amax(dim=-1, keepdim=True).expand_as(size)


@names
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 150))
def test_every_element_is_within_its_formats_rounding(name, seed, tokens):
    """Half a step of the format at the element's size, plus what the scale adds.

    A float format with p mantissa bits rounds to 2^-(p+1) of the element, and below its smallest
    normal to half its smallest subnormal times the scale. An even one rounds to half a step.
    float32 arithmetic on the way (divide, multiply, the scale itself) adds four roundings.
    """
    c_kv, k_rope = draw_rows(seed, tokens)
    back = BY_NAME[name].round_trip(c_kv, k_rope)
    amax = shared_amax(name, c_kv)
    if name.startswith("one-row"):
        rope_amax = k_rope.abs().amax(dim=-1, keepdim=True)
        amax = torch.maximum(amax, rope_amax if name == "one-row" else k_rope.abs().amax())
    if name == "bf16":
        bound = 2**-8 * c_kv.abs()
    elif name == "token-int8":
        bound = 0.5 * amax / 127
    elif name == "token-e5m2":
        bound = torch.maximum(2**-3 * c_kv.abs(), 2**-17 * amax / 57344)
    else:
        largest = 2 * 448 if name == "token-pow2" else 448  # a power of two up to twice amax / 448
        scale = amax * (largest / 448**2)
        bound = torch.maximum(2**-4 * c_kv.abs(), 2**-10 * scale)
    slack = 4 * 2**-24 * amax
    assert bool(((back.c_kv - c_kv).abs() <= bound + slack).all())
    if name.startswith("one-row"):
        rope_bound = 2**-4 * k_rope.abs() + 2**-10 * amax.amax(dim=-1, keepdim=True) / 448
    else:
        # token-amax divides and multiplies by the scale around the rounding to BF16
        rope_bound = (2**-8 + 2**-22) * k_rope.abs()
    assert bool(((back.k_rope - k_rope).abs() <= rope_bound + 4 * 2**-24 * k_rope.abs()).all())


@names
def test_a_scale_known_at_once_means_later_tokens_change_nothing(name):
    cache_format = BY_NAME[name]
    c_kv, k_rope = draw_rows(3, 40)
    # A later token that sets a new maximum and, by its odd size, another rounding for all.
    later = torch.cat((c_kv, 37.7 * c_kv.abs().amax() * torch.ones(1, 512)))
    before = cache_format.round_trip(c_kv, k_rope)
    after = cache_format.round_trip(later, torch.cat((k_rope, k_rope[:1])))
    same = torch.equal(before.c_kv, after.c_kv[:-1])
    assert same == (cache_format.append in (AT_ONCE, "nothing"))


def test_bytes_per_token_are_those_of_the_layouts():
    sizes = {name: cache_format.bytes_per_token for name, cache_format in BY_NAME.items()}
    assert sizes["bf16"] == 2 * (512 + 64)
    assert sizes["token-amax"] == sizes["token-pow2"] == 512 + 4 + 128
    assert sizes["tile-1x128"] == 512 + 4 * 4 + 128
    assert sizes["block-64"] == 512 + 4 / 64 + 128
    assert sizes["one-row"] == 576 + 4


def test_rope_keeps_bf16_precision_unless_it_shares_the_row():
    """FR-14: a latent in +-0.05 beside a rotary key in +-1."""
    generator = torch.Generator().manual_seed(1)
    c_kv = 0.05 * (2 * torch.rand(8, 512, generator=generator) - 1)
    k_rope = 2 * torch.rand(8, 64, generator=generator) - 1
    for name, cache_format in BY_NAME.items():
        error = (cache_format.round_trip(c_kv, k_rope).k_rope - k_rope).abs()
        if name.startswith("one-row"):
            assert float((error / k_rope.abs()).max()) > 2**-6
        else:
            assert bool((error <= (2**-8 + 2**-22) * k_rope.abs()).all())


def test_a_backend_without_quantisation_is_stage_0s():
    generator = torch.Generator().manual_seed(2)
    exact, plain = AbsorbedBackend(), RoundTripBackend(BY_NAME["bf16"])
    from stage0_reference.latent_cache import allocate_pages

    cache = allocate_pages(4, 16, 32, 8)
    c_kv, k_rope = torch.randn(50, 32), torch.randn(50, 8)
    exact.append(c_kv, k_rope, cache, torch.arange(50))
    q = torch.randn(1, 3, 2, 32, generator=generator), torch.randn(1, 3, 2, 8, generator=generator)
    table, lengths = torch.arange(4)[None].int(), torch.tensor([50]).int()
    one = exact.attend(*q, cache, table, lengths, 0.2)
    other = plain.attend(*q, cache, table, lengths, 0.2)
    # Two float32 evaluations: scores differ by at most 40 u of their terms' sum, weights by twice.
    u = 2.0**-24
    terms = 0.2 * (q[0].abs().sum(-1).max() * c_kv.abs().max() + 8 * 16)
    bound = (4 * 41 * u * terms + 104 * u) * c_kv.abs().max()
    assert float((one.out - other.out).abs().max()) <= float(bound)
