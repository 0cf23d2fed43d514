"""A model on the Triton kernels says what it says in plain torch: in batches, chunked, moved, in a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.attention.triton import TritonAttention
from engine.graphs import DecodeGraphs
from engine.torch_runner import TorchRunner


def test_text_is_that_of_plain_torch(small_runner: Callable[..., TorchRunner], drive: Any) -> None:
    texts = []
    for backend in ("triton", "gather"):
        runner = small_runner(
            "llama3", attention=backend, block_size=8, kv_memory_bytes=1 << 18, device="auto"
        )
        assert isinstance(runner._attention, TritonAttention) == (backend == "triton")
        driver = drive(runner)
        sequences = [driver.add(range(3, 3 + length), 6) for length in (1, 9, 20)]
        texts.append(driver.run(sequences, 3, chunk=12))
    assert texts[0] == texts[1]


def test_text_of_padded_steps_is_that_of_eager_ones(
    small_runner: Callable[..., TorchRunner], drive: Any, carry: Any
) -> None:
    """On a CPU nothing is captured, but buffers, padding and the choice of size are those of a GPU; tokens of
    the step before are not told again."""
    runner = small_runner("llama3", attention="triton", block_size=8, kv_memory_bytes=1 << 18, device="auto")
    eager = drive(
        small_runner("llama3", attention="gather", block_size=8, kv_memory_bytes=1 << 18, device="auto")
    )
    attention = runner._attention
    assert isinstance(attention, TritonAttention)
    ran: list[int] = []

    def noting(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            out = run()
            ran.append(len(out))
            return out

        return replay

    runner._graphs = DecodeGraphs(
        runner._model, attention, runner.layout, sizes=(1, 4), max_tokens=64, capture=noting
    )
    runner._carry = runner._graphs.carry
    carrying = carry(runner, runner.step)
    padded = drive(carrying)
    texts = []
    for driver in (padded, eager):
        sequences = [driver.add(range(3, 3 + length), 6) for length in (1, 20, 7)]
        texts.append(driver.run(sequences, 3))
        driver.step(sequences[:1])
        texts[-1] += sequences[0].drawn
    assert texts[0] == texts[1]
    assert ran == [4, 4, 1], "prompts run eagerly, three decodes as four"
    assert carrying.carried == 3 + 3 + 1
