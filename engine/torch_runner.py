"""The runner that computes: a model, its KV pool and the sampler, in a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from engine import sampler
from engine.attention import KvPool, StepPlan, plan_step
from engine.models.llama import Llama
from engine.words import Batch, BatchResult, Chunk
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.request import TokenLogprobs

_SCORED = 128
"""Prompt tokens scored at a time: their logits are 128 × vocabulary × 4 bytes."""


class TorchRunner:
    """An `engine.runner.Runner`. One thread does all steps, so the event loop never waits for torch.

    A step that has begun runs to its end, also when the caller is cancelled; the next one waits for it.
    """

    def __init__(
        self, model: Llama, pool: KvPool, fingerprint: Fingerprint, *, device: torch.device, threads: int = 1
    ) -> None:
        self._model, self._pool, self._fingerprint, self._device = model, pool, fingerprint, device
        # OpenMP counts threads per calling thread: to be set where the steps run.
        self._thread = ThreadPoolExecutor(1, "steps", initializer=torch.set_num_threads, initargs=(threads,))

    @property
    def layout(self) -> KvLayout:
        return self._pool.layout

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

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

    async def run(self, batch: Batch) -> BatchResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.step, batch)

    @torch.inference_mode()
    def step(self, batch: Batch) -> BatchResult:
        """The same, at once and in the caller's thread."""
        chunks = batch.chunks
        drawing = [index for index, chunk in enumerate(chunks) if chunk.draw]
        plan = plan_step(chunks, self._pool.layout, self._device)
        hidden = self._model.forward(plan, self._pool)
        scores = self._score(hidden, plan, chunks)
        if not drawing:
            return BatchResult((None,) * len(chunks), scores=scores)
        logits = self._model.logits(hidden, plan.draws)
        drawn, found = sampler.draw(logits, [chunks[index] for index in drawing])
        tokens: list[int | None] = [None] * len(chunks)
        logprobs: list[TokenLogprobs | None] = [None] * len(chunks)
        for index, token, probability in zip(drawing, drawn, found, strict=True):
            tokens[index], logprobs[index] = token, probability
        return BatchResult(tuple(tokens), tuple(logprobs) if any(found) else (), scores)

    def _score(
        self, hidden: torch.Tensor, plan: StepPlan, chunks: Sequence[Chunk]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log-probabilities of the prompt tokens that chunks ask for."""
        if not len(plan.scores):
            return ()
        wanted = [(target, c.sampling.prompt_logprobs) for c in chunks for target in c.targets]
        found: list[TokenLogprobs] = []
        for first in range(0, len(wanted), _SCORED):
            logits = self._model.logits(hidden, plan.scores[first : first + _SCORED])
            found += sampler.score(logits, wanted[first : first + _SCORED])
        each = iter(found)
        return tuple(tuple(islice(each, len(chunk.targets))) for chunk in chunks)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
