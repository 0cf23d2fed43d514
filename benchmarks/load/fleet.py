"""The whole fleet end to end: a real model behind `fleetctl up`, streaming clients, what they see.

Closed loop: each client sends its next request when the last one has ended. `--url` measures any other
OpenAI-compatible server with the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

from benchmarks.load.client import Heard, stream
from benchmarks.report import emit
from fleet.goodput import summarize
from fleet.objectives import Objectives

WORDS = [
    "river",
    "stone",
    "cloud",
    "paper",
    "engine",
    "garden",
    "letter",
    "winter",
    "market",
    "bridge",
    "silver",
    "candle",
]


def prompts(count: int, tokens: int, seed: int) -> list[str]:
    """Texts of about `tokens` tokens each (one a word with the demo model), with no common beginning."""
    chance = random.Random(seed)
    return [" ".join(chance.choice(WORDS) for _ in range(tokens)) for _ in range(count)]


@contextmanager
def fleet(
    prefill: int, decode: int, settings: list[str], model: str = "smollm2"
) -> Iterator[tuple[str, str]]:
    """A fleet of its own on free ports; yields its base URL and model."""
    with started(prefill, decode, settings, model) as said:
        yield said["url"], said["model"]


@contextmanager
def started(prefill: int, decode: int, settings: list[str], model: str) -> Iterator[dict[str, Any]]:
    """Likewise; yields all that `fleetctl up` said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fleetctl"]
        place = ["--fleet", "bench", "--state-dir", folder, "--json"]
        shape = [
            "--model",
            model,
            "--prefill",
            str(prefill),
            "--decode",
            str(decode),
            "--port",
            "0",
            "--detach",
        ]
        sets = [part for setting in settings for part in ("--set", setting)]
        up = subprocess.run(
            [*command, "up", "--model", model, *place, *shape, *sets], capture_output=True, text=True
        )
        if up.returncode:
            raise SystemExit(f"the fleet did not come up:\n{up.stdout}{up.stderr}")
        try:
            yield json.loads(up.stdout)
        finally:
            subprocess.run([*command, "down", *place], capture_output=True, check=False)


async def load(url: str, model: str, clients: int, texts: list[str], tokens: int) -> list[Heard]:
    place = urlparse(url)
    waiting = list(reversed(texts))
    answers: list[Heard] = []

    async def client() -> None:
        while waiting:
            body = {
                "model": model,
                "prompt": waiting.pop(),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            answers.append(await stream(place.hostname or "", place.port or 80, "/v1/completions", body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def report(case: str, answers: list[Heard], promised: Objectives, settings: dict[str, object]) -> None:
    good = [a for a in answers if a.error is None and a.finish]
    shown = {**settings, "requests": len(answers), "failed": len(answers) - len(good)}
    if not good:
        raise SystemExit(f"no request was answered: {answers[0].error}")
    span = max(a.ended for a in good) - min(a.started for a in good)
    written = sum(int(a.usage.get("completion_tokens", len(a.tokens))) for a in good)
    emit(f"{case}/output_tokens_s", "tokens/s", [written / span], **shown)
    emit(f"{case}/ttft", "s", [a.ttft for a in good if a.ttft is not None], **shown)
    emit(f"{case}/tpot", "s", [a.tpot for a in good if a.tpot is not None], **shown)
    emit(f"{case}/itl", "s", [gap for a in good for gap in a.gaps], **shown)
    emit(f"{case}/first_to_second_token", "s", [a.gaps[0] for a in good if a.gaps], **shown)
    # Of all that were asked, the failed ones too: those count against it.
    figures = summarize((a.outcome for a in answers), promised, span)
    if figures.goodput is not None and figures.attainment is not None:
        shown |= {"ttft_ms": promised.ttft_ms, "tpot_ms": promised.tpot_ms}
        emit(f"{case}/goodput", "requests/s", [figures.goodput], attainment=figures.attainment, **shown)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks load/fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ttft-ms", type=float, default=2000, help="objective that goodput is judged by")
    parser.add_argument("--tpot-ms", type=float, default=150, help="likewise")
    parser.add_argument("--set", action="append", default=[], help="a setting for fleetctl up")
    parser.add_argument("--url", help="measure this server instead of a fleet of its own")
    parser.add_argument("--model", help="its model", default="")
    given = parser.parse_args(argv)
    if given.quick:
        given.requests, given.tokens = 8, 16
    settings: dict[str, object] = {
        name: getattr(given, name) for name in ("prefill", "decode", "clients", "prompt_tokens", "tokens")
    }
    settings |= {"set": given.set} if given.set else {}
    texts = prompts(given.requests, given.prompt_tokens, seed=1)
    warm = prompts(2, given.prompt_tokens, seed=2)

    def measure(url: str, model: str, case: str) -> None:
        asyncio.run(load(url, model, 2, warm, 8))
        promised = Objectives(ttft_ms=given.ttft_ms, tpot_ms=given.tpot_ms)
        report(case, asyncio.run(load(url, model, given.clients, texts, given.tokens)), promised, settings)

    if given.url:
        measure(given.url, given.model, "peer")
        return
    with fleet(given.prefill, given.decode, given.set) as (url, model):
        measure(url, model, f"fleet/{given.prefill}p{given.decode}d")


if __name__ == "__main__":
    main(sys.argv[1:])
