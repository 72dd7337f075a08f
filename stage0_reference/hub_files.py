"""The small files beside a checkpoint's weights: read them, or say which one is broken and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"

_LFS_POINTER = b"version https://git-lfs"  # how the text begins that git keeps in a file's place


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises
    ------
    OSError
        The file cannot be opened.
    ValueError
        It holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {how_to_mend(path)}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} must hold a JSON object; got {type(value).__name__}; {how_to_mend(path)}"
        )
    return value


def how_to_mend(path: Path) -> str:
    """Say what to do about a broken file: a clone without Git LFS is the commonest cause."""
    with path.open("rb") as stream:
        is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    return "it is a Git LFS pointer, run `git lfs pull`" if is_pointer else "get the file again"
