"""Where a device's memory goes: what is left for KV, what is told, and the steps it is measured by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_runner, plan_pool
from engine.memory import MemoryBudget, ModelShape, activation_bytes, graph_bytes, kv_bytes
from engine.profile import largest_steps
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch
from fleet.kv_layout import KvLayout

GIB = 1 << 30
EIGHT_B = ModelShape(8_030_000_000, 2, 4096, 14336, 32, 8, 128, 128256)


def test_kv_gets_what_its_share_leaves() -> None:
    activations = activation_bytes(EIGHT_B, step_tokens=8192, max_batch=256)
    graphs = graph_bytes(EIGHT_B, largest=256, count=21, table_entries=8192)
    assert GIB // 2 < activations < 3 * GIB
    assert graphs < GIB

    def kv(share: float, free: int = 140 * GIB) -> float:
        return kv_bytes(
            EIGHT_B, total=141 * GIB, free=free, share=share, activations=activations, graphs=graphs
        )

    assert 105 * GIB < kv(0.9) < 112 * GIB
    assert kv(0.45) == pytest.approx(kv(0.9) - 0.45 * 141 * GIB, abs=2)
    assert kv(0.9, free=40 * GIB) < 25 * GIB, "what others hold is not there"
    assert kv(0.1) < 0, "the weights alone are more"


def test_a_larger_step_leaves_less() -> None:
    small, large = (activation_bytes(EIGHT_B, step_tokens=n, max_batch=64) for n in (512, 8192))
    assert large - small == 7680 * 2 * (3 * 4096 + 3 * 14336)
    assert graph_bytes(EIGHT_B, largest=64, count=0, table_entries=10) == 0


def test_a_budget_says_where_all_goes() -> None:
    budget = MemoryBudget(15 * GIB, 2 * GIB, GIB // 2, 100 * GIB, 141 * GIB)
    assert str(budget) == "weights 15.0, activations 2.0, graphs 0.5, KV 100.0 of 141.0 GiB"
    assert budget.counters()["memory_device_bytes"] == 141 * GIB
    assert str(MemoryBudget(GIB, 0, 0, 2 * GIB)) == "weights 1.0, KV 2.0 GiB"
    assert "memory_device_bytes" not in MemoryBudget(GIB, 0, 0, GIB).counters()


def test_a_runner_knows_its_budget(small_model: Callable[[str], Path]) -> None:
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory_bytes=1 << 20)
    folder = small_model("qwen2")
    runner = build_runner(folder, settings)
    assert isinstance(runner, TorchRunner)
    assert runner.budget is not None
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.7 * files < runner.budget.weights < files, "all files, without their headers"
    assert runner.budget.kv == runner.blocks * runner.layout.block_bytes


def test_on_a_cpu_kv_is_a_gibibyte_unless_told(small_model: Callable[[str], Path]) -> None:
    layout, blocks = plan_pool(small_model("smollm"), EngineSettings(dtype="float32", device="cpu"))
    assert blocks == GIB // layout.block_bytes


def test_measured_steps_are_the_largest(small_runner: Callable[..., TorchRunner]) -> None:
    layout = KvLayout(1, 1, 8, 16, "float32")

    def sizes(blocks: int, max_tokens: int, **settings: Any) -> list[tuple[int, int]]:
        def size(batch: Batch) -> tuple[int, int]:
            return len(batch.chunks), sum(len(chunk.tokens) for chunk in batch.chunks)

        return [size(b) for b in largest_steps(layout, blocks, max_tokens, EngineSettings(**settings))]

    assert sizes(1000, 4096, max_batch=64, max_step_tokens=2048) == [(1, 2048), (64, 64)]
    assert sizes(1000, 100, max_batch=8, max_step_tokens=2048) == [(1, 99), (8, 8)], "what the model allows"
    assert sizes(3, 4096, max_batch=8, max_step_tokens=2048) == [(1, 48), (8, 8)], "what the pool holds"
    runner = small_runner()
    for batch in largest_steps(runner.layout, runner.blocks, runner.max_tokens, EngineSettings()):
        drawn = runner.step(batch)
        assert all(token is not None for token in drawn.tokens)
        assert len(drawn.logprobs) == len(batch.chunks)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ValueError, match="kv_memory_bytes is -1"):
        EngineSettings(kv_memory_bytes=-1)
    with pytest.raises(ValueError, match=r"memory_share is 1\.5; it must be between 0\.05 and 1"):
        EngineSettings(memory_share=1.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_on_a_device_steps_take_what_was_planned(small_model: Callable[[str], Path]) -> None:
    settings = EngineSettings(device="cuda", memory_share=0.2, max_step_tokens=1024)
    runner = build_runner(small_model("smollm"), settings)
    assert isinstance(runner, TorchRunner)
    assert runner.budget is not None
    assert runner.budget.total is not None
    assert 0.1 * runner.budget.total < runner.budget.kv < 0.2 * runner.budget.total
