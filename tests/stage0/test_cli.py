"""The command: results on stdout, everything else on stderr, one line and status 2 for mistakes."""

from __future__ import annotations

import io
import json

import pytest

from stage0_reference import cli

pytestmark = pytest.mark.stage0


def run(capsys, *arguments):
    """Run the command; give its status, stdout and stderr."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_streams_prompt_and_continuation(capsys):
    status, out, err = run(capsys, "generate", "import os\n", "--max-new-tokens", "12")
    assert status == 0
    assert out.startswith("import os\n")
    assert len(out) > len("import os\n\n")
    assert "12 tokens (length)" in err
    assert "1152 bytes per token and layer" in err


def test_generate_json_is_one_object_on_stdout(capsys):
    status, out, err = run(
        capsys, "generate", "--json", "def add(a, b):\n", "--max-new-tokens", "16"
    )
    assert status == 0
    report = json.loads(out)
    assert err == ""
    assert len(report["token_ids"]) == 16
    assert bytes(report["token_ids"]).decode() == report["text"]
    assert report["cache_bytes_per_token"] == 6 * 1152
    assert report["cache_bytes_per_token_per_layer"] == 1152
    assert report["tokens_per_second"] > 0
    assert report["stage"] == 0


def test_same_seed_same_text(capsys):
    arguments = ("generate", "--json", "class ", "--max-new-tokens", "20", "--temperature", "1")
    texts = [
        json.loads(run(capsys, *arguments, "--seed", seed)[1])["text"] for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"import re\n")))
    status, out, _ = run(capsys, "generate", "-", "--max-new-tokens", "3")
    assert status == 0
    assert out.startswith("import re\n")


def test_eval_gives_loss_and_tokens_and_more_context_helps(capsys):
    losses = []
    for context in ("300", "1500"):
        status, out, _ = run(
            capsys,
            *("eval", "--context", context, "--longest-context", "1500", "--windows", "2"),
            "--json",
        )
        assert status == 0
        report = json.loads(out)
        assert report["tokens"] == 512
        losses.append(report["loss"])
    assert losses[1] < losses[0]


def test_eval_scores_a_file_of_ones_own(capsys, tmp_path):
    text = tmp_path / "mine.py"
    text.write_text("x = 1\n" * 200)
    status, out, _ = run(
        capsys,
        *("eval", "--text", str(text), "--context", "600", "--longest-context", "600", "--json"),
    )
    assert status == 0
    assert json.loads(out)["loss"] < 0.1  # a text that repeats itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", ""], "PROMPT must not be empty"),
        (["generate", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["generate", "x", "--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "x" * 5000], "prompts[0] must have between 1 and 4095 tokens"),
        (["generate", "x", "--stage", "9"], "stage must be one of 0"),
        (["generate", "x", "--device", "abacus"], "--device must be auto, cpu or cuda"),
        (["generate", "x", "--device", "cuda:99"], "--device cuda:99 is not on this machine"),
        (["generate", "x", "--model", "nowhere"], "directory nowhere does not exist"),
        (["generate", "x", "--model", "Makefile"], "directory Makefile is a file"),
        (["generate", "x", "--page-size", str(10**13)], "allocate memory"),
        (["generate", "x", "--page-size", "0"], "--page-size must be at least 1"),
        (["eval", "--context", "100"], "context must be above 256"),
        (["eval", "--context", "9999"], "--context must be at most the model's 4096"),
        (["eval", "--page-size", "0"], "--page-size must be at least 1"),
        (["generate", "x", "--seed", "9" * 30], "seed must fit 64 bits"),
        (["generate", "x", "--model", "nowhere", "--stage", "9"], "stage must be one of 0"),
        (["eval", "--windows", "-1"], "--windows must be at least 0"),
        (["eval", "--text", "missing.txt"], "missing.txt"),
        (["paint"], "invalid choice: 'paint'"),
        ([], "the following arguments are required: COMMAND"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_mistakes_give_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert message in err


@pytest.mark.parametrize("where", ["build_parser", "run_generate", "load_from_arguments"])
def test_an_interrupt_ends_without_a_word_and_with_the_shells_status(capsys, monkeypatch, where):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, where, interrupt)
    assert run(capsys, "generate", "x") == (130, "", "")


@pytest.mark.parametrize("command", [[], ["generate"], ["eval"], ["demo"]])
def test_help_names_every_option_with_a_reason(capsys, command):
    status, out, _ = run(capsys, *command, "--help")
    assert status == 0
    assert "--help" in out or "COMMAND" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_strict_where_a_number_is_missing(capsys):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    status, out, _ = run(
        capsys,
        *("eval", "--context", "300", "--longest-context", "300", "--windows", "1", "--json"),
    )
    assert status == 0
    assert json.loads(out, parse_constant=refuse)["standard_error"] is None
    status, out, _ = run(capsys, "generate", "--json", "x", "--max-new-tokens", "1")
    assert json.loads(out, parse_constant=refuse)["tokens_per_second"] is None


def test_text_that_is_not_utf8_is_named(capsys, tmp_path, monkeypatch):
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\xff")
    status, _, err = run(capsys, "eval", "--text", str(binary))
    assert status == 2
    assert "picture.png must be UTF-8 text" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    status, _, err = run(capsys, "generate", "-")
    assert status == 2
    assert "stdin must be UTF-8 text" in err


def test_demo_shows_a_column_per_stage(capsys):
    status, out, _ = run(capsys, "demo", "--windows", "1", "--max-new-tokens", "8")
    assert status == 0
    assert "stage 0" in out
    assert "1152" in out
    assert "held-out nats/byte, context 2048" in out
    assert max(map(len, out.splitlines())) <= 80
