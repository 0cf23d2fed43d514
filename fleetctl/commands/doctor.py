"""`doctor`: what is wrong with a fleet and what to do next; and all that a bug report needs, in one file."""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import io
import json
import os
import platform
import shutil
import ssl
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from fleet import __version__
from fleet.errors import FleetError, Unavailable
from fleetctl.commands.explain import CA
from fleetctl.machine import memory
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleet.member import WorkerCard
    from fleet.registry import View
    from fleetctl.checkup import Check, Facts
    from fleetctl.routers import RouterAddress, Said

_LINES = 500
"""Of each log, from its end."""
_ANSWER_S = 5.0
_WORKERS = 32
"""Workers whose page of figures is packed; of more, the first."""
_PATHS = {"live.json": "/fleet/live", "requests.json": "/fleet/requests?limit=200",
          "slow.json": "/fleet/requests?slow=0.001&limit=50", "metrics.txt": "/metrics"}  # fmt: skip


@click.command()
@fleet_options()
@CA
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The bundle.  [default: pdfleet-doctor-TIME.tar.gz]",
)
@click.option("--no-bundle", is_flag=True, help="Only look, and write nothing.")
def doctor(target: Target, ca: Path | None, output: Path | None, no_bundle: bool) -> None:
    """Check the fleet and this machine, and pack what a bug report needs into one file.

    Keys, tokens and passwords are taken out; prompts and answers are in no part of it. Ends with 1 where
    something is wrong. A fleet with API keys wants an admin's in PDFLEET_API_KEY.
    """
    files: dict[str, str] = {}
    facts = asyncio.run(_look(target, ca, files))
    from fleetctl.checkup import checks

    found = list(checks(facts))
    path = None
    if not no_bundle:
        path = output or Path(time.strftime("pdfleet-doctor-%Y%m%d-%H%M%S.tar.gz"))
        files["checks.json"] = _json([asdict(check) for check in found])
        _pack(path, files)
    _say(target, found, path)
    if any(check.fine is False for check in found):
        raise SystemExit(1)


def _say(target: Target, found: list[Check], path: Path | None) -> None:
    if target.as_json:
        target.say("", checks=[asdict(check) for check in found], bundle=None if path is None else str(path))
        return
    signs = {True: ("OK     ", "green"), False: ("PROBLEM", "red"), None: ("unknown", "yellow")}
    width = max(len(check.name) for check in found)
    for check in found:
        sign, colour = signs[check.fine]
        click.echo(f"{click.style(sign, fg=colour)}  {check.name:<{width}}  {check.said}")
        if check.next_step:
            click.echo(f"{'':{width + 11}}next: {check.next_step}")
    if path is not None:
        click.echo(f"\npacked into {path}: look at it before you send it")


async def _look(target: Target, ca: Path | None, files: dict[str, str]) -> Facts:
    from fleet.registry import View
    from fleetctl.checkup import Facts
    from fleetctl.commands.operate import status_fields
    from fleetctl.connect import connected
    from fleetctl.picture import cards_in, read_view, registered_routers, take_picture
    from fleetctl.routers import RouterAddress
    from fleetctl.servers import nats_serves

    state, etcd = target.state(), target.given_etcd
    if etcd is None:
        etcd = state.etcd if state is not None else os.environ.get("PDFLEET_CONTROL_ETCD", "127.0.0.1:2379")
    picture, view, answers = None, View({}, live=False), True
    async with connected(etcd, own=target.given_etcd is None) as (registry, wire):
        try:
            view = await read_view(registry, target.fleet, etcd)
        except Unavailable:
            answers = False
        if answers or state is not None:
            picture = await take_picture(registry, wire, target.fleet, etcd, state)
            files["status.json"] = _json(status_fields(picture))
    cards = cards_in(view, target.fleet)
    routers = [RouterAddress(id, url.rstrip("/")) for id, url, _ in registered_routers(view, target.fleet)]
    pages = await _ask_routers(ca, routers, files)
    closed, asked = await _ports(cards)
    await _worker_pages(cards, files)
    nats = state.nats if state is not None else os.environ.get("PDFLEET_CONTROL_NATS")
    parts = urlsplit((nats or "").split(",")[0])
    greets = await nats_serves(parts.hostname or "", parts.port or 4222, _ANSWER_S) if nats else None
    offs = await asyncio.gather(*(asyncio.to_thread(_clock_off, router.url) for router in routers))
    _own_files(target, view, files)
    where = target.folder.path if target.folder.path.exists() else Path.home()
    disk, bytes_of = shutil.disk_usage(where), memory()
    return Facts(
        picture=picture,
        cards=tuple(cards.values()),
        etcd=etcd,
        etcd_answers=answers,
        nats=f"{parts.hostname}:{parts.port or 4222}" if nats else None,
        nats_answers=greets,
        versions={"fleetctl": __version__, **_versions(view, cards, target.fleet)},
        unproven=_unproven(pages) if pages else None,
        clocks_off_s={router.id: off for router, off in zip(routers, offs, strict=True) if off is not None},
        closed=closed,
        asked_ports=asked,
        disk_free=disk.free,
        disk=disk.total,
        disk_path=str(where),
        memory_free=bytes_of.get("MemAvailable"),
        memory=bytes_of.get("MemTotal"),
    )


async def _ask_routers(ca: Path | None, routers: list[RouterAddress], files: dict[str, str]) -> list[str]:
    """Packs what they say; their pages of figures."""
    from fleetctl.routers import Asker

    asker, pages = Asker(ca), []

    async def ask(router: RouterAddress, path: str) -> Said | str:
        try:
            return await asker.get(router, path, _ANSWER_S)
        except FleetError as error:
            return error.message

    for router in routers:
        said = await asyncio.gather(*(ask(router, path) for path in _PATHS.values()))
        for name, one in zip(_PATHS, said, strict=True):
            text = one if isinstance(one, str) else one.body.decode(errors="replace")
            files[f"routers/{_plain(router.id)}/{name}"] = text
            if name == "metrics.txt" and not isinstance(one, str) and one.status == 200:
                pages.append(text)
    return pages


def _unproven(pages: list[str]) -> frozenset[str]:
    found = set()
    for page in pages:
        for line in page.splitlines():
            if line.startswith("pdfleet_router_worker_proven{") and float(line.rpartition(" ")[2]) == 0:
                found.add(line.partition('worker="')[2].partition('"')[0])
    return frozenset(found)


async def _ports(cards: Mapping[str, WorkerCard]) -> tuple[tuple[str, ...], int]:
    asked = [
        (card.id, use, address)
        for card in cards.values()
        for use, address in (
            ("control", card.address),
            ("sessions", card.sessions),
            ("figures", card.metrics),
        )
        if address
    ]
    gate = asyncio.Semaphore(64)

    async def open_(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            async with gate, asyncio.timeout(_ANSWER_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return True
        except (OSError, ValueError, TimeoutError):
            return False

    opened = await asyncio.gather(*(open_(address) for _, _, address in asked))
    closed = (f"{id} ({use}) at {at}" for (id, use, at), fine in zip(asked, opened, strict=True) if not fine)
    return tuple(closed), len(asked)


async def _worker_pages(cards: Mapping[str, WorkerCard], files: dict[str, str]) -> None:
    from fleetctl.routers import Asker, RouterAddress

    asker = Asker(None, key="")
    for card in [card for card in cards.values() if card.metrics][:_WORKERS]:
        try:
            said = await asker.get(RouterAddress(card.id, f"http://{card.metrics}"), "/metrics", _ANSWER_S)
            files[f"workers/{_plain(card.id)}/metrics.txt"] = said.body.decode(errors="replace")
        except FleetError as error:
            files[f"workers/{_plain(card.id)}/metrics.txt"] = error.message


def _clock_off(url: str) -> float | None:
    """Seconds by which a router's clock is before this one, by the date it puts on an answer to nothing."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    try:
        if parts.scheme == "https":
            # Asked for the time only, and shown no key: it need not prove itself.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_ANSWER_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
        try:
            began = time.time()
            connection.request("GET", "/health")
            date = connection.getresponse().getheader("date")
            ended = time.time()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return None
    if date is None:
        return None
    # A header tells whole seconds: half of one is the best guess of the rest.
    return email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - (began + ended) / 2


def _versions(view: View, cards: Mapping[str, WorkerCard], fleet: str) -> dict[str, str]:
    found = {card.id: card.version for card in cards.values()}
    versions: dict[str, str] = {str(id): version for id, version in found.items()}
    for key, value in view.values.items():
        if key.startswith(f"/fleet/{fleet}/routers/"):
            try:
                said = json.loads(value)
                versions[str(said["id"])] = str(said["version"])
            except (ValueError, KeyError, TypeError):
                versions[key.rpartition("/")[2]] = "unreadable"
    return versions


def _own_files(target: Target, view: View, files: dict[str, str]) -> None:
    """What stands in etcd, and what this machine has: logs, settings, figures."""
    files["cards.json"] = _json({key: _read(value) for key, value in sorted(view.values.items())})
    files["machine.json"] = _json({
        "version": __version__, "python": platform.python_version(), "system": platform.platform(),
        "processors": os.cpu_count(), "load": os.getloadavg(), "memory": memory(), "time": time.time(),
        "packages": {name: _version_of(name) for name in ("torch", "grpcio", "protobuf", "nats-py", "aetcd",
                     "fastapi", "uvicorn", "msgspec", "tokenizers", "xgrammar", "numpy", "ucxx-cu13")},
    })  # fmt: skip
    files["environment.txt"] = "\n".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PDFLEET_")
    )
    state = target.folder.read() if target.given_etcd is None else None
    if state is None:
        return
    files["supervisor.json"] = _json({
        "fleet": state.fleet, "model": state.model, "etcd": state.etcd, "nats": state.nats,
        "router": state.router, "ready": state.ready,
        "children": [{**asdict(child), "command": _command(child.pid)} for child in state.children],
    })  # fmt: skip
    for path in sorted(target.folder.logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LINES:]
        files[f"logs/{path.name}"] = "\n".join(lines)


def _command(pid: int | None) -> str:
    """With its flags: the settings that it was given."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value.decode(errors="replace")


def _json(said: Any) -> str:
    return json.dumps(said, indent=1, default=str)


def _plain(name: str) -> str:
    """As a file's name: ids come from a registry that others write, too."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:80]


def _pack(path: Path, files: Mapping[str, str]) -> None:
    """Readable by its owner alone."""
    from fleetctl.checkup import secrets_of, without_secrets

    known, folder = secrets_of(os.environ), path.name.removesuffix(".tar.gz")
    path.touch(mode=0o600)
    with tarfile.open(path, "w:gz") as packed:
        for name, text in sorted(files.items()):
            data = without_secrets(text, known).encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            packed.addfile(entry, io.BytesIO(data))
