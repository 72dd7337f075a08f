"""Memory for partial results, kept from call to call."""

from __future__ import annotations

import torch
from torch import Tensor

from stage3_dataflow.split_plan import DEFAULT_SPLIT_RULE, SplitRule, largest_split_count


class DecodeWorkspace:
    """Buffers for what goes from launch to launch: partial outputs above all. They only grow.

    One workspace serves one stream: two decodes that may run at the same time need one each, even
    if neither splits a request. A buffer that was outgrown is kept, since a captured CUDA graph may
    go on writing to it.

    Parameters
    ----------
    device
        Where the buffers lie.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._out = torch.empty(0, dtype=torch.uint8, device=device)
        self._lse = torch.empty(0, dtype=torch.float32, device=device)
        self._order = torch.empty(0, dtype=torch.int32, device=device)
        self._counter: Tensor | None = None
        self._outgrown: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = (self._out, self._lse, self._order, *self._outgrown)
        return sum(buffer.nbytes for buffer in held)

    def order(self, splits: int) -> Tensor:
        """Int32, room for `split_plan.longest_first_order` of as many splits."""
        if self._order.numel() <= splits:
            self._outgrown.append(self._order)
            self._order = self._order.new_empty(1 + splits)
        return self._order

    def counter(self) -> Tensor:
        """Int32 [1]: a kernel that counts with it finds 0 and leaves 0.

        One that a CUDA graph sets to 0 is that graph's: until its first replay nobody has.
        """
        if self._counter is not None:
            return self._counter
        counter = torch.zeros(1, dtype=torch.int32, device=self._lse.device)
        if not (counter.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._counter = counter
        return counter

    def partials(
        self,
        batch: int,
        splits: int,
        rows: int,
        width: int,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Partial outputs `dtype` [batch, splits, rows, width], and lse f32 without the width."""
        count = batch * splits * rows
        size = count * width * dtype.itemsize
        if self._lse.numel() < count:
            self._outgrown.append(self._lse)
            self._lse = self._lse.new_empty(count)
        if self._out.numel() < size:
            self._outgrown.append(self._out)
            self._out = self._out.new_empty(size)
        shape = (batch, splits, rows)
        return self._out[:size].view(dtype).view(*shape, width), self._lse[:count].view(shape)


def workspace_bytes(
    batch: int,
    s_q: int,
    heads: int,
    kv_lora_rank: int,
    capacity: int,
    split_rule: SplitRule = DEFAULT_SPLIT_RULE,
) -> int:
    """Bytes that a decode of this size needs at most for partial results, 0 if none is split.

    The Hopper kernel keeps them in BF16 where the output is BF16, and then needs half. The order in
    which it takes up splits, of which there may be 4 bytes for each, comes on top.

    Parameters
    ----------
    capacity
        Tokens that a row of the block table can hold (columns times page_size).
    """
    splits = largest_split_count(capacity, split_rule)
    return 0 if splits == 1 else 4 * batch * splits * s_q * heads * (kv_lora_rank + 1)
