"""The prefill role as processes find it: its settings and its service, under `pdfleet.roles`."""

from __future__ import annotations

from engine.loop import Engine
from fleet.chassis import Chassis
from fleet.member import Role
from fleet.roles import WorkerRole
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService
from prefill_worker.settings import PrefillWorkerSettings


def serve(
    chassis: Chassis, engine: Engine, transfer: Transfer, settings: PrefillWorkerSettings
) -> PrefillService:
    return PrefillService(chassis, engine, transfer)


ROLE = WorkerRole(Role.PREFILL, PrefillWorkerSettings, serve)
