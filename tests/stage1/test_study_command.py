"""`snapmla study quant` writes tables and pictures that agree with each other."""

from __future__ import annotations

import csv
import json

import pytest

from stage0_reference import cli
from stage0_reference.attention_backend import available_stages
from stage1_quant.alternatives import FORMATS

pytestmark = pytest.mark.stage1


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("study")
    status = cli.main(
        ["study", "quant", "--out", str(out), "--windows", "2", "--samples", "1"]
        + ["--contexts", "300", "400", "--json"]
    )
    assert status == 0
    return out


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_format_has_its_row_in_every_table(study):
    names = [cache_format.name for cache_format in FORMATS]
    assert [row["format"] for row in rows(study / "errors_shipped.csv")] == names
    assert [row["format"] for row in rows(study / "errors_synthetic.csv")] == names
    loss = rows(study / "loss.csv")
    assert {row["context"] for row in loss} == {"300", "400"}
    assert len(loss) == 2 * (len(names) + 2)


def test_sharing_a_row_with_rope_costs_rope_its_precision(study):
    for table in ("errors_shipped.csv", "errors_synthetic.csv"):
        errors = {row["format"]: row for row in rows(study / table)}
        for shared in ("one-row", "one-row-tensor"):
            assert float(errors[shared]["rope_sqnr_db"]) < 40
            assert float(errors[shared]["output_error"]) > float(
                errors["token-pow2"]["output_error"]
            )
        assert float(errors["token-pow2"]["rope_sqnr_db"]) > 50
        assert float(errors["token-e5m2"]["latent_sqnr_db"]) < float(
            errors["token-amax"]["latent_sqnr_db"]
        )


def test_summary_fits_80_columns_and_names_its_setting(study):
    text = (study / "summary.txt").read_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "--windows 2" in text
    facts = json.loads((study / "facts.json").read_text())
    assert facts["torch"] in text


@pytest.mark.parametrize("name", ["value_ranges", "format_errors", "loss"])
def test_pictures_are_png_files(study, name):
    assert (study / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_stages_are_compared_on_the_same_windows(tmp_path):
    pytest.importorskip("matplotlib")
    command = ["study", "stages", "--out", str(tmp_path), "--windows", "2", "--contexts", "300"]
    assert cli.main(command) == 0
    loss = rows(tmp_path / "loss.csv")
    assert [row["format"] for row in loss] == [f"stage {n}" for n in available_stages()]
    assert float(loss[0]["added"]) == 0.0
    for row in loss:
        difference = float(row["loss"]) - float(loss[0]["loss"])
        assert abs(difference - float(row["added"])) < 1e-5  # six digits are written
        assert row["tokens"] == "512"
    text = (tmp_path / "summary.txt").read_text()
    assert max(map(len, text.splitlines())) <= 80
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--windows", "1"], "--windows must be at least 2"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--contexts", "100"], "--contexts must be above 256"),
        (["--contexts", "9000"], "--contexts must be at most the model's 4096"),
    ],
)
def test_mistakes_give_one_line_and_status_2(tmp_path, capsys, arguments, message):
    pytest.importorskip("matplotlib")
    assert cli.main(["study", "quant", "--out", str(tmp_path / "s"), *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = tmp_path / "never"
    assert cli.main(["study", "quant", "--out", str(out)]) == 2
    assert "pip install 'snapmla[plots]'" in capsys.readouterr().err
    assert not out.exists()
