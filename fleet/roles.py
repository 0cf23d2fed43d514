"""The roles one worker can take, one at a time: a service each, on the same engine and transfer layer."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Protocol

from fleet.chassis import Chassis, RoleService, Stream
from fleet.events import LoadReport
from fleet.handoff import CancelReason
from fleet.ids import LeaseId
from fleet.member import Role
from fleet.settings import SettingsError, load

log = logging.getLogger(__name__)

GROUP = "pdfleet.roles"
"""Entry points by which a process finds the other roles, whose rooms it must not import."""


class ProcessService(RoleService, Protocol):
    """A role's service, with what its engine and transfer layer call."""

    def stepped(self, report: Any) -> None: ...

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        """Also of leases that another role granted, which are none of its business."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What a role's room offers, under its name in the group."""

    role: Role
    settings: type[Any]
    """Of a process of this role: `fleet.worker_process.WorkerSettings`."""
    serve: Callable[[Chassis, Any, Any, Any], ProcessService]
    """(chassis, engine, transfer, settings) → its service."""


def other_roles(own: Role, flags: str) -> list[tuple[WorkerRole, Any]]:
    """The other roles that are installed, each with the settings it would act by. `flags` are those of a
    process of the other role, over its defaults. Raises `SettingsError`."""
    found: list[tuple[WorkerRole, Any]] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name == own:
            continue
        role: WorkerRole = entry.load()
        try:
            found.append((role, load(role.settings, shlex.split(flags), os.environ)))
        except ValueError as error:
            raise SettingsError(f"--other-role: {error}") from None
    return found


class Roles:
    """Hands everything to the service of the role that acts; what others lent stays theirs until it is back.

    Implements `fleet.chassis.RoleService`; `stepped` and `lease_ended` are what engine and transfer call.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        """The one that acts."""
        self._services: dict[Role, ProcessService] = {}
        self._begin: dict[Role, Callable[[], None]] = {}

    def add(self, role: Role, service: ProcessService, begin: Callable[[], None]) -> None:
        """`begin` is called whenever the role is taken: it sizes the engine's steps for it."""
        self._services[role] = service
        self._begin[role] = begin

    @property
    def turns(self) -> Mapping[Role, Callable[[], None]]:
        """What makes the worker one of each role it can take."""
        return {role: partial(self.turn, role) for role in self._services}

    def turn(self, role: Role) -> None:
        assert not self.busy(), f"the {self.role} role still has work"
        self._begin[role]()
        self.role = role

    @property
    def acting(self) -> ProcessService:
        return self._services[self.role]

    def accept(self, stream: Stream) -> None:
        self.acting.accept(stream)

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        self.acting.cancel(stream, reason)

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None:
        self.acting.proceed(stream, generated)

    def release(self, lease: LeaseId) -> None:
        self.acting.release(lease)

    def renew(self, lease: LeaseId) -> None:
        for service in self._services.values():
            service.renew(lease)

    def report(self, base: LoadReport) -> LoadReport:
        return self.acting.report(base)

    def busy(self) -> bool:
        return any(service.busy() for service in self._services.values())

    def idle(self) -> bool:
        return all(service.idle() for service in self._services.values())

    def stepped(self, report: Any) -> None:
        self._services[self.role].stepped(report)

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        for service in self._services.values():
            service.lease_ended(lease, why)
