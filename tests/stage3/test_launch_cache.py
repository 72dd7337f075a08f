"""A kept kernel is called with what a first launch bound, and found only for the same kind."""

from __future__ import annotations

import pytest
import torch

from stage3_dataflow.kernels import launch_cache

pytestmark = pytest.mark.stage3


class Device:
    """A GPU that no tensor has to lie on."""

    type = "cuda"
    index = 0


class OnDevice(torch.Tensor):
    """A CPU tensor that says it lies on `Device`."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values)

    @property
    def device(self):
        return Device


class Kernel:
    """Stands in for a `triton.jit` function and for the kernel it compiles to."""

    arg_names = ("x", "rows", "stride", "WIDTH", "FAST")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(*arguments, **named):
            constants = tuple(named[name] for name in self.arg_names if name in named)
            self.launches.append(("looked up", grid, (*arguments, *constants)))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        assert len(grid) == 3
        return lambda *arguments: self.kernel.launches.append(("kept", grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch_cache, "is_interpreting", lambda: False)
    monkeypatch.setattr(launch_cache, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def run(kernel, x, rows=3, stride=16, width=64, grid=(2,), **options):
    launch_cache.launch(
        kernel,
        grid,
        (x, rows, stride),
        {"WIDTH": width, "FAST": True},
        unspecialized=launch_cache.places(kernel, "rows"),
        **options,
    )


def aligned(dtype=torch.float32, offset=0):
    return OnDevice(torch.zeros(64, dtype=dtype)[offset:])


def test_the_second_launch_passes_the_same_arguments_to_the_kept_kernel(kernel):
    x = aligned()
    run(kernel, x)
    run(kernel, x, rows=5, grid=(4, 2))
    (how, grid, first), (again, second_grid, second) = kernel.launches
    assert (how, again) == ("looked up", "kept")
    assert grid == (2,) and second_grid == (4, 2, 1)
    assert first[0] is second[0] and first[1:] == (3, 16, 64, True)
    assert second[1:] == (5, 16, 64, True)


@pytest.mark.parametrize(
    "change",
    [
        {"x": aligned(torch.bfloat16)},
        {"x": aligned(offset=1)},
        {"stride": 1},
        {"width": 128},
        {"rows": 2**31},
        {"num_warps": 8},
    ],
    ids=["dtype", "alignment", "specialised integer", "constant", "64-bit integer", "option"],
)
def test_what_the_machine_code_depends_on_is_looked_up_again(kernel, change):
    run(kernel, aligned())
    run(kernel, **({"x": aligned()} | change))
    assert [how for how, *_ in kernel.launches] == ["looked up", "looked up"]


def test_constants_out_of_order_are_refused(kernel):
    with pytest.raises(TypeError, match="constants must be"):
        launch_cache.launch(kernel, (1,), (aligned(), 1, 1), {"FAST": True, "WIDTH": 64})
