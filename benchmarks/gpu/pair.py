"""Two processes on one GPU, a prefill and a decode worker's runner: KV moves between them, the text stays.

`python -m benchmarks.gpu.pair [--dry]`. Each has its own context, weights, graphs and pool, as workers have;
KV goes through host memory that both map, as the shared-memory transport does it. Tokens after the hand-over
must be those of the prefilling process alone, and decodes are timed alone and beside prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import emit

PROMPT, NEW, ROUNDS = 4096, 32, 6
TINY_PROMPT, TINY_NEW, TINY_ROUNDS = 20, 2, 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pair")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, in Triton's interpreter")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        serve(Path(options.child), options.dry)
        return 0
    from benchmarks.gpu.random_model import ONE_B, TINY, write
    from benchmarks.gpu.timing import device_of

    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        folder = Path(name)
        write(folder, TINY if options.dry else ONE_B, device_of(options.dry))
        children = [Child(folder, options.dry) for _ in range(2)]
        try:
            return play(children[0], children[1], options.dry)
        finally:
            for child in children:
                child.close()


class Child:
    """A process with a runner; answers a question a line."""

    def __init__(self, folder: Path, dry: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.pair", "--child", str(folder)]
        self._process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self._process.wait()}")
        return json.loads(line)

    def call(self, **question: Any) -> Any:
        self.ask(**question)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def play(prefill: Child, decode: Child, dry: bool) -> int:
    tokens, new, rounds = (TINY_PROMPT, TINY_NEW, TINY_ROUNDS) if dry else (PROMPT, NEW, ROUNDS)
    prompt = [7 * i % 50 for i in range(tokens)]
    about, device = prefill.answer(), decode.answer()["device"]
    size = about["block_bytes"]
    count = -(-(tokens + new) // about["block_size"])
    blocks, full = list(range(count)), list(range(-(-tokens // about["block_size"])))
    # What one process says alone is what the other has to say after the hand-over.
    first = prefill.call(do="prefill", prompt=prompt, blocks=blocks)
    alone = prefill.call(do="decode", token=first["token"], start=tokens, count=new, blocks=blocks)
    prefills, moves, same = [], [], []
    for _ in range(rounds):
        start = prefill.call(do="prefill", prompt=prompt, blocks=blocks)
        begun = time.perf_counter()
        prefill.call(do="out", blocks=full)
        decode.call(do="in", blocks=full)
        moves.append(len(full) * size / (time.perf_counter() - begun) / 1e9)
        prefills.append(tokens / start["seconds"])
        moved = decode.call(do="decode", token=start["token"], start=tokens, count=new, blocks=blocks)
        same.append([start["token"], *moved["tokens"]] == [first["token"], *alone["tokens"]])
    ask: dict[str, Any] = {
        "do": "decode", "token": first["token"], "start": tokens, "count": new, "blocks": blocks,
    }  # fmt: skip
    quiet = decode.call(**ask)["seconds"]
    prefill.ask(do="prefill", prompt=prompt, blocks=blocks, times=1 if dry else 10)
    beside = decode.call(**ask)["seconds"]
    prefill.answer()
    settings = {"tokens": tokens, "device": device}
    emit("gpu/pair-prefill", "tokens/s", prefills, **settings, same_text=all(same))
    emit("gpu/pair-handover", "GB/s", moves, **settings, bytes=len(full) * size)
    emit("gpu/pair-decode", "ms", [s * 1000 for s in quiet], **settings, pair="alone")
    emit("gpu/pair-decode", "ms", [s * 1000 for s in beside], **settings, pair="beside prompts")
    if not all(same):
        print(f"text differs after the hand-over in {same.count(False)} of {rounds} rounds", file=sys.stderr)
    return 0 if all(same) else 1


def serve(folder: Path, dry: bool) -> None:
    import asyncio

    from benchmarks.gpu.timing import device_of, name_of
    from engine.build import build_runner, plan_pool
    from engine.settings import EngineSettings
    from engine.torch_runner import TorchRunner

    device = device_of(dry)
    settings = EngineSettings(
        dtype="bfloat16", device=str(device), attention="triton", kv_memory_bytes=1 << (16 if dry else 31),
        max_batch=1 if dry else 8, max_step_tokens=32 if dry else PROMPT, memory_share=0.45,
    )  # fmt: skip
    layout, blocks = plan_pool(folder, settings)
    path = folder / "kv"
    with path.open("ab") as file:
        file.truncate(blocks * layout.block_bytes)
    memory = np.memmap(path, dtype=np.uint8, mode="r+", shape=(blocks, layout.block_bytes))
    runner = build_runner(folder, settings, memory, apart=True)
    assert isinstance(runner, TorchRunner)
    tell(device=name_of(device), block_bytes=layout.block_bytes, block_size=layout.block_size)
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["do"]:
            case "prefill":
                samples = [prefilled(runner, asked) for _ in range(asked.get("times", 1))]
                tell(token=samples[-1][0], seconds=samples[-1][1])
            case "decode":
                tell(**decoded(runner, asked))
            case "out":
                asyncio.run(runner.to_host(asked["blocks"]))
                tell()
            case "in":
                asyncio.run(runner.from_host(asked["blocks"]))
                tell()
    asyncio.run(runner.close())


def tell(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def prefilled(runner: Any, asked: dict[str, Any]) -> tuple[int, float]:
    from engine.words import Batch, Chunk
    from fleet.request import Sampling

    greedy = Sampling(1, temperature=0.0)
    chunk = Chunk(0, tuple(asked["prompt"]), 0, tuple(asked["blocks"]), True, greedy)
    start = time.perf_counter()
    token = runner.step(Batch((chunk,))).tokens[0]
    return token, time.perf_counter() - start


def decoded(runner: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from engine.words import Batch, Chunk
    from fleet.request import Sampling

    greedy = Sampling(asked["count"], temperature=0.0)
    token, tokens, samples = asked["token"], [], []
    for index in range(asked["count"]):
        chunk = Chunk(0, (token,), asked["start"] + index, tuple(asked["blocks"]), True, greedy)
        start = time.perf_counter()
        token = runner.step(Batch((chunk,))).tokens[0]
        samples.append(time.perf_counter() - start)
        tokens.append(token)
    return {"tokens": tokens, "seconds": samples}


if __name__ == "__main__":
    sys.exit(main())
