"""Memory for partial results, kept from call to call."""

from __future__ import annotations

import torch
from torch import Tensor

from stage3_dataflow.split_plan import DEFAULT_SPLIT_RULE, SplitRule, largest_split_count


class DecodeWorkspace:
    """Buffers for the partial outputs of split requests. They only grow.

    One workspace serves one stream: two decodes that may run at the same time need one each. A
    buffer that was outgrown is kept, since a captured CUDA graph may go on writing to it.

    Parameters
    ----------
    device
        Where the buffers lie.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        self._lse = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 4 * sum(buffer.numel() for buffer in (self._out, self._lse, *self._outgrown))

    def partials(self, batch: int, splits: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Partial outputs f32 [batch, splits, rows, width] and lse f32 [batch, splits, rows]."""
        count = batch * splits * rows
        if self._lse.numel() < count:
            self._outgrown.append(self._lse)
            self._lse = self._lse.new_empty(count)
        if self._out.numel() < count * width:
            self._outgrown.append(self._out)
            self._out = self._out.new_empty(count * width)
        shape = (batch, splits, rows)
        return self._out[: count * width].view(*shape, width), self._lse[:count].view(shape)


def workspace_bytes(
    batch: int,
    s_q: int,
    heads: int,
    kv_lora_rank: int,
    capacity: int,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
) -> int:
    """Bytes that a decode of this size needs for partial results: 0 if nothing can be split.

    Parameters
    ----------
    capacity
        Tokens that a row of the block table can hold (columns times page_size).
    """
    splits = largest_split_count(capacity, split_rule)
    return 0 if splits == 1 else 4 * batch * splits * s_q * heads * (kv_lora_rank + 1)
