"""A stand-in for CUDA graphs on the CPU: operations are recorded and replayed on their tensors.

Like a graph, it replays what was recorded whatever Python would do now, sees new inputs only if
they were written into the recorded tensors, and refuses to ask for a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.latent_attention import AttentionOutput, masked_softmax
from stage3_dataflow.decode_graph import CapturedStep


class TensorOnlyBackend(AbsorbedBackend):
    """Appends, and attends with one query, without ever asking for a value.

    Negative slots write into a page of their own behind the pool.
    """

    capturable = True

    def make_cache(self, config, num_pages, page_size, *, device="cpu"):
        return super().make_cache(config, num_pages + 1, page_size, device=device)

    def append(self, c_kv, k_rope, cache, slot_mapping):
        num_slots = cache.c_kv.shape[0] * cache.c_kv.shape[1]
        slots = torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)
        for plane, rows in zip(cache, (c_kv, k_rope), strict=True):
            plane.view(num_slots, -1)[slots] = rows.to(plane.dtype)

    def attend(
        self, q_latent, q_rope, cache, block_table, cache_seqlens, softmax_scale, *, causal=True
    ):
        if q_latent.shape[1] > 1:  # chunks of prompts are never captured
            return super().attend(
                q_latent, q_rope, cache, block_table, cache_seqlens, softmax_scale, causal=causal
            )
        pages = block_table.clamp(min=0).long()
        latents, ropes = (plane[pages].flatten(1, 2).float() for plane in cache)
        present = torch.arange(latents.shape[1]) < cache_seqlens[:, None]
        latents = latents.masked_fill(~present[..., None], 0.0)
        scores = q_latent.float()[:, 0] @ latents.mT + q_rope.float()[:, 0] @ ropes.mT
        weights, lse = masked_softmax(scores * softmax_scale, present[:, None])
        return AttentionOutput((weights @ latents)[:, None].to(q_latent.dtype), lse[:, None])


class OperationLog(TorchDispatchMode):
    """Records operations with their tensors; `replay` runs them again on the same tensors."""

    ASKS_FOR_A_VALUE = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.ASKS_FOR_A_VALUE:
            raise RuntimeError(f"{name} asks the device for a value during capture")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
            for kept, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # A view of an argument, or the argument itself, is up to date already.
                if _is(kept) and kept.untyped_storage().data_ptr() not in given:
                    kept.copy_(new)


def _is(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def log_capture(step: Callable[[], Tensor]) -> CapturedStep:
    """Capture on the CPU."""
    step()  # a warm-up, as for a graph
    with OperationLog() as log:
        output = step()
    return CapturedStep(log.replay, output)
