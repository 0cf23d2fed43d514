"""A thousand clients leave at random points of a whole fleet's work: nothing of them is left anywhere."""

from __future__ import annotations

import asyncio
import json
import random
import socket

from http_front import listening
from whole_fleet import MODEL, Box

from engine.latency_runner import LatencyModel
from engine.settings import EngineSettings
from router.settings import CostSettings, RouterSettings

LEAVES = 1000
AT_ONCE = 50
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""SO_LINGER on, 0 s: closing sends RST."""


def body_of(draw: random.Random) -> tuple[str, bytes]:
    text = "the quick brown fox " * draw.choice([1, 3, 20])
    fields = {
        "model": MODEL,
        "max_tokens": draw.choice([1, 5, 60]),
        "n": draw.choice([1, 1, 2]),
        "stream": draw.random() < 0.6,
        "logprobs": draw.choice([None, 1]),
        "echo": draw.random() < 0.2,
        "prompt": f"{draw.randrange(40)} {text}",
    }
    if draw.random() < 0.5:
        chat = [{"role": "user", "content": fields.pop("prompt")}]
        fields |= {"messages": chat, "logprobs": bool(fields["logprobs"]), "echo": None}
        return "/v1/chat/completions", json.dumps(fields).encode()
    return "/v1/completions", json.dumps(fields).encode()


def test_a_thousand_clients_leave(tokenizer_json: str) -> None:
    async def main() -> None:
        draw = random.Random(4)
        box = Box(
            2,
            2,
            # Too few for all: some wait, some are preempted.
            blocks=150,
            router=RouterSettings(cost=CostSettings(local_prefill_tokens=0)),
            engine=EngineSettings(block_size=16, max_batch=16, max_step_tokens=128),
            latency=LatencyModel(base_s=0.002, per_prompt_token_s=0.0001, per_decode_s=0.0002),
        )
        served = 0
        async with box, listening(box, tokenizer_json) as (ingress, port):

            async def leave() -> None:
                nonlocal served
                route, body = body_of(draw)
                how, delay, reads = draw.random(), draw.expovariate(20.0), draw.randrange(0, 12)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = (
                    f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    "connection: close\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                ).encode()
                data = head + body
                writer.write(data if how > 0.1 else data[: draw.randrange(1, len(data))])
                try:
                    if how < 0.5:
                        await asyncio.sleep(delay)  # also before the first byte of an answer
                    else:
                        seen = b""
                        for _ in range(reads):
                            async with asyncio.timeout(60):
                                got = await reader.read(256)
                            seen += got
                            if not got:
                                break
                        served += seen.startswith(b"HTTP/1.1 200 OK")
                finally:
                    if how < 0.75:
                        raw = writer.get_extra_info("socket")
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        writer.transport.abort()
                    writer.close()

            for _ in range(LEAVES // AT_ONCE):
                await asyncio.gather(*(leave() for _ in range(AT_ONCE)))
            async with asyncio.timeout(60):
                while ingress.exchanges:
                    await asyncio.sleep(0.01)
            assert ingress.metrics.running == 0
            await box.rest()
            box.validate()  # no sequence, no stream, no lease, all blocks free, on every worker
            for worker in box.workers.values():
                load = worker.load()
                assert (load.running, load.waiting) == (0, 0)
                assert load.blocks_free == load.blocks_total == 150
            counters = box.router.flow.counters
            assert counters["cancelled"] > LEAVES // 4
            assert counters["handoffs"] > LEAVES // 20
            assert served > LEAVES // 10

    asyncio.run(main())
