"""Checks of arguments that cost no synchronisation, with one way to say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def describe(value: Any) -> str:
    """Dtype, shape and device of a tensor in a few words; the type of anything else."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def check_tensor(
    name: str,
    value: Any,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    *,
    device: torch.device | None = None,
    contiguous_last: bool = True,
    remedy: str = "",
) -> None:
    """Refuse a tensor of another dtype, shape, device, or with a strided last axis.

    Parameters
    ----------
    shape
        Sizes; a word stands for any size and names it in the message.

    Raises
    ------
    TypeError
        Not a tensor, or another dtype.
    ValueError
        Anything else, with what was expected, what came and the remedy.
    """
    if (
        isinstance(value, Tensor)
        and value.dtype in dtypes
        and value.dim() == len(shape)
        and all(
            isinstance(want, str) or want == got
            for want, got in zip(shape, value.shape, strict=True)
        )
        and (device is None or value.device == device)
        and not (contiguous_last and _is_strided_last(value))
    ):
        return
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    expected = f"{names} [{', '.join(map(str, shape))}]"
    if device is not None:
        expected += f" on {device}"
    got = describe(value)
    if isinstance(value, Tensor) and contiguous_last and _is_strided_last(value):
        expected += " with a contiguous last axis"
        got += f" with strides {list(value.stride())}"
        remedy = remedy or f"Use {name}.contiguous()"
    error = f"{name} must be {expected}; got {got}" + (f". {remedy}" if remedy else "")
    wrong_type = not isinstance(value, Tensor) or value.dtype not in dtypes
    raise TypeError(error) if wrong_type else ValueError(error)


def geometry_of(*arguments: Any) -> tuple[Any, ...] | None:
    """Dtype, shape, strides and device of tensors, tuples of tensors and None; None for others."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found += (argument.dtype, argument.shape, argument.stride(), argument.device)
        elif argument is None:
            found.append(None)
        elif isinstance(argument, tuple):
            parts = geometry_of(*argument)
            if parts is None:
                return None
            found.append(parts)
        else:
            return None
    return tuple(found)


class AcceptedGeometries:
    """Geometries that an entry point has checked and accepted, so that it checks them once.

    A model calls with the same shapes layer after layer, step after step; the checks of one call
    take longer than a short kernel. What depends on anything but geometry (values, addresses,
    names of formats) is to be checked each time. What has no geometry (a list, say) is never known.
    """

    MOST = 4096
    """Batches of many sizes may come; what was known is then forgotten, and checked again."""

    def __init__(self) -> None:
        self._known: set[tuple[Any, ...]] = set()

    def __contains__(self, geometry: tuple[Any, ...] | None) -> bool:
        return geometry in self._known

    def add(self, geometry: tuple[Any, ...] | None) -> None:
        """Remember a geometry; None is not one."""
        if geometry is None:
            return
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known.add(geometry)


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Refuse an output with gaps."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; got {describe(tensor)} with strides "
            f"{list(tensor.stride())}. Use torch.empty and copy the result"
        )


def check_no_alias(name: str, output: Tensor, others: dict[str, Tensor]) -> None:
    """Refuse an output that shares memory with an input: other programs may still read it."""
    first, last = _extent(output)
    for other_name, other in others.items():
        if other.data_ptr() >= last:
            continue
        start, end = _extent(other)
        if start < last and first < end and output.numel() and other.numel():
            raise ValueError(
                f"{name} may not share memory with {other_name}. Pass a separate tensor"
            )


def _is_strided_last(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte that a strided tensor has, and the one behind its last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def check_widths(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Refuse widths that the kernels have no tiles for."""
    if kv_lora_rank not in (32, 64, 128, 256, 512):  # an FP8 product takes 32 at least
        raise NotImplementedError(
            "kv_lora_rank must be 32, 64, 128, 256 or 512 for the kernels; "
            f"got {kv_lora_rank}. stage2_pv_pipeline.mla_decode serves any width"
        )
    if qk_rope_head_dim not in (0, 16, 32, 64, 128):
        raise NotImplementedError(
            "qk_rope_head_dim must be 0, 16, 32, 64 or 128 for the kernels; "
            f"got {qk_rope_head_dim}. stage2_pv_pipeline.mla_decode serves any width"
        )
