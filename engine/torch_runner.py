"""The runner that computes: a model, its KV pool and the sampler, in a thread of their own."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine import sampler
from engine.attention.protocol import Attention
from engine.carry import Carry
from engine.kv_pool import KvPool
from engine.memory import MemoryBudget
from engine.mirror import Mirror
from engine.models.decoder import Decoder
from engine.sparing import OutOfMemory, Sparing, joined
from engine.staging import Staging
from engine.step_plan import Ints, plan_step
from engine.words import Batch, BatchResult, Chunk
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.request import TokenLogprobs

if TYPE_CHECKING:
    from engine.graphs import DecodeGraphs

log = logging.getLogger(__name__)

_SCORED = 128
"""Prompt tokens scored at a time: their logits are 128 × vocabulary × 4 bytes."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step, or a part of one, that the device was asked for."""

    count: int
    """Of its chunks."""
    drawing: list[int]
    drawn: sampler.Drawing | None
    scores: tuple[tuple[TokenLogprobs, ...], ...]

    def result(self) -> BatchResult:
        """Waits for the device, in any thread."""
        tokens: list[int | None] = [None] * self.count
        if self.drawn is None:
            return BatchResult(tuple(tokens), scores=self.scores)
        logprobs: list[TokenLogprobs | None] = [None] * self.count
        drawn, found = self.drawn.result()
        for index, token, probability in zip(self.drawing, drawn, found, strict=True):
            tokens[index], logprobs[index] = token, probability
        return BatchResult(tuple(tokens), tuple(logprobs) if any(found) else (), self.scores)


class TorchRunner:
    """An `engine.runner.Runner`. One thread does all steps, so the event loop never waits for torch; where a
    device computes, that thread only asks for them, and another waits for what they draw.

    A step that has begun runs to its end, also when the caller is cancelled; the next one waits for it.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        attention: Attention[Any],
        fingerprint: Fingerprint,
        *,
        device: torch.device,
        threads: int = 1,
        host: torch.Tensor | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`host`: uint8 `[blocks, block_bytes]`, where the pool is not itself the memory that others read.
        `graphs`: of the same model, pool and attention."""
        self._mirror = Mirror(pool.memory, host) if host is not None else None
        self._graphs = graphs
        self.budget: MemoryBudget | None = None
        """Where its memory goes, once it was planned or measured."""
        self._sparing = Sparing(self._launch)
        self._staging = Staging(device)
        self._carry = graphs.carry if graphs is not None else Carry(device)
        self._by_kernels = device.type == "cuda" and find_spec("triton") is not None
        self._model, self._pool, self._attention = model, pool, attention
        self._fingerprint, self._device = fingerprint, device
        # OpenMP counts threads per calling thread: to be set where the steps run.
        self._thread = ThreadPoolExecutor(1, "steps", initializer=torch.set_num_threads, initargs=(threads,))
        self._waiting = ThreadPoolExecutor(1, "results")

    @property
    def layout(self) -> KvLayout:
        return self._pool.layout

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def max_tokens(self) -> int:
        return self._model.config.max_tokens

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._model.config.vocabulary

    @property
    def blocks(self) -> int:
        return self._pool.blocks

    @property
    def asynchronous(self) -> bool:
        return self._device.type != "cpu"

    async def run(self, batch: Batch) -> BatchResult:
        loop = asyncio.get_running_loop()
        parts = await loop.run_in_executor(self._thread, self._sparing.run, batch)
        if not self.asynchronous:
            return _result(batch, parts)
        return await loop.run_in_executor(self._waiting, _result, batch, parts)

    def step(self, batch: Batch) -> BatchResult:
        """The same, at once, in the caller's thread and as a whole: `OutOfMemory` where that does not fit."""
        return self._launch(batch).result()

    def _launch(self, batch: Batch) -> _Step:
        try:
            return self._asked(batch)
        except (torch.OutOfMemoryError, MemoryError) as error:
            cause = str(error).partition(". ")[0]
        except RuntimeError as error:
            # What torch raises for want of a host's memory has no type of its own.
            if "DefaultCPUAllocator" not in str(error):
                raise
            cause = str(error).rpartition("DefaultCPUAllocator: ")[2]
        # Outside of the handler: until then the failed try's tensors are alive.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning("a step of %d sequences does not fit into memory: %s", len(batch.chunks), cause)
        raise OutOfMemory(cause)

    @torch.inference_mode()
    def _asked(self, batch: Batch) -> _Step:
        """On a device nothing here waits for it, but for what few requests want: scores of prompts, penalties
        and constraints."""
        chunks = batch.chunks
        drawing = [index for index, chunk in enumerate(chunks) if chunk.draw]
        plan = plan_step(chunks, self._pool.layout)
        slots = np.asarray([chunks[index].slot for index in drawing], dtype=np.int64)
        fresh, draws, slot, tokens, positions, sources = self._staging.upload(
            plan.fresh, plan.draws, slots, plan.tokens, plan.positions, plan.sources
        )
        self._pool.clear(fresh)
        size = self._graphs.size_of(plan) if self._graphs is not None else None
        scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if self._graphs is not None and size is not None:
            # A copy: drawing changes logits, and a graph's are read again.
            logits = self._graphs.logits(plan, size)[draws]
        else:
            prepared = self._attention.prepare(plan)
            if (plan.sources >= 0).any():
                tokens = self._carry.into(tokens, sources)
            hidden = self._model.forward(tokens, positions, self._attention, prepared)
            scores = self._score(hidden, plan.scores, chunks)
            if not drawing:
                return _Step(len(chunks), drawing, None, scores)
            logits = self._model.logits(hidden, draws)
        drawn = sampler.launch(logits, [chunks[i] for i in drawing], kernels=self._by_kernels)
        self._carry.keep(slot, drawn.tokens, logits.shape[1])
        return _Step(len(chunks), drawing, drawn, scores)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _score(
        self, hidden: torch.Tensor, rows: Ints, chunks: Sequence[Chunk]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log-probabilities of the prompt tokens that chunks ask for."""
        if not len(rows):
            return ()
        wanted = [(target, c.sampling.prompt_logprobs) for c in chunks for target in c.targets]
        found: list[TokenLogprobs] = []
        for first in range(0, len(wanted), _SCORED):
            logits = self._model.logits(hidden, self._tensor(rows[first : first + _SCORED]))
            found += sampler.score(logits, wanted[first : first + _SCORED])
        each = iter(found)
        return tuple(tuple(islice(each, len(chunk.targets))) for chunk in chunks)

    @property
    def staged(self) -> bool:
        return self._mirror is not None

    async def to_host(self, blocks: Sequence[int]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._copy, blocks, True)

    async def from_host(self, blocks: Sequence[int]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._copy, blocks, False)

    @torch.inference_mode()
    def _copy(self, blocks: Sequence[int], out: bool) -> None:
        if self._mirror is not None:
            (self._mirror.out if out else self._mirror.into)(blocks)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._waiting.shutdown)


def _result(batch: Batch, parts: Sequence[tuple[Batch, _Step]]) -> BatchResult:
    return joined(batch, [(part, step.result()) for part, step in parts])
