"""What of a device's memory goes where: weights, activations, graphs, KV; planned before loading. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_SPARE = 0.02
"""Part of a device's memory that is left: the allocator cannot use each byte of what it holds."""

_CONTEXT = 600 << 20
"""Bytes that a CUDA context and the libraries of a process take before it computes anything."""

_FLOAT = 4
_SCORED = 128
"""Prompt tokens whose logits are there at once (`TorchRunner`)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """As much of a model as its memory depends on."""

    numbers: int
    """In all weights."""
    bytes_each: int
    """Of a weight and of an activation."""
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. On a CPU `total` is None, and nothing but weights and KV is counted."""

    weights: int
    activations: int
    graphs: int
    kv: int
    total: int | None = None
    """Of the device, whoever has it."""

    def counters(self) -> dict[str, int]:
        """For the engine's load report."""
        parts = {
            "memory_weights_bytes": self.weights,
            "memory_activations_bytes": self.activations,
            "memory_graphs_bytes": self.graphs,
            "memory_kv_bytes": self.kv,
        }
        return parts if self.total is None else {**parts, "memory_device_bytes": self.total}

    def __str__(self) -> str:
        parts = [f"weights {_gib(self.weights)}"]
        if self.total is not None:
            parts += [f"activations {_gib(self.activations)}", f"graphs {_gib(self.graphs)}"]
        whole = "" if self.total is None else f" of {_gib(self.total)}"
        return f"{', '.join(parts)}, KV {_gib(self.kv)}{whole} GiB"


def activation_bytes(shape: ModelShape, *, step_tokens: int, max_batch: int) -> int:
    """What the largest step holds beside weights and KV, at its widest place.

    A layer holds the residual, its normed rows, one product and what is made of it; the feed-forward is
    wider than attention in all models so far, but not by definition. Logits are float32, and drawing
    holds up to three copies of them.
    """
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.heads * shape.head_dim
    widest = 3 * shape.hidden + max(attention, 3 * shape.inner)
    logits = max(max_batch, _SCORED) * shape.vocabulary * (3 * _FLOAT + shape.bytes_each)
    return step_tokens * widest * shape.bytes_each + logits


def graph_bytes(shape: ModelShape, *, largest: int, count: int, table_entries: int) -> int:
    """What captured steps hold: one pool for all (they never run at once), the buffers they read, and the
    device's own note of each launch."""
    if not count:
        return 0
    step = activation_bytes(shape, step_tokens=largest, max_batch=largest)
    return step + largest * table_entries * 4 + count * (4 << 20)


def kv_bytes(shape: ModelShape, *, total: int, free: int, share: float, activations: int, graphs: int) -> int:
    """Bytes for KV on a device: its share of the whole less what else it needs, and no more than is free.

    May be negative: then the model does not fit.
    """
    needed = shape.numbers * shape.bytes_each + activations + graphs + _CONTEXT
    return min(int(total * share), int(free - total * _SPARE)) - needed


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
