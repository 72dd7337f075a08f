"""The names of Gluon that moved between Triton 3.6 and 3.9, behind one module.

Gluon is Triton's lower-level language (`triton.experimental.gluon`): the layout of every tile, the
roles of the warps and each hand-off between them are written out. Being experimental, it renames
things. A kernel that takes them from here compiles with either version:

====================  =============================  ======================
here                  3.6                            3.9
====================  =============================  ======================
`load_tile`           tma.async_copy_global_to_shared  tma.async_load
`load_words`          async_copy_global_to_shared    async_copy.async_load
`reinterpret`         memdesc._reinterpret           memdesc.reinterpret
`thread_barrier`      thread_barrier                 barrier
`device_record`       core._aggregate, own __init__  aggregate
====================  =============================  ======================

and `relabel_accumulator`, which no version has.
"""

import triton.language.core as core
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma_accumulator,
)

__all__ = [
    "arrive_after_words",
    "device_record",
    "load_tile",
    "load_words",
    "reinterpret",
    "relabel_accumulator",
    "thread_barrier",
]

# 3.9 keeps the old name only to raise, so the new one is asked for first.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_words = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
arrive_after_words = async_copy.mbarrier_arrive
thread_barrier = getattr(gluon_core, "barrier", None) or gluon_core.thread_barrier


def device_record(cls):
    """Let a class of annotated fields be passed between device functions as one value."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return core._aggregate(cls)


@gluon_core.builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Look at a piece of shared memory as another dtype, shape and layout of as many bytes."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon_core.builtin
def relabel_accumulator(accumulator, layout, _semantic=None):
    """Give an accumulator still being computed another layout of the same registers.

    FP8 and BF16 products want accumulator layouts that differ only in the depth of an instruction
    (32 and 16). `convert_layout` takes finished tensors alone, and waiting in between would let the
    tensor cores idle.
    """
    layout = core._unwrap_if_constexpr(layout)
    old = accumulator.type.tensor_type
    new = gluon_core.distributed_type(old.element_ty, old.shape, layout)
    builder = _semantic.builder
    handle = builder.create_convert_layout(new.to_ir(builder), accumulator.handle)
    return warpgroup_mma_accumulator(handle, new)
