"""The budget of a device's memory: planned from a model's files, then measured by the largest steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from engine.memory import MemoryBudget, ModelShape, activation_bytes, graph_bytes, kv_bytes
from engine.padding import sizes_for
from engine.settings import EngineSettings
from engine.sparing import OutOfMemory
from engine.weights import open_weights, weight_files
from engine.words import Batch, Chunk
from fleet.errors import BadRequest
from fleet.kv_layout import DTYPE_BYTES, KvLayout
from fleet.request import Sampling

if TYPE_CHECKING:
    from engine.torch_runner import TorchRunner

log = logging.getLogger(__name__)

ON_CPU = 1 << 30
"""KV bytes on a CPU, unless told otherwise: its memory belongs to everybody."""


class SizedConfig(Protocol):
    """What a model's configuration says of its size."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


def planned(
    folder: Path, config: SizedConfig, layout: KvLayout, settings: EngineSettings, device: torch.device
) -> MemoryBudget:
    """Before anything is loaded. BadRequest where a model leaves no room for KV on its device."""
    shape = ModelShape(
        numbers=_numbers(folder),
        bytes_each=DTYPE_BYTES[layout.dtype],
        hidden=config.hidden,
        inner=config.inner,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
    )
    weights = shape.numbers * shape.bytes_each
    if device.type != "cuda":
        return MemoryBudget(weights, 0, 0, settings.kv_memory_bytes or ON_CPU)
    free, total = torch.cuda.mem_get_info(device)
    activations = activation_bytes(shape, step_tokens=settings.max_step_tokens, max_batch=settings.max_batch)
    sizes = sizes_for(settings.max_batch)
    graphs = graph_bytes(
        shape, largest=sizes[-1], count=len(sizes), table_entries=layout.blocks_for(config.max_tokens)
    )
    kv = settings.kv_memory_bytes or kv_bytes(
        shape,
        total=total,
        free=free,
        share=settings.memory_share,
        activations=activations,
        graphs=graphs,
    )
    budget = MemoryBudget(weights, activations, graphs, kv, total)
    if kv < layout.block_bytes:
        raise BadRequest(
            f"no room for KV on {device}: {budget}, {free / (1 << 30):.1f} free, memory_share "
            f"{settings.memory_share}; another device, a lower max_step_tokens or a larger share would do"
        )
    return budget


def measured(runner: TorchRunner, budget: MemoryBudget, settings: EngineSettings) -> MemoryBudget:
    """Runs the largest steps there can be, which compiles what they need too; CUDA only.

    BadRequest where they do not fit. Leaves numbers in blocks that nobody owns.
    """
    device = runner.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for batch in largest_steps(runner.layout, runner.blocks, runner.max_tokens, settings):
        try:
            runner.step(batch)
        except OutOfMemory as error:
            raise BadRequest(
                f"the largest step does not fit beside {budget}: {error}; lower kv_memory_bytes, "
                "memory_share or max_step_tokens"
            ) from error
    taken = torch.cuda.max_memory_allocated(device) - before
    found = replace(budget, activations=taken)
    if taken > budget.activations:
        log.warning(
            "steps take %.1f GiB at most, %.1f were planned",
            taken / (1 << 30),
            budget.activations / (1 << 30),
        )
    return found


def largest_steps(layout: KvLayout, blocks: int, max_tokens: int, settings: EngineSettings) -> list[Batch]:
    """A prompt of all tokens of a step, and decodes of all sequences, each drawn by every rule."""
    drawn = Sampling(max_tokens=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=5)
    tokens = min(settings.max_step_tokens, max_tokens - 1, blocks * layout.block_size)
    table = tuple(range(layout.blocks_for(tokens)))
    prompt = Chunk(0, (0,) * tokens, 0, table, True, drawn)
    decodes = [
        Chunk(slot, (0,), 0, (slot % blocks,), True, drawn)
        for slot in range(min(settings.max_batch, settings.max_step_tokens))
    ]
    return [Batch((prompt,)), Batch(tuple(decodes))]


def _numbers(folder: Path) -> int:
    count = 0
    for path in weight_files(folder):
        with open_weights(folder, path) as file:
            count += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
