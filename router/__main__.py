"""Starts a router: `python -m router --help`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from fleet import __version__
from fleet.api_keys import ApiKey, read_list
from fleet.bus.nats_bus import NatsBus
from fleet.life import Life, run_process
from fleet.model_files import resolve
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings, SettingsError, load_or_exit
from fleet.tracing import Tracer, TraceSettings
from fleet.wire.network import NetworkWire
from fleet.wire.session import WireSettings
from router.exposition import families, targets
from router.live import Live
from router.openai.access_log import AccessLog
from router.openai.asgi import Ingress
from router.openai.keys_file import KeysFile
from router.openai.server import HttpServer
from router.openai.settings import HttpSettings
from router.settings import RouterSettings
from router.text.tokenizer import ModelText, TextSettings
from router.watcher import Router, routers_prefix

log = logging.getLogger(__name__)

LATENCY = "latency"
"""The model without weights; its text is bytes."""


@dataclass(frozen=True, slots=True)
class RouterProcessSettings(RouterSettings):
    """The ingress of a fleet, and the choice of workers for each request."""

    model: str = "smollm2"
    """Whose tokenizer and chat template to use: folder, .gguf file, hub name, or `smollm2`."""
    served_model_name: str = ""
    """Name clients use; empty: the model's own."""
    router_id: str = ""
    """Name of this router in the fleet; empty: drawn."""
    api_keys: str = field(default="", repr=False)
    """API keys as TENANT:KEY, several separated by commas, besides those of `http.keys_file`. Flags are seen
    by everybody on the machine: prefer the environment."""
    control: ControlSettings = field(default_factory=ControlSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    text: TextSettings = field(default_factory=TextSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)


def load_text(settings: RouterProcessSettings) -> tuple[str, ModelText]:
    """Served name and text side of the model. Takes a second."""
    kind = settings.model.partition(":")[0]
    if kind == LATENCY:
        return settings.served_model_name or kind, ModelText.of_bytes(settings.text)
    files = resolve(settings.model)
    return settings.served_model_name or files.name, ModelText.load(files.folder, settings.text)


def load_keys(settings: RouterProcessSettings) -> tuple[tuple[ApiKey, ...], KeysFile | None]:
    """From the environment and the file, and the file to follow. SettingsError or OSError: unreadable; no
    key is shown."""
    try:
        keys = read_list(settings.api_keys) if settings.api_keys else ()
    except ValueError as error:
        raise SettingsError(f"PDFLEET_API_KEYS: {error}") from None
    if settings.http.keys_file is None:
        return keys, None
    file = KeysFile(settings.http.keys_file, settings.objectives, keys)
    try:
        return file.read(), file
    except ValueError as error:
        raise SettingsError(f"http.keys_file {settings.http.keys_file}: {error}") from None


async def run(life: Life, settings: RouterProcessSettings) -> None:
    """Serves until SIGTERM, then finishes what runs. A part that ends before ends all."""
    control = settings.control
    keys, keys_file = load_keys(settings)
    if not keys and control.bind not in ("127.0.0.1", "::1", "localhost"):
        log.warning("there are no API keys: anybody who reaches %s may ask; set http.keys_file", control.bind)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        registry = EtcdRegistry.of(control)
        stack.push_async_callback(registry.close)
        bus = NatsBus(control.nats, control.nats_tls())
        stack.push_async_callback(bus.close)
        wire = NetworkWire(settings.wire, control.tls())
        stack.push_async_callback(wire.close)
        name, text = await asyncio.to_thread(load_text, settings)
        id = settings.router_id or f"router-{secrets.token_hex(3)}"
        router = Router(settings, control.fleet, registry, bus, wire, frozenset({name}), name=id)

        def context(model: str) -> int | None:
            return max((pool.max_tokens for pool in router.roster.pools(model)), default=None)

        ingress = Ingress(
            router.flow,
            {name: text},
            settings.http,
            version=__version__,
            context=context,
            keys=keys,
            objectives=settings.objectives,
            default_class=settings.admission.default_class,
            records=router.flow.records,
            name=id,
        )
        router.share(ingress.limits)
        if settings.http.access_log:
            written = AccessLog()
            stack.callback(written.close)
            ingress.finished.append(written.tell)
            ingress.metrics.beside.append(written.families)
        if settings.trace.endpoint:
            ingress.tracer = Tracer(settings.trace, instance=id)
            # Sending what is left may take seconds, and the loop has other things to end.
            stack.push_async_callback(asyncio.to_thread, ingress.tracer.close)
        clock = asyncio.get_running_loop().time
        ingress.metrics.beside.append(lambda: families(router.flow, router.counters, clock()))
        ingress.targets = lambda: targets(router.flow, control.fleet)
        ingress.live = live = Live(
            router.flow, router=id, fleet=control.fleet, version=__version__, beside=router
        )
        router.planning.on_decision = lambda decision: live.planned(decision, clock())
        beside = [tasks.create_task(router.run())]
        if keys_file is not None:
            looking = keys_file.follow(ingress.change_keys, settings.http.keys_reload_s)
            beside.append(tasks.create_task(looking))
        server = await HttpServer.start(ingress, settings.http, control.bind)
        serving = tasks.create_task(server.serve())
        host = f"[{control.advertised}]" if ":" in control.advertised else control.advertised
        url = f"{'https' if settings.http.tls_cert else 'http'}://{host}:{server.port}"
        card = {
            "id": id,
            "life": router.life,
            "http": url,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
        }
        lease = await registry.lease(control.lease_ttl_s)
        await lease.put(routers_prefix(control.fleet) + id, msgspec.json.encode(card))
        log.info("%s serves %s at %s", id, name, url)
        life.settled()
        await life.stopping.wait()
        ingress.draining = True
        if settings.http.linger_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(life.hurrying.wait(), settings.http.linger_s)
        await lease.close()
        await server.stop(settings.http.drain_limit_s, life.hurrying)
        await serving
        for task in beside:
            task.cancel()
        log.info("%s has left", id)


if __name__ == "__main__":
    chosen = load_or_exit(RouterProcessSettings, prog="python -m router")
    run_process(lambda life: run(life, chosen))
