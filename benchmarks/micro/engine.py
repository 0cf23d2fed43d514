"""The runner alone: prompt tokens/s by prompt length, decode tokens/s by batch at a context of 512."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.report import emit
from engine.build import build_runner, choose_device, choose_dtype, plan_pool
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch, Chunk
from fleet.model_files import resolve
from fleet.request import Sampling

CONTEXT = 512
PROMPTS = (128, 512, 2048)
BATCHES = (1, 8, 32)
STEP = 512
"""Prompt tokens a step: longer prompts are computed in chunks, as the scheduler's default has it."""


def repeat(work: Callable[[], int], least: int, seconds: float) -> list[float]:
    """Tokens/s of each run, at least `least` and for so long; one run before them is not counted."""
    work()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        tokens = work()
        samples.append(tokens / (time.perf_counter() - start))
    return samples


def prefill(runner: TorchRunner, length: int) -> Callable[[], int]:
    tokens = random.Random(length).choices(range(100, runner.vocabulary), k=length)
    blocks = tuple(range(runner.layout.blocks_for(length)))
    greedy = Sampling(max_tokens=1, temperature=0)

    def work() -> int:
        for start in range(0, length, STEP):
            part = tuple(tokens[start : start + STEP])
            last = start + len(part) == length
            runner.step(Batch((Chunk(0, part, start, blocks, last, greedy, (), length),)))
        return length

    return work


def decode(runner: TorchRunner, batch: int, sampling: Sampling, steps: int) -> Callable[[], int]:
    """`steps` steps of a batch whose context grows from `CONTEXT - steps / 2`; blocks lie scattered."""
    each = runner.layout.blocks_for(CONTEXT + steps)
    order = list(range(batch * each))
    random.Random(batch).shuffle(order)
    tables = [tuple(order[row * each : (row + 1) * each]) for row in range(batch)]

    def work() -> int:
        for step in range(steps):
            start = CONTEXT - steps // 2 + step
            chunks = (Chunk(row, (100 + row,), start, tables[row], True, sampling) for row in range(batch))
            runner.step(Batch(tuple(chunks)))
        return steps * batch

    return work


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats, the shorter cases only")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--dtype", action="append", help="default: float32 and, where the CPU has it, bfloat16"
    )
    parser.add_argument("--threads", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--block-size", type=int, action="append", help="default: the engine's")
    options = parser.parse_args(argv)
    files = resolve(options.model)
    device = choose_device(options.device)
    dtypes = options.dtype or sorted({"float32", choose_dtype("auto", device)})
    least, seconds, steps = (2, 0.0, 4) if options.quick else (5, 4.0, 16)
    greedy, warm = Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1, temperature=0.8)
    for dtype in dtypes:
        for size in options.block_size or [EngineSettings().block_size]:
            # Room for the largest batch, whatever the type.
            one = EngineSettings(dtype=dtype, device=str(device), block_size=size)
            layout, _ = plan_pool(files.folder, one)
            blocks = max(BATCHES) * layout.blocks_for(CONTEXT + steps) + 1
            settings = EngineSettings(
                dtype=dtype, device=str(device), block_size=size, kv_memory_bytes=blocks * layout.block_bytes
            )
            runner = build_runner(files.folder, settings)
            assert isinstance(runner, TorchRunner)
            for threads in options.threads or [1, 2]:
                # The steps run in this thread, so its count of threads is the one that counts.
                torch.set_num_threads(threads)
                told = {
                    "model": files.name,
                    "dtype": dtype,
                    "device": str(device),
                    "threads": threads,
                    "block_size": size,
                }
                for length in PROMPTS[: 2 if options.quick else 3]:
                    samples = repeat(prefill(runner, length), least, seconds)
                    emit("engine/prefill", "tokens/s", samples, prompt=length, chunk=STEP, **told)
                for batch in BATCHES:
                    samples = repeat(decode(runner, batch, greedy, steps), least, seconds)
                    emit("engine/decode", "tokens/s", samples, batch=batch, context=CONTEXT, **told)
                batch = max(BATCHES)
                samples = repeat(decode(runner, batch, warm, steps), least, seconds)
                emit("engine/decode-sampled", "tokens/s", samples, batch=batch, context=CONTEXT, **told)
    return 0
