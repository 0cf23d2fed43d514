"""Loads a model folder's safetensors, in parallel, and checks every tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.linear import Linear, Linears
from fleet.errors import BadRequest

Progress = Callable[[str, int, int], None]
"""Called with ("load", tensors done, tensors in all)."""

Made = TypeVar("Made")

_PLAIN = ("F32", "BF16", "F16", "F64")
"""Types of tensors whose numbers are the weights."""

_READERS = 8
"""Layers loaded at a time, at most: each holds a matrix or two beside those that are done."""


def torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise BadRequest(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index if it has one, in name order."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in _named(index)})
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequest(f"{folder} has no .safetensors file")
    return files


def _named(index: Path) -> set[str]:
    """Files by the names that an index has; it names nothing outside of its folder."""
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{index} cannot be read as JSON: {error}") from error
    names = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(names, dict) or not names:
        raise BadRequest(f"{index} has no weight_map of tensors to files")
    for name in names.values():
        if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadRequest(f"{index} names {name!r}, which is no file in its folder")
    return set(names.values())


def open_weights(folder: Path, path: Path) -> Any:
    """One of `weight_files`, as a context manager."""
    if not path.is_file():
        raise BadRequest(f"{folder} has no file {path.name}, which is to hold its weights")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadRequest(f"{path} is not a readable safetensors file: {error}") from error


def weights_digest(folder: Path) -> str:
    """32 hex digits over every byte of the weights.

    All of it, not a sample, so that a revision that touches one tensor is another model. XXH3 runs at
    memory speed, several files at a time, and loading reads the same bytes anyway, so nothing needs to be
    cached.
    """
    files = weight_files(folder)
    if len(files) == 1:
        return _digest(files[0])
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1, len(files)), "digest") as pool:
        return str(xxhash.xxh3_128("".join(pool.map(_digest, files)).encode()).hexdigest())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return str(digest.hexdigest())


class Checkpoint:
    """An open model folder from which tensors are taken by name; a context manager.

    Missing tensors and wrong shapes raise BadRequest, as do, at `close`, tensors nobody took: a model that
    ignores some of its weights gives wrong text without a sign.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        weights: str = "auto",
    ) -> None:
        """`weights`: one of `engine.linear.WEIGHTS`, of the matrices."""
        self._linears = Linears(weights)
        self._folder, self._dtype, self._device, self._progress = folder, dtype, device, progress
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        for path in weight_files(folder):
            file = self._files.enter_context(open_weights(folder, path))
            self._where |= dict.fromkeys(file.keys(), file)
        self._left = set(self._where)
        self._lock = Lock()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of its own memory, in the model's type, on its device."""
        self._check(name, tuple(shape))
        return self._into(torch.empty(tuple(shape), dtype=self._dtype, device=self._device), [name])

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        inner: int,
        bias: bool = False,
        order: Tensor | None = None,
    ) -> Linear:
        """One matrix from several that see the same rows, one under the other: fewer, larger products.
        `order`: `[sum(outs)]`, which of their outputs goes where."""
        weight, biases = self.stacked([names], outs, inner)[0], None
        if bias:
            for name, out in zip(names, outs, strict=True):
                self._check(f"{name}.bias", (out,))
            biases = torch.empty(sum(outs), dtype=self._dtype, device=self._device)
            biases = self._into(biases, [f"{name}.bias" for name in names], outs)
        if order is not None:
            order = order.to(self._device)
            weight, biases = weight[order], None if biases is None else biases[order]
        return self._linears.make(weight, biases)

    def stacked(self, names: Sequence[Sequence[str]], outs: Sequence[int], inner: int) -> Tensor:
        """Such matrices, one a list of names: `[lists, sum(outs), inner]`."""
        for each in names:
            for name, out in zip(each, outs, strict=True):
                self._check(f"{name}.weight", (out, inner))
        every = torch.empty(len(names), sum(outs), inner, dtype=self._dtype, device=self._device)
        for part, each in zip(every, names, strict=True):
            self._into(part, [f"{name}.weight" for name in each], outs)
        return every

    def _into(self, out: Tensor, names: Sequence[str], outs: Sequence[int] = ()) -> Tensor:
        """Reads tensors one under the other into their place: nothing is copied twice."""
        parts = torch.split(out, list(outs)) if outs else (out,)
        for name, part in zip(names, parts, strict=True):
            part.copy_(self._where[name].get_tensor(name))
            if not _finite(part):
                kind = str(self._dtype).removeprefix("torch.")
                raise BadRequest(f"{self._folder}: tensor {name} has numbers that are not finite in {kind}")
            with self._lock:
                self._left.discard(name)
                if self._progress:
                    self._progress("load", len(self._where) - len(self._left), len(self._where))
        return out

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Before memory is taken for it: a mistake in a config may ask for any amount."""
        if name not in self._where:
            raise BadRequest(f"{self._folder} has no tensor {name}")
        part = self._where[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise BadRequest(
                f"{self._folder}: tensor {name} has shape {tuple(part.get_shape())}; its config says {shape}"
            )
        if part.get_dtype() not in _PLAIN:
            raise BadRequest(
                f"{self._folder}: tensor {name} is {part.get_dtype()}; supported: {', '.join(_PLAIN)}. "
                "Quantized weights are not"
            )

    def has(self, name: str) -> bool:
        return name in self._where

    def each(self, count: int, make: Callable[[int], Made]) -> list[Made]:
        """`make(0)`, `make(1)`, …, a few at a time in threads of their own, since reading, converting and
        laying out take one processor each. The error is that of the lowest number that has one."""
        threads = torch.get_num_threads()
        workers = min(_READERS, os.cpu_count() or 1, count)
        with ThreadPoolExecutor(workers, "load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                return list(pool.map(make, range(count)))
            finally:
                # It is also what threads that are started later begin with.
                torch.set_num_threads(threads)

    def tied(self, weight: Tensor) -> Linear:
        """A matrix that was taken already, as the head that is the embedding."""
        return self._linears.make(weight)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def ignore(self, *parts: str) -> None:
        """Tensors that some checkpoints carry and that mean nothing here, by a part of their names."""
        self._left = {name for name in self._left if not any(part in name for part in parts)}

    def finish(self) -> None:
        if self._left:
            raise BadRequest(
                f"{self._folder} has {len(self._left)} tensors this model does not know, "
                f"such as {min(self._left)}"
            )


def _finite(values: Tensor) -> bool:
    """Of contiguous ones. What is not finite makes a sum so; a piece at a time, so that no copy is large."""
    return all(
        math.isfinite(piece.sum(dtype=torch.float32)) for piece in torch.split(values.view(-1), 1 << 18)
    )
