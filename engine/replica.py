"""One replica from a model's name: finds the files, plans the pool, loads the weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.build import build_runner, latency_model, plan_pool
from engine.loop import Constrain, Engine
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import StepReport
from fleet.errors import BadRequest
from fleet.model_files import resolve

log = logging.getLogger(__name__)

Allocate = Callable[[int, int], NDArray[np.uint8]]
"""(blocks, block_bytes) → uint8 `[blocks, block_bytes]`: the transfer layer's memory."""


async def load_replica(
    model: str, settings: EngineSettings, allocate: Allocate, sink: Callable[[StepReport], None]
) -> tuple[Engine, str]:
    """The engine, and what the model is called unless told otherwise.

    Takes seconds, off the event loop. Raises a FleetError that says what is wrong with the model.
    """
    if latency_model(model) is not None:
        source, name = model, model.partition(":")[0]
    else:
        files = await asyncio.to_thread(resolve, model)
        source, name = str(files.folder), files.name
    layout, blocks = plan_pool(source, settings)
    memory = allocate(blocks, layout.block_bytes)
    log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB of %s",
        blocks,
        layout.block_size,
        blocks * layout.block_bytes / 2**20,
        layout.dtype,
    )
    runner = await asyncio.to_thread(build_runner, source, settings, memory)
    constrain, vocabulary = None, 1 << 32
    memory_bytes: dict[str, int] = {}
    if isinstance(runner, TorchRunner):
        if runner.budget is not None:
            log.info("memory: %s", runner.budget)
            memory_bytes = runner.budget.counters()
        vocabulary = runner.vocabulary
        constrain = await asyncio.to_thread(_constrain, Path(source), vocabulary, settings)
    return Engine(runner, settings, sink, constrain, memory_bytes, vocabulary), name


def _constrain(folder: Path, vocabulary: int, settings: EngineSettings) -> Constrain | None:
    """None where the model's tokenizer is of a kind that cannot be constrained: it serves all else."""
    from engine.grammar import Grammars, Vocabulary  # brings in xgrammar, which takes a second

    try:
        return Grammars(Vocabulary.load(folder, vocabulary), settings.grammar).matcher
    except BadRequest as error:
        log.warning("constraints on what is generated will be refused: %s", error.message)
        return None
