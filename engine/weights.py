"""Loads a model folder's safetensors and checks every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from engine.linear import Linear, Linears
from fleet.errors import BadRequest

Progress = Callable[[str, int, int], None]
"""Called with ("load", tensors done, tensors in all)."""


def torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise BadRequest(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index if it has one, in name order."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequest(f"{folder} has no .safetensors file")
    return files


def weights_digest(folder: Path) -> str:
    """32 hex digits over every byte of the weights.

    All of it, not a sample, so that a revision that touches one tensor is another model. XXH3 runs at
    memory speed, and loading reads the same bytes anyway, so nothing needs to be cached.
    """
    digest = xxhash.xxh3_128()
    for path in weight_files(folder):
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
            if not path.is_file():
                raise BadRequest(f"{folder} lacks {path.name}, which its index names")
            file = self._files.enter_context(safe_open(path, framework="pt"))
            self._where |= dict.fromkeys(file.keys(), file)
        self._left = set(self._where)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of its own memory, in the model's type, on its device."""
        if name not in self._where:
            raise BadRequest(f"{self._folder} has no tensor {name}")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise BadRequest(
                f"{self._folder}: tensor {name} has shape {tuple(tensor.shape)}; "
                f"its config says {tuple(shape)}"
            )
        self._left.discard(name)
        if self._progress:
            self._progress("load", len(self._where) - len(self._left), len(self._where))
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def linear(self, names: Sequence[str], outs: Sequence[int], inner: int, bias: bool = False) -> Linear:
        """One matrix from several that see the same rows, one under the other: fewer, larger products."""
        pairs = list(zip(names, outs, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", (out, inner)) for name, out in pairs])
        biases = torch.cat([self.take(f"{name}.bias", (out,)) for name, out in pairs]) if bias else None
        return self._linears.make(weight, biases)

    def tied(self, weight: Tensor) -> Linear:
        """A matrix that was taken already, as the head that is the embedding."""
        return self._linears.make(weight)

    def ignore(self, *suffixes: str) -> None:
        """Tensors that some checkpoints carry and that mean nothing."""
        self._left = {name for name in self._left if not name.endswith(suffixes)}

    def finish(self) -> None:
        if self._left:
            raise BadRequest(
                f"{self._folder} has {len(self._left)} tensors this model does not know, "
                f"such as {min(self._left)}"
            )
