"""What `fleetctl doctor` looks for, and how it takes secrets out of what it packs. Pure.

A check says what is so, and where something is wrong what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.kv_layout import Fingerprint
from fleet.member import WorkerCard
from fleetctl.words import WORKERS, FleetPicture

REMOVED = "[removed]"
_NAME = (
    r"[\w.-]*(?:password|passwd|secret|token|authorization|credentials?"
    r"|(?:api|access|private|secret|auth)[_.-]?keys?)"
)
"""Ends so: `first_token_timeout_s` and `max_tokens` are no secrets."""
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.DOTALL), ""),
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s\"']+@", re.IGNORECASE), "@"),
    (re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE), ""),
    (re.compile(r"\bsk-[\w-]{8,}"), ""),
    (re.compile(rf"(--?{_NAME}[= ])(?!--)\S+", re.IGNORECASE), ""),
    (re.compile(rf"(\"{_NAME}\"\s*:\s*)(?:\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\])", re.IGNORECASE), ""),
    (re.compile(rf"(\b{_NAME}\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s\"'\[][^\s]*)", re.IGNORECASE), ""),
)
"""What is taken out but for its first group, and what stays behind it."""
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of this process's environment that nobody else should see, wherever they turn up: the longest
    first. Of lists as TENANT:KEY the keys, too."""
    found: set[str] = set()
    for name, value in environ.items():
        if _SECRET_NAME.fullmatch(name):
            parts = [value, *(part.rpartition(":")[2].strip() for part in value.split(","))]
            found.update(part for part in parts if len(part) >= 4)
    return tuple(sorted(found, key=lambda value: -len(value)))


def without_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Keys, tokens, passwords and what stands before the @ of a URL are taken out. `known`: secrets to be
    taken out as they are."""
    for secret in known:
        text = text.replace(secret, REMOVED)
    for pattern, behind in _SECRETS:
        before = r"\1" if pattern.groups else ""
        text = pattern.sub(f"{before}{REMOVED}{behind}", text)
    return text


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    fine: bool | None
    """None: it could not be looked at."""
    said: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out about a fleet and this machine. None: it could not be."""

    picture: FleetPicture | None
    cards: tuple[WorkerCard, ...]
    etcd: str
    etcd_answers: bool
    nats: str | None
    nats_answers: bool | None
    versions: Mapping[str, str]
    """Of each process of the fleet, and of this command."""
    unproven: frozenset[str] | None
    """Workers of whose cache a router is not certain."""
    clocks_off_s: Mapping[str, float]
    """By router: how far its clock is from this one."""
    closed: tuple[str, ...]
    """Ports on cards that nobody here can connect to: worker, use and address."""
    asked_ports: int
    disk_free: int
    disk: int
    disk_path: str
    memory_free: int | None
    memory: int | None


_CLOCK_S = 2.0
"""More is no matter of a slow answer, of which a header tells whole seconds."""


def checks(facts: Facts) -> Iterator[Check]:
    etcd = "answers" if facts.etcd_answers else "is silent"
    step = "" if facts.etcd_answers else "is the fleet up (`fleetctl up`), and --etcd right?"
    yield Check("etcd", facts.etcd_answers, f"{facts.etcd} {etcd}", step)
    if facts.nats is None:
        yield Check("NATS", None, "its address is not known here", "set PDFLEET_CONTROL_NATS")
    else:
        nats = "greets" if facts.nats_answers else "is silent"
        step = "" if facts.nats_answers else "requests go on, with older loads; `fleetctl logs nats`"
        yield Check("NATS", facts.nats_answers, f"{facts.nats} {nats}", step)
    yield from _processes(facts)
    if facts.unproven is None:
        yield Check("caches", None, "no router told its figures", "see the checks of routers and keys")
    else:
        names = ", ".join(sorted(facts.unproven)[:4])
        told = f"not certain of {len(facts.unproven)}: {names}" if names else "routers are certain of each"
        step = "it passes in seconds while NATS works" if names else ""
        yield Check("caches", not facts.unproven, told, step)
    yield from _budgets(facts)
    yield _ports(facts)
    yield _versions(facts)
    yield _fingerprints(facts)
    far = {name: off for name, off in facts.clocks_off_s.items() if abs(off) > _CLOCK_S}
    told = ", ".join(f"{name} is {off:+.0f} s off" for name, off in far.items())
    yield Check("clocks", not far if facts.clocks_off_s else None, told or (
        "as here, to within seconds" if facts.clocks_off_s else "no router answered"),
        "start NTP there: logs cannot be put in order" if far else "")  # fmt: skip
    yield _room(
        "disk", facts.disk_free, facts.disk, 1 << 30, f" at {facts.disk_path}", "remove old logs or models"
    )
    if facts.memory_free is None or facts.memory is None:
        yield Check("memory", None, "this system does not say")
    else:
        yield _room(
            "memory", facts.memory_free, facts.memory, 512 << 20, "", "fewer workers, or less KV memory each"
        )


def _processes(facts: Facts) -> Iterator[Check]:
    if facts.picture is None:
        yield Check("workers", None, "nobody could be asked", "etcd first")
        return
    bad = [router for router in facts.picture.routers if router.state != "ready"]
    none = not facts.picture.routers
    told = ", ".join(f"{router.id} is {router.state}" for router in bad)
    yield Check("routers", not bad and not none, told or (
        "there is none" if none else f"{len(facts.picture.routers)} could serve now"),
        "`fleetctl logs router`" if bad or none else "")  # fmt: skip
    off = [row for row in facts.picture.workers if row.state != "ready"]
    missing = [str(kind) for kind in WORKERS if not any(
        row.role == kind and row.state == "ready" for row in facts.picture.workers)]  # fmt: skip
    told = ", ".join(
        [f"{row.id} is {row.state}" for row in off[:4]] + [f"no {role} is ready" for role in missing]
    )
    which = off[0].id if off else missing[0] if missing else ""
    yield Check("workers", not off and not missing, told or f"all {len(facts.picture.workers)} are ready",
                f"`fleetctl logs {which}`" if which else "")  # fmt: skip


_BUDGET = ("weights", "activations", "graphs", "kv")
"""Parts of a worker's memory, as its counters name them."""


def _budgets(facts: Facts) -> Iterator[Check]:
    """Where the memory of each worker's device goes; of workers that tell."""
    for row in facts.picture.workers if facts.picture else ():
        told = row.counters or {}
        parts = {part: told[f"memory_{part}_bytes"] for part in _BUDGET if f"memory_{part}_bytes" in told}
        if not parts:
            continue
        said = ", ".join(f"{part} {_gib(size)}" for part, size in parts.items() if size)
        whole = told.get("memory_device_bytes")
        fine = whole is None or sum(parts.values()) <= 0.98 * whole
        yield Check(
            f"memory of {row.id}", fine, f"{said}{'' if whole is None else f' of {_gib(whole)}'} GiB",
            "" if fine else "steps may be cut in parts for want of memory: lower engine.memory_share",
        )  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"


def _ports(facts: Facts) -> Check:
    if not facts.asked_ports:
        return Check("ports", None, "no card names one")
    if not facts.closed:
        return Check("ports", True, f"all {facts.asked_ports} on cards can be reached from here")
    step = "does control.advertise name this host as others see it? is a firewall between?"
    return Check("ports", False, "; ".join(facts.closed[:4]), step)


def _versions(facts: Facts) -> Check:
    by_version: dict[str, list[str]] = {}
    for name, version in facts.versions.items():
        by_version.setdefault(version, []).append(name)
    if len(by_version) == 1:
        return Check("versions", True, f"{next(iter(by_version))} everywhere")
    told = "; ".join(f"{version}: {', '.join(names[:3])}" for version, names in sorted(by_version.items()))
    return Check("versions", False, told, "bring all to one version, routers first")


def _fingerprints(facts: Facts) -> Check:
    by_model: dict[str, dict[Fingerprint, list[str]]] = {}
    for card in facts.cards:
        by_model.setdefault(card.model, {}).setdefault(card.fingerprint, []).append(card.id)
    torn = {model: prints for model, prints in by_model.items() if len(prints) > 1}
    if not torn:
        return Check("fingerprints", True if facts.cards else None, "KV of a model's workers means the same"
                     if facts.cards else "no worker is there")  # fmt: skip
    model, prints = next(iter(torn.items()))
    told = " against ".join(", ".join(names[:3]) for names in prints.values())
    one, other, *_ = prints
    return Check("fingerprints", False, f"{model}: {told} never exchange KV: {one.mismatch(other)}",
                 "give them the same model and settings, or wait where an update is under way")  # fmt: skip


def _room(name: str, free: int, whole: int, least: int, where: str, step: str) -> Check:
    fine = free >= min(least, whole // 10)
    return Check(
        name, fine, f"{free / (1 << 30):.1f} of {whole / (1 << 30):.1f} GiB free{where}", "" if fine else step
    )
