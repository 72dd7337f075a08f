"""The tests' own footing: without these, a test elsewhere may pass for the wrong reason."""

import importlib
import os
import pkgutil

import jaxtyping
import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import stage0_reference
import stage1_quant
import stage2_pv_pipeline

FLOATING = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]

ALLOCATORS = {
    "empty": lambda dtype: torch.empty(3, 5, dtype=dtype),
    "empty with a size tuple": lambda dtype: torch.empty((3, 5), dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 5), dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((3, 5), (1, 3), dtype=dtype),
    "empty_permuted": lambda dtype: torch.empty_permuted((3, 5), (1, 0), dtype=dtype),
    "new_empty": lambda dtype: torch.ones(1).new_empty((3, 5), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.ones(1).new_empty_strided((3, 5), (5, 1), dtype=dtype),
}


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("allocate", ALLOCATORS.values(), ids=ALLOCATORS)
def test_uninitialised_floating_memory_is_nan(allocate, dtype):
    tensor = allocate(dtype)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == dtype
    assert tensor.to(torch.complex128).isnan().all()  # isnan does not take every 8-bit type


def test_initialised_memory_is_left_alone():
    assert not torch.zeros(7).isnan().any()
    assert not torch.zeros(7).new_zeros(7).isnan().any()
    assert not torch.full_like(torch.empty(7), 1.0).isnan().any()


def test_uninitialised_integers_can_still_be_allocated():
    assert torch.empty(4, dtype=torch.int64).shape == (4,)
    assert torch.empty(4, dtype=torch.bool).shape == (4,)


def test_poisoned_allocation_keeps_requires_grad_device_and_out():
    assert torch.empty(2, requires_grad=True).is_leaf
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    out = torch.zeros(2)
    assert torch.empty(2, out=out) is out


@pytest.fixture(scope="module")
def allocated_by_a_module_fixture():
    return torch.empty(3)


def test_fixtures_of_a_wider_scope_are_poisoned_too(allocated_by_a_module_fixture):
    assert allocated_by_a_module_fixture.isnan().all()


@pytest.mark.parametrize("attempt", range(2))
def test_each_test_starts_from_the_same_seed(attempt):
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(()))


def test_each_example_starts_from_the_same_seed():
    drawn = set()

    @settings(max_examples=5)
    @given(st.integers())
    def draw(_):
        drawn.add(torch.rand(()).item())

    draw()
    assert len(drawn) == 1


def test_hypothesis_runs_the_profile_that_was_asked_for():
    current = settings()
    assert current.deadline is None
    assert current.print_blob
    asked = os.environ.get("SNAPMLA_HYPOTHESIS_PROFILE") or "ci" * bool(os.environ.get("CI"))
    assert current.derandomize == (asked == "ci")
    assert (current.max_examples >= 1000) == (asked == "deep")


@pytest.mark.gpu
def test_gpu_tests_run_only_with_a_gpu(device):
    assert device.type == "cuda"
    torch.empty(1, device=device)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only under pytest -n")
def test_parallel_workers_use_one_thread_each():
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "package",
    [stage0_reference, stage1_quant, stage2_pv_pipeline],
    ids=lambda package: package.__name__,
)
def test_shapes_are_checked_in_every_module(package):
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.name.endswith("__main__"):
            loader = importlib.import_module(info.name).__loader__
            assert type(loader).__module__.startswith("jaxtyping"), info.name


@jaxtyping.jaxtyped(typechecker=beartype)
def row_sums(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    return matrix.sum(-1)


def test_a_wrong_shape_is_refused():
    with pytest.raises(jaxtyping.TypeCheckError, match="rows columns"):
        row_sums(torch.ones(2, 3, 4))


@pytest.mark.unchecked
@given(st.integers(1, 3))
def test_a_wrong_shape_passes_where_checks_are_off(size):
    assert row_sums(torch.ones(size, 3, 4)).shape == (size, 3)


@pytest.mark.unchecked
def test_checked_functions_compile_where_checks_are_off():
    compiled = torch.compile(row_sums, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2,), 3.0))
