"""A process with one transfer, told what to do by JSON lines: a source or a reader for the live tests."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
import numpy as np
import uvloop

from fleet.errors import FleetError
from fleet.handoff import KvTicket
from fleet.ids import Incarnation, WorkerId
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer

BLOCKS_TO_COME = 1024
"""Tokens that an open lease will have, for readers that would ask."""


def say(**answer: Any) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


async def main() -> None:
    given = msgspec.json.decode(sys.argv[1])
    region = Region.allocate(given["blocks"], given["block_bytes"])
    region.array[:] = np.arange(1, given["blocks"] + 1, dtype=np.uint8)[:, None]
    ends: list[str] = []
    transfer = await Transfer.start(
        worker=WorkerId(given["worker"]),
        incarnation=Incarnation(given["incarnation"]),
        fingerprint="same",
        region=region,
        settings=TransferSettings(**given["settings"]),
        on_end=lambda lease, why: ends.append(why),
    )
    say(ready=transfer.address)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = msgspec.json.decode(line)
        if order["do"] == "grant":
            say(ticket=transfer.grant(order["blocks"], len(order["blocks"]) * 16))
        elif order["do"] == "open":
            say(ticket=transfer.open(order["blocks"], BLOCKS_TO_COME))
        elif order["do"] == "extend":
            transfer.extend(order["lease"], order["blocks"])
            say(extended=True)
        elif order["do"] == "pull":
            ticket = msgspec.convert(order["ticket"], KvTicket)
            say(pulling=True)
            try:
                async with transfer.keep(ticket):
                    for _ in range(order["times"]):
                        await transfer.pull(ticket, order["pairs"], 30)
                say(pulled=True, sums=region.array.sum(axis=1, dtype=np.int64).tolist())
            except FleetError as error:
                say(error=type(error).__name__, message=error.message)
        elif order["do"] == "state":
            descriptors = len(os.listdir("/proc/self/fd"))
            say(leases=transfer.leases, ends=ends, counters=transfer.counters(), descriptors=descriptors)
    await transfer.close()


if __name__ == "__main__":
    uvloop.run(main())  # as workers do
