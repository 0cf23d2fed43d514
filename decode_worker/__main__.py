"""Starts a decode worker: `python -m decode_worker --help`."""

from __future__ import annotations

from functools import partial

from decode_worker.service import DecodeService
from decode_worker.settings import DecodeWorkerSettings
from engine.replica import load_replica
from fleet.life import run_process
from fleet.member import Role
from fleet.settings import load_or_exit
from fleet.worker_process import Makings, run_worker
from kv_transfer.region import Region
from kv_transfer.transfer import Transfer

if __name__ == "__main__":
    settings = load_or_exit(DecodeWorkerSettings, prog="python -m decode_worker")
    makings = Makings(
        allocate=Region.allocate,
        load=load_replica,
        link=Transfer.start,
        serve=partial(DecodeService, pull_limit_s=settings.pull_limit_s),
    )
    run_process(lambda life: run_worker(life, Role.DECODE, settings, makings))
