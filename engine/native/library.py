"""Compiles the C kernels beside this file once a machine, and loads them; says why where that cannot be."""

from __future__ import annotations

import ctypes
import functools
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
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from fleet.model_files import cache_folder

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent
_FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-math-errno",
    "-fno-trapping-math", "-w",
)  # fmt: skip
_LIMIT_S = 120.0
"""A compiler that takes longer than this is not waited for; it usually takes 3 s."""

_VERSION_LIMIT_S = 20.0
"""The same of its `--version`."""

_MOST_SAID = 1 << 20
"""Bytes; a compiler that says more is none."""

_SEAL = 16
"""Bytes of the digest at the end of a compiled file: one that lost its end, as when a disk was full or a
machine fell, would end the process that loads it with SIGBUS."""

_ABANDONED_S = 3600.0
"""Folders of compilations that are older than this are of processes that were killed."""


class Step(Structure):
    """`Step` of common.h: the same fields in the same order. Whoever fills it keeps what it points to."""

    _fields_ = (
        ("pool", c_void_p),
        ("tables", c_void_p),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("block_bytes", c_int64),
        ("layer_bytes", c_int64),
        ("width", c_int32),
        ("sequences", c_int32),
        ("decodes", c_int32),
        ("rows", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
    )


_ATTENTION = (POINTER(Step), c_int32, c_void_p, c_int64, c_void_p, c_float, c_int32, c_float)
_SIGNATURES = {
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float),
    "rotary": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64),
    "gated": (c_void_p, c_void_p, c_int64, c_int64, c_int32),
    "write_kv": (POINTER(Step), c_int32, c_void_p, c_int64),
    "decode_attention": _ATTENTION,
}
"""Of functions there is one of for each type, by its suffix."""

_TILE_SIGNATURES = {
    "chunk_attention": _ATTENTION,
    "pack_bf16": (c_void_p, c_void_p, c_int64, c_int64),
    "pack_int8": (c_void_p, c_void_p, c_int64, c_int64),
    "product_bf16": (c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64),
    "product_int8": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64),
}
"""Of functions that are there only where there are matrix tiles."""

_FAIL = ("decode_attention", "chunk_attention", "product_int8")
"""These return 1 where they had no memory, else 0; the others nothing."""

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded kernels. Addresses are checked by nobody: callers hold tensors of the right shape."""

    library: ctypes.CDLL
    amx: bool
    """Whether there are kernels for matrix tiles of bfloat16, and this process may use them."""

    def function(self, name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
        found: ctypes._NamedFuncPointer = getattr(self.library, f"{name}_{_SUFFIXES[dtype]}")
        return found


class Unusable(Exception):
    """There are no kernels here; the text says why."""


@functools.cache
def _attempt() -> Native | str:
    try:
        return _declare(ctypes.CDLL(str(build())))
    except Unusable as why:
        return str(why)
    except (OSError, AttributeError) as error:
        return f"the kernels cannot be loaded: {error}"


def native(dtype: torch.dtype | None = None) -> Native:
    """The kernels, built at the first call in a process and a machine. Raises `Unusable`."""
    if dtype is not None and dtype not in _SUFFIXES:
        raise Unusable(f"no kernels for {dtype}")
    found = _attempt()
    if isinstance(found, str):
        raise Unusable(found)
    return found


def _declare(library: ctypes.CDLL) -> Native:
    for name, arguments in _SIGNATURES.items():
        for suffix in _SUFFIXES.values():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, c_int32 if name in _FAIL else None
    library.highest.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    library.highest.restype = None
    library.draw.argtypes = (c_void_p, c_int64, c_float, c_float, c_float, c_int32, c_int32)
    library.draw.restype = c_int64
    library.has_amx.argtypes, library.has_amx.restype = (), c_int32
    amx = bool(library.has_amx())
    for name, arguments in _TILE_SIGNATURES.items() if amx else ():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int32 if name in _FAIL else None
    return Native(library, amx)


def build() -> Path:
    """Where the compiled kernels lie; compiles them if they do not. Raises `Unusable`."""
    if os.environ.get("PDFLEET_NATIVE") == "0":
        raise Unusable("switched off by PDFLEET_NATIVE=0")
    if os.name != "posix":
        raise Unusable("only built where there is a POSIX compiler")
    compiler = _compiler()
    try:
        folder = cache_folder() / "native"
    except RuntimeError as error:  # no HOME, and no entry for this user
        raise Unusable(
            f"there is no folder to keep the kernels in ({error}); PDFLEET_CACHE names one"
        ) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _own(folder)
    path = folder / f"kernels-{_key(compiler)}.so"
    if not _trusted(path):
        _compile(compiler, path)
    return path


def _compiler() -> list[str]:
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
        raise Unusable(
            "no C compiler (cc, gcc or clang) is installed; with one, decoding is several times faster"
        )
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


def _key(compiler: list[str]) -> str:
    """Of all that what comes out depends on: sources, flags, compiler, libc and what this processor can."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted((*_SOURCE.glob("*.c"), *_SOURCE.glob("*.h"))):
        digest.update(file.read_bytes())
    system = (platform.machine(), platform.libc_ver(), platform.python_version())
    digest.update(repr((_FLAGS, shutil.which(compiler[0]), compiler[1:], system)).encode())
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


def _compile(compiler: list[str], path: Path) -> None:
    """Beside its place, then moved there at once: processes that start together each make a whole one."""
    name = shlex.join(compiler)
    log.info("compiling the CPU kernels with %s, once on this machine", name)
    for left in path.parent.glob("making-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
        made = Path(folder) / path.name
        said = ""
        # Where there is no OpenMP to link with, the kernels run in one thread.
        for threads in (("-fopenmp",), ()):
            command = [*compiler, *_FLAGS, *threads, str(_SOURCE / "kernels.c"), "-o", str(made), "-lm"]
            code, output = _ran(command, _LIMIT_S)
            if code == 0:
                if not made.is_file():
                    raise Unusable(f"{name} did not compile the kernels: it wrote no file")
                made.write_bytes((content := made.read_bytes()) + _seal(content))
                made.chmod(0o700)
                made.replace(path)
                return
            errors = [line for line in output.splitlines() if "error" in line]
            said = errors[0].rpartition("/")[2] if errors else f"it ended with {code}"
        raise Unusable(f"{name} did not compile the kernels: {said}")
