"""What every test runs under: shape checks, Hypothesis profiles, seeds, poisoned memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch
from torch import Tensor

SEED = 0

# Without a GPU the kernels' own code runs in Triton's interpreter, which is chosen when a kernel is
# imported. The fixture `kernels_of_stage3` keeps it to the tests of stage 3: it is slow.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# In these packages and modules each call is checked against its annotations: shapes, dtypes, types.
# Stages with kernels list their other modules one by one, since the hook rewrites every function it
# finds and @triton.jit helpers do not survive that. The checks come before the code's own refusals,
# and torch.compile cannot trace them: the marker `unchecked` is for tests of either.
CHECKED = [
    "stage0_reference",
    "stage1_quant",
    "stage2_pv_pipeline",
    "stage3_dataflow.arguments",
    "stage3_dataflow.context_parallel",
    "stage3_dataflow.custom_ops",
    "stage3_dataflow.decode",
    "stage3_dataflow.decode_graph",
    "stage3_dataflow.engine",
    "stage3_dataflow.execution_path",
    "stage3_dataflow.flash_mla",
    "stage3_dataflow.fused_writes",
    "stage3_dataflow.prefix",
    "stage3_dataflow.rank_group",
    "stage3_dataflow.scheduler",
    "stage3_dataflow.split_plan",
    "stage3_dataflow.tensor_parallel",
    "stage3_dataflow.triton_backend",
    "stage3_dataflow.workspace",
    "stage3_dataflow.write_references",
]

# The hook acts on what is imported from here on. The option --jaxtyping-packages would do the same,
# but cannot hand an argument to the checker for more than one package.
jaxtyping.install_import_hook(
    CHECKED,
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",  # an int is a float
)

# The first example of a test may load a checkpoint or compile a kernel: no deadline, and being slow
# to draw is no fault. All settings are spelt out, as Hypothesis has other defaults when it sees CI.
PROFILES: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 50, "derandomize": False},
    "ci": {"max_examples": 50, "derandomize": True, "database": None},
    "deep": {"max_examples": 1000, "derandomize": False},
}
for name, choices in PROFILES.items():
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        **choices,
    )
hypothesis.settings.load_profile(
    os.environ.get("SNAPMLA_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


class TorchGenerator:
    """torch's global generator, behind the three names that Hypothesis asks of a generator."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Hypothesis now seeds torch before each example, so that an example means the same when replayed.
# It keeps only a weak reference.
torch_generator = TorchGenerator()
hypothesis.register_random(torch_generator)

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads only make them wait for one another.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so for the processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device; torch {torch.__version__} sees {torch.cuda.device_count()}"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device to test on: the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def annotation_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turn the checks of annotations off for a test marked `unchecked`."""
    jaxtyping.config.update(
        "jaxtyping_disable", request.node.get_closest_marker("unchecked") is not None
    )
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def kernels_of_stage3(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the library by its PyTorch twins outside the tests of stage 3, where there is no GPU."""
    from stage3_dataflow.execution_path import use_path

    interpreted = request.node.get_closest_marker("stage3") is not None
    with use_path("default" if interpreted or torch.cuda.is_available() else "pytorch"):
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start each test from the same random numbers, whichever worker it runs in."""
    torch.manual_seed(SEED)


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an allocator like `allocate` whose floating-point memory comes back full of NaN."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():  # a leaf that requires grad refuses in-place writes otherwise
                tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned


@pytest.fixture(scope="session", autouse=True)
def poisoned_empty() -> Iterator[None]:
    """Fill what torch hands out uninitialised with NaN, so that reading it is seen.

    The allocators are replaced by name for the whole session, which reaches fixtures of any scope.
    `torch.utils.deterministic.fill_uninitialized_memory` would do it below Python, but it only acts
    under `torch.use_deterministic_algorithms`, which refuses some operations and replaces others:
    the tests would then run other kernels than a user does.
    """
    # torch notes on first use which functions are factories, and must note the real ones.
    with torch.device("meta"):
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
        yield
