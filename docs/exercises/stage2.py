"""Stage 2: get V's scale past the sum over tokens.

Replace each ``raise NotImplementedError`` and ask

    python -m docs.exercises.check stage2

Chapter 30 has the ideas.
"""

from __future__ import annotations

from torch import Tensor


def fuse_and_quantize(p: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """P with V's scale in it, in e4m3 under one sigma a row: p8 [rows, block] and sigma [rows].

    `p` is [rows, block] and at least 0, `scale` [block] and positive, both float32. The largest
    element of each row of p8 is 448; ``p8 * sigma`` stands for ``p * scale``. p8 is float32 holding
    e4m3 values. Use `stage1_quant.encode_e4m3` and `decode_e4m3`. Rows are never all zero here.
    """
    raise NotImplementedError


def rescaled_step(
    state: tuple[Tensor, Tensor, Tensor, Tensor], scores: Tensor, codes: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one block into the pipeline.

    The state is (max [rows], denominator [rows], O [rows, width], sigma [rows]), at first (-inf, 0,
    0, 1), all float32; the output at the end is ``O * sigma / denominator``. `scores` [rows, block]
    are natural logits, all finite here; `codes` is [block, width], float32; `scale` is [block].
    O is kept in units of the newest sigma. The denominator sums unquantised p, without V's scale.
    """
    raise NotImplementedError


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partial results over disjoint keys: out [rows, width] and lse [rows].

    `outs` is [splits, rows, width], each normalised; `lses` is [splits, rows], natural. A partial
    with lse -inf saw nothing: its output may be anything, NaN too, and must not matter. If all are
    empty the result is 0 and -inf.
    """
    raise NotImplementedError


def promoted(p: Tensor, codes: Tensor, promote_every: int) -> Tensor:
    """``p @ codes`` on the modelled tensor core, emptied every `promote_every` tokens, float32.

    `p` is [rows, tokens], `codes` [tokens, width], both float64. Every part starts from an empty
    accumulator (`stage2_pv_pipeline.tensor_core_accumulator.tensor_core_product`) and joins the
    total in float32.
    """
    raise NotImplementedError
