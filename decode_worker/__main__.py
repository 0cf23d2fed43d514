"""Starts a decode worker: `python -m decode_worker --help`."""

from __future__ import annotations

from decode_worker.role import ROLE
from engine.replica import load_replica
from fleet.worker_process import Makings, start_worker
from kv_transfer.region import Region
from kv_transfer.transfer import Transfer

if __name__ == "__main__":
    makings = Makings(allocate=Region.allocate, load=load_replica, link=Transfer.start)
    start_worker(ROLE, makings, prog="python -m decode_worker")
