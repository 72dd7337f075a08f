"""Which implementation a call runs on this machine, and why.

===============  =====================================================================
path             when
===============  =====================================================================
``triton``       a CUDA device that converts e4m3 (compute capability 8.9 or newer)
``interpreter``  a CPU tensor with TRITON_INTERPRET=1: the kernels' own code, very slowly
``pytorch``      a CPU tensor otherwise: the plain PyTorch twins of stages 1 and 2
===============  =====================================================================

Nothing falls back in silence: a GPU that the kernels can't serve is refused by name. `use_path`
runs the twins on any device, to see whether a wrong result is the kernels' or the caller's.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

SMALLEST_CAPABILITY = (8, 9)
"""Ada and Hopper brought the conversions to and from e4m3."""


_twins_asked_for = contextvars.ContextVar("twins_asked_for", default=False)


class ExecutionPath(NamedTuple):
    """What runs, and the reason in words."""

    name: Literal["triton", "interpreter", "pytorch"]
    reason: str


def which_path(device: torch.device | str) -> ExecutionPath:
    """Say which implementation calls with tensors on `device` run.

    Raises
    ------
    NotImplementedError
        A device that no implementation serves, or Triton is not installed for a GPU.

    Examples
    --------
    >>> which_path("cpu").name in ("pytorch", "interpreter")
    True
    """
    device = torch.device(device)
    if _twins_asked_for.get():
        return ExecutionPath("pytorch", "use_path asked for the twins")
    if device.type == "cuda":
        return _cuda_path(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu":
        raise NotImplementedError(f"device must be cuda or cpu; got {device}")
    if is_interpreting():
        return ExecutionPath("interpreter", "CPU tensors and TRITON_INTERPRET=1")
    return ExecutionPath("pytorch", "CPU tensors; TRITON_INTERPRET=1 would interpret the kernels")


@contextlib.contextmanager
def use_path(name: Literal["pytorch", "default"]) -> Iterator[None]:
    """Run calls inside the block through the PyTorch twins, or by the rules of this module again.

    Examples
    --------
    >>> with use_path("pytorch"):
    ...     which_path("cpu").name
    'pytorch'
    """
    if name not in ("pytorch", "default"):
        raise ValueError(f"name must be pytorch or default; got {name!r}")
    token = _twins_asked_for.set(name == "pytorch")
    try:
        yield
    finally:
        _twins_asked_for.reset(token)


@functools.cache
def _cuda_path(index: int) -> ExecutionPath:
    capability = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if capability < SMALLEST_CAPABILITY:
        needed = ".".join(map(str, SMALLEST_CAPABILITY))
        raise NotImplementedError(
            f"device must have compute capability {needed} or newer to convert e4m3; got {name} "
            f"with {capability[0]}.{capability[1]}. stage2_pv_pipeline.mla_decode runs there"
        )
    if importlib.util.find_spec("triton") is None:
        raise NotImplementedError("CUDA tensors need Triton: pip install triton")
    return ExecutionPath("triton", f"{name}, compute capability {capability[0]}.{capability[1]}")


@functools.cache
def is_interpreting() -> bool:
    """Say whether Triton interprets kernels here. Triton decides when a kernel is imported."""
    return (
        os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    )
