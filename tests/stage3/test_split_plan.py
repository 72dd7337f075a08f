"""Splits cover a request once, in order, by its own length alone; kernels compute the same plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stage3_dataflow
from stage3_dataflow import DecodeWorkspace, SplitRule, suggest_split_rule, workspace_bytes
from stage3_dataflow.split_plan import (
    MIN_RAGGED_TOKENS,
    MOST_ROUNDS,
    SPLIT_GRANULE,
    check_split_rule,
    largest_split_count,
    longest_first_order,
    splits_for,
)

pytestmark = pytest.mark.stage3

lengths = st.integers(0, 200_000)
rules = st.builds(SplitRule, st.integers(1, 5000), st.integers(1, 200))


@given(length=lengths, rule=rules)
@example(0, SplitRule(1, 1))
@example(64, SplitRule(64, 8))
@example(65, SplitRule(64, 8))
def test_splits_cover_every_token_once_in_order(length, rule):
    splits = splits_for(length, rule)
    assert splits[0][0] == 0
    assert splits[-1][1] == length
    for (_, end), (start, _) in zip(splits[:-1], splits[1:], strict=True):
        assert end == start
    assert all(start < end for start, end in splits) or splits == [(0, 0)]


@given(length=lengths, rule=rules)
def test_splits_keep_the_rule(length, rule):
    splits = splits_for(length, rule)
    assert len(splits) <= rule.max_splits
    assert len(splits) <= max(1, -(-length // rule.min_tokens))
    sizes = {end - start for start, end in splits[:-1]}
    assert len(sizes) <= 1
    assert all(size % SPLIT_GRANULE == 0 for size in sizes)


@given(capacity=st.integers(0, 20_000), rule=rules, data=st.data())
def test_the_grid_has_a_program_for_every_split(capacity, rule, data):
    length = data.draw(st.integers(0, capacity))
    assert len(splits_for(length, rule)) <= largest_split_count(capacity, rule)


@given(
    plans=st.lists(st.tuples(st.integers(0, 5000), rules), min_size=1, max_size=8),
)
@settings(max_examples=10)
def test_the_kernels_compute_the_same_splits(device, plans):
    from tests.stage3.split_probe import bounds_of

    for length, rule in plans:
        wanted = splits_for(length, rule)
        found = bounds_of(length, rule, len(wanted), device)
        assert found[-1] == len(wanted)
        for index, (start, end) in enumerate(wanted):
            assert found[2 * index : 2 * index + 2] == [start, end]


@given(lengths=st.lists(st.integers(-3, 1100), min_size=1, max_size=200), rule=rules)
@example([2**31 - 1, -(2**31), 1000, 0, 1], SplitRule(64, 3))
@settings(max_examples=10)
def test_the_order_has_every_split_once_those_of_large_ones_first(device, lengths, rule):
    """Ties as they stand, so that it is one order; a length that is none counts as 0."""
    from stage3_dataflow.kernels.launch import launch_longest_first

    capacity = 1000
    grid_splits = largest_split_count(capacity, rule)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    order = longest_first_order(seqlens, capacity, rule, grid_splits)
    number, *parts = order.tolist()
    plans = [splits_for(n if 0 <= n <= capacity else 0, rule) for n in lengths]
    assert number == len(parts) == len(set(parts)) == sum(map(len, plans))
    places = [divmod(part, grid_splits) for part in parts]
    assert all(split < len(plans[request]) for request, split in places)
    sizes = [(-plans[request][0][1], request, split) for request, split in places]
    assert sizes == sorted(sizes)
    found = torch.full_like(seqlens, -7).repeat(1 + grid_splits)
    counter = torch.full_like(seqlens[:1], 9)
    launch_longest_first(seqlens, found, counter, capacity, *rule, grid_splits)
    assert found[: 1 + number].tolist() == order.tolist()
    assert all(rest == -7 for rest in found[1 + number :].tolist())
    assert int(counter) == 0


@pytest.mark.parametrize("field", SplitRule._fields)
@pytest.mark.parametrize("value", [0, -1])
def test_rules_that_cut_nothing_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"split_rule\.{field} must be at least 1; got {value}"):
        check_split_rule(SplitRule()._replace(**{field: value}))


@given(
    batch=st.integers(1, 300),
    rows=st.integers(1, 500),
    length=st.integers(1, 200_000),
    processors=st.integers(1, 200),
)
def test_the_suggested_rule_is_one_and_fills_the_processors(batch, rows, length, processors):
    """At most eight times over, and never with more rounds of blocks than whole requests take."""
    rule = suggest_split_rule(batch, rows, length, processors=processors)
    check_split_rule(rule)
    programs = batch * -(-rows // 64)
    assert programs * rule.max_splits <= max(MOST_ROUNDS * processors, programs)
    assert len(splits_for(length, rule)) == rule.max_splits
    longest = max(end - start for start, end in splits_for(length, rule))
    rounds = -(-programs * rule.max_splits // processors)
    assert rounds * longest <= -(-programs // processors) * (length + SPLIT_GRANULE)


@given(batch=st.integers(1, 66), rows=st.integers(1, 64), length=st.integers(8192, 200_000))
def test_half_a_gpu_is_never_left_idle(batch, rows, length):
    """With as many splits more as fit at once, a long request takes half as long or less."""
    rule = suggest_split_rule(batch, rows, length, processors=132)
    assert 2 <= rule.max_splits
    assert batch * rule.max_splits > 66


def test_no_processor_is_refused():
    with pytest.raises(ValueError, match="processors must be at least 1; got 0"):
        suggest_split_rule(1, 16, 100, processors=0)


RECORDED = json.loads(
    (Path(stage3_dataflow.__file__).parent / "results" / "h200_split_rules.json").read_text()
)["shapes"]


@pytest.mark.parametrize(
    "shape", RECORDED, ids=lambda shape: "{batch},{heads},{length}".format(**shape)
)
def test_the_suggested_rule_is_near_the_fastest_that_was_measured(shape):
    rule = suggest_split_rule(shape["batch"], shape["heads"], shape["length"], processors=132)
    taken = {int(splits): us for splits, us in shape["microseconds"].items()}
    assert taken[rule.max_splits] <= 1.03 * min(taken.values())


@given(
    batch=st.integers(1, 9),
    s_q=st.integers(1, 4),
    heads=st.integers(1, 20),
    capacity=st.integers(0, 5000),
    rule=rules,
)
@settings(max_examples=20)
def test_workspace_bytes_are_what_a_decode_takes(batch, s_q, heads, capacity, rule):
    """FR-32: partials counted before pages are; the buffers grow to that and no further."""
    width = 32
    splits = largest_split_count(capacity, rule)
    workspace = DecodeWorkspace("cpu")
    if splits > 1:
        out, lse = workspace.partials(batch, splits, s_q * heads, width)
        assert out.shape == (batch, splits, s_q * heads, width)
        assert lse.shape == (batch, splits, s_q * heads)
    assert workspace.nbytes == workspace_bytes(batch, s_q, heads, width, capacity, rule)
    before = workspace.nbytes
    if splits > 1:
        again, _ = workspace.partials(batch, splits - 1, s_q * heads, width)
        assert again.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert workspace.nbytes == before


@given(
    lengths=st.lists(st.integers(1, 131072), min_size=1, max_size=64),
    rows=st.integers(1, 256),
    processors=st.integers(1, 200),
    longest_first=st.booleans(),
)
def test_a_ragged_batch_has_no_split_above_its_part_of_a_processors_share(
    lengths, rows, processors, longest_first
):
    """A quarter; the whole of it and a tenth where the longest requests start first."""
    mean, longest = sum(lengths) // len(lengths), max(lengths)
    rule = suggest_split_rule(
        len(lengths),
        rows,
        max(mean, 1),
        processors=processors,
        longest=longest,
        longest_first=longest_first,
    )
    if longest <= 1.25 * mean:
        return
    tiles = -(-rows // 64)
    share = len(lengths) * mean * tiles / processors
    largest = max(end - start for length in lengths for start, end in splits_for(length, rule))
    part = 1.1 * share if longest_first else share / 4
    assert largest <= max(MIN_RAGGED_TOKENS, part + SPLIT_GRANULE) + SPLIT_GRANULE
