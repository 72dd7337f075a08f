"""The checker tells right answers from templates and from tempting wrong ones."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from docs.exercises import check as checker
from docs.exercises import stage0, stage1, stage2, stage3
from docs.exercises.properties import EXERCISES
from docs.exercises.solutions import stage0 as solved0
from docs.exercises.solutions import stage1 as solved1
from docs.exercises.solutions import stage2 as solved2
from docs.exercises.solutions import stage3 as solved3
from stage1_quant import decode_e4m3, encode_e4m3

ROOT = Path(__file__).parents[2]
MODULES = {
    "stage0": (stage0, solved0),
    "stage1": (stage1, solved1),
    "stage2": (stage2, solved2),
    "stage3": (stage3, solved3),
}
EVERY = [(stage, name) for stage, judges in EXERCISES.items() for name in judges]

# Answers use tensors and tuples that the stages' own annotations do not describe.
pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize(("stage", "name"), EVERY)
def test_the_solution_is_right_and_the_template_is_not(stage, name):
    template, solution = (getattr(module, name) for module in MODULES[stage])
    assert checker.verdict(EXERCISES[stage][name], solution) is None
    assert checker.verdict(EXERCISES[stage][name], template) == "not written yet"


@pytest.mark.parametrize("stage", MODULES)
def test_template_and_solution_ask_for_the_same(stage):
    template, solution = MODULES[stage]
    for module in (template, solution):
        functions = [n for n, f in inspect.getmembers(module, inspect.isfunction)
                     if f.__module__ == module.__name__]  # fmt: skip
        assert set(functions) == set(EXERCISES[stage])
    for name in EXERCISES[stage]:
        assert inspect.signature(getattr(template, name)) == inspect.signature(
            getattr(solution, name)
        )


def log2_scale(amax):
    """An exponent from a logarithm: off by one beside powers of two."""
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=464.0 * 2.0**-40) / 448)))


def unmasked_online_step(running_max, running_sum, accumulator, scores, values):
    new_max = torch.maximum(running_max, scores.amax(-1))
    decay, weights = torch.exp(running_max - new_max), torch.exp(scores - new_max[:, None])
    return (
        new_max,
        running_sum * decay + weights.sum(-1),
        accumulator * decay[:, None] + weights @ values,
    )


def one_scale_for_both(c_kv, k_rope):
    row = torch.cat((c_kv, k_rope), -1)
    codes, scale, rope = solved1.quantize_row(row, k_rope)
    return codes[:, : c_kv.shape[1]], scale, rope


def cast_without_sigma(p, scale):
    return decode_e4m3(encode_e4m3(p * scale)), torch.ones(len(p))


def ratio_without_sigma(state, scores, codes, scale):
    result = solved2.rescaled_step(state, scores, codes, scale)
    decay = torch.exp(state[0] - result[0])
    p8, sigma = solved2.fuse_and_quantize(torch.exp(scores - result[0][:, None]), scale)
    return result[0], result[1], state[2] * decay[:, None] + p8 @ codes, sigma


def denominator_of_quantised_p(state, scores, codes, scale):
    result = solved2.rescaled_step(state, scores, codes, scale)
    p8, sigma = solved2.fuse_and_quantize(torch.exp(scores - result[0][:, None]), scale)
    decay = torch.exp(state[0] - result[0])
    return result[0], state[1] * decay + (p8 * sigma[:, None] / scale).sum(-1), *result[2:]


def merge_in_base_2(outs, lses):
    merged = solved2.merge(outs, lses)
    weights = torch.exp2(lses - torch.where(merged[1].isneginf(), 0.0, merged[1]))
    return (weights[..., None] * outs.nan_to_num()).sum(0), merged[1]


def read_nan(outs, lses):
    lse = torch.logsumexp(lses, 0)
    return (torch.exp(lses - lse)[..., None] * outs).sum(0), lse


WRONG = {
    "the first head's matrix": ("stage0", "absorb_query", lambda q, w: q @ w[0]),
    "mask from the start": (
        "stage0", "visible", lambda s_q, length: torch.ones(s_q, length).tril().bool(),
    ),
    "32-bit slots": (
        "stage0", "slots", lambda table, p, size: (table[p // size] * size + p % size).long(),
    ),
    "-inf minus -inf": ("stage0", "online_step", unmasked_online_step),
    "log2 of 448": ("stage1", "pow2_scale", log2_scale),
    "one scale": ("stage1", "quantize_row", one_scale_for_both),
    "q scale lost": (
        "stage1", "scaled_score", lambda q, k: solved1.scaled_score((q[0], q[1] ** 0, q[2]), k),
    ),
    "rope unscaled": (
        "stage1", "read_back", lambda c, s, r: (solved1.read_back(c, s, r)[0], r),
    ),
    "no sigma": ("stage2", "fuse_and_quantize", cast_without_sigma),
    "ratio without sigma": ("stage2", "rescaled_step", ratio_without_sigma),
    "denominator of p8": ("stage2", "rescaled_step", denominator_of_quantised_p),
    "base 2": ("stage2", "merge", merge_in_base_2),
    "0 x NaN": ("stage2", "merge", read_nan),
    "never promoted": (
        "stage2", "promoted", lambda p, codes, every: solved2.promoted(p, codes, 10**6),
    ),
    "splits not of 64": (
        "stage3", "splits_for",
        lambda n, least, most: [(a, min(a + least, n)) for a in range(0, max(n, 1), least)],
    ),
    "32-bit offsets": (
        "stage3", "element_offset", lambda page, o, ps, ts: (page * ps + o * ts).long(),
    ),
    "pages of 0": (
        "stage3", "pad_batch",
        lambda *args: tuple(part.clamp(min=0) for part in solved3.pad_batch(*args)),
    ),
    "whole table": (
        "stage3", "rows_to_read",
        lambda table, lengths, size: solved3.rows_to_read(table, lengths * 0 + 40, size),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_tempting_wrong_answer_is_caught(fault):
    stage, name, answer = WRONG[fault]
    wrong = checker.verdict(EXERCISES[stage][name], answer)
    assert wrong is not None and wrong != "not written yet"


def test_every_exercise_has_a_wrong_answer():
    assert {(stage, name) for stage, name, _ in WRONG.values()} == set(EVERY)


@pytest.mark.parametrize(("arguments", "status"), ((["stage3"], 1), (["stage3", "--solutions"], 0)))
def test_the_command_says_and_returns_what_is_right(arguments, status):
    result = subprocess.run(
        [sys.executable, "-m", "docs.exercises.check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stderr
    assert result.stdout.splitlines()[-1] == f"{0 if status else 4} of 4 right"
