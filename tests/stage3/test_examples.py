"""The examples in the library's docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import stage3_dataflow

pytestmark = [pytest.mark.stage3, pytest.mark.unchecked]  # doctest looks at the undecorated source

MODULES = sorted(
    f"stage3_dataflow.{module.name}"
    for module in pkgutil.iter_modules(stage3_dataflow.__path__)
    if not module.ispkg
)


def examples_of(name):
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if examples_of(name)])
def test_the_examples_of_a_module_hold(name):
    runner = doctest.DocTestRunner(verbose=False)
    with stage3_dataflow.use_path("pytorch"):
        for test in examples_of(name):
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize(
    "function", ["mla_decode", "append_kv", "quantize_q", "fetch_dequant", "which_path"]
)
def test_an_entry_point_has_an_example(function):
    entry = getattr(stage3_dataflow, function)
    text = entry.__doc__ or ""
    # append_kv and quantize_q refer to the fused functions that they call.
    referred = {"append_kv": "fused_k_append", "quantize_q": "fused_q_quant"}.get(function)
    if referred:
        assert referred in text
        text = getattr(stage3_dataflow, referred).__doc__
    assert ">>>" in text
