"""The drift study's table and picture say what the model says."""

from __future__ import annotations

import csv

import pytest

from stage2_pv_pipeline.drift_study import POLICIES, main
from stage2_pv_pipeline.tensor_core_accumulator import KINDS, drift

pytestmark = pytest.mark.stage2


def test_every_kind_length_and_policy_has_its_row(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main(["--out", str(tmp_path), "--lengths", "512", "1024"])
    with open(tmp_path / "drift.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(KINDS) * 2 * len(POLICIES)
    row = next(
        r for r in rows if (r["kind"], r["tokens"], r["promoted"])
        == ("one heavy key", "1024", "never promoted")
    )  # fmt: skip
    assert float(row["relative bias of O"]) == pytest.approx(
        drift("one heavy key", 1024, None).bias, rel=1e-3
    )
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
