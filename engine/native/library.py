"""Compiles the C kernels beside this file once a machine, and loads them; says why where that cannot be."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
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
    except OSError as error:
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
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise Unusable(
            "no C compiler (cc, gcc or clang) is installed; with one, decoding is several times faster"
        )
    name = f"kernels-{_key(compiler)}.so"
    folder = cache_folder() / "native"
    path = folder / name
    if not _trusted(path):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile(compiler, path)
    return path


def _key(compiler: str) -> str:
    """Of all that what comes out depends on: sources, flags, compiler, and what this processor can do."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted((*_SOURCE.glob("*.c"), *_SOURCE.glob("*.h"))):
        digest.update(file.read_bytes())
    digest.update(
        repr((_FLAGS, shutil.which(compiler), platform.machine(), platform.python_version())).encode()
    )
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_LIMIT_S, check=False)
        digest.update(version.stdout)
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                digest.update(line.encode())
            if not line:
                break
    except (OSError, subprocess.TimeoutExpired):
        digest.update(platform.processor().encode())
    return digest.hexdigest()


def _trusted(path: Path) -> bool:
    """There, ours, and written by nobody else."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _compile(compiler: str, path: Path) -> None:
    """Beside its place, then moved there at once: processes that start together each make a whole one."""
    log.info("compiling the CPU kernels with %s, once on this machine", compiler)
    source = str(_SOURCE / "kernels.c")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        said = ""
        # Where there is no OpenMP to link with, the kernels run in one thread.
        for threads in (("-fopenmp",), ()):
            command = [compiler, *_FLAGS, *threads, source, "-o", str(made), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Unusable(f"{compiler} did not compile the kernels: {error}") from error
            if done.returncode == 0:
                made.chmod(0o700)
                made.replace(path)
                return
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            said = errors[0].rpartition("/")[2] if errors else f"it ended with {done.returncode}"
        raise Unusable(f"{compiler} did not compile the kernels: {said}")
