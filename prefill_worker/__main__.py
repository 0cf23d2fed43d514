"""Starts a prefill worker: `python -m prefill_worker --help`."""

from __future__ import annotations

from engine.replica import load_replica
from fleet.life import run_process
from fleet.member import Role
from fleet.settings import load_or_exit
from fleet.worker_process import Makings, run_worker
from kv_transfer.region import Region
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService
from prefill_worker.settings import PrefillWorkerSettings

if __name__ == "__main__":
    settings = load_or_exit(PrefillWorkerSettings, prog="python -m prefill_worker")
    makings = Makings(
        allocate=Region.allocate,
        load=load_replica,
        link=Transfer.start,
        serve=PrefillService,
    )
    run_process(lambda life: run_worker(life, Role.PREFILL, settings, makings))
