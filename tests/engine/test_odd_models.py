"""Model folders that somebody else has made: what is wrong is named, before memory is taken for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_runner
from engine.settings import EngineSettings
from fleet.errors import BadRequest

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory_bytes=2 << 20)
INDEX = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HUGE = 10**12


@pytest.fixture
def folder(small_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_model("llama2"), tmp_path / "model"))


def refused(folder: Path, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        build_runner(folder, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": HUGE}, "num_hidden_layers 1000000000000; at most 4096"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000; at most 4194304"),
        ({"num_attention_heads": 1 << 30}, "holds no block|q_proj.weight has shape"),
        (
            {"hidden_size": 1 << 30, "head_dim": 8},
            r"embed_tokens\.weight has shape \(160, 32\); its config says",
        ),
        (
            {"vocab_size": 1 << 31},
            r"embed_tokens\.weight has shape \(160, 32\); its config says \(2147483648",
        ),
        ({"intermediate_size": 1 << 31}, r"gate_proj\.weight has shape \(48, 32\)"),
        ({"num_key_value_heads": -1}, "num_key_value_heads -1; it must be at least 1"),
        ({"num_key_value_heads": "2"}, "no number num_key_value_heads"),
        ({"head_dim": 8.5}, "no number head_dim"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05; it must be a number above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small'; it must be"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; it must be a number above 1"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\]; it must be an object"),
        ({"rope_parameters": {**YARN, "factor": float("inf")}}, "has factor inf; it must be finite"),
        ({"rope_parameters": {**YARN, "factor": 1e9}}, "reaches 32000000000 positions"),
        ({"rope_parameters": {**YARN, "beta_fast": 0}}, r"beta_fast 0\.0 and beta_slow 1\.0"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": -5}}, "embeddings is -5"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, r"low_freq_factor 4\.0 and high_freq"),
        ({"rope_parameters": {**LLAMA3, "factor": 0}}, r"factor 0\.0; it must be above 0"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"hidden_act": {}, "hidden_activation": ["silu"]}, "another kind than it should be: unhashable"),
    ],
)
def test_a_configuration_that_cannot_be(changes: dict[str, Any], said: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(folder, said)


@pytest.mark.parametrize("text", ["[" * 100_000, "{nope"], ids=["nested", "broken"])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_what_is_no_json(file: str, text: str, folder: Path) -> None:
    (folder / file).write_text(text)
    refused(folder, f"{file} cannot be read as JSON")


def test_a_configuration_of_gigabytes(folder: Path) -> None:
    with (folder / "config.json").open("w") as file:
        file.truncate(8 << 30)
    refused(folder, "has 8589934592 bytes; no configuration is as long")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([1], "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": 3}}, "names 3, which is no file in its folder"),
        (
            {"weight_map": {"a": "../outside.safetensors"}},
            r"names '\.\./outside\.safetensors', which is no file",
        ),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd', which is no file in its folder"),
        ({"weight_map": {"a": "m-1-of-2.safetensors"}}, r"has no file m-1-of-2\.safetensors"),
    ],
)
def test_an_index_of_what_is_not_there(index: Any, said: str, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, said)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers(number: float, folder: Path) -> None:
    """They would be seen at the first request only, and then at each."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = number
    save_file(weights, folder / "model.safetensors")
    refused(
        folder, r"tensor model\.layers\.1\.mlp\.up_proj\.weight has numbers that are not finite in float32"
    )


def test_weights_too_large_for_the_type_they_are_served_in(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full((32,), 7e4)
    save_file(weights, folder / "model.safetensors")
    build_runner(folder, SETTINGS)
    with pytest.raises(BadRequest, match=r"model\.norm\.weight has numbers that are not finite in float16"):
        build_runner(folder, EngineSettings(dtype="float16", device="cpu", kv_memory_bytes=2 << 20))


def test_a_file_of_weights_that_lost_its_end_and_one_that_is_none(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (b"", whole[:50], whole[:-1], (8 << 30).to_bytes(8, "little") + b"{" * 100):
        path.write_bytes(broken)
        refused(folder, r"model\.safetensors is not a readable safetensors file")
    path.unlink()
    path.mkdir()
    refused(folder, r"has no file model\.safetensors")


def test_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, r"tokenizer\.json cannot be read")
