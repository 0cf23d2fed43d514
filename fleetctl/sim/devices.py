"""What models and GPUs are made of, as their makers publish it: what a roofline is computed from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, dense figures (not those with sparsity)."""

    flops: float
    """Products and sums a second in bfloat16."""
    bytes_s: float
    """Of its own memory."""
    memory: float
    """Bytes."""


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # NVIDIA A100 80GB datasheet (2021): SXM.
        "a100": Gpu(312e12, 2.039e12, 80e9),
        # NVIDIA H100 datasheet (2023): SXM; 1,979 teraFLOPS with sparsity.
        "h100": Gpu(989e12, 3.35e12, 80e9),
        # NVIDIA H200 datasheet (2024): SXM; the same processor.
        "h200": Gpu(989e12, 4.8e12, 141e9),
    }
)


@dataclass(frozen=True)
class Model:
    """A dense transformer, its weights and KV in 16 bits."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @cached_property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    @cached_property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * 2 * self.kv_heads * self.head_dim


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        # config.json of each on huggingface.co; parameters as the model card counts them.
        "llama-3.1-8b": Model(8.03e9, 32, 32, 8, 128),
        "llama-3.1-70b": Model(70.6e9, 80, 64, 8, 128),
        "llama2-70b": Model(69.0e9, 80, 64, 8, 128),
        "qwen3-32b": Model(32.8e9, 64, 64, 8, 128),
        "bloom-176b": Model(176.2e9, 70, 112, 112, 128),
        "smollm2-135m": Model(134.5e6, 30, 9, 3, 64),
    }
)
