"""Decode steps of a random model of 1B class against their byte floor: weights and KV read once.

`python -m benchmarks.gpu.step [--dry]`. `gpu/decode-step` is the whole step as the engine waits for it: plan,
upload, graph, draw, tokens on the host. `gpu/decode-graph` is the device's part alone. `gpu/engine-step` is
the time from step to step of a whole engine, with and without a second step in flight (`engine.overlap`).
`gpu/prefill` is a prompt against the device's matrix rate.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.gpu.random_model import ONE_B, TINY, write
from benchmarks.gpu.timing import copy_rate, device_of, median, name_of, product_rate, seconds
from benchmarks.report import emit
from engine.settings import EngineSettings

TARGET = 0.7


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.step")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, in Triton's interpreter")
    options = parser.parse_args(argv)
    device = device_of(options.dry)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), TINY if options.dry else ONE_B, device)
        measure(Path(folder), device, options.dry)
    return 0


def measure(folder: Path, device: torch.device, dry: bool) -> None:
    from engine.build import build_runner
    from engine.torch_runner import TorchRunner

    copies = copy_rate(device, 1 << (16 if dry else 32))
    products = product_rate(device, 64 if dry else 8192)
    settings = EngineSettings(
        dtype="bfloat16", device=str(device), attention="triton", block_size=16,
        kv_memory_bytes=1 << (18 if dry else 34), max_batch=2 if dry else 64,
        max_step_tokens=16 if dry else 8192,
    )  # fmt: skip
    runner = build_runner(folder, settings)
    assert isinstance(runner, TorchRunner)
    assert runner.budget is not None
    print(f"memory: {runner.budget}", file=sys.stderr)
    context = 12 if dry else 1024
    for batch in (1, 2) if dry else (1, 8, 64):
        decodes(runner, batch, context, copies, 2 if dry else 100)
        for overlap in ("off", "on"):
            served(runner, replace(settings, overlap=overlap), batch, context, copies, 3 if dry else 100)
    prefill(runner, 12 if dry else 8192, products, runner.budget.weights // 2, 1 if dry else 5)


def decodes(runner: object, batch: int, context: int, copies: float, rounds: int) -> None:
    from engine.step_plan import plan_step
    from engine.torch_runner import TorchRunner
    from engine.words import Batch, Chunk
    from fleet.request import Sampling

    assert isinstance(runner, TorchRunner)
    assert runner.budget is not None
    layout = runner.layout
    width = layout.blocks_for(context)
    greedy = Sampling(1 << 20, temperature=0.0)
    step = Batch(
        tuple(
            Chunk(i, (5,), context - 1, tuple(range(i * width, (i + 1) * width)), True, greedy)
            for i in range(batch)
        )
    )
    samples = []
    for round in range(rounds + 3):
        start = time.perf_counter()
        runner.step(step)
        if round >= 3:
            samples.append(time.perf_counter() - start)
    kv = batch * context * layout.block_bytes // layout.block_size
    floor = (runner.budget.weights + kv) / copies
    about = {
        "batch": batch, "context": context, "weights_bytes": runner.budget.weights, "kv_bytes": kv,
        "limit": floor * 1000, "limit_is": "weights and KV at the rate of copies",
        "device": name_of(runner.device),
    }  # fmt: skip
    emit("gpu/decode-step", "ms", [s * 1000 for s in samples], **about, target=TARGET,
         ratio=floor / median(samples))  # fmt: skip
    graphs, plan = runner._graphs, plan_step(step.chunks, layout)
    size = graphs.size_of(plan) if graphs is not None else None
    if graphs is not None and size is not None:
        with torch.inference_mode():
            alone = seconds(lambda: graphs.logits(plan, size), runner.device, rounds)
        emit("gpu/decode-graph", "ms", [s * 1000 for s in alone], **about, target=TARGET,
             ratio=floor / median(alone))  # fmt: skip


def served(
    runner: object, settings: EngineSettings, batch: int, context: int, copies: float, tokens: int
) -> None:
    """Decodes by the engine's loop; `context` is that of the last step."""
    from engine.loop import Engine
    from engine.torch_runner import TorchRunner
    from engine.words import NewSequence, StepReport
    from fleet.block_hash import HashKeys
    from fleet.request import Sampling

    assert isinstance(runner, TorchRunner)
    assert runner.budget is not None
    times: list[float] = []
    ended: set[str] = set()

    async def main() -> None:
        done = asyncio.Event()

        def hear(report: StepReport) -> None:
            if len(report.drawn) == batch:
                times.append(time.perf_counter())
            ended.update(end.id for end in report.finished)
            if len(ended) == batch:
                done.set()

        engine = Engine(runner, settings, hear)
        running = asyncio.create_task(engine.run())
        keys, drawn = HashKeys("m", settings.block_size), Sampling(tokens, temperature=0.0)
        for number in range(batch):
            prompt = tuple((7 * number + i) % 50 for i in range(max(1, context - tokens)))
            engine.add(NewSequence(str(number), prompt, drawn, keys))
        await done.wait()
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(main())
    samples = [b - a for a, b in pairwise(times)]
    kv = batch * context * runner.layout.block_bytes // runner.layout.block_size
    floor = (runner.budget.weights + kv) / copies
    emit("gpu/engine-step", "ms", [s * 1000 for s in samples], batch=batch, context=context,
         overlap=settings.overlap, device=name_of(runner.device), limit=floor * 1000,
         limit_is="weights and KV at the rate of copies", target=TARGET if settings.overlap == "on" else None,
         ratio=floor / median(samples))  # fmt: skip


def prefill(runner: object, tokens: int, products: float, numbers: int, rounds: int) -> None:
    from engine.torch_runner import TorchRunner
    from engine.words import Batch, Chunk
    from fleet.request import Sampling

    assert isinstance(runner, TorchRunner)
    table = tuple(range(runner.layout.blocks_for(tokens)))
    greedy = Sampling(1, temperature=0.0)
    step = Batch((Chunk(0, tuple(i % 50 for i in range(tokens)), 0, table, True, greedy),))
    samples = []
    for round in range(rounds + 1):
        start = time.perf_counter()
        runner.step(step)
        if round:
            samples.append(time.perf_counter() - start)
    work = 2 * numbers * tokens
    emit(
        "gpu/prefill", "tokens/s", [tokens / s for s in samples],
        tokens=tokens, device=name_of(runner.device),
        limit=products * tokens / work, limit_is="products of the weights at the matrix rate",
        ratio=work / products / median(samples),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
