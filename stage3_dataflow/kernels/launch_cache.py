"""Launch a kernel without Triton's look-up, once it has run with arguments of the same kind.

Before each launch Triton finds the machine code that fits the arguments, which on one H200's host
took about 80 microseconds, several times a short decode. What the code depends on is little:
dtypes, whether pointers are 16-byte aligned, constants, and the integers that a kernel lets Triton
specialise on. With these as a key the compiled kernel is kept, and called directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stage3_dataflow.execution_path import is_interpreting

LARGEST_INT32 = 2**31 - 1

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    device: torch.device | None = None,
    unspecialized: frozenset[int] = frozenset(),
    **options: Any,
) -> None:
    """Run ``kernel[grid](*arguments, **constants, **options)``.

    Parameters
    ----------
    arguments
        Tensors, numbers, None, and TMA descriptors: of these, nothing may vary that the constants
        don't tell.
    constants
        The kernel's constexpr parameters, which follow `arguments` in its signature, in order.
    device
        Where to run; by default where the first argument lies.
    unspecialized
        Places in `arguments` of integers that the kernel does not specialise on.
    """
    device = device or arguments[0].device
    if is_interpreting() or device.type != "cuda":
        kernel[grid](*arguments, **constants, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(
                kernel,
                grid,
                arguments,
                constants,
                device=device,
                unspecialized=unspecialized,
                **options,
            )  # Triton launches on the current device
        return
    key: list[Any] = [id(kernel), device, *constants.values(), *options.values()]
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            key += (argument.dtype, argument.data_ptr() & 15 == 0)
        elif isinstance(argument, int):
            key.append(argument > LARGEST_INT32 if place in unspecialized else argument)
    found = tuple(key)
    compiled = _compiled.get(found)
    if compiled is None:
        if list(kernel.arg_names[len(arguments) :]) != list(constants):
            raise TypeError(f"constants must be {kernel.arg_names[len(arguments) :]}, in order")
        _compiled[found] = kernel[grid](*arguments, **constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def places(kernel: Any, *names: str) -> frozenset[int]:
    """Places of a kernel's parameters that are named in its ``do_not_specialize``."""
    return frozenset(kernel.arg_names.index(name) for name in names)
