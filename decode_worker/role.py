"""The decode role as processes find it: its settings and its service, under `pdfleet.roles`."""

from __future__ import annotations

from decode_worker.service import DecodeService
from decode_worker.settings import DecodeWorkerSettings
from engine.loop import Engine
from fleet.chassis import Chassis
from fleet.member import Role
from fleet.roles import WorkerRole
from kv_transfer.transfer import Transfer


def serve(
    chassis: Chassis, engine: Engine, transfer: Transfer, settings: DecodeWorkerSettings
) -> DecodeService:
    return DecodeService(chassis, engine, transfer, settings.pull_limit_s)


ROLE = WorkerRole(Role.DECODE, DecodeWorkerSettings, serve)
