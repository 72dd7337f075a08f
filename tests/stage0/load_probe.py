"""What loading a decoder holds at most: ``python -m tests.stage0.load_probe DIR``, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from stage0_reference.decoder import Decoder
from stage0_reference.model_config import ModelConfig
from stage0_reference.pretrained import load_decoder


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: a map's pages can be dropped and do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def main() -> None:
    """Look after every copy: the destination is written then, and its source still there."""
    peak = 0
    copy = Tensor.copy_

    def measured_copy(self: Tensor, source: Tensor) -> Tensor:
        nonlocal peak
        copy(self, source)
        peak = max(peak, anonymous_bytes())
        return self

    Tensor.copy_ = measured_copy  # type: ignore[method-assign, assignment]
    Decoder(ModelConfig.from_directory(sys.argv[1]), device="meta")  # torch imports 70 MB for this
    before = anonymous_bytes()
    decoder = load_decoder(sys.argv[1], dtype=torch.float32)
    parameters = sum(tensor.nbytes for tensor in decoder.checkpoint_tensors().values())
    print(json.dumps({"peak": max(peak, anonymous_bytes()) - before, "parameters": parameters}))


if __name__ == "__main__":
    main()
