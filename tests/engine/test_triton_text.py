"""A model on the Triton kernels says what it says in plain torch: in batches, chunked, moved, in a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.attention.triton import TritonAttention
from engine.torch_runner import TorchRunner


def test_text_is_that_of_plain_torch(small_runner: Callable[..., TorchRunner], drive: Any) -> None:
    texts = []
    for backend in ("triton", "gather"):
        runner = small_runner("llama3", attention=backend, block_size=8, kv_memory_bytes=1 << 18)
        assert isinstance(runner._attention, TritonAttention) == (backend == "triton")
        driver = drive(runner)
        sequences = [driver.add(range(3, 3 + length), 6) for length in (1, 9, 20)]
        texts.append(driver.run(sequences, 3, chunk=12))
    assert texts[0] == texts[1]
