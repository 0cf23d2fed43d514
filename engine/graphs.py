"""Steps of decodes as captured graphs: one launch of what would be hundreds, over buffers that stay.

A graph is captured for each of a few sizes at start; steps are padded to the next one (`engine.padding`).
Steps with prompt tokens run eagerly: they are long enough to hide their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import padding
from engine.attention.protocol import Attention, Prepared
from engine.attention.triton import TritonAttention, TritonStep
from engine.carry import Carry
from engine.kernels.attention import Split, plan_split
from engine.staging import Staging, offsets
from engine.step_plan import StepPlan
from fleet.kv_layout import KvLayout

log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
"""Runs what was captured over what its buffers hold now; the tensor is the same one each time."""

Capture = Callable[[Callable[[], Tensor]], Replay]


class DecodingModel(Protocol):
    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention[Prepared], prepared: Prepared
    ) -> Tensor: ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor: ...


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time, and what one
    returns is read before another runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()  # compiles kernels and makes handles, which a capture may not
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (transfers) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def eagerly(run: Callable[[], Tensor]) -> Replay:
    """A capture that captures nothing: each replay runs all of it. On devices without graphs, for tests."""
    return run


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Replay
    parts: int


class DecodeGraphs:
    """Captured steps of one model over one pool. All of it runs in the thread of the steps."""

    def __init__(
        self,
        model: DecodingModel,
        attention: TritonAttention,
        layout: KvLayout,
        *,
        sizes: Sequence[int],
        max_tokens: int,
        capture: Capture,
    ) -> None:
        """Captures at once, the largest size first, so that smaller ones find its memory."""
        self._attention, self._layout = attention, layout
        device = attention.device
        self._staging = Staging(device)
        self.carry = Carry(device)
        """Captured with the steps; what else draws keeps its tokens here, too."""
        self._sizes = tuple(sorted(sizes))
        width = layout.blocks_for(max_tokens)
        _, head = offsets(padding.regions(self._sizes[-1]))
        self._buffer = torch.zeros(head + self._sizes[-1] * width * 4, dtype=torch.uint8, device=device)
        with torch.inference_mode():
            self._graphs = {
                size: self._captured(model, size, width, capture)
                for size in sorted(self._sizes, reverse=True)
            }
        log.info("captured decode steps of %s sequences", ", ".join(map(str, self._sizes)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def size_of(self, plan: StepPlan) -> int | None:
        """The graph for this step, or None: it is to be run eagerly."""
        return padding.size_of(plan, self._sizes)

    def logits(self, plan: StepPlan, size: int) -> Tensor:
        """Computes a step, KV written: float32 `[sequences, vocabulary]`, in the rows of the plan; valid
        until the next one."""
        graph = self._graphs[size]
        _, span = plan_split(
            plan.lengths.tolist(),
            self._layout.kv_heads,
            processors=self._attention.processors,
            tile=self._attention.tile,
            parts=graph.parts,
        )
        self._staging.into(self._buffer, *padding.padded(plan, size, span))
        return graph.replay()[: plan.sequences]

    def _captured(self, model: DecodingModel, size: int, width: int, capture: Capture) -> _Graph:
        empty = padding.regions(size)
        places, head = offsets(empty)
        tokens, sources, positions, slots, lengths, sizes = (
            self._buffer[place : place + array.nbytes].view(
                torch.int64 if array.dtype.itemsize == 8 else torch.int32
            )
            for place, array in zip(places, empty, strict=True)
        )
        tables = self._buffer[head : head + size * width * 4].view(torch.int32).view(size, width)
        parts = padding.parts_of(size, self._layout.kv_heads, self._attention.processors)
        prepared = TritonStep(slots, lengths, tables, size, Split(parts, sizes), lengths[:0])
        rows = torch.arange(size, device=self._buffer.device)
        # What is captured runs once over padding alone, which writes nothing.
        self._staging.into(self._buffer, *empty)

        def run() -> Tensor:
            known = self.carry.into(tokens, sources)
            return model.logits(model.forward(known, positions, self._attention, prepared), rows)

        return _Graph(capture(run), parts)
