"""From a model folder and settings to a runner: first the pool's size, then the runner over its memory.

Two steps, because the memory between them belongs to the transfer layer, which registers it once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.choose import capture_decodes, choose_attention
from engine.kv_pool import KvPool
from engine.latency_runner import LatencyModel, LatencyRunner
from engine.models.architecture import DecoderConfig
from engine.models.decoder import Decoder
from engine.ops import choose_ops
from engine.profile import ON_CPU, measured, planned
from engine.runner import Runner
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.weights import Checkpoint, torch_dtype, weights_digest
from fleet.errors import BadRequest
from fleet.kv_layout import Fingerprint, KvLayout

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

LATENCY = "latency"
"""Name of the model without weights: `latency`, or with times in milliseconds
`latency:base=5,prompt=0.1,decode=0.2,context=0.001`."""


_LONGEST_CONFIG = 16 << 20
"""Bytes."""


def latency_model(name: str) -> LatencyModel | None:
    """The times in a model's name; None where it names a real model. BadRequest on an unknown part."""
    kind, _, settings = name.partition(":")
    if kind != LATENCY:
        return None
    fields = {
        "base": "base_s",
        "prompt": "per_prompt_token_s",
        "decode": "per_decode_s",
        "context": "per_context_token_s",
    }
    times: dict[str, float] = {}
    for part in filter(None, settings.split(",")):
        key, _, value = part.partition("=")
        try:
            times[fields[key]] = float(value) / 1000
        except (KeyError, ValueError) as error:
            raise BadRequest(
                f"{part!r} in model {name!r}: want KEY=MILLISECONDS, with KEY one of {', '.join(fields)}"
            ) from error
    return LatencyModel(**times)


def plan_pool(folder: Path | str, settings: EngineSettings) -> tuple[KvLayout, int]:
    """Layout and number of the pool's blocks, for a model folder or for a latency model by its name.

    Without `kv_memory_bytes`, a device's blocks are what weights and steps leave of it
    (`engine.profile.planned`). BadRequest when not one block fits.
    """
    if latency_model(str(folder)) is not None:
        layout = LatencyRunner.layout_of(settings.block_size)
        size = settings.kv_memory_bytes or ON_CPU
    else:
        config = DecoderConfig.read(read_config(Path(folder)))
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        layout = KvLayout(len(config.layers), config.kv_heads, config.head_dim, settings.block_size, dtype)
        size = settings.kv_memory_bytes or ON_CPU
        if device.type != "cpu":
            size = planned(Path(folder), config, layout, settings, device).kv
    blocks = size // layout.block_bytes
    if blocks < 1:
        raise BadRequest(f"kv_memory_bytes {size} holds no block; one is {layout.block_bytes} bytes")
    return layout, blocks


def build_runner(
    folder: Path | str,
    settings: EngineSettings,
    memory: NDArray[np.uint8] | None = None,
    progress: Progress | None = None,
    *,
    apart: bool = False,
) -> Runner:
    """The runner of a model folder, or of a latency model by its name, over `memory`.

    `memory`: uint8 `[blocks, block_bytes]` as `plan_pool` says, contiguous. None: the runner takes its own,
    on its device. `apart`: the pool is kept apart from `memory` on a CPU too, as it is on a device, where
    blocks are copied when they are handed over. Loading takes seconds: call it off the event loop.
    """
    if memory is not None and not settings.kv_memory_bytes:
        settings = replace(settings, kv_memory_bytes=memory.nbytes)
    layout, blocks = plan_pool(folder, settings)
    latency = latency_model(str(folder))
    if latency is not None:
        if memory is None:
            return LatencyRunner.with_own_memory(blocks, settings.block_size, latency)
        return LatencyRunner(memory, layout, latency)
    folder = Path(folder)
    device = choose_device(settings.device)
    host: torch.Tensor | None = None
    if memory is None:
        shape = (blocks, layout.block_bytes)
        pool = KvPool(layout, torch.zeros(shape, dtype=torch.uint8, device=device))
    elif device.type == "cpu" and not apart:
        pool = KvPool(layout, torch.from_numpy(memory))
    else:
        # KV is handed over from host memory, which mirrors the device's, block by block. Only blocks that
        # are handed over ever touch its pages.
        host = torch.from_numpy(memory)
        pool = KvPool(layout, torch.zeros(memory.shape, dtype=torch.uint8, device=device))
    config = read_config(folder)
    with Checkpoint(folder, torch_dtype(layout.dtype), device, progress, settings.weights) as checkpoint:
        model = Decoder(
            DecoderConfig.read(config),
            checkpoint,
            choose_ops(torch_dtype(layout.dtype), device, settings.attention),
        )
    attention = choose_attention(settings.attention, pool)
    identity = fingerprint(folder, config, layout, settings.weights)
    budget = planned(
        folder, model.config, layout, replace(settings, kv_memory_bytes=pool.memory.nbytes), device
    )
    runner = TorchRunner(
        model,
        pool,
        attention,
        identity,
        device=device,
        threads=settings.threads,
        host=host,
        graphs=capture_decodes(model, attention, layout, settings, model.config.max_tokens)
        if model.capturable
        else None,
    )
    runner.budget = measured(runner, budget, settings) if device.type == "cuda" else budget
    return runner


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of a folder's config.json."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _LONGEST_CONFIG:
            raise BadRequest(f"{path} has {path.stat().st_size} bytes; no configuration is as long")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadRequest(f"{path} is not a JSON object")
    return config


def fingerprint(folder: Path, config: dict[str, Any], layout: KvLayout, weights: str = "auto") -> Fingerprint:
    """Of what a folder holds, not of its name or place.

    Of the config, what the model is made of counts (as read), so that a comment or a version stamp does not
    part two workers of the same model. `weights`: numbers of int8 weights are another model's.
    """
    model = DecoderConfig.read(config)
    told = f"{model!r}\n{weights_digest(folder)}" + ("" if weights == "auto" else f"\n{weights}")
    digest = hashlib.blake2b(told.encode(), digest_size=16)
    try:
        tokenizer = hashlib.blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16)
    except OSError as error:
        raise BadRequest(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    return Fingerprint.of(layout, model=digest.hexdigest(), tokenizer=tokenizer.hexdigest(), rope=model.rope)


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device, else the CPU."""
    try:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
    except RuntimeError as error:
        raise BadRequest(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest(f"device {name!r}: this torch sees no CUDA device")
    return device


def choose_dtype(name: str, device: torch.device) -> str:
    """`auto` is bfloat16 where the device multiplies in it, else float32.

    A CPU without AVX512-BF16 or AMX does bfloat16 products at a tenth of the speed of float32 ones.
    """
    if name != "auto":
        torch_dtype(name)
        return name
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "float32"
    return "bfloat16"
