"""Compiles C that lies beside Python once a machine, and loads it; says why where that cannot be.

Whoever has such C has the same in Python, too: a compiler is never needed, and without one it is only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import select
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleet.model_files import cache_folder

log = logging.getLogger(__name__)

L = TypeVar("L", bound=ctypes.CDLL)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-w")

_VERSION_LIMIT_S = 20.0
"""A compiler that takes longer to say its version is not waited for."""

_MOST_SAID = 1 << 20
"""Bytes; a compiler that says more is none."""

_SEAL = 16
"""Bytes of the digest at the end of a compiled file: one that lost its end, as when a disk was full or a
machine fell, would end the process that loads it with SIGBUS."""

_ABANDONED_S = 3600.0
"""Folders of compilations that are older than this are of processes that were killed."""


class Unusable(Exception):
    """It cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """C that becomes one library."""

    name: str
    """What it is, in a word or two: `kernels`."""
    file: Path
    """To be compiled; what it includes lies beside it."""
    gain: str
    """What is so with a compiler, to be told where there is none."""
    limit_s: float
    """A compiler that takes longer than this is not waited for."""
    flags: tuple[str, ...] = ()
    """Besides the usual ones."""
    attempts: tuple[tuple[str, ...], ...] = ((),)
    """Further flags: the first of these with which it compiles."""


def load(source: Source, kind: type[L]) -> L:
    """The library, compiled first if it is not yet. Raises `Unusable`."""
    try:
        return kind(str(build(source)))
    except OSError as error:
        raise Unusable(f"the {source.name} cannot be loaded: {error}") from error


def build(source: Source) -> Path:
    """Where it lies, compiled now if it was not before. Raises `Unusable`, and OSError of the folder."""
    if os.environ.get("PDFLEET_NATIVE") == "0":
        raise Unusable("switched off by PDFLEET_NATIVE=0")
    if os.name != "posix":
        raise Unusable("only built where there is a POSIX compiler")
    compiler = _compiler(source)
    try:
        folder = cache_folder() / "native"
    except RuntimeError as error:  # no HOME, and no entry for this user
        raise Unusable(
            f"there is no folder to keep the {source.name} in ({error}); PDFLEET_CACHE names one"
        ) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _own(folder)
    path = folder / f"{source.file.stem}-{_key(source, compiler)}.so"
    if not _trusted(path):
        _compile(source, compiler, path)
    return path


def _compiler(source: Source) -> list[str]:
    """As `make` takes it: `CC` may be a command with arguments."""
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise Unusable(f"CC is {given!r}, which is no command: {error}") from error
    if command:
        return command
    found = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if found is None:
        raise Unusable(f"no C compiler (cc, gcc or clang) is installed; with one, {source.gain}")
    return [found]


def _own(folder: Path) -> None:
    """Whoever may write a folder may put another file in the place of one that was looked at."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise Unusable(
            f"{folder} belongs to user {found.st_uid}, who could change what is run here; "
            "PDFLEET_CACHE names another"
        )
    if found.st_mode & 0o022:
        folder.chmod(0o700)


def _key(source: Source, compiler: list[str]) -> str:
    """Of all that what comes out depends on: sources, flags, compiler, libc and what this processor can."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted((*source.file.parent.glob("*.c"), *source.file.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    system = (platform.machine(), platform.libc_ver(), platform.python_version())
    flags = (_FLAGS, source.flags, source.attempts)
    digest.update(repr((flags, shutil.which(compiler[0]), compiler[1:], system)).encode())
    digest.update(_ran([*compiler, "--version"], _VERSION_LIMIT_S)[1].encode())
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                digest.update(line.encode())
            if not line:
                break
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()


def _trusted(path: Path) -> bool:
    """There, a file of ours that nobody else can write, and whole."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                return False
            made = file.read()
    except OSError:
        return False
    return _seal(made[:-_SEAL]) == made[-_SEAL:]


def _seal(made: bytes) -> bytes:
    return hashlib.blake2b(made, digest_size=_SEAL).digest()


def _ran(command: list[str], limit_s: float) -> tuple[int, str]:
    """The exit code of a compiler and what it said. Raises `Unusable` where it cannot be run or does not end;
    then it is ended, and all that it has started with it."""
    name = shlex.join(command[:1])
    end = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Unusable(f"{name} cannot be run: {error}") from error
    assert process.stdout is not None
    said = bytearray()
    with process.stdout as pipe:
        try:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            while poll.poll(max(0.0, end - time.monotonic()) * 1000):
                piece = os.read(pipe.fileno(), 1 << 16)
                if not piece:
                    break
                said += piece
                if len(said) > _MOST_SAID:
                    raise Unusable(f"{name} says more than a compiler would")
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise Unusable(f"{name} did not end within {limit_s:g} s") from error
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, said.decode(errors="replace")


def _compile(source: Source, compiler: list[str], path: Path) -> None:
    """Beside its place, then moved there at once: processes that start together each make a whole one."""
    name = shlex.join(compiler)
    log.info("compiling the %s with %s, once on this machine", source.name, name)
    for left in path.parent.glob("making-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
        made = Path(folder) / path.name
        said = ""
        for more in source.attempts:
            command = [*compiler, *_FLAGS, *source.flags, *more, str(source.file), "-o", str(made), "-lm"]
            code, output = _ran(command, source.limit_s)
            if code == 0:
                if not made.is_file():
                    raise Unusable(f"{name} did not compile the {source.name}: it wrote no file")
                made.write_bytes((content := made.read_bytes()) + _seal(content))
                made.chmod(0o700)
                made.replace(path)
                return
            errors = [line for line in output.splitlines() if "error" in line]
            said = errors[0].rpartition("/")[2] if errors else f"it ended with {code}"
        raise Unusable(f"{name} did not compile the {source.name}: {said}")
