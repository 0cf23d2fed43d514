"""The watcher: registry, bus and sessions → roster and index; and the `Router` that joins it to the flow.

Nothing here is on a request's path, and no worker waits for another: each has its own session task and
its own snapshot task, all with limits. Without NATS the workers are asked directly; without etcd the last
known ones are served on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from fleet.bus import Bus, Subscription
from fleet.card_codec import decode_card
from fleet.errors import FleetError, Internal
from fleet.events import Dispatch, KvEvents, LoadReport, Settled, kv_subject, load_subject, moves_subject
from fleet.ids import Incarnation, RequestId, WorkerId, new_incarnation
from fleet.member import WorkerCard, workers_prefix
from fleet.registry import Registry, View
from fleet.wire import Wire
from fleet.wire.codec import (
    decode_kv_events,
    decode_load_report,
    decode_router_moves,
    encode_router_moves,
)
from router.flow import Flow
from router.link import Link
from router.peers import Heard, Limits, Outbox, Peers
from router.planning import Planning
from router.prefix_index import Outcome, PrefixIndex
from router.roster import Change, LinkState, Roster
from router.settings import RouterSettings

log = logging.getLogger(__name__)

_AT_ONCE = 2
"""Cards read and sessions begun in one turn of the loop."""


def routers_prefix(fleet: str) -> str:
    """Below it every router shows itself, under its lease."""
    return f"/fleet/{fleet}/routers/"


class Router:
    """A router without its ingress: `flow` is what the ingress uses, `run` keeps it informed.

    The same on real plumbing and in virtual time.
    """

    def __init__(
        self,
        settings: RouterSettings,
        fleet: str,
        registry: Registry,
        bus: Bus,
        wire: Wire,
        models: frozenset[str] = frozenset(),
        *,
        name: str = "router",
        life: Incarnation | None = None,
    ) -> None:
        """`models`: names that the ingress serves; a worker of another is pointed out. Empty: not known.
        `name` and `life` are what other routers know this one by; a life is drawn where none is given."""
        self._models = models
        self.settings = settings
        self.fleet = fleet
        self.name = name
        self.life = life or new_incarnation()
        self.roster = Roster(
            settings.unknown, mass_share=settings.watch.mass_share, grace_s=settings.peers.grace_s
        )
        self.roster.tell = self._tell
        self.peers = Peers(self.life, self.roster, settings.peers)
        self._outbox = Outbox(name, self.life, self.roster, settings.peers)
        self._to_tell = asyncio.Event()
        self.index = PrefixIndex(settings.index)
        self.links: dict[WorkerId, Link] = {}
        self.flow = Flow(settings, self.roster, self.index, self.links)
        self.planning = Planning(self.flow, fleet, registry, bus, name, self.life)
        self.counters: Counter[str] = Counter()
        """Totals since start: `views`, `kv_messages`, `load_messages`, `bad_messages`, `bus_dropped`,
        `snapshots`, `snapshots_failed`, `unproven`, `forgotten` (blocks of the index, for its cap),
        `names_unfound` (workers that never told of what they were sent); of other routers `peer_messages`,
        `peer_gaps` and `peers_silent`."""
        self.others: tuple[tuple[str, str], ...] = ()
        """Id and URL of each of the other routers that the registry shows."""
        self._registry = registry
        self._bus = bus
        self._wire = wire
        self._tasks: asyncio.TaskGroup | None = None
        self._sessions: dict[WorkerId, asyncio.Task[None]] = {}
        self._asking: dict[WorkerId, asyncio.Task[None]] = {}
        """One question at a time to each worker: its snapshot, or its load."""
        self._not_before: dict[WorkerId, float] = {}
        """When a worker that did not answer is asked again."""
        self._pause: dict[WorkerId, float] = {}
        self._cards: dict[str, tuple[bytes, WorkerCard | str]] = {}
        """By key of the registry: as it was read last, or why it could not be."""
        self._unfound: frozenset[WorkerId] = frozenset()
        self._starting = asyncio.Lock()
        """Held for a turn of the loop by whoever asks for a part: what is asked at once comes at once, and
        decoding a part takes as long as taking it in."""
        self._loading = asyncio.Lock()
        """Held while one part of a snapshot is taken in, and until the loop has looked around."""

    async def run(self) -> None:
        """Until cancelled. A defect in any part of it ends the whole, and with it the process."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                # Subscribed before the first look at the registry: no event falls in between.
                events = await self._bus.subscribe(kv_subject(self.fleet))
                loads = await self._bus.subscribe(load_subject(self.fleet))
                moves = await self._bus.subscribe(moves_subject(self.fleet))
                tasks.create_task(self._follow_events(events))
                tasks.create_task(self._follow_loads(loads))
                tasks.create_task(self._follow_workers())
                tasks.create_task(self._follow_routers())
                tasks.create_task(self._follow_moves(moves))
                tasks.create_task(self._tell_others())
                tasks.create_task(self._tick())
                tasks.create_task(self.planning.run())
        finally:
            self._tasks = None

    def explain(self, request: RequestId) -> dict[str, Any] | None:
        """The hand-off record of a request; None: not known, or too long ago."""
        record = self.flow.records.get(request)
        return record.as_dict(asyncio.get_running_loop().time()) if record is not None else None

    # -- registry

    async def _follow_workers(self) -> None:
        prefix = workers_prefix(self.fleet)
        async for view in self._registry.watch(prefix):
            self.counters["views"] += 1
            await self._decode(view)
            self._apply(self._read(view, prefix))
        raise Internal("the watch of the registry ended")

    async def _decode(self, view: View) -> None:
        """Of cards those that are new, some in a turn of the loop."""
        found: dict[str, tuple[bytes, WorkerCard | str]] = {}
        for key, value in view.values.items():
            known = self._cards.get(key)
            if known is not None and known[0] == value:
                found[key] = known
                continue
            if len(found) % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            try:
                found[key] = value, decode_card(value, key)
            except ValueError as error:
                found[key] = value, str(error)
        self._cards = found

    def _read(self, view: View, prefix: str) -> Change:
        cards: dict[WorkerId, WorkerCard] = {}
        refused: dict[WorkerId, str] = {}
        for key, (_, card) in self._cards.items():
            if isinstance(card, str):
                refused[WorkerId(key.removeprefix(prefix))] = card
            else:
                cards[card.id] = card
        before = self.roster.refused
        change = self.roster.apply_view(cards, live=view.live, emptied=view.emptied, refused=refused)
        for worker, why in self.roster.refused.items():
            if before.get(worker) != why:
                log.error("worker %s is refused: %s", worker, why)
        return change

    def _apply(self, change: Change) -> None:
        for card in change.left:
            log.info("worker %s (%s) is gone", card.id, card.role)
            self.index.remove_worker(card.id)
            self.links.pop(card.id, None)
            self._not_before.pop(card.id, None)
            self._pause.pop(card.id, None)
            for tasks in (self._sessions, self._asking):
                if (task := tasks.pop(card.id, None)) is not None:
                    task.cancel()
        if change.doubted:
            log.warning(
                "%s vanished from the registry at once; kept while their sessions live", change.doubted
            )
        for place, card in enumerate(change.joined):
            log.info("worker %s (%s of %s) at %s", card.id, card.role, card.model, card.address)
            if self._models and card.model not in self._models:
                served = ", ".join(sorted(self._models))
                log.warning(
                    "worker %s serves %s, this router %s: it gets no request until served_model_name agrees",
                    card.id, card.model, served,
                )  # fmt: skip
            self.flow.meters.models.add(card.model)
            self.index.add_worker(card.id, card.incarnation)
            link = self.links[card.id] = Link(card, self._wire, self.settings.watch, self._link_moved)
            self._sessions[card.id] = self._spawn(self._keep(link, place // _AT_ONCE))
        for card in change.turned:
            log.info("worker %s is a %s worker now", card.id, card.role)
            self.links[card.id].card = card
        self.flow.wake()

    @staticmethod
    async def _keep(link: Link, turns: int) -> None:
        """Many sessions are not opened in one turn of the loop, which then would do nothing else for long."""
        for _ in range(turns):
            await asyncio.sleep(0)
        await link.run()

    def _link_moved(self, link: Link, state: LinkState, why: str) -> None:
        card = link.card
        if self.links.get(card.id) is not link:
            return
        self._apply(self.roster.apply_link(card.id, card.incarnation, state))
        if state is LinkState.UP:
            self._not_before.pop(card.id, None)
            self._ask(card)

    # -- other routers

    async def _follow_routers(self) -> None:
        async for view in self._registry.watch(routers_prefix(self.fleet)):
            if view.live:
                lives = [_life_in(value) for value in view.values.values()]
                known = [life for life in lives if life is not None]
                self.peers.listed(known, nameless=len(lives) - len(known))
                self.others = _others_in(view, self.name)
                self._to_tell.set()
        raise Internal("the watch of the registry ended")

    async def _follow_moves(self, subscription: Subscription) -> None:
        async for message in subscription:
            try:
                moves = decode_router_moves(message.data)
            except ValueError as error:
                self._bad(message.subject, error)
                continue
            heard = self.peers.apply(moves, asyncio.get_running_loop().time())
            self.counters["peer_messages"] += heard is not Heard.OWN
            self.counters["peer_gaps"] += heard is Heard.GAP
            if moves.settled:
                self.flow.turn()
        raise Internal("the subscription to what other routers do ended")

    def share(self, limits: Limits) -> None:
        """The limits of API keys are those of all routers together from now on."""
        self._outbox.limits = self.peers.limits = limits
        limits.tell = self._tell_keys

    def _tell_keys(self) -> None:
        self._outbox.keys_moved()
        self._to_tell.set()

    def _tell(self, move: Dispatch | Settled) -> None:
        self._outbox.add(move)
        self._to_tell.set()

    async def _tell_others(self) -> None:
        """The first move goes at once; those that follow soon go together. Alone, a router says nothing."""
        loop = asyncio.get_running_loop()
        while True:
            self._to_tell.clear()
            if not self.peers.others:
                self._outbox.clear()
                await self._to_tell.wait()
                continue
            if self._outbox.due(loop.time()) > loop.time():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._outbox.due(loop.time())):
                        await self._to_tell.wait()
                continue
            moves = self._outbox.take(loop.time())
            await self._bus.publish(moves_subject(self.fleet, self.life), encode_router_moves(moves))
            await asyncio.sleep(self.settings.peers.batch_s)

    # -- bus

    async def _follow_events(self, subscription: Subscription) -> None:
        async for message in subscription:
            self.counters["kv_messages"] += 1
            if self.index.follow(message.data):
                continue
            try:
                events = decode_kv_events(message.data)
            except ValueError as error:
                self._bad(message.subject, error)
                continue
            self._take_events(events)
        raise Internal("the subscription to KV events ended")

    def _take_events(self, events: KvEvents) -> None:
        if self.index.apply(events) is Outcome.UNPROVEN:
            self._unproven(events.worker)

    async def _follow_loads(self, subscription: Subscription) -> None:
        async for message in subscription:
            self.counters["load_messages"] += 1
            try:
                report = decode_load_report(message.data)
            except ValueError as error:
                self._bad(message.subject, error)
                continue
            self._take_load(report)
        raise Internal("the subscription to load reports ended")

    def _take_load(self, report: LoadReport) -> None:
        standing = self.roster.get(report.worker)
        usable = standing is not None and standing.usable
        if not self.roster.apply_load(report, asyncio.get_running_loop().time()):
            return
        if self.index.check(report.worker, report.incarnation, report.kv) is Outcome.UNPROVEN:
            self._unproven(report.worker)
        if standing is not None and standing.usable and not usable:
            self.flow.wake()
        else:
            self.flow.turn()

    def _bad(self, subject: str, error: ValueError) -> None:
        self.counters["bad_messages"] += 1
        log.warning("a message on %s cannot be read: %s", subject, error)

    # -- questions to workers

    def _unproven(self, worker: WorkerId) -> None:
        self.counters["unproven"] += 1
        log.info("index of %s is unproven: %s", worker, self.index.doubted(worker))
        if (standing := self.roster.get(worker)) is not None:
            self._ask(standing.card)

    def _ask(self, card: WorkerCard) -> None:
        """Asks what is not known of a worker, unless it is being asked or its session is down."""
        now = asyncio.get_running_loop().time()
        standing = self.roster.get(card.id)
        if (
            standing is None
            or standing.link is not LinkState.UP
            or card.id in self._asking
            or now < self._not_before.get(card.id, now)
        ):
            return
        silent = standing.report is None or now - standing.reported_at > self.settings.watch.load_s
        if silent or self.index.doubted(card.id) is not None:
            self._asking[card.id] = self._spawn(self._question(card, silent))

    async def _question(self, card: WorkerCard, load: bool) -> None:
        settings, loop = self.settings.watch, asyncio.get_running_loop()
        try:
            if load:
                self._take_load(await self._wire.status(card.address, settings.snapshot_timeout_s))
            if self.index.doubted(card.id) is not None:
                await self._load_snapshot(card)
        except FleetError as error:
            self.counters["snapshots_failed"] += 1
            pause = self._pause.get(card.id, settings.retry_min_s)
            self._pause[card.id] = min(2 * pause, settings.retry_max_s)
            self._not_before[card.id] = loop.time() + pause
            log.warning("worker %s does not answer, asked again in %.1f s: %s", card.id, pause, error.message)
        else:
            self._pause.pop(card.id, None)
        finally:
            if self._asking.get(card.id) is asyncio.current_task():
                del self._asking[card.id]

    async def _load_snapshot(self, card: WorkerCard) -> None:
        """Part by part, and between two parts of any workers the loop does whatever else waits: a thousand
        workers that are asked at once hold up no request."""
        number, timeout_s = 0, self.settings.watch.snapshot_timeout_s
        while True:
            async with self._starting:
                await asyncio.sleep(0)
            part = await self._wire.snapshot(card.address, timeout_s, number)
            async with self._loading:
                outcome = self.index.load_snapshot(part)
                await asyncio.sleep(0)
            if outcome is not Outcome.WAITING or part.part + 1 >= part.parts:
                break
            number += 1
        while outcome is Outcome.WAITING:
            async with self._loading:
                outcome = self.index.catch_up(card.id)
                await asyncio.sleep(0)
        self.counters["snapshots"] += outcome is Outcome.APPLIED

    async def _tick(self) -> None:
        settings, loop = self.settings.watch, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(settings.tick_s)
            for worker in self.roster.expire(loop.time(), 3 * settings.load_s):
                log.warning("load of %s is unknown", worker)
                # Its events come the same way: what they told is not to be trusted either.
                self.index.doubt(worker, "no load reports")
            for router in self.peers.expire(loop.time()):
                self.counters["peers_silent"] += 1
                log.warning("router %s is silent: what it sends is not seen here", router)
            for standing in self.roster.workers():
                self._ask(standing.card)
            self.index.tidy(loop.time())
            unfound = self.index.unfound()
            for worker in sorted(unfound - self._unfound):
                self.counters["names_unfound"] += 1
                log.error(
                    "worker %s never tells of the blocks that it is sent: it caches nothing, or names blocks "
                    "otherwise than this router, and no prompt is found there", worker,
                )  # fmt: skip
            self._unfound = unfound
            if self.index.forgotten > self.counters["forgotten"]:
                if not self.counters["forgotten"]:
                    log.warning("the index has reached its %d blocks", self.settings.index.max_blocks)
                self.counters["forgotten"] = self.index.forgotten

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "the router does not run"
        return self._tasks.create_task(work)


def _others_in(view: View, name: str) -> tuple[tuple[str, str], ...]:
    """Id and URL of the routers it shows but the one of this name; of another version, those that say so."""
    found = []
    for _, value in sorted(view.values.items()):
        try:
            card = msgspec.json.decode(value, type=dict[str, str | int])
            found.append((str(card["id"]), str(card["http"])))
        except (msgspec.MsgspecError, KeyError):
            continue
    return tuple(router for router in found if router[0] != name)


def _life_in(card: bytes) -> Incarnation | None:
    """Of a router's card; None: it does not say, being of another version."""
    try:
        return Incarnation(str(msgspec.json.decode(card, type=dict[str, str | int])["life"]))
    except (msgspec.MsgspecError, KeyError):
        return None
