"""From a directory as the hub has it to text, and what a broken one says: a line, a remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage0_reference import cli
from tests.model_factory import TINY_SIZES, randomise
from tests.stage0.test_tokenizer import byte_level_backend

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.stage0

INDEX = "model.safetensors.index.json"
PROMPT = "hello world, é"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer as transformers saves them, in several shards."""
    directory = tmp_path_factory.mktemp("hub") / "DeepSeek-Tiny"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(),
        bos_token="<｜begin▁of▁text｜>",
        eos_token="<｜end▁of▁text｜>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    tokenizer.save_pretrained(directory)
    sizes = TINY_SIZES | {"vocab_size": len(tokenizer), "num_key_value_heads": 3}
    config = transformers.DeepseekV3Config(
        **sizes,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    randomise(dict(model.named_parameters()), seed=0)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="60KB")
    return directory


@pytest.fixture
def copy(downloaded: Path, tmp_path: Path) -> Path:
    """One that may be broken."""
    return Path(shutil.copytree(downloaded, tmp_path / "model"))


def generate(capsys: pytest.CaptureFixture[str], directory: Path, *options: str):
    """Status, stdout and stderr of `snapmla generate`."""
    status = cli.main(
        ["generate", PROMPT, "--model", str(directory), "--max-new-tokens", "5", *options]
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_downloaded_model_continues_text_with_its_own_tokenizer(capsys, downloaded, stage):
    files = {path.name for path in downloaded.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", INDEX} <= files
    assert "chat_template.jinja" in files and sum(".safetensors" in name for name in files) > 3
    status, out, err = generate(capsys, downloaded, "--stage", stage, "--json", "--ignore-eos")
    assert status == 0, err
    assert err == ""  # no progress bar where there is no terminal
    report = json.loads(out)
    theirs = transformers.AutoTokenizer.from_pretrained(downloaded)
    prompt = theirs.encode(PROMPT)
    assert report["prompt_tokens"] == len(prompt)
    assert len(report["token_ids"]) == 5
    assert report["text"] == theirs.decode(report["token_ids"], skip_special_tokens=True)


def shard_of(directory: Path, tensor: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


TENSOR = "model.layers.1.self_attn.kv_b_proj.weight"


def cut(directory: Path) -> None:
    shard = shard_of(directory, TENSOR)
    shard.write_bytes(shard.read_bytes()[:-1000])


def list_in_index(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.layers.1.extra.weight"] = shard_of(directory, TENSOR).name
    (directory / INDEX).write_text(json.dumps(index))


def reshape(directory: Path) -> None:
    shard = shard_of(directory, TENSOR)
    tensors = load_file(shard)
    tensors[TENSOR] = tensors[TENSOR][1:].clone()
    save_file(tensors, shard, metadata={"format": "pt"})


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(kept))

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def point(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(LFS_POINTER)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what happened: how, the file that is named ("SHARD": the one with TENSOR), the remedy
    "missing shard": (lambda d: shard_of(d, TENSOR).unlink(), "SHARD", "download it"),
    "truncated shard": (cut, "SHARD", "get the file again"),
    "pointer for a shard": (
        lambda d: shard_of(d, TENSOR).write_text(LFS_POINTER),
        "SHARD",
        "run `git lfs pull`",
    ),
    "pointers for all shards": (
        lambda d: [shard.write_text(LFS_POINTER) for shard in d.glob("*.safetensors")],
        "files that cannot be used (",
        "run `git lfs pull`",
    ),
    "pointer for the tokenizer": (
        point("tokenizer.json"),
        "tokenizer.json cannot be read",
        "run `git lfs pull`",
    ),
    "pointer for the index": (point(INDEX), INDEX, "run `git lfs pull`"),
    "index names what is not there": (list_in_index, "SHARD", "take both from one export"),
    "wrong shape": (reshape, "SHARD", "is config.json of the same model?"),
    "another model's config": (
        edit_config(hidden_size=56),
        "expected [267, 56], got [267, 48] in model-0000",
        "is config.json of the same model?",
    ),
    "no index": (remove(INDEX), INDEX, "download"),
    "needed field missing": (
        edit_config(kv_lora_rank=...),
        "config.json lacks kv_lora_rank",
        "take the file that came with the weights",
    ),
    "impossible field": (
        edit_config(kv_lora_rank="512"),
        "config.json",
        "kv_lora_rank must be an integer of at least 1; got '512'",
    ),
    "another architecture": (
        edit_config(model_type="llama"),
        "config.json",
        "supported: deepseek_v2, deepseek_v3",
    ),
    "config cut": (
        lambda d: (d / "config.json").write_text('{"model_type":'),
        "config.json is not valid JSON",
        "get the file again",
    ),
    "no config": (remove("config.json"), "no config.json", "expected a checkpoint directory"),
    "no tokenizer": (
        remove("tokenizer.json"),
        "looked for tokenizer.json",
        "Get the file that came with the weights",
    ),
}


@pytest.mark.parametrize(("damage", "names", "remedy"), FAULTS.values(), ids=FAULTS)
def test_a_broken_download_is_one_line_that_names_file_and_remedy(
    capsys, copy, damage, names, remedy
):
    names = shard_of(copy, TENSOR).name if names == "SHARD" else names
    damage(copy)
    status, out, err = generate(capsys, copy)
    assert (status, out) == (2, "")
    assert err.startswith("snapmla generate: error: ") and err.count("\n") == 1, err
    assert names in err and remedy in err, err


def test_a_name_on_the_hub_is_no_directory_and_the_line_says_how_to_get_one(capsys):
    status, _, err = generate(capsys, Path("deepseek-ai/DeepSeek-V2-Lite"))
    assert status == 2
    assert "deepseek-ai/DeepSeek-V2-Lite does not exist; `hf download" in err
